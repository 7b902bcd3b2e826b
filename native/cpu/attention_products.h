// The two products of a tile: queries times keys, weights times values. Two ways with the same chains, hence the same bits: packed
// (keys transposed and values paired once in memory, worth it for many rows), and direct (both done in registers, for few).
#pragma once

// Keys of a tile as [element][KEY_TILE].
template <class T>
static void pack_keys(const T *const *rows, const T *const *next, int64_t offset, const Shape<T> &s, float *out) {
  for (int e = 0; e < s.elements; e += W)
    for (int k = 0; k < KEY_TILE; k += W) {
      VF r[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        __builtin_prefetch(next[k + i] + offset + e * Shape<T>::PER_ELEMENT, 0, 2);
        r[i] = load_head(rows[k + i] + offset, e, s.dim);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store(out + int64_t(e + i) * KEY_TILE + k, r[i]);
    }
}

#if KILAT_DP
// Values of keys k and k + 1, columns d .. d + 2 W - 1, as pairs.
INLINE void value_pairs(const bf16 *a, const bf16 *b, int d, int dim, VB &lo, VB &hi) {
  if (dim - d >= 2 * W) interleave(load_pairs(a + d), load_pairs(b + d), lo, hi);
  else interleave(load_half_words_n(a + d, dim - d), load_half_words_n(b + d, dim - d), lo, hi);
}
#endif

// Values of a tile as [key][dim_v], or pairs of keys as [key / 2][dim_v] of bf16 pairs.
template <class T>
static void pack_values(const T *const *rows, const T *const *next, int64_t offset, const Shape<T> &s, float *out) {
#if KILAT_DP
  if constexpr (Shape<T>::PER_ELEMENT == 2) {
    for (int k = 0; k < KEY_TILE; k += 2)
      for (int d = 0; d < s.dim_v; d += 2 * W) {
        VB lo, hi;
        __builtin_prefetch(next[k] + offset + d, 0, 2);
        __builtin_prefetch(next[k + 1] + offset + d, 0, 2);
        value_pairs(rows[k] + offset, rows[k + 1] + offset, d, s.dim, lo, hi);
        float *to = out + int64_t(k / 2) * s.dim_v + d;
        store(to, _mm512_castsi512_ps(lo));
        if (d + W < s.dim_v) store(to + W, _mm512_castsi512_ps(hi));
      }
    return;
  }
#endif
  for (int k = 0; k < KEY_TILE; k++)
    for (int d = 0; d < s.dim_v; d += W) {
      __builtin_prefetch(next[k] + offset + d, 0, 2);
      store(out + int64_t(k) * s.dim_v + d, load_head(rows[k] + offset, d, s.dim));
    }
}

template <int MR, int NV>
INLINE void load_scaled(VF (&acc)[MR][NV], const float *c, int64_t stride, const float *factor) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++, c += stride)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) acc[i][j] = mul(load(c + j * W), set1(factor[i]));
}

template <int MR, int NV>
INLINE void store_tile(const VF (&acc)[MR][NV], float *c, int64_t stride) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++, c += stride)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) store(c + j * W, acc[i][j]);
}

struct SmallArgs {
  const char *a, *b;
  int64_t a_bytes, b_bytes, steps;  // bytes from row to row, and from step to step
  const float *factor;              // of the former c, or nullptr: c is set
  float *c;
  int64_t c_stride;
};

// c [MR][NV vectors] = a [MR][steps] * b [steps][NV vectors], on top of c * factor.
template <class S, int MR, int NV>
static void small_product(const SmallArgs &p) {
  VF acc[MR][NV];
  if (p.factor) load_scaled(acc, p.c, p.c_stride, p.factor);
  else clear(acc);
  const char *a = p.a, *b = p.b;
  int64_t a_bytes = p.a_bytes, b_bytes = p.b_bytes;
  for (int64_t s = 0; s < p.steps; s++) {
    S::template step<MR, NV>(
        acc, [a, a_bytes](int, int i) { return a + i * a_bytes; }, [b](int j) { return S::load_b(b + j * W * 4); });
    a += 4;
    b += b_bytes;
  }
  store_tile(acc, p.c, p.c_stride);
}

typedef void (*SmallFn)(const SmallArgs &);

template <class S, int MR, int NV>
static inline SmallFn pick_small(int rows, int vectors) {
  if (vectors < NV) {
    if constexpr (NV > 1) return pick_small<S, MR, NV - 1>(rows, vectors);
  } else if (rows < MR) {
    if constexpr (MR > 1) return pick_small<S, MR - 1, NV>(rows, vectors);
  } else {
    return small_product<S, MR, NV>;
  }
  return nullptr;
}

// By reference: copying a struct that was written word by word stalls.
template <class S>
static void product(int rows, int vectors, SmallArgs &p) {
  for (int v = 0; v < vectors; v += ATTN_VECTORS) {
    pick_small<S, ATTN_ROWS, ATTN_VECTORS>(rows, vectors - v < ATTN_VECTORS ? vectors - v : int(ATTN_VECTORS))(p);
    p.b += ATTN_VECTORS * W * 4;
    p.c += ATTN_VECTORS * W;
  }
}

template <class T>
static void packed_scores(int rows, const float *query, const float *keys, const Shape<T> &s, int vectors, float *scores) {
  SmallArgs p = {reinterpret_cast<const char *>(query), reinterpret_cast<const char *>(keys), s.elements * 4, KEY_TILE * 4,
                 s.elements, nullptr, scores, KEY_TILE};
  product<typename Shape<T>::S>(rows, vectors, p);
}

template <class T>
static void packed_values(int rows, const char *weights, const float *values, const Shape<T> &s, int vectors, const float *factor,
                          float *acc) {
  int64_t steps = int64_t(vectors) * W / Shape<T>::PER_ELEMENT;
  const char *b = reinterpret_cast<const char *>(values);
  SmallArgs p = {weights, b, KEY_TILE * Shape<T>::WEIGHT_BYTES, s.dim_v * 4, steps, factor, acc, s.dim_v};
  product<typename Shape<T>::S>(rows, s.dim_v / W, p);
}

template <class T, int MR>
static void direct_scores_of(const float *query, const T *const *keys, const T *const *next, int64_t offset, const Shape<T> &s,
                             int vectors, float *scores) {
  for (int k = 0; k < vectors * W; k += W) {
    VF acc[MR][1];
    clear(acc);
    for (int e = 0; e < s.elements; e += W) {
      asm volatile("" ::: "memory");  // or the compiler keeps 2 W addresses in vector registers between rounds
      VF r[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        __builtin_prefetch(next[k + i] + offset + e * Shape<T>::PER_ELEMENT, 0, 2);
        r[i] = load_head(keys[k + i] + offset, e, s.dim);
      }
      transpose(r);
      const char *a = reinterpret_cast<const char *>(query + e);
      int64_t a_bytes = s.elements * 4;
#pragma GCC unroll 16
      for (int i = 0; i < W; i++)
        Shape<T>::S::template step<MR, 1>(acc, [a, a_bytes, i](int, int m) { return a + m * a_bytes + i * 4; },
                                          [&r, i](int) { return Shape<T>::S::as_b(r[i]); });
    }
    store_tile(acc, scores + k, KEY_TILE);
  }
}

// Columns d .. d + 2 W - 1 of the output.
template <class T, int MR>
static void direct_values_of(const char *weights, const T *const *values, const T *const *next, int64_t offset, int d,
                             const Shape<T> &s, int vectors, const float *factor, float *c) {
  VF acc[MR][2];
  load_scaled(acc, c, s.dim_v, factor);
  const int64_t a_bytes = KEY_TILE * Shape<T>::WEIGHT_BYTES;
  for (int k = 0; k < vectors * W; k += Shape<T>::PER_ELEMENT) {
    VF b[2];
    __builtin_prefetch(next[k] + offset + d, 0, 2);
#if KILAT_DP
    if constexpr (Shape<T>::PER_ELEMENT == 2) {
      __builtin_prefetch(next[k + 1] + offset + d, 0, 2);
      VB lo, hi;
      value_pairs(values[k] + offset, values[k + 1] + offset, d, s.dim, lo, hi);
      b[0] = _mm512_castsi512_ps(lo);
      b[1] = _mm512_castsi512_ps(hi);
    } else
#endif
    {
      b[0] = load_head(values[k] + offset, d, s.dim);
      b[1] = load_head(values[k] + offset, d + W, s.dim);
    }
    const char *a = weights + k * Shape<T>::WEIGHT_BYTES;
    Shape<T>::S::template step<MR, 2>(acc, [a](int, int m) { return a + m * a_bytes; },
                                      [&b](int j) { return Shape<T>::S::as_b(b[j]); });
  }
  store_tile(acc, c, s.dim_v);
}

// The last vector of an odd number of them.
template <class T, int MR>
static void direct_values_last(const char *weights, const T *const *values, int64_t offset, int d, const Shape<T> &s, int vectors,
                               const float *factor, float *c) {
  float wide[MR * 2 * W];
  for (int i = 0; i < MR; i++) store(wide + i * 2 * W, load(c + i * s.dim_v));
  for (int i = 0; i < MR; i++) store(wide + i * 2 * W + W, zero());
  Shape<T> narrow = s;
  narrow.dim_v = 2 * W;
  direct_values_of<T, MR>(weights, values, values, offset, d, narrow, vectors, factor, wide);
  for (int i = 0; i < MR; i++) store(c + i * s.dim_v, load(wide + i * 2 * W));
}

template <class T, int MR = DIRECT_ROWS>
static void direct_scores(int rows, const float *query, const T *const *keys, const T *const *next, int64_t offset,
                          const Shape<T> &s, int vectors, float *scores) {
  if (rows == MR) return direct_scores_of<T, MR>(query, keys, next, offset, s, vectors, scores);
  if constexpr (MR > 1) direct_scores<T, MR - 1>(rows, query, keys, next, offset, s, vectors, scores);
}

template <class T, int MR = DIRECT_ROWS>
static void direct_values(int rows, const char *weights, const T *const *values, const T *const *next, int64_t offset,
                          const Shape<T> &s, int vectors, const float *factor, float *acc) {
  if (rows == MR) {
    int d = 0;
    for (; d + 2 * W <= s.dim_v; d += 2 * W)
      direct_values_of<T, MR>(weights, values, next, offset, d, s, vectors, factor, acc + d);
    if (d < s.dim_v) direct_values_last<T, MR>(weights, values, offset, d, s, vectors, factor, acc + d);
    return;
  }
  if constexpr (MR > 1) direct_values<T, MR - 1>(rows, weights, values, next, offset, s, vectors, factor, acc);
}
