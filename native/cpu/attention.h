// attention: softmax(q k^T scale) v over pages, for decode rows and prefill chunks alike.
//
// What fixes the bits of a query's result, and nothing else may: keys go in tiles of KEY_TILE counted from position 0; a tile updates
// a running (maximum, sum, accumulator) as in arXiv:2205.14135; SPLIT_TILES tiles make a split, which starts afresh, and the splits
// of a query are merged one after another in order. A tile or split that a query cannot see changes nothing (factor 1, terms 0), so
// which queries share a block, how keys are divided among threads, and how a prompt was cut have no influence.
#pragma once

// Weights of the second product: fp32, or rounded to bf16 where that product takes pairs.
template <class T>
INLINE void store_weights(char *row, int i, VF p) {
  if (Shape<T>::WEIGHT_BYTES == 2) store(reinterpret_cast<bf16 *>(row) + i, p);
  else store(reinterpret_cast<float *>(row) + i, p);
}

// What a row of a tile sees: keys from (inclusive) to (exclusive), as indices into the tile.
struct Sight {
  int from, to;
};

static inline int clamp_tile(int64_t i) { return i < 0 ? 0 : i > KEY_TILE ? KEY_TILE : int(i); }

static inline Sight sight_of(int64_t position, int64_t tile_key, int64_t window) {
  return {window > 0 ? clamp_tile(position + 1 - window - tile_key) : 0, clamp_tile(position + 1 - tile_key)};
}

// n rows of scores [KEY_TILE], of which the first `vectors` vectors matter -> weights, and in factor what to multiply the former
// accumulators with. WHOLE: every row sees the whole tile. Rows go side by side through each stage, for one row is a long chain.
template <class T, bool WHOLE>
static void softmax_rows(float *scores, const Sight *sight, int n, int vectors, float scale, float *top, float *sum, char *weights,
                         float *factor) {
  VF hidden = set1(-INFINITY);
  float peaks[W], old[W], tops[W];
  if (WHOLE) vectors = TILE_VECTORS;
  for (int i = 0; i < n; i++) {
    float *s = scores + i * KEY_TILE;
    VF peak = hidden;
    if (!WHOLE)
      for (int j = 0; j < vectors; j++)
        store(s + j * W, keep_lanes(load(s + j * W), hidden, sight[i].from - j * W, sight[i].to - j * W));
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++) peak = max(peak, load(s + j * W));
    peaks[i] = max_lanes(peak);
    old[i] = top[i];
  }
  for (int i = n; i < W; i++) peaks[i] = old[i] = 0;
  VF old_top = load(old), new_top = max(old_top, mul(load(peaks), set1(scale)));
  store(tops, new_top);
  store(factor, exp2_negative<true>(sub(old_top, new_top)));
  for (int i = 0; i < n; i++) {
    const float *s = scores + i * KEY_TILE;
    char *out = weights + i * KEY_TILE * Shape<T>::WEIGHT_BYTES;
    VF shift = set1(tops[i]), part[2] = {zero(), zero()};
#pragma GCC unroll 8
    for (int j = 0; j < vectors; j++) {
      VF p = exp2_negative<sizeof(T) == 4>(fmsub(load(s + j * W), set1(scale), shift));
      if (!WHOLE) p = keep_lanes(p, zero(), sight[i].from - j * W, sight[i].to - j * W);
      part[j % 2] = add(part[j % 2], p);
      store_weights<T>(out, j * W, p);
    }
    top[i] = tops[i];
    store(sum + i * W, fma(load(sum + i * W), set1(factor[i]), add(part[0], part[1])));
  }
}

// One tile of keys for the rows of one kv head that start at row0. Row r is query r / group.
template <class T>
static void tile_update(const Workspace &w, const Shape<T> &s, const TileRows<T> &at, const TileRows<T> &next, int64_t head_offset,
                        int row0, int tokens, int64_t first_position, int64_t tile_key, int64_t window, float scale) {
  int rows = tokens * s.group;
  bool direct = rows <= DIRECT_ROWS;
  if (!direct) {
    pack_keys(at.keys, next.keys, head_offset, s, w.keys);
    pack_values(at.values, next.values, head_offset, s, w.values);
  }
  const int step = direct ? DIRECT_ROWS : ATTN_ROWS;
  for (int r = 0; r < rows; r += step) {
    int n = rows - r < step ? rows - r : step;
    Sight sight[MOST_ROWS];
    int from = KEY_TILE, to = 0, whole = 0;
    int64_t position = first_position + r / s.group;
    for (int i = 0, head = r % s.group; i < n; i++) {
      sight[i] = sight_of(position, tile_key, window);
      if (++head == s.group) head = 0, position++;
      from = sight[i].from < from ? sight[i].from : from;
      to = sight[i].to > to ? sight[i].to : to;
      whole += sight[i].from == 0 && sight[i].to == KEY_TILE;
    }
    if (from >= to) continue;  // nobody sees the tile
    int vectors = (to + W - 1) / W;
    float factor[W];
    const float *query = w.query + int64_t(row0 + r) * s.elements;
    float *acc = w.state.acc + int64_t(row0 + r) * s.dim_v;
    if (direct) direct_scores(n, query, at.keys, next.keys, head_offset, s, vectors, w.scores);
    else packed_scores(n, query, w.keys, s, vectors, w.scores);
    auto softmax = whole == n ? softmax_rows<T, true> : softmax_rows<T, false>;
    softmax(w.scores, sight, n, vectors, scale, w.state.top + row0 + r, w.state.sum + (row0 + r) * W, w.weights, factor);
    if (direct) direct_values(n, w.weights, at.values, next.values, head_offset, s, vectors, factor, acc);
    else packed_values(n, w.weights, w.values, s, vectors, factor, acc);
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

// First key of the first tile that a block needs.
static inline int64_t first_key_of(const QueryBlock &b, int64_t window) {
  int64_t from = window > 0 ? b.first_position + 1 - window : 0;
  return from > 0 ? from / KEY_TILE * KEY_TILE : 0;
}

static inline int64_t end_key_of(const QueryBlock &b) { return b.first_position + b.tokens; }

// One split of one block for heads h0 .. h1 - 1 into w.state. While a tile is worked on the next one is fetched: of this split; with
// `further` also of the next split of the block, and after its last one of the block `after` (or nullptr).
template <class T>
static void split_update(const AttentionArgs &a, const Shape<T> &s, const QueryBlock &b, int h0, int h1, int64_t split,
                         float scale, const Workspace &w, bool further, const QueryBlock *after) {
  int rows = b.tokens * s.group;
  int64_t first = first_key_of(b, a.window), all = end_key_of(b), begin = split * SPLIT_KEYS, end = begin + SPLIT_KEYS;
  if (begin < first) begin = first;
  if (end > all) end = all;
  int64_t fetch_end = further ? all : end;
  state_reset(w.state, rows * (h1 - h0), s.dim_v);
  const int32_t *tables = a.rows.page_table;
  TileRows<T> tiles[2];
  int now = 0;
  tile_rows(a.kv, tables + b.row * a.rows.table_stride, begin, all, &tiles[0]);
  for (int64_t key = begin; key < end; key += KEY_TILE, now ^= 1) {
    TileRows<T> *next = &tiles[now ^ 1];
    if (key + KEY_TILE < fetch_end) {
      tile_rows(a.kv, tables + b.row * a.rows.table_stride, key + KEY_TILE, all, next);
    } else if (after) {
      const int32_t *table = tables + after->row * a.rows.table_stride;
      tile_rows(a.kv, table, first_key_of(*after, a.window), end_key_of(*after), next);
    } else {
      next = &tiles[now];
    }
    for (int h = h0; h < h1; h++)
      tile_update(w, s, tiles[now], *next, h * a.kv.head_stride, (h - h0) * rows, b.tokens, b.first_position, key, a.window, scale);
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
