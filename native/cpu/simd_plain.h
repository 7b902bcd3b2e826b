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

// Vectors of W int32 (VI), or of W groups of four bytes.
static inline VI zero_i() { return VI{}; }
static inline VI load_i(const void *p) {
  VI v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline void store_i(void *p, VI v) { memcpy(p, &v, sizeof v); }
static inline VI set1_i(const void *p) {
  int32_t x;
  memcpy(&x, p, 4);
  return VI{x, x, x, x, x, x, x, x};
}
static inline VI shift_left(VI v, int n) { return (VI)((VB)v << n); }
static inline VI and_mask(VI v, int mask) { return v & mask; }
// a | (b & mask)
static inline VI or_masked(VI a, VI b, int mask) { return a | (b & mask); }
// v shifted left, or right where N < 0
template <int N>
INLINE VI shifted(VI v) {
  if constexpr (N >= 0) return (VI)((VB)v << N);
  else return (VI)((VB)v >> -N);
}
static inline VF to_float(VI v) {
  VF x;
  for (int i = 0; i < W; i++) x[i] = float(v[i]);
  return x;
}
static inline VF load_half(const void *p) {
  uint16_t h[W];
  memcpy(h, p, sizeof h);
  VB size, sign;
  for (int i = 0; i < W; i++) {
    size[i] = uint32_t(h[i] & 0x7fff) << 13;
    sign[i] = uint32_t(h[i] & 0x8000) << 16;
  }
  // the fields of the wider format, and the distance of the two exponents as a factor: exact; infinities become 2^16
  return (VF)((VB)((VF)size * set1(5192296858534827628530496329220096.0f)) | sign);
}
static inline VF load_u8(const void *p) {
  VF x;
  for (int i = 0; i < W; i++) x[i] = float(static_cast<const uint8_t *>(p)[i]);
  return x;
}
static inline VF load_s8(const void *p) {
  VF x;
  for (int i = 0; i < W; i++) x[i] = float(static_cast<const int8_t *>(p)[i]);
  return x;
}
// v rounded to even, within a signed byte
static inline void store_s8(int8_t *p, VF v) {
  for (int i = 0; i < W; i++) p[i] = int8_t(nearbyintf(v[i]));
}
// acc + the four products of unsigned bytes of u and signed bytes of x
enum { WIDE_OFFSET = 0 };
template <bool WIDE>
INLINE VI dot4(VI acc, VI u, VI x) {
  uint8_t a[W * 4];
  int8_t b[W * 4];
  memcpy(a, &u, sizeof a);
  memcpy(b, &x, sizeof b);
  for (int i = 0; i < W * 4; i++) acc[i / 4] += a[i] * b[i];
  return acc;
}

#include "simd_buffered.h"
