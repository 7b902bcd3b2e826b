// linear: rows of x times panels of packed weights.
//
// A unit of work is a block of rows times a range of panels. Its rows are first packed, step after step with the rows of a register
// tile side by side, so that the inner loop reads A and B as two plain streams. Tiles are tall (many rows, few columns) or, for up to
// WIDE_ROWS rows, wide: more columns give the chains that hide latency, and the weights stream from memory.
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
};

enum { ROW_BLOCK = 64, AHEAD_BYTES = 1024, STEP_BYTES = PANEL * 4, PANEL_VECTORS = PANEL / W };

template <class S, class T, int MR, int NV>
static void tile(const TileArgs &t) {
  VF acc[MR][NV];
  clear(acc);
  const char *a = t.a, *b = t.b;
  int64_t panel_bytes = t.panel_bytes;
  const char *ahead = t.ahead;
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

template <class T>
struct LinearJob {
  Context *c;
  const Linear *w;
  const T *x;
  int64_t stride, rows;
  T *out;
  int row_blocks, column_blocks;
  int64_t elements;
  uint64_t id;
  bool failed;
};

// Tiles of a block: as few as fit, rows spread evenly, so that no tile is much shorter than the others.
static inline int tiles_of(int rows) { return (rows + TALL_ROWS - 1) / TALL_ROWS; }

template <class T>
static void linear_unit(void *raw, int unit, int worker) {
  typedef typename SchemeOf<T>::Linear S;
  LinearJob<T> *job = static_cast<LinearJob<T> *>(raw);
  const Linear *w = job->w;
  int block = unit / job->column_blocks, part = unit % job->column_blocks;
  int64_t first = job->rows * block / job->row_blocks, last = job->rows * (block + 1) / job->row_blocks;
  int rows = int(last - first), tiles = rows <= WIDE_ROWS ? 1 : tiles_of(rows);
  Scratch *scratch = &job->c->worker[worker];
  uint64_t holds = job->id << 20 | uint64_t(block + 1);
  if (scratch->holds != holds) {
    float *out = static_cast<float *>(scratch_get(scratch, size_t(job->elements + W) * 4 * (rows + W)));
    if (!out) {
      job->failed = true;
      return;
    }
    for (int t = 0; t < tiles; t++) {
      int r0 = rows * t / tiles, r1 = rows * (t + 1) / tiles;
      pack_rows(job->x + (first + r0) * job->stride, job->stride, r1 - r0, w->k, job->elements, out + r0 * job->elements);
    }
    scratch->holds = holds;
  }
  const float *packed = static_cast<const float *>(scratch->data);
  int64_t panel = w->panels * part / job->column_blocks, panel_end = w->panels * (part + 1) / job->column_blocks;
  int64_t column = panel * PANEL, end = panel_end * PANEL;
  while (column < end) {
    bool wide = rows <= WIDE_ROWS && column + WIDE_VECTORS * W <= end;
    for (int t = 0; t < tiles; t++) {
      int r0 = rows * t / tiles, r1 = rows * (t + 1) / tiles;
      TileArgs args;
      args.a = reinterpret_cast<const char *>(packed + r0 * job->elements);
      args.b = w->data + column / PANEL * w->panel_bytes + column % PANEL * 4;
      args.steps = w->steps;
      args.panel_bytes = w->panel_bytes;
      args.out = job->out + (first + r0) * w->n + column;
      args.out_stride = w->n;
      args.bias = w->bias ? w->bias + column : nullptr;
      // A tile of a long block fetches its share of the next columns, a lone tile what it needs soon itself.
      int64_t column_bytes = w->panel_bytes / tiles;
      args.ahead = tiles > 1 ? args.b + w->panel_bytes + t * column_bytes : args.b + AHEAD_BYTES;
      args.ahead_step = STEP_BYTES / tiles;
      args.columns = w->n - column < PANEL * 4 ? int(w->n - column) : PANEL * 4;
      (wide ? pick_tile<S, T, WIDE_ROWS, WIDE_VECTORS>(r1 - r0) : pick_tile<S, T, TALL_ROWS, TALL_VECTORS>(r1 - r0))(args);
    }
    column += (wide ? WIDE_VECTORS : TALL_VECTORS) * W;
  }
}

// Into how many ranges the panels are cut: the number at which the busiest thread has least to do if all are equally fast; of
// several such, the largest, so that a thread that is held up leaves the rest to the others.
static inline int column_blocks_of(const Context *c, const Linear *w, int row_blocks, int64_t rows) {
  if (c->threads == 1) return 1;
  // Nanoseconds of one panel: its bytes at about 25 GB/s, or its products at about 200 GFLOP/s. No unit below 2 us.
  int64_t read_ns = w->panel_bytes / 25, compute_ns = rows * w->k * PANEL / 100;
  int64_t most = w->panels * (read_ns > compute_ns ? read_ns : compute_ns) / 2000 + 1;
  if (most > c->threads * 8) most = c->threads * 8;
  if (most > w->panels) most = w->panels;
  int64_t best = 1, best_span = w->panels * ((row_blocks + c->threads - 1) / c->threads);
  for (int64_t n = 2; n <= most; n++) {
    int64_t span = (row_blocks * n + c->threads - 1) / c->threads * ((w->panels + n - 1) / n);
    if (span <= best_span) best = n, best_span = span;
  }
  return int(best);
}

template <class T>
static int linear_of(Context *c, const Linear *w, const T *x, int64_t stride, int64_t rows, T *out) {
  LinearJob<T> job = {c, w, x, stride, rows, out, 1, 1, w->steps * SchemeOf<T>::Linear::PARTS, ++c->products, false};
  job.row_blocks = int((rows + ROW_BLOCK - 1) / ROW_BLOCK);
  job.column_blocks = column_blocks_of(c, w, job.row_blocks, rows < ROW_BLOCK ? rows : int64_t(ROW_BLOCK));
  pool_run(c->pool, job.row_blocks * job.column_blocks, linear_unit<T>, &job);
  return job.failed ? -1 : 0;
}

static int linear(Context *c, const Linear *w, const void *x, int64_t stride, int64_t rows, void *out) {
  if (w->dtype == KILAT_F32) return linear_of(c, w, static_cast<const float *>(x), stride, rows, static_cast<float *>(out));
  return linear_of(c, w, static_cast<const bf16 *>(x), stride, rows, static_cast<bf16 *>(out));
}
