// linear with quantized weights: rows of x, rounded to 8 bits, times panels; alone, or with the gate of an MLP applied to the result.
#pragma once

struct QuantJob {
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

// One panel of the weight.
struct PanelAt {
  const QuantType *type;
  const char *data;
  int64_t column;
  int columns;
};

static PanelAt panel_at(const Linear &w, int64_t panel) {
  const QuantPart *part = w.parts;
  while (panel >= part->first_panel + part->panels) part++;
  panel -= part->first_panel;
  int64_t left = part->n - panel * PANEL;
  return {part->type, part->data + panel * part->panel_bytes, part->first + panel * PANEL, left < PANEL ? int(left) : PANEL};
}

// A block of rows as a worker has it in its scratch memory: rounded, tile after tile.
struct QuantBlock {
  const QuantJob *job;
  int rows, tiles;
  int64_t groups;
  char *rounded;
  int first(int t) const { return rows * t / tiles; }
};

// False without memory.
static bool quant_block(const QuantJob &job, int block, Scratch *scratch, QuantBlock *out) {
  int64_t first = job.rows * block / job.row_blocks, last = job.rows * (block + 1) / job.row_blocks;
  out->job = &job;
  out->rows = int(last - first);
  out->tiles = (out->rows + QUANT_ROWS - 1) / QUANT_ROWS;
  out->groups = job.w->k / GROUP;
  uint64_t holds = job.id << 20 | uint64_t(block + 1);
  bool there = scratch->holds == holds;
  if (!there && !scratch_get(scratch, size_t(out->rows * out->groups * X_GROUP_BYTES))) return false;
  out->rounded = static_cast<char *>(scratch->data);
  if (there) return true;
  for (int t = 0; t < out->tiles; t++) {
    int from = out->first(t), rows = out->first(t + 1) - from;
    for (int i = 0; i < rows; i++)
      round_row(job.x + (first + from + i) * job.stride, out->groups, rows, i, out->rounded + from * out->groups * X_GROUP_BYTES);
  }
  scratch->holds = holds;
  return true;
}

static QuantTileFn quant_tile_of(const QuantType &t, int rows) {
  switch (t.scales * 16 + t.bits) {
    case PLAIN * 16 + 4: return pick_quant_tile<PLAIN, 4>(rows);
    case PLAIN * 16 + 5: return pick_quant_tile<PLAIN, 5>(rows);
    case PLAIN * 16 + 8: return pick_quant_tile<PLAIN, 8>(rows);
    case WITH_MIN * 16 + 4: return pick_quant_tile<WITH_MIN, 4>(rows);
    case WITH_MIN * 16 + 5: return pick_quant_tile<WITH_MIN, 5>(rows);
    case K_MIN * 16 + 4: return pick_quant_tile<K_MIN, 4>(rows);
    case K_MIN * 16 + 5: return pick_quant_tile<K_MIN, 5>(rows);
    default: return pick_quant_tile<K_HALVES, 6>(rows);
  }
}

// One panel for all rows of a block.
static void quant_panel(const QuantBlock &block, const PanelAt &p, bf16 *out, int64_t out_stride) {
  QuantArgs args;
  args.b = p.data;
  args.groups = block.groups;
  args.offset_bits = p.type->offset_bits;
  args.out_stride = out_stride;
  args.bias = block.job->w->bias ? block.job->w->bias + p.column : nullptr;
  args.columns = p.columns;
  for (int i = 0; i < block.tiles; i++) {
    int from = block.first(i);
    args.a = block.rounded + from * block.groups * X_GROUP_BYTES;
    args.out = out + from * out_stride;
    quant_tile_of(*p.type, block.first(i + 1) - from)(args);
  }
}

// silu(gate) * up of a buffer [rows][gates, ups] of two panels.
static void gate_panel(const bf16 *buffer, int rows, bf16 *out, int64_t out_stride) {
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < PANEL; j += W) {
      const bf16 *gate = buffer + i * 2 * PANEL + j;
      store(out + i * out_stride + j, mul(rounded(silu_of(load(gate)), bf16()), load(gate + PANEL)));
    }
}

static void quant_unit(void *raw, int unit, int worker) {
  QuantJob *job = static_cast<QuantJob *>(raw);
  const Linear &w = *job->w;
  int row_block = unit / job->column_blocks, part = unit % job->column_blocks;
  QuantBlock block;
  if (!quant_block(*job, row_block, &job->c->worker[worker], &block)) {
    job->failed = true;
    return;
  }
  int64_t width = job->gated ? w.n / 2 : w.n;
  bf16 *out = job->out + job->rows * row_block / job->row_blocks * width;
  int64_t panel = job->panels * part / job->column_blocks, end = job->panels * (part + 1) / job->column_blocks;
  alignas(64) bf16 buffer[ROW_BLOCK * 2 * PANEL];
  for (; panel < end; panel++) {
    PanelAt p = panel_at(w, panel);
    if (!job->gated) {
      quant_panel(block, p, out + p.column, width);
      continue;
    }
    quant_panel(block, p, buffer, 2 * PANEL);
    quant_panel(block, panel_at(w, panel + job->panels), buffer + PANEL, 2 * PANEL);
    gate_panel(buffer, block.rows, out + p.column, width);
  }
}

static inline int quant_linear(Context *c, const Linear *w, bool gated, const bf16 *x, int64_t stride, int64_t rows, bf16 *out) {
  int64_t panels = gated ? w->panels / 2 : w->panels;
  QuantJob job = {c, w, x, stride, rows, out, gated, panels, 1, 1, ++c->products, false};
  job.row_blocks = int((rows + ROW_BLOCK - 1) / ROW_BLOCK);
  job.column_blocks = column_blocks_of(c, w, panels, job.row_blocks, rows < ROW_BLOCK ? rows : int64_t(ROW_BLOCK));
  pool_run(c->pool, job.row_blocks * job.column_blocks, quant_unit, &job);
  return job.failed ? -1 : 0;
}
