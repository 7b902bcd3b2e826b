// 8 fp32 lanes with fused multiply-add.
#pragma once

#include <immintrin.h>
#include <string.h>

typedef __m256 VF;
typedef __m256i VB;
enum { W = 8 };

static inline VF zero() { return _mm256_setzero_ps(); }
static inline VF set1(float x) { return _mm256_set1_ps(x); }
static inline VF load(const float *p) { return _mm256_loadu_ps(p); }
static inline void store(float *p, VF v) { _mm256_storeu_ps(p, v); }
static inline VF widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
static inline VF load(const bf16 *p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
static inline __m128i narrow(VF v) {
  __m256i x = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08));
}
static inline void store(bf16 *p, VF v) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), narrow(v)); }

static inline VF add(VF a, VF b) { return _mm256_add_ps(a, b); }
static inline VF sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
static inline VF mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
static inline VF div(VF a, VF b) { return _mm256_div_ps(a, b); }
static inline VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
static inline VF fmsub(VF a, VF b, VF c) { return _mm256_fmsub_ps(a, b, c); }
static inline VF fnma(VF a, VF b, VF c) { return _mm256_fnmadd_ps(a, b, c); }
static inline VF max(VF a, VF b) { return _mm256_max_ps(a, b); }
static inline VF round_even(VF v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// v in [0.5, 2], n whole and >= -200: the exponent is added in two halves so that neither overflows; below 2^-126 the result is 0.
static inline VF scale_exponent(VF v, VF n) {
  __m256i e = _mm256_cvtps_epi32(n);
  __m256i half = _mm256_srai_epi32(e, 1);
  VF a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, _mm256_set1_epi32(127)), 23));
  VF b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(e, half), _mm256_set1_epi32(127)), 23));
  VF alive = _mm256_cmp_ps(n, set1(-126.0f), _CMP_NLT_UQ);
  return _mm256_and_ps(_mm256_mul_ps(_mm256_mul_ps(v, a), b), alive);
}
static inline VF add_to_exponent(VF v, VF n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
static inline VF keep_lanes(VF v, VF other, int first, int last) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                   _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(in));
}
static inline VB load_pairs(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
static inline VF low_of(VB v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
static inline VF high_of(VB v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000)))); }

INLINE void transpose(VF (&r)[W]) {
  VF t[W];
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
    t[4 + i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
  }
  for (int i = 0; i < W; i++) r[i] = t[i];
}

#include "simd_buffered.h"
