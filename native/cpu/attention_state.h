// The sizes, running state and memory of attention.
#pragma once

enum {
  KEY_TILE = 64,
  SPLIT_TILES = 4,
  SPLIT_KEYS = KEY_TILE * SPLIT_TILES,
  BLOCK_ROWS = 192,  // queries times heads that a unit works on at most, more only if one token has more
  TILE_VECTORS = KEY_TILE / W,
  // Register tile, narrower than that of linear: both products have KEY_TILE or dim columns.
  ATTN_ROWS = WIDE_ROWS,
  ATTN_VECTORS = WIDE_VECTORS,
  // Up to so many rows are multiplied directly: their accumulators and a transposed square of keys share the registers.
  DIRECT_ROWS = 8,
  MOST_ROWS = 8,  // of either way
};
static_assert(int(ATTN_ROWS) <= int(MOST_ROWS), "");

static const float kNothing = -FLT_MAX;  // maximum over no keys; finite, so that differences are never inf - inf

// A block of consecutive queries of one row.
struct QueryBlock {
  int row, tokens;
  int64_t first_token, first_position;  // index into q, position in the session
  int64_t split_begin, split_end;       // splits that any of its queries sees
};

// Sizes that follow from the head dimension: 4-byte elements of a query, and columns of the output, in whole vectors.
template <class T>
struct Shape {
  typedef typename SchemeOf<T>::Attention S;
  enum {
    PER_ELEMENT = sizeof(T) == 2 && KILAT_DP ? 2 : 1,  // head elements in a 4-byte element
    WEIGHT_BYTES = PER_ELEMENT == 2 ? 2 : 4,           // of one weight of a value
  };
  int dim, elements, dim_v, group;
  explicit Shape(const kilat_heads &h)
      : dim(int(h.dim)),
        elements((dim + PER_ELEMENT * W - 1) / (PER_ELEMENT * W) * W),
        dim_v((dim + W - 1) / W * W),
        group(int(h.n_q / h.n_kv)) {}
};

// Running state of `rows` (query, head) rows of a unit.
struct State {
  float *top, *sum, *acc;  // [rows], [rows][W], [rows][dim_v]
};

struct Workspace {
  float *query, *keys, *values, *scores;
  char *weights;
  State state, total;
};

static inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
static inline int64_t state_floats_of(int rows, int dim_v) { return round_up(rows, 16) + int64_t(rows) * (W + dim_v); }
static inline State state_at(float *p, int rows) { return {p, p + round_up(rows, 16), p + round_up(rows, 16) + int64_t(rows) * W}; }

template <class T>
static bool workspace(Scratch *scratch, const Shape<T> &s, int rows, Workspace *w) {
  int64_t query = int64_t(rows) * s.elements, keys = int64_t(s.elements) * KEY_TILE, values = int64_t(KEY_TILE) * s.dim_v;
  int64_t scores = MOST_ROWS * KEY_TILE, state = round_up(state_floats_of(rows, s.dim_v), 16);
  float *p = static_cast<float *>(scratch_get(scratch, size_t(query + keys + values + 2 * scores + 2 * state) * 4));
  if (!p) return false;
  w->keys = p;
  w->values = w->keys + keys;
  w->scores = w->values + values;
  w->weights = reinterpret_cast<char *>(w->scores + scores);
  w->query = w->scores + 2 * scores;
  w->state = state_at(w->query + query, rows);
  w->total = state_at(w->query + query + state, rows);
  return true;
}

static void state_reset(const State &s, int rows, int dim_v) {
  for (int i = 0; i < rows; i++) s.top[i] = kNothing;
  memset(s.sum, 0, sizeof(float) * rows * W);
  memset(s.acc, 0, sizeof(float) * rows * dim_v);
}

// total = total merged with part, row by row.
static void state_merge(const State &total, const State &part, int rows, int dim_v) {
  for (int r = 0; r < rows; r += W) {
    int n = rows - r < W ? rows - r : W;
    VF old_top = load_n(total.top + r, n), top = load_n(part.top + r, n), both = max(old_top, top);
    float keep[W], take[W];
    store(keep, exp2_negative<true>(sub(old_top, both)));
    store(take, exp2_negative<true>(sub(top, both)));
    store_n(total.top + r, both, n);
    for (int i = 0; i < n; i++) {
      VF k = set1(keep[i]), t = set1(take[i]);
      float *sum = total.sum + (r + i) * W, *acc = total.acc + int64_t(r + i) * dim_v;
      const float *psum = part.sum + (r + i) * W, *pacc = part.acc + int64_t(r + i) * dim_v;
      store(sum, fma(load(psum), t, mul(load(sum), k)));
      for (int d = 0; d < dim_v; d += W) store(acc + d, fma(load(pacc + d), t, mul(load(acc + d), k)));
    }
  }
}

// Where the keys and values of a tile are, head 0. Keys past the last one repeat it: their weights are 0.
template <class T>
struct TileRows {
  const T *keys[KEY_TILE], *values[KEY_TILE];
};

template <class T>
static void tile_rows(const kilat_kv &kv, const int32_t *table, int64_t key, int64_t key_end, TileRows<T> *out) {
  int64_t page = key / kv.page_tokens, offset = key % kv.page_tokens;
  int n = key_end - key < KEY_TILE ? int(key_end - key) : KEY_TILE;
  for (int i = 0; i < n;) {
    const T *at = static_cast<const T *>(kv.base) + table[page++] * kv.page_stride + offset * kv.token_stride;
    for (; i < n && offset < kv.page_tokens; i++, offset++, at += kv.token_stride) {
      out->keys[i] = at;
      out->values[i] = at + kv.side_stride;
    }
    offset = 0;
  }
  for (int i = n; i < KEY_TILE; i++) out->keys[i] = out->keys[n - 1], out->values[i] = out->values[n - 1];
}

// W elements of a head from element e on, zeros past dim.
template <class T>
INLINE VF load_head(const T *x, int e, int dim) {
  int left = dim - e * Shape<T>::PER_ELEMENT;
#if KILAT_DP
  if constexpr (Shape<T>::PER_ELEMENT == 2)
    return _mm512_castsi512_ps(left >= 2 * W ? load_pairs(x + 2 * e) : load_half_words_n(x + 2 * e, left < 0 ? 0 : left));
#endif
  if (left <= 0) return zero();
  return left >= W ? load(x + e) : load_n(x + e, left);
}
