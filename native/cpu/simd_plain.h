// 8 fp32 lanes in the compiler's generic vectors: any processor, for correctness rather than speed.
#pragma once

#include <math.h>
#include <string.h>

typedef float VF __attribute__((vector_size(32)));
typedef uint32_t VB __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
enum { W = 8 };

static inline VF zero() { return VF{}; }
static inline VF set1(float x) { return VF{x, x, x, x, x, x, x, x}; }
static inline VF load(const float *p) {
  VF v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float *p, VF v) { memcpy(p, &v, sizeof v); }
struct Halves {
  bf16 h[W];
};
static inline VF widen(const Halves &x) {
  VB b;
  for (int i = 0; i < W; i++) b[i] = uint32_t(x.h[i].bits) << 16;
  return (VF)b;
}
static inline Halves narrow(VF v) {
  Halves x;
  for (int i = 0; i < W; i++) x.h[i] = round_bf16(v[i]);
  return x;
}
static inline VF load(const bf16 *p) {
  Halves x;
  memcpy(&x, p, sizeof x);
  return widen(x);
}
static inline void store(bf16 *p, VF v) {
  Halves x = narrow(v);
  memcpy(p, &x, sizeof x);
}
static inline VF add(VF a, VF b) { return a + b; }
static inline VF sub(VF a, VF b) { return a - b; }
static inline VF mul(VF a, VF b) { return a * b; }
static inline VF div(VF a, VF b) { return a / b; }
static inline VF fma(VF a, VF b, VF c) { return a * b + c; }
static inline VF fmsub(VF a, VF b, VF c) { return a * b - c; }
static inline VF fnma(VF a, VF b, VF c) { return c - a * b; }
static inline VF max(VF a, VF b) { return a > b ? a : b; }
static inline VF round_even(VF v) {
  for (int i = 0; i < W; i++) v[i] = nearbyintf(v[i]);
  return v;
}
static inline VF scale_exponent(VF v, VF n) {
  for (int i = 0; i < W; i++) v[i] = n[i] < -126.0f ? 0.0f : ldexpf(v[i], n[i] == n[i] ? int(n[i]) : 0);
  return v;
}
static inline VF add_to_exponent(VF v, VF n) { return (VF)((VB)v + ((VB)n << 23)); }
static inline VF keep_lanes(VF v, VF other, int first, int last) {
  VI lane = {0, 1, 2, 3, 4, 5, 6, 7};
  VI in = (lane >= first) & (lane < last);
  return in ? v : other;
}
static inline VB load_pairs(const void *p) {
  VB v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline VF low_of(VB v) { return (VF)(v << 16); }
static inline VF high_of(VB v) { return (VF)(v & 0xffff0000u); }
INLINE void transpose(VF (&r)[W]) {
  for (int i = 0; i < W; i++)
    for (int j = 0; j < i; j++) {
      float t = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = t;
    }
}

#include "simd_buffered.h"
