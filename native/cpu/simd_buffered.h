// What instruction sets without lane masks share: partial loads and stores through a buffer, and reductions in a fixed tree.
#pragma once

template <class T>
static inline VF load_n(const T *p, int n) {
  T buffer[W] = {};
  memcpy(buffer, p, sizeof(T) * n);
  return load(buffer);
}
template <class T>
static inline void store_n(T *p, VF v, int n) {
  T buffer[W];
  store(buffer, v);
  memcpy(p, buffer, sizeof(T) * n);
}
static inline float sum_lanes(VF v) {
  float x[W];
  store(x, v);
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}
static inline float max_lanes(VF v) {
  float x[W];
  store(x, v);
  float top = x[0];
  for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
  return top;
}
