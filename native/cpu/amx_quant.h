// linear with quantized weights on AMX tiles, for many rows. Sums of products of integers are exact and each is scaled and added as
// quant_tile.h does it, so the bits are those of quant_linear.h, which serves the few: there is nothing to choose but speed.
#pragma once

enum { TILE_QUANT_ROWS = 16 };  // from so many rows on: a whole tile

// Rows of x, rounded to 8 bits: of each group the rows of all tiles, 32 bytes each, and what rounding them gave. Rows to spare are zero.
struct RoundedRows {
  TileRows t;
  int64_t groups;
  char *quants;
  XGroup *heads;
  int all() const { return t.tiles * t.height; }
};

static void round_tile_rows(const bf16 *x, int64_t stride, const RoundedRows &r) {
  memset(r.quants, 0, size_t(r.groups * r.all() * GROUP));
  for (int i = 0; i < r.t.rows; i++)
    for (int64_t g = 0; g < r.groups; g++) {
      const int64_t at = g * r.all() + i;
      round_group(x + i * stride + g * GROUP, reinterpret_cast<int8_t *>(r.quants + at * GROUP), r.heads + at);
    }
}

// Tiles 0 and 1 are sums, 4 rows of x, 6 and 7 weights, of 32 inputs or of 16.
static inline TileShapes quant_shapes_of(int height, int inputs) {
  TileShapes shapes = shapes_of(height);
  shapes.row_bytes[4] = uint16_t(inputs);
  shapes.rows[6] = shapes.rows[7] = uint8_t(inputs / 4);
  return shapes;
}

// Quants of a group as [step][column][4 inputs].
template <int BITS>
static void unpack_group(const char *planes, char *out) {
  for_each<0, GROUP_STEPS>([&](auto step) {
    constexpr int S = decltype(step)::value;
    for (int j = 0; j < PANEL; j += W) store_i(out + S * PLANE + j * 4, quants<BITS, S>(planes + j * 4));
  });
}

// sums [rows of x][PANEL] of integers, for one tile of rows.
AMX_CODE static inline void byte_sums(const char *a, const char *b, int32_t *sums) {
  tile_zero<0>();
  tile_zero<1>();
  tile_load<4>(a, GROUP);
  tile_load<6>(b, PLANE);
  tile_dot_bytes<0, 4, 6>();
  tile_load<7>(b + TILE_LINE, PLANE);
  tile_dot_bytes<1, 4, 7>();
  tile_store<0>(sums, PLANE);
  tile_store<1>(sums + TILE_COLUMNS, PLANE);
}

// Scale the integers of `rows` rows and add them to acc [rows][width].
template <QuantScales SCALES>
static void add_scaled(const int32_t *sums, const XGroup *x, int rows, const VF *d, const VF *least, int half, int offset_bits, float *acc,
                       int64_t width) {
  constexpr bool MIN = SCALES == WITH_MIN || SCALES == K_MIN;
  for (int i = 0; i < rows; i++, sums += PANEL, acc += width) {
    const VI start = MIN ? zero_i() : shift_left(set1_i(SCALES == K_HALVES ? &x[i].minus_half[half] : &x[i].minus_sum), offset_bits);
    for (int j = 0; j < PANEL / W; j++) {
      VF y = fma(mul(d[j], set1(x[i].d)), to_float(_mm512_add_epi32(start, load_i(sums + j * W))), load(acc + j * W));
      if (MIN) y = fma(least[j], set1(x[i].d_sum), y);
      store(acc + j * W, y);
    }
  }
}

// One panel for all rows: acc [rows][width] fp32.
template <QuantScales SCALES, int BITS>
AMX_CODE static void quant_tiles(const char *b, const RoundedRows &x, int offset_bits, float *acc, int64_t width) {
  constexpr int HALVES = SCALES == K_HALVES ? 2 : 1, INPUTS = GROUP / HALVES;
  constexpr int64_t HEADER = header_bytes_of(SCALES), SCALE = scale_bytes_of(SCALES), RECORD = SCALE + quant_bytes_of(BITS);
  alignas(64) char steps[GROUP_STEPS * PLANE];
  alignas(64) int32_t sums[TILE_ROWS * PANEL];
  const char *header = b;
  for (int i = 0; i < x.t.rows; i++) memset(acc + i * width, 0, PANEL * 4);
  tiles_begin(quant_shapes_of(x.t.height, INPUTS));
  for (int64_t g = 0; g < x.groups; g++, b += RECORD) {
    if (HEADER && g % HEADER_GROUPS == 0) {
      header = b;
      b += HEADER;
    }
    for (int line = 0; line < RECORD; line += 64) __builtin_prefetch(b + line + QUANT_AHEAD_BYTES, 0, 2);
    unpack_group<BITS>(b + SCALE, steps);
    for (int half = 0; half < HALVES; half++) {
      VF d[PANEL / W], least[PANEL / W];
      for (int j = 0; j < PANEL / W; j++) {
        d[j] = scale_of<SCALES>(header, b, j * W, half);
        if constexpr (SCALES == WITH_MIN || SCALES == K_MIN) least[j] = min_of<SCALES>(header, b, j * W);
        else least[j] = zero();
      }
      for (int first = 0; first < x.t.rows; first += x.t.height) {
        const int64_t at = g * x.all() + first;
        const int rows = x.t.rows - first < x.t.height ? x.t.rows - first : x.t.height;
        byte_sums(x.quants + at * GROUP + half * INPUTS, steps + half * (INPUTS / 4) * PLANE, sums);
        add_scaled<SCALES>(sums, x.heads + at, rows, d, least, half, offset_bits, acc + first * width, width);
      }
    }
  }
  tiles_end();
}

static void quant_tile_panel(const PanelAt &p, const RoundedRows &x, float *acc, int64_t width) {
  const int offset = p.type->offset_bits;
  switch (p.type->scales * 16 + p.type->bits) {
    case PLAIN * 16 + 4: return quant_tiles<PLAIN, 4>(p.data, x, offset, acc, width);
    case PLAIN * 16 + 5: return quant_tiles<PLAIN, 5>(p.data, x, offset, acc, width);
    case PLAIN * 16 + 8: return quant_tiles<PLAIN, 8>(p.data, x, offset, acc, width);
    case WITH_MIN * 16 + 4: return quant_tiles<WITH_MIN, 4>(p.data, x, offset, acc, width);
    case WITH_MIN * 16 + 5: return quant_tiles<WITH_MIN, 5>(p.data, x, offset, acc, width);
    case K_MIN * 16 + 4: return quant_tiles<K_MIN, 4>(p.data, x, offset, acc, width);
    case K_MIN * 16 + 5: return quant_tiles<K_MIN, 5>(p.data, x, offset, acc, width);
    default: return quant_tiles<K_HALVES, 6>(p.data, x, offset, acc, width);
  }
}

// The rows of a block in the worker's scratch memory, where they stay for the next unit of the same block; false without memory.
static bool rounded_block(const QuantJob &job, int block, Scratch *scratch, RoundedRows *r) {
  const int64_t first = job.rows * block / job.row_blocks, bytes = r->groups * r->all() * GROUP;
  const uint64_t holds = job.id << 20 | uint64_t(block + 1);
  const bool there = scratch->holds == holds;
  if (!there && !scratch_get(scratch, size_t(r->groups * r->all()) * X_GROUP_BYTES)) return false;
  r->quants = static_cast<char *>(scratch->data);
  r->heads = reinterpret_cast<XGroup *>(r->quants + bytes);
  if (there) return true;
  round_tile_rows(job.x + first * job.stride, job.stride, *r);
  scratch->holds = holds;
  return true;
}

static void quant_tile_unit(void *raw, int unit, int worker) {
  QuantJob &job = *static_cast<QuantJob *>(raw);
  const Linear &w = *job.w;
  const int block = unit / job.column_blocks, part = unit % job.column_blocks;
  const int64_t first = job.rows * block / job.row_blocks, last = job.rows * (block + 1) / job.row_blocks;
  RoundedRows x = {TileRows(int(last - first)), w.k / GROUP, nullptr, nullptr};
  if (!rounded_block(job, block, &job.c->worker[worker], &x)) {
    job.failed = true;
    return;
  }
  const int64_t n = job.gated ? w.n / 2 : w.n, width = job.gated ? 2 * PANEL : PANEL, end = job.panels * (part + 1) / job.column_blocks;
  bf16 *out = job.out + first * n;
  alignas(64) float acc[ROW_BLOCK * 2 * PANEL];
  for (int64_t panel = job.panels * part / job.column_blocks; panel < end; panel++) {
    const PanelAt p = panel_at(w, panel);
    quant_tile_panel(p, x, acc, width);
    if (job.gated) {
      quant_tile_panel(panel_at(w, panel + job.panels), x, acc + PANEL, width);
      gate_rows(acc, x.t.rows, out + p.column, n);
    } else {
      round_rows(acc, width, w.bias ? w.bias + p.column : nullptr, x.t.rows, p.columns, out + p.column, n);
    }
  }
}

static int quant_tile_linear(Context *c, const Linear *w, bool gated, const bf16 *x, int64_t stride, int64_t rows, bf16 *out) {
  if (rows < TILE_QUANT_ROWS) return kAvx512Bf16.quant_linear(c, w, gated, x, stride, rows, out);
  const int64_t panels = gated ? w->panels / 2 : w->panels;
  QuantJob job = {c, w, x, stride, rows, out, gated, panels, 1, 1, ++c->products, false};
  job.row_blocks = int((rows + ROW_BLOCK - 1) / ROW_BLOCK);
  job.column_blocks = column_blocks_of(c, w, panels, job.row_blocks, rows < ROW_BLOCK ? rows : int64_t(ROW_BLOCK));
  pool_run(c->pool, job.row_blocks * job.column_blocks, quant_tile_unit, &job);
  return job.failed ? -1 : 0;
}
