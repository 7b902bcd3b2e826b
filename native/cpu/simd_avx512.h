// 16 fp32 lanes. With KILAT_DP, also products of bf16 pairs.
#pragma once

#include <immintrin.h>

typedef __m512 VF;
typedef __m512i VB;  // 16 pairs of bf16, the lower index in the lower half
enum { W = 16 };

static inline __mmask16 mask_of(int n) { return __mmask16((1u << n) - 1); }

static inline VF zero() { return _mm512_setzero_ps(); }
static inline VF set1(float x) { return _mm512_set1_ps(x); }
static inline VF load(const float *p) { return _mm512_loadu_ps(p); }
static inline VF load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(mask_of(n), p); }
static inline void store(float *p, VF v) { _mm512_storeu_ps(p, v); }
static inline void store_n(float *p, VF v, int n) { _mm512_mask_storeu_ps(p, mask_of(n), v); }

static inline VF widen(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
static inline VF load(const bf16 *p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
static inline VF load_n(const bf16 *p, int n) { return widen(_mm256_maskz_loadu_epi16(mask_of(n), p)); }

static inline __m256i narrow(VF v) {
#if KILAT_DP
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  __m512i x = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(r);
#endif
}
static inline void store(bf16 *p, VF v) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrow(v)); }
static inline void store_n(bf16 *p, VF v, int n) { _mm256_mask_storeu_epi16(p, mask_of(n), narrow(v)); }

static inline VF add(VF a, VF b) { return _mm512_add_ps(a, b); }
static inline VF sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
static inline VF mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
static inline VF div(VF a, VF b) { return _mm512_div_ps(a, b); }
static inline VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
static inline VF fmsub(VF a, VF b, VF c) { return _mm512_fmsub_ps(a, b, c); }
static inline VF fnma(VF a, VF b, VF c) { return _mm512_fnmadd_ps(a, b, c); }
// b where either is not a number
static inline VF max(VF a, VF b) { return _mm512_max_ps(a, b); }
static inline float sum_lanes(VF v) { return _mm512_reduce_add_ps(v); }
static inline float max_lanes(VF v) { return _mm512_reduce_max_ps(v); }
static inline VF round_even(VF v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// v * 2^n for whole n; exactly 0 below the smallest denormal
static inline VF scale_exponent(VF v, VF n) { return _mm512_scalef_ps(v, n); }
// v with the low bits of n's representation added to its exponent
static inline VF add_to_exponent(VF v, VF n) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}
// lanes from first (inclusive) to last (exclusive) keep v, the others get other
static inline VF keep_lanes(VF v, VF other, int first, int last) {
  uint32_t hi = last >= W ? 0xffffu : last <= 0 ? 0u : (1u << last) - 1;
  uint32_t lo = first >= W ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1;
  return _mm512_mask_mov_ps(other, __mmask16(hi & ~lo), v);
}

static inline VB load_pairs(const void *p) { return _mm512_loadu_si512(p); }
static inline VF low_of(VB v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
static inline VF high_of(VB v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000)))); }

#if KILAT_DP
static inline VF dot_pairs(VF acc, VB a, VB b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
static inline VB set1_pair(const void *p) { return _mm512_set1_epi32(*static_cast<const int32_unaligned *>(p)); }
#endif

// Rows in[0 .. 15] of 16 lanes -> columns.
INLINE void transpose(VF (&r)[W]) {
  VF t[W];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

#if KILAT_DP
// 32 bf16 of a and of b -> 32 pairs (a_i, b_i): the first 16 in lo, the rest in hi.
static inline void interleave(VB a, VB b, VB &lo, VB &hi) {
  alignas(64) static const uint16_t kLo[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                               8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  __m512i lo_index = _mm512_load_si512(kLo);
  lo = _mm512_permutex2var_epi16(a, lo_index, b);
  hi = _mm512_permutex2var_epi16(a, _mm512_add_epi16(lo_index, _mm512_set1_epi16(16)), b);
}
static inline VB load_half_words_n(const bf16 *p, int n) {
  return _mm512_maskz_loadu_epi16(n >= 32 ? 0xffffffffu : (1u << n) - 1, p);
}
#endif

// Vectors of W int32, or of W groups of four bytes.
typedef __m512i VI;
static inline VI zero_i() { return _mm512_setzero_si512(); }
static inline VI load_i(const void *p) { return _mm512_loadu_si512(p); }
static inline void store_i(void *p, VI v) { _mm512_storeu_si512(p, v); }
static inline VI set1_i(const void *p) { return _mm512_set1_epi32(*static_cast<const int32_unaligned *>(p)); }
static inline VI shift_left(VI v, int n) { return _mm512_sll_epi32(v, _mm_cvtsi32_si128(n)); }
static inline VI and_mask(VI v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }
// a | (b & mask)
static inline VI or_masked(VI a, VI b, int mask) { return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi32(mask), 0xf8); }
// v shifted left, or right where N < 0
template <int N>
INLINE VI shifted(VI v) {
  if constexpr (N > 0) return _mm512_slli_epi32(v, N);
  else if constexpr (N < 0) return _mm512_srli_epi32(v, -N);
  else return v;
}
static inline VF to_float(VI v) { return _mm512_cvtepi32_ps(v); }
static inline VF load_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p))); }
static inline VF load_u8(const void *p) { return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)))); }
static inline VF load_s8(const void *p) { return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)))); }
// v rounded to even, within a signed byte
static inline void store_s8(int8_t *p, VF v) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
// acc + the four products of unsigned bytes of u, below 128, and bytes of x in -127 .. 127; with WIDE, of any bytes, less 128 if
// WIDE_OFFSET: without an instruction for it, the sums of two products must fit 16 bits
enum { WIDE_OFFSET = !KILAT_DP };
template <bool WIDE>
INLINE VI dot4(VI acc, VI u, VI x) {
#if KILAT_DP
  return _mm512_dpbusd_epi32(acc, u, x);
#else
  if constexpr (WIDE) {
    VI w = _mm512_xor_si512(u, _mm512_set1_epi8(-128));
    u = _mm512_abs_epi8(w);
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), zero_i(), x);
  }
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(u, x), _mm512_set1_epi16(1)));
#endif
}
