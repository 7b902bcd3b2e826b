// What the C entry points and the kernels of every instruction set share: data types, the context, and the table of kernels.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "kilat_cpu.h"
#include "arena.h"
#include "pool.h"
#include "quant.h"

namespace kilat {

struct bf16 {
  uint16_t bits;
};

// Weights are stored as panels of 32 output columns. A panel holds, for each step along k, 32 lanes of 4 bytes: one fp32 value, or
// two bf16 values with neighbouring k (the lower k in the lower half). Columns past n and an odd last k are zero.
struct Linear {
  int dtype;
  int64_t n, k, steps, panels;
  int64_t panel_bytes;  // steps * PANEL * 4
  char *data;           // panels * panel_bytes, 64-byte aligned
  float *bias;          // [panels * PANEL] fp32, zeros past n; nullptr without bias
  int64_t bytes;
  // Of a quantized weight: its parts in order, and then panel_bytes is that of an average panel. Otherwise n_parts is 0.
  QuantPart parts[KILAT_MAX_PARTS];
  int n_parts;
};

struct Table;

struct Scratch {
  void *data = nullptr;
  size_t bytes = 0;
  uint64_t holds = 0;  // what an op has left in it for its next unit, or 0; scratch_get forgets it
  std::atomic<int> taken{0};  // units of this worker's share of a job that somebody has taken
  // What it fetches of a feed: pages `page` .. of row `row`, then of the rows before it down to `last_row`; `left` pages at most.
  int64_t row = 0, last_row = 0, page = 0, left = 0;
};

// Keys and values that attention will read after the next products. Those that compute more than they read fetch them under way, each
// worker the rows that it will most likely attend to. Advice: no result depends on it.
struct Feed {
  const kilat_rows *rows = nullptr;  // nullptr: nothing to fetch
  const char *base = nullptr;
  int64_t page_tokens = 0, page_stride = 0;  // the stride in bytes
  int64_t piece_bytes = 0;                   // of a page, keys and values side by side
};

struct Context {
  Pool *pool;
  const Table *table;
  int threads;
  Scratch *worker;  // [threads], each touched by its own thread only
  Scratch shared;   // touched before and between jobs only
  Arena arena;  // packed weights
  uint64_t products = 0;  // calls of linear so far
  Feed feed;
  const Linear *after = nullptr;  // weight of the product after this one, if that is known
};

// At least `bytes` of 64-byte aligned memory that stays until the next larger request; nullptr when memory is exhausted.
void *scratch_get(Scratch *s, size_t bytes);

struct NormArgs {
  const void *x;
  int64_t stride, rows, h;
  void *residual;  // nullptr: plain norm
  const void *weight;
  float eps;
  void *out;
};

struct RopeArgs {
  const void *qkv;
  int64_t stride, tokens;
  kilat_heads heads;
  const float *cos_sin;
  const int32_t *positions, *slots;
  kilat_kv kv;
  const void *norm_q, *norm_k;
  float eps;
  void *q;
};

struct AttentionArgs {
  const void *q;
  kilat_heads heads;
  kilat_kv kv;
  kilat_rows rows;
  float scale;
  int64_t window;
  void *out;
};

// The kernels of one instruction set; index of each pair: KILAT_F32, KILAT_BF16.
struct Table {
  int (*linear)(Context *, const Linear *, bool gated, const void *x, int64_t stride, int64_t rows, void *out);
  int (*quant_linear)(Context *, const Linear *, bool gated, const bf16 *x, int64_t stride, int64_t rows, bf16 *out);
  void (*norm[2])(Context *, const NormArgs *);
  void (*silu_mul[2])(Context *, const void *x, int64_t stride, int64_t rows, int64_t n, void *out);
  void (*greedy[2])(Context *, const void *x, int64_t stride, int64_t rows, int64_t n, int64_t *ids, float *top);
  void (*sample_rows)(Context *, const float *logits, int64_t stride, int64_t rows, int64_t n, const kilat_filter *, int64_t *ids);
  void (*rope_write[2])(Context *, const RopeArgs *);
  int (*attention[2])(Context *, const AttentionArgs *);
};

extern const Table kPlain;
#if defined(__x86_64__)
extern const Table kAvx2, kAvx512, kAvx512Bf16;
#endif

// A unit of a job of `units`, each given once in as many calls: of the worker's own share as long as there are, then of the others'.
static inline int own_unit(Context *c, int units, int worker) {
  for (int i = 0; i < c->threads; i++) {
    const int w = (worker + i) % c->threads, first = int(int64_t(units) * w / c->threads);
    const int unit = first + c->worker[w].taken.fetch_add(1, std::memory_order_relaxed);
    if (unit < int(int64_t(units) * (w + 1) / c->threads)) return unit;
  }
  return units;  // not reached
}

// Number of equal blocks that `rows` rows of `cost` nanoseconds each are cut into: enough for balance, none below about 2 us.
static inline int blocks_of(const Context *c, int64_t rows, int64_t cost_ns) {
  int64_t by_cost = rows * cost_ns / 2000 + 1;
  int64_t most = c->threads == 1 ? 1 : int64_t(c->threads) * 4;
  int64_t n = by_cost < most ? by_cost : most;
  return int(n < rows ? n : rows);
}

}  // namespace kilat
