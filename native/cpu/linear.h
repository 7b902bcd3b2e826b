// linear: rows of x times panels of packed weights; alone, or with the gate of an MLP applied to the result.
//
// A unit of work is a block of rows times a range of panels. Its rows are first packed, step after step with the rows of a register
// tile side by side, so that the inner loop reads A and B as two plain streams.
#pragma once

template <class T>
struct LinearJob {
  Context *c;
  const Linear *w;
  const T *x;
  int64_t stride, rows;
  T *out;
  int64_t panels;  // to be shared out; with a gate, panels of gates
  int row_blocks, column_blocks;
  int64_t elements;
  uint64_t id;
  bool failed;
};

// Tiles of a block: as few as fit, rows spread evenly, so that no tile is much shorter than the others.
struct Tiles {
  int rows, n;
  explicit Tiles(int rows) : rows(rows), n(rows <= WIDE_ROWS ? 1 : (rows + TALL_ROWS - 1) / TALL_ROWS) {}
  int first(int t) const { return rows * t / n; }
  int count(int t) const { return first(t + 1) - first(t); }
};

// The packed rows of a block in the worker's scratch memory, where they stay for the next unit of the same block; nullptr without
// memory.
template <class T>
static const float *packed_block(const LinearJob<T> &job, int block, int64_t first, const Tiles &tiles, Scratch *scratch) {
  uint64_t holds = job.id << 20 | uint64_t(block + 1);
  if (scratch->holds != holds) {
    float *out = static_cast<float *>(scratch_get(scratch, size_t(job.elements + W) * 4 * (tiles.rows + W)));
    if (!out) return nullptr;
    for (int t = 0; t < tiles.n; t++)
      pack_rows(job.x + (first + tiles.first(t)) * job.stride, job.stride, tiles.count(t), job.w->k, job.elements,
                out + tiles.first(t) * job.elements);
    scratch->holds = holds;
  }
  return static_cast<const float *>(scratch->data);
}

// The first panel of the unit that this worker takes next if all are equally fast, at the end of that in the product after this one;
// nullptr when nothing is known.
template <class T>
static const char *handed_on(const LinearJob<T> &job, int unit) {
  const Linear &w = *job.w;
  int next = unit + job.c->threads, all = job.row_blocks * job.column_blocks;
  if (next < all) return w.data + job.panels * (next % job.column_blocks) / job.column_blocks * w.panel_bytes;
  const Linear *after = job.c->after;
  return after ? after->data + (next - all) * after->panel_bytes : nullptr;
}

// Arguments of tile t for the columns from `column` on, but for the output. `next` is the panel to work on after that of `column`, or
// nullptr.
template <class T>
static TileArgs tile_args(const LinearJob<T> &job, const float *packed, const Tiles &tiles, int t, int64_t column, const char *next) {
  const Linear &w = *job.w;
  TileArgs args;
  args.a = reinterpret_cast<const char *>(packed + tiles.first(t) * job.elements);
  args.b = w.data + column / PANEL * w.panel_bytes + column % PANEL * 4;
  args.steps = w.steps;
  args.panel_bytes = w.panel_bytes;
  args.out = nullptr;
  args.out_stride = 0;
  args.bias = w.bias ? w.bias + column : nullptr;
  args.columns = w.n - column < PANEL * 4 ? int(w.n - column) : PANEL * 4;
  args.ahead = args.later = args.b;
  args.ahead_step = args.later_step = 0;
  if (next) {  // Each tile of a block fetches its share of it; a lone one has nothing else to fetch.
    const int shares = tiles.n > 1 ? tiles.n : 2;
    args.ahead = next + column % PANEL * 4 + t * (w.panel_bytes / shares);
    args.ahead_step = STEP_BYTES / shares;
    if (tiles.n == 1) args.later = args.ahead + w.panel_bytes / 2, args.later_step = args.ahead_step;
  }
  return args;
}

// Let a tile of a product that computes more than it reads fetch the next page of the feed, at its own pace.
static inline void feed_tile(const Feed &feed, Scratch *worker, TileArgs *args) {
  if (!worker->left) return;
  worker->left--;
  const kilat_rows &rows = *feed.rows;
  args->later = feed.base + rows.page_table[worker->row * rows.table_stride + worker->page] * feed.page_stride;
  args->later_step = (feed.piece_bytes + args->steps - 1) / args->steps;
  if (++worker->page * feed.page_tokens < rows.kv_len[worker->row]) return;
  worker->page = 0;
  if (worker->row-- == worker->last_row) worker->left = 0;
}

template <class T>
static void linear_unit(void *raw, int unit, int worker) {
  typedef typename SchemeOf<T>::Linear S;
  LinearJob<T> *job = static_cast<LinearJob<T> *>(raw);
  int block = unit / job->column_blocks, part = unit % job->column_blocks;
  int64_t first = job->rows * block / job->row_blocks, last = job->rows * (block + 1) / job->row_blocks;
  Tiles tiles(int(last - first));
  const float *packed = packed_block(*job, block, first, tiles, &job->c->worker[worker]);
  if (!packed) {
    job->failed = true;
    return;
  }
  int64_t column = job->panels * part / job->column_blocks * PANEL, end = job->panels * (part + 1) / job->column_blocks * PANEL;
  const char *after = handed_on(*job, unit);
  while (column < end) {
    bool wide = tiles.rows <= WIDE_ROWS && column + WIDE_VECTORS * W <= end;
    const int64_t panel = column / PANEL + 1;
    const char *next = panel * PANEL < end ? job->w->data + panel * job->w->panel_bytes : after;
    for (int t = 0; t < tiles.n; t++) {
      TileArgs args = tile_args(*job, packed, tiles, t, column, next);
      args.out = job->out + (first + tiles.first(t)) * job->w->n + column;
      args.out_stride = job->w->n;
      if (tiles.n > 1) feed_tile(job->c->feed, &job->c->worker[worker], &args);
      int rows = tiles.count(t);
      (wide ? pick_tile<S, T, WIDE_ROWS, WIDE_VECTORS>(rows) : pick_tile<S, T, TALL_ROWS, TALL_VECTORS>(rows))(args);
    }
    column += (wide ? WIDE_VECTORS : TALL_VECTORS) * W;
  }
}

// As linear_unit for a weight whose first half of columns are gates and second half ups: a panel of each goes into a buffer,
// rounded as linear rounds it, and silu_mul of them into out, so that the bits are those of the two ops one after the other.
template <class T>
static void gated_unit(void *raw, int unit, int worker) {
  typedef typename SchemeOf<T>::Linear S;
  LinearJob<T> *job = static_cast<LinearJob<T> *>(raw);
  int block = unit / job->column_blocks, part = unit % job->column_blocks;
  int64_t first = job->rows * block / job->row_blocks, last = job->rows * (block + 1) / job->row_blocks;
  Tiles tiles(int(last - first));
  const float *packed = packed_block(*job, block, first, tiles, &job->c->worker[worker]);
  if (!packed) {
    job->failed = true;
    return;
  }
  const int64_t n = job->w->n / 2, half_bytes = n / PANEL * job->w->panel_bytes;
  const bool both = tiles.rows <= WIDE_ROWS && WIDE_VECTORS * W == 2 * PANEL;
  alignas(64) T buffer[(TALL_ROWS > WIDE_ROWS ? TALL_ROWS : WIDE_ROWS) * 2 * PANEL];
  int64_t end = job->panels * (part + 1) / job->column_blocks * PANEL;
  const char *after = handed_on(*job, unit);
  for (int64_t column = job->panels * part / job->column_blocks * PANEL; column < end; column += PANEL) {
    const char *next = column + PANEL < end ? job->w->data + (column / PANEL + 1) * job->w->panel_bytes : after;
    for (int t = 0; t < tiles.n; t++) {
      int rows = tiles.count(t);
      for (int done = 0; done < 2 * PANEL; done += both ? 2 * PANEL : TALL_VECTORS * W) {
        const bool up = done >= PANEL;
        TileArgs args = tile_args(*job, packed, tiles, t, column + done % PANEL + (up ? n : 0), next && up ? next + half_bytes : next);
        if (both) args.panel_bytes = half_bytes;
        args.out = buffer + done;
        args.out_stride = 2 * PANEL;
        if (tiles.n > 1) feed_tile(job->c->feed, &job->c->worker[worker], &args);
        (both ? pick_tile<S, T, WIDE_ROWS, WIDE_VECTORS>(rows) : pick_tile<S, T, TALL_ROWS, TALL_VECTORS>(rows))(args);
      }
      T *out = job->out + (first + tiles.first(t)) * n + column;
      for (int i = 0; i < rows; i++)
        for (int j = 0; j < PANEL; j += W) {
          const T *gate = buffer + i * 2 * PANEL + j;
          store(out + i * n + j, mul(rounded(silu_of(load(gate)), T()), load(gate + PANEL)));
        }
    }
  }
}

template <class T>
static int linear_of(Context *c, const Linear *w, bool gated, const T *x, int64_t stride, int64_t rows, T *out) {
  int64_t panels = gated ? w->panels / 2 : w->panels;
  LinearJob<T> job = {c, w, x, stride, rows, out, panels, 1, 1, w->steps * SchemeOf<T>::Linear::PARTS, ++c->products, false};
  job.row_blocks = int((rows + ROW_BLOCK - 1) / ROW_BLOCK);
  job.column_blocks = column_blocks_of(c, w, panels, job.row_blocks, rows < ROW_BLOCK ? rows : int64_t(ROW_BLOCK));
  pool_run(c->pool, job.row_blocks * job.column_blocks, gated ? gated_unit<T> : linear_unit<T>, &job);
  return job.failed ? -1 : 0;
}

static int linear(Context *c, const Linear *w, bool gated, const void *x, int64_t stride, int64_t rows, void *out) {
  if (w->dtype == KILAT_F32)
    return linear_of(c, w, gated, static_cast<const float *>(x), stride, rows, static_cast<float *>(out));
  return linear_of(c, w, gated, static_cast<const bf16 *>(x), stride, rows, static_cast<bf16 *>(out));
}
