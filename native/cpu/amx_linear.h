// linear on AMX tiles: rows of x times panels of packed weights, both bf16; alone, or with the gate of an MLP applied to the result.
//
// A block of 16 steps of half a panel is a tile as the instruction wants it, so weights are read as they are packed. Any number of rows goes
// through the same instruction in the same order of blocks, and what a row gets does not depend on the other rows of its tile: amx_check.h
// makes sure of that before this is ever used.
#pragma once

enum {
  TILE_ROWS = 16,
  TILE_COLUMNS = 16,  // half a panel
  TILE_STEPS = 16,
  TILE_LINE = 64,       // bytes of a row of a tile
  TILE_ROW_BLOCK = 128,  // a product is fast enough to wait for weights: they serve more rows than elsewhere, in the same scratch memory
  TILE_PRODUCTS_PER_NS = 500,
  STEP_BYTES = PANEL * 4,
  BLOCK_BYTES = TILE_STEPS * STEP_BYTES,
  TILE_AHEAD_BYTES = 2 * BLOCK_BYTES
};

// Tiles of a block of rows: one, or an even number of one height; the last may have rows to spare, which are zero.
struct TileRows {
  int rows, tiles, height;
  explicit TileRows(int rows)
      : rows(rows), tiles(rows <= TILE_ROWS ? 1 : (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS) * 2), height((rows + tiles - 1) / tiles) {}
};

static inline int64_t blocks_along(int64_t steps) { return (steps + TILE_STEPS - 1) / TILE_STEPS; }

// Tiles 0 to 3 are sums and 4, 5 rows of x; 6 and 7 are weights.
static inline TileShapes shapes_of(int height) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; i++) {
    shapes.row_bytes[i] = TILE_LINE;
    shapes.rows[i] = uint8_t(i < 6 ? height : TILE_STEPS);
  }
  return shapes;
}

// Rows of x as [tile][block][height][32 values], zero past k and past the rows.
static void tile_rows(const bf16 *x, int64_t stride, const TileRows &t, int64_t k, char *out) {
  for (int first = 0; first < t.tiles * t.height; first += t.height)
    for (int64_t at = 0; at < k; at += 2 * TILE_STEPS)
      for (int i = first; i < first + t.height; i++, out += TILE_LINE)
        store_i(out, i < t.rows ? load_half_words_n(x + i * stride + at, int(k - at < 2 * TILE_STEPS ? k - at : 2 * TILE_STEPS)) : zero_i());
}

struct TileProduct {
  const char *a;  // rows of x as above, from the first of TILES tiles on
  int height;
  const char *panel[2];
  int64_t steps;
  bool ahead;   // whether to fetch what comes after in the panels
  float *sums;  // [TILES * height][width]: columns of the panels side by side
  int64_t width;
};

template <int TILES, int PANELS>
AMX_CODE static inline void tile_step(const char *a, int64_t a_tile, const char *b, const char *b2) {
  tile_load<4>(a, TILE_LINE);
  if constexpr (TILES == 2) tile_load<5>(a + a_tile, TILE_LINE);
  tile_load<6>(b, STEP_BYTES);
  tile_dot<0, 4, 6>();
  if constexpr (TILES == 2) tile_dot<2, 5, 6>();
  tile_load<7>(b + TILE_LINE, STEP_BYTES);
  tile_dot<1, 4, 7>();
  if constexpr (TILES == 2) tile_dot<3, 5, 7>();
  if constexpr (PANELS == 2) {
    tile_load<6>(b2, STEP_BYTES);
    tile_dot<2, 4, 6>();
    tile_load<7>(b2 + TILE_LINE, STEP_BYTES);
    tile_dot<3, 4, 7>();
  }
}

// One tile of rows times one or two panels, or two tiles times one panel.
template <int TILES, int PANELS>
AMX_CODE static void tile_product(const TileProduct &p) {
  static_assert(TILES * PANELS <= 2, "there are four tiles of sums");
  const int64_t a_block = p.height * TILE_LINE, a_tile = blocks_along(p.steps) * a_block;
  const char *a = p.a, *b = p.panel[0], *b2 = p.panel[1];
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  int64_t s = 0;
  for (; s + TILE_STEPS <= p.steps; s += TILE_STEPS) {
    tile_step<TILES, PANELS>(a, a_tile, b, b2);
    for (int i = 0; p.ahead && i < BLOCK_BYTES; i += 64) {
      __builtin_prefetch(b + TILE_AHEAD_BYTES + i, 0, 2);
      if (PANELS == 2) __builtin_prefetch(b2 + TILE_AHEAD_BYTES + i, 0, 2);
    }
    a += a_block;
    b += BLOCK_BYTES;
    if (PANELS == 2) b2 += BLOCK_BYTES;
  }
  if (s < p.steps) {  // a panel ends with its last step; what is past it may be anything, even no memory
    alignas(64) char last[PANELS][BLOCK_BYTES] = {};
    memcpy(last[0], b, size_t(p.steps - s) * STEP_BYTES);
    if constexpr (PANELS == 2) memcpy(last[1], b2, size_t(p.steps - s) * STEP_BYTES);
    tile_step<TILES, PANELS>(a, a_tile, last[0], last[PANELS - 1]);
  }
  const int64_t stride = p.width * 4;
  float *second = PANELS == 2 ? p.sums + PANEL : p.sums + p.height * p.width;
  tile_store<0>(p.sums, stride);
  tile_store<1>(p.sums + TILE_COLUMNS, stride);
  if constexpr (TILES * PANELS == 2) {
    tile_store<2>(second, stride);
    tile_store<3>(second + TILE_COLUMNS, stride);
  }
}

static void round_rows(const float *sums, int64_t width, const float *bias, int rows, int64_t columns, bf16 *out, int64_t stride) {
  for (int i = 0; i < rows; i++, sums += width, out += stride)
    for (int j = 0; j < columns; j += W) {
      VF y = load(sums + j);
      if (bias) y = add(y, load(bias + j));
      if (columns - j >= W) store(out + j, y);
      else store_n(out + j, y, int(columns - j));
    }
}

// Sums [rows][gates, ups] of two panels; each is rounded as linear rounds it.
static void gate_rows(const float *sums, int rows, bf16 *out, int64_t stride) {
  for (int i = 0; i < rows; i++, sums += 2 * PANEL, out += stride)
    for (int j = 0; j < PANEL; j += W) {
      VF gate = rounded(load(sums + j), bf16()), up = rounded(load(sums + PANEL + j), bf16());
      store(out + j, mul(rounded(silu_of(gate), bf16()), up));
    }
}

struct TileJob {
  Context *c;
  const Linear *w;
  const bf16 *x;
  int64_t stride, rows;
  bf16 *out;
  bool gated;
  int64_t panels;  // to be shared out; with a gate, panels of gates
  int row_blocks, column_blocks;
  uint64_t id;
  bool failed;
};

// One panel, or two of one tile of rows; with a gate one of gates and that of their ups. Returns how many of job.panels it did.
AMX_CODE static int tile_panels(const TileJob &job, const TileRows &t, const char *packed, int64_t panel, int64_t end, bf16 *out) {
  const Linear &w = *job.w;
  const bool gated = job.gated, both = t.tiles == 1 && (gated || panel + 1 < end);
  const char *b = w.data + panel * w.panel_bytes, *b2 = b + (gated ? w.panels / 2 : 1) * w.panel_bytes;
  const int64_t columns = (both ? 2 : 1) * PANEL, width = gated ? 2 * PANEL : columns, n = gated ? w.n / 2 : w.n, column = panel * PANEL;
  alignas(64) float sums[2 * TILE_ROWS * 2 * PANEL];
  for (int i = 0; i < t.tiles; i += 2) {
    const int first = i * t.height, rows = t.rows - first < 2 * t.height ? t.rows - first : 2 * t.height;
    TileProduct p = {packed + first * blocks_along(w.steps) * TILE_LINE, t.height, {b, b2}, w.steps, i == 0, sums, width};
    if (both) {
      tile_product<1, 2>(p);
    } else if (t.tiles == 1) {
      tile_product<1, 1>(p);
    } else {
      tile_product<2, 1>(p);
      p.panel[0] = b2;
      p.sums = sums + PANEL;
      if (gated) tile_product<2, 1>(p);
    }
    bf16 *to = out + first * n + column;
    if (gated) gate_rows(sums, rows, to, n);
    else round_rows(sums, width, w.bias ? w.bias + column : nullptr, rows, n - column < columns ? n - column : columns, to, n);
  }
  return both && !gated ? 2 : 1;
}

AMX_CODE static void tile_unit(void *raw, int unit, int worker) {
  TileJob &job = *static_cast<TileJob *>(raw);
  const int block = unit / job.column_blocks, part = unit % job.column_blocks;
  const int64_t first = job.rows * block / job.row_blocks, last = job.rows * (block + 1) / job.row_blocks;
  const TileRows t(int(last - first));
  Scratch *scratch = &job.c->worker[worker];
  const uint64_t holds = job.id << 20 | uint64_t(block + 1);
  if (scratch->holds != holds) {  // the rows stay there for the next unit of the same block
    const int64_t lines = t.tiles * t.height * blocks_along(job.w->steps);
    if (!scratch_get(scratch, size_t(lines) * TILE_LINE)) {
      job.failed = true;
      return;
    }
    tile_rows(job.x + first * job.stride, job.stride, t, job.w->k, static_cast<char *>(scratch->data));
    scratch->holds = holds;
  }
  tiles_begin(shapes_of(t.height));
  bf16 *out = job.out + first * (job.gated ? job.w->n / 2 : job.w->n);
  const int64_t end = job.panels * (part + 1) / job.column_blocks;
  for (int64_t panel = job.panels * part / job.column_blocks; panel < end;)
    panel += tile_panels(job, t, static_cast<const char *>(scratch->data), panel, end, out);
  tiles_end();
}

static int linear(Context *c, const Linear *w, bool gated, const void *x, int64_t stride, int64_t rows, void *out) {
  if (w->dtype == KILAT_F32) return kAvx512Bf16.linear(c, w, gated, x, stride, rows, out);
  const int64_t panels = gated ? w->panels / 2 : w->panels;
  TileJob job = {c, w, static_cast<const bf16 *>(x), stride, rows, static_cast<bf16 *>(out), gated, panels, 1, 1, ++c->products, false};
  job.row_blocks = int((rows + TILE_ROW_BLOCK - 1) / TILE_ROW_BLOCK);
  const int64_t together = rows < TILE_ROW_BLOCK ? rows : int64_t(TILE_ROW_BLOCK);
  job.column_blocks = column_blocks_of(c, w, panels, job.row_blocks, together, TILE_PRODUCTS_PER_NS);
  pool_run(c->pool, job.row_blocks * job.column_blocks, tile_unit, &job);
  return job.failed ? -1 : 0;
}
