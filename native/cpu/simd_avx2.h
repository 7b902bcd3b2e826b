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

// Vectors of W int32, or of W groups of four bytes.
typedef __m256i VI;
static inline VI zero_i() { return _mm256_setzero_si256(); }
static inline VI load_i(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
static inline void store_i(void *p, VI v) { _mm256_storeu_si256(static_cast<__m256i *>(p), v); }
static inline VI set1_i(const void *p) { return _mm256_set1_epi32(*static_cast<const int32_unaligned *>(p)); }
static inline VI shift_left(VI v, int n) { return _mm256_sll_epi32(v, _mm_cvtsi32_si128(n)); }
static inline VI and_mask(VI v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
// a | (b & mask)
static inline VI or_masked(VI a, VI b, int mask) { return _mm256_or_si256(a, and_mask(b, mask)); }
// v shifted left, or right where N < 0
template <int N>
INLINE VI shifted(VI v) {
  if constexpr (N > 0) return _mm256_slli_epi32(v, N);
  else if constexpr (N < 0) return _mm256_srli_epi32(v, -N);
  else return v;
}
static inline VF to_float(VI v) { return _mm256_cvtepi32_ps(v); }
static inline VF load_half(const void *p) {
  VI h = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
  // the fields of the wider format, and the distance of the two exponents as a factor: exact; infinities become 2^16
  VF size = mul(_mm256_castsi256_ps(_mm256_slli_epi32(and_mask(h, 0x7fff), 13)), set1(5192296858534827628530496329220096.0f));
  return _mm256_or_ps(size, _mm256_castsi256_ps(_mm256_slli_epi32(and_mask(h, 0x8000), 16)));
}
static inline VF load_u8(const void *p) { return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)))); }
static inline VF load_s8(const void *p) { return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)))); }
// v rounded to even, within a signed byte
static inline void store_s8(int8_t *p, VF v) {
  VI x = _mm256_cvtps_epi32(v);
  __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(words, words));
}
// acc + the four products of unsigned bytes of u, below 128, and bytes of x in -127 .. 127; with WIDE, of any bytes less 128: the sums of
// two products fit 16 bits either way
enum { WIDE_OFFSET = 1 };
template <bool WIDE>
INLINE VI dot4(VI acc, VI u, VI x) {
  if constexpr (WIDE) {
    VI w = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
    u = _mm256_abs_epi8(w);
    x = _mm256_sign_epi8(x, w);
  }
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), _mm256_set1_epi16(1)));
}

#include "simd_buffered.h"
