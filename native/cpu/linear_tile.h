// The register tiles of linear, and the packing of rows of x that feeds them.
//
// Tiles are tall (many rows, few columns) or, for up to WIDE_ROWS rows, wide: more columns give the chains that hide latency, and
// the weights stream from memory.
#pragma once

struct TileArgs {
  const char *a, *b;
  int64_t steps, panel_bytes;
  void *out;
  int64_t out_stride;
  const float *bias;
  int columns;  // columns of the tile that exist
  // What this tile fetches ahead, a little at every step, and how far it moves per step.
  const char *ahead;
  int64_t ahead_step;
  // And of what comes after this product.
  const char *later;
  int64_t later_step;
};

enum { AHEAD_BYTES = 1024, STEP_BYTES = PANEL * 4, PANEL_VECTORS = PANEL / W };

template <class S, class T, int MR, int NV>
static void tile(const TileArgs &t) {
  VF acc[MR][NV];
  clear(acc);
  const char *a = t.a, *b = t.b;
  int64_t panel_bytes = t.panel_bytes;
  const char *ahead = t.ahead, *later = t.later;
  for (int64_t s = 0; s < t.steps; s++) {
    S::template step<MR, NV>(
        acc, [a](int part, int i) { return a + (part * MR + i) * 4; },
        [b, panel_bytes](int j) { return S::load_b(b + (j / PANEL_VECTORS) * panel_bytes + (j % PANEL_VECTORS) * W * 4); });
    if (NV * W > PANEL / 2 && MR <= WIDE_ROWS) {
#pragma GCC unroll 4
      for (int j = 0; j < NV; j += 64 / (W * 4))
        __builtin_prefetch(b + (j / PANEL_VECTORS) * panel_bytes + (j % PANEL_VECTORS) * W * 4 + AHEAD_BYTES, 0, 2);
    } else {
      __builtin_prefetch(ahead, 0, 2);
      ahead += t.ahead_step;
      __builtin_prefetch(later, 0, 2);
      later += t.later_step;
    }
    a += S::PARTS * MR * 4;
    b += STEP_BYTES;
  }
  T *out = static_cast<T *>(t.out);
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) {
      VF y = t.bias ? add(acc[i][j], load(t.bias + j * W)) : acc[i][j];
      T *to = out + i * t.out_stride + j * W;
      int n = t.columns - j * W;
      if (n >= W) store(to, y);
      else if (n > 0) store_n(to, y, n);
    }
  }
}

typedef void (*TileFn)(const TileArgs &);

template <class S, class T, int MR, int NV>
static inline TileFn pick_tile(int rows) {
  if (rows == MR) return tile<S, T, MR, NV>;
  if constexpr (MR > 1) return pick_tile<S, T, MR - 1, NV>(rows);
  return nullptr;
}

// W 4-byte elements of a row of x from element e on, as the scheme of T wants them, zero from k on.
INLINE VF load_elements(const float *x, int64_t e, int64_t k) { return k - e >= W ? load(x + e) : load_n(x + e, int(k - e)); }
INLINE VF load_elements(const bf16 *x, int64_t e, int64_t k) {
#if KILAT_DP
  int64_t left = k - 2 * e;
  return left >= 2 * W ? _mm512_castsi512_ps(load_pairs(x + 2 * e)) : _mm512_castsi512_ps(load_half_words_n(x + 2 * e, int(left)));
#else
  int64_t left = k - e;
  if (left <= 0) return zero();
  return left >= W ? load(x + e) : load_n(x + e, int(left));
#endif
}

// Pack `rows` (<= W) rows: element e of row i goes to out[e * rows + i]. Writes up to W elements past the end.
template <class T>
static void pack_rows(const T *x, int64_t stride, int rows, int64_t k, int64_t elements, float *out) {
  for (int64_t e = 0; e < elements; e += W) {
    int n = elements - e < W ? int(elements - e) : W;
    if (rows == 1) {
      store(out + e, load_elements(x, e, k));
      continue;
    }
    VF r[W];
    for (int i = 0; i < W; i++) r[i] = i < rows ? load_elements(x + i * stride, e, k) : zero();
    transpose(r);
    for (int i = 0; i < n; i++) store(out + (e + i) * rows, r[i]);
  }
}
