// attention: softmax(q k^T scale) v over pages, for decode rows and prefill chunks alike.
//
// What fixes the bits of a query's result, and nothing else may: keys go in tiles of KEY_TILE counted from position 0; a tile updates
// a running (maximum, sum, accumulator) as in arXiv:2205.14135; SPLIT_TILES tiles make a split, which starts afresh, and the
// splits of a query are merged one after another in order. A tile or split that a query cannot see changes nothing (factor 1, terms
// 0), so which queries share a block, how keys are divided among threads, and how a prompt was cut have no influence.
#pragma once

enum {
  KEY_TILE = 64,
  SPLIT_TILES = 4,
  SPLIT_KEYS = KEY_TILE * SPLIT_TILES,
  BLOCK_ROWS = 128,  // queries times heads that a unit works on at most, more only if one token has more
  TILE_VECTORS = KEY_TILE / W,
  // Register tile, narrower than that of linear: both products have KEY_TILE or dim columns.
  ATTN_ROWS = WIDE_ROWS,
  ATTN_VECTORS = WIDE_VECTORS,
};

static const float kNothing = -FLT_MAX;  // maximum over no keys; finite, so that differences are never inf - inf

// A block of consecutive queries of one row.
struct QueryBlock {
  int row, tokens;
  int64_t first_token, first_position;  // index into q, position in the session
  int64_t split_begin, split_end;       // splits that any of its queries sees
};

template <class T>
struct AttentionJob {
  Context *c;
  const AttentionArgs *a;
  const QueryBlock *blocks;
  int n_blocks, head_groups, heads_per_group;
  int64_t max_splits;  // > 0: a unit is one split and leaves its state in partial
  float *partial;
  int64_t state_floats;  // floats of the state of one (block, head group) at most
  float score_scale;
  bool failed;
};

// Sizes that follow from the head dimension. DimA: 4-byte elements of a query; dim_v: columns of the output, whole vectors.
template <class T>
struct Shape {
  typedef typename SchemeOf<T>::Attention S;
  enum { PER_ELEMENT = sizeof(T) == 2 && KILAT_DP ? 2 : 1 };  // head elements in a 4-byte element
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
  int64_t scores = ATTN_ROWS * KEY_TILE, state = round_up(state_floats_of(rows, s.dim_v), 16);
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
    store(keep, exp2_of(sub(old_top, both)));
    store(take, exp2_of(sub(top, both)));
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

template <class T>
INLINE VF load_head(const T *x, int e, int dim) {
  typedef Shape<T> Sh;
  int left = dim - e * Sh::PER_ELEMENT;
  if (left <= 0) return zero();
#if KILAT_DP
  if constexpr (Sh::PER_ELEMENT == 2)
    return _mm512_castsi512_ps(left >= 2 * W ? load_pairs(x + 2 * e) : load_half_words_n(x + 2 * e, left));
#endif
  return left >= W ? load(x + e) : load_n(x + e, left);
}

// Keys of a tile as [element][KEY_TILE]; key i of the tile is at rows[i] (nullptr: not there, zeros).
template <class T>
static void pack_keys(const T *const *rows, int64_t offset, const Shape<T> &s, float *out) {
  for (int e = 0; e < s.elements; e += W)
    for (int k = 0; k < KEY_TILE; k += W) {
      VF r[W];
      for (int i = 0; i < W; i++) r[i] = rows[k + i] ? load_head(rows[k + i] + offset, e, s.dim) : zero();
      transpose(r);
      for (int i = 0; i < W; i++) store(out + int64_t(e + i) * KEY_TILE + k, r[i]);
    }
}

// Values of a tile as [key][dim_v], or pairs of keys as [key / 2][dim_v] of bf16 pairs.
template <class T>
static void pack_values(const T *const *rows, int64_t offset, const Shape<T> &s, float *out) {
#if KILAT_DP
  if constexpr (Shape<T>::PER_ELEMENT == 2) {
    for (int k = 0; k < KEY_TILE; k += 2)
      for (int d = 0; d < s.dim_v; d += 2 * W) {
        int n = s.dim - d < 2 * W ? s.dim - d : 2 * W;
        VB a = rows[k] ? load_half_words_n(rows[k] + offset + d, n) : VB{};
        VB b = rows[k + 1] ? load_half_words_n(rows[k + 1] + offset + d, n) : VB{};
        VB lo, hi;
        interleave(a, b, lo, hi);
        float *to = out + int64_t(k / 2) * s.dim_v + d;
        store(to, _mm512_castsi512_ps(lo));
        if (d + W < s.dim_v) store(to + W, _mm512_castsi512_ps(hi));
      }
    return;
  }
#endif
  for (int k = 0; k < KEY_TILE; k++)
    for (int d = 0; d < s.dim_v; d += W) {
      int n = s.dim - d < W ? s.dim - d : W;
      store(out + int64_t(k) * s.dim_v + d, rows[k] ? load_n(rows[k] + offset + d, n) : zero());
    }
}

// c [MR][NV vectors] (row stride c_stride) = a [MR][steps] * b [steps][NV vectors], on top of c * factor if factor is given.
template <class S, int MR, int NV>
static void small_product(const char *a, int64_t a_bytes, const char *b, int64_t b_bytes, int64_t steps, const float *factor,
                          float *c, int64_t c_stride) {
  VF acc[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) acc[i][j] = factor ? mul(load(c + i * c_stride + j * W), set1(factor[i])) : zero();
  for (int64_t s = 0; s < steps; s++) {
    S::template step<MR, NV>(acc, [a, a_bytes](int, int i) { return a + i * a_bytes; }, [b](int j) { return b + j * W * 4; });
    a += 4;
    b += b_bytes;
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) store(c + i * c_stride + j * W, acc[i][j]);
}

typedef void (*SmallFn)(const char *, int64_t, const char *, int64_t, int64_t, const float *, float *, int64_t);

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

template <class S>
static void product(int rows, int columns, const char *a, int64_t a_bytes, const char *b, int64_t b_bytes, int64_t steps,
                    const float *factor, float *c, int64_t c_stride) {
  for (int v = 0; v < columns / W; v += ATTN_VECTORS) {
    int vectors = columns / W - v < ATTN_VECTORS ? columns / W - v : ATTN_VECTORS;
    pick_small<S, ATTN_ROWS, ATTN_VECTORS>(rows, vectors)(a, a_bytes, b + v * W * 4, b_bytes, steps, factor, c + v * W, c_stride);
  }
}

// Weights of the second product: fp32, or rounded to bf16 where that product takes pairs.
template <class T>
INLINE void store_weight(char *row, int i, VF p) {
  if (Shape<T>::PER_ELEMENT == 2) store(reinterpret_cast<bf16 *>(row) + i, p);
  else store(reinterpret_cast<float *>(row) + i, p);
}

// One row of a tile's scores -> weights; sees keys from (inclusive) to (exclusive) of the tile. Returns the factor of what was
// accumulated before.
template <class T>
INLINE void softmax_row(float *scores, int from, int to, float scale, float *top, float *sum, char *weights, float *factor) {
  VF v[TILE_VECTORS];
  VF hidden = set1(-INFINITY), peak = hidden;
  for (int j = 0; j < TILE_VECTORS; j++) {
    v[j] = mul(load(scores + j * W), set1(scale));
    if (from > 0 || to < KEY_TILE) v[j] = keep_lanes(v[j], hidden, from - j * W, to - j * W);
    peak = max(peak, v[j]);
  }
  float old_top = *top, best = max_lanes(peak), new_top = best > old_top ? best : old_top;
  *top = new_top;
  *factor = old_top - new_top;
  VF shift = set1(new_top), part[2] = {zero(), zero()};
  for (int j = 0; j < TILE_VECTORS; j++) {
    v[j] = exp2_of(sub(v[j], shift));
    part[j % 2] = add(part[j % 2], v[j]);
    store_weight<T>(weights, j * W, v[j]);
  }
  float keep[W];
  VF f = exp2_of(set1(*factor));
  store(keep, f);
  *factor = keep[0];
  store(sum, fma(load(sum), f, add(part[0], part[1])));
}

// One tile of keys for all rows of one kv head. Row r is query r / group.
template <class T>
static void tile_update(const Workspace &w, const Shape<T> &s, int row0, int tokens, int64_t first_position, int64_t tile_key,
                        int64_t window, float scale) {
  typedef typename SchemeOf<T>::Attention S;
  int rows = tokens * s.group;
  const int weight_bytes = Shape<T>::PER_ELEMENT == 2 ? KEY_TILE * 2 : KEY_TILE * 4;
  for (int r = 0; r < rows; r += ATTN_ROWS) {
    int n = rows - r < ATTN_ROWS ? rows - r : ATTN_ROWS;
    int64_t last = first_position + (r + n - 1) / s.group, first = first_position + r / s.group;
    if (last < tile_key || (window > 0 && first - window >= tile_key + KEY_TILE - 1)) continue;  // nobody sees the tile
    product<S>(n, KEY_TILE, reinterpret_cast<const char *>(w.query + int64_t(row0 + r) * s.elements), s.elements * 4,
               reinterpret_cast<const char *>(w.keys), KEY_TILE * 4, s.elements, nullptr, w.scores, KEY_TILE);
    float factor[ATTN_ROWS];
    for (int i = 0; i < n; i++) {
      int64_t position = first_position + (r + i) / s.group;
      int64_t to = position + 1 - tile_key, from = window > 0 ? position + 1 - window - tile_key : 0;
      softmax_row<T>(w.scores + i * KEY_TILE, from < 0 ? 0 : from > KEY_TILE ? KEY_TILE : int(from),
                     to < 0 ? 0 : to > KEY_TILE ? KEY_TILE : int(to), scale, w.state.top + row0 + r + i,
                     w.state.sum + (row0 + r + i) * W, w.weights + i * weight_bytes, factor + i);
    }
    product<S>(n, s.dim_v, w.weights, weight_bytes, reinterpret_cast<const char *>(w.values), s.dim_v * 4, weight_bytes / 4, factor,
               w.state.acc + int64_t(row0 + r) * s.dim_v, s.dim_v);
  }
}

// Addresses of the keys and values of a tile, head 0; nullptr from key_end on.
template <class T>
static void tile_rows(const kilat_kv &kv, const int32_t *table, int64_t key, int64_t key_end, const T **keys, const T **values) {
  int64_t page = key / kv.page_tokens, offset = key % kv.page_tokens;
  for (int i = 0; i < KEY_TILE; i++) {
    if (key + i < key_end) {
      keys[i] = static_cast<const T *>(kv.base) + table[page] * kv.page_stride + offset * kv.token_stride;
      values[i] = keys[i] + kv.side_stride;
    } else {
      keys[i] = values[i] = nullptr;
    }
    if (++offset == kv.page_tokens) offset = 0, page++;
  }
}

template <class T>
static void gather_query(const AttentionArgs &a, const Shape<T> &s, const QueryBlock &b, int head, float *out) {
  for (int t = 0; t < b.tokens; t++)
    for (int g = 0; g < s.group; g++) {
      const T *q = static_cast<const T *>(a.q) + ((b.first_token + t) * a.heads.n_q + head * s.group + g) * s.dim;
      for (int e = 0; e < s.elements; e += W) store(out + e, load_head(q, e, s.dim));
      out += s.elements;
    }
}

// One split of one block for heads h0 .. h1 - 1 into w.state.
template <class T>
static void split_update(const AttentionArgs &a, const Shape<T> &s, const QueryBlock &b, int h0, int h1, int64_t split,
                         float scale, const Workspace &w) {
  int rows = b.tokens * s.group;
  int64_t last = b.first_position + b.tokens - 1, begin = split * SPLIT_KEYS, end = begin + SPLIT_KEYS;
  if (a.window > 0 && b.first_position + 1 - a.window > begin) begin = (b.first_position + 1 - a.window) / KEY_TILE * KEY_TILE;
  if (end > last + 1) end = last + 1;
  state_reset(w.state, rows * (h1 - h0), s.dim_v);
  const T *keys[KEY_TILE], *values[KEY_TILE];
  for (int64_t key = begin; key < end; key += KEY_TILE) {
    tile_rows<T>(a.kv, a.rows.page_table + b.row * a.rows.table_stride, key, last + 1, keys, values);
    for (int h = h0; h < h1; h++) {
      pack_keys(keys, h * a.kv.head_stride, s, w.keys);
      pack_values(values, h * a.kv.head_stride, s, w.values);
      tile_update<T>(w, s, (h - h0) * rows, b.tokens, b.first_position, key, a.window, scale);
    }
  }
}

template <class T>
static void write_out(const AttentionArgs &a, const Shape<T> &s, const QueryBlock &b, int h0, int h1, const State &total) {
  int row = 0;
  for (int h = h0; h < h1; h++)
    for (int t = 0; t < b.tokens; t++)
      for (int g = 0; g < s.group; g++, row++) {
        T *out = static_cast<T *>(a.out) + ((b.first_token + t) * a.heads.n_q + h * s.group + g) * s.dim;
        const float *acc = total.acc + int64_t(row) * s.dim_v;
        VF inverse = set1(1.0f / sum_lanes(load(total.sum + row * W)));
        for (int d = 0; d < s.dim; d += W) {
          VF y = mul(load(acc + d), inverse);
          if (s.dim - d >= W) store(out + d, y);
          else store_n(out + d, y, s.dim - d);
        }
      }
}
