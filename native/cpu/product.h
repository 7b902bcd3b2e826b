// The register tile of all matrix products: MR rows times NV vectors of accumulators, one addition chain per output element, in
// the order of k. Spilling an accumulator to memory and loading it again keeps its bits, so tiles may be cut anywhere.
#pragma once

// A step takes one element of A per row and part (a(part, row) is its address) and one vector of B per column vector (b(j) is it).
// One element of A is 4 bytes in every scheme: an fp32 value, or a pair of bf16.
struct Fp32Scheme {  // A fp32, B fp32
  enum { PARTS = 1 };
  INLINE VF load_b(const char *p) { return load(reinterpret_cast<const float *>(p)); }
  INLINE VF as_b(VF v) { return v; }
  template <int MR, int NV, class AddrA, class GetB>
  INLINE void step(VF (&acc)[MR][NV], AddrA a, GetB b) {
    VF vb[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) vb[j] = b(j);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      VF va = set1(*reinterpret_cast<const float_aliasing *>(a(0, i)));
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) acc[i][j] = fma(va, vb[j], acc[i][j]);
    }
  }
};

struct WidenScheme {  // A fp32, B pairs of bf16 that are widened in registers
  enum { PARTS = 2 };
  INLINE VB load_b(const char *p) { return load_pairs(p); }
  template <int MR, int NV, class AddrA, class GetB>
  INLINE void step(VF (&acc)[MR][NV], AddrA a, GetB b) {
    VB raw[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) raw[j] = b(j);
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      VF vb[NV];
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) vb[j] = part ? high_of(raw[j]) : low_of(raw[j]);
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        VF va = set1(*reinterpret_cast<const float_aliasing *>(a(part, i)));
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) acc[i][j] = fma(va, vb[j], acc[i][j]);
      }
    }
  }
};

#if KILAT_DP
struct PairScheme {  // A and B pairs of bf16, one instruction for both products
  enum { PARTS = 1 };
  INLINE VB load_b(const char *p) { return load_pairs(p); }
  INLINE VB as_b(VF v) { return _mm512_castps_si512(v); }
  template <int MR, int NV, class AddrA, class GetB>
  INLINE void step(VF (&acc)[MR][NV], AddrA a, GetB b) {
    VB vb[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) vb[j] = b(j);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
      VB va = set1_pair(a(0, i));
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) acc[i][j] = dot_pairs(acc[i][j], va, vb[j]);
    }
  }
};
#endif

// What the products of activations and weights (or keys, values) of type T use on this instruction set.
template <class T>
struct SchemeOf {
  typedef Fp32Scheme Linear;
  typedef Fp32Scheme Attention;
};
template <>
struct SchemeOf<bf16> {
#if KILAT_DP
  typedef PairScheme Linear;
  typedef PairScheme Attention;
#else
  typedef WidenScheme Linear;
  typedef Fp32Scheme Attention;  // keys and values are widened once per tile instead
#endif
};

template <int MR, int NV>
INLINE void clear(VF (&acc)[MR][NV]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) acc[i][j] = zero();
}
