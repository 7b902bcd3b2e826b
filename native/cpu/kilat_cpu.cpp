// The C entry points: detection, contexts, packed weights, and the hand-over to the kernels of the chosen instruction set.
#include "kilat_cpu.h"

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <new>

#include "context.h"

using namespace kilat;

struct kilat_cpu {
  Context context;
};
struct kilat_linear {
  Linear linear;
  ArenaPiece memory;
};

namespace kilat {

void *scratch_get(Scratch *s, size_t bytes) {
  s->holds = 0;
  if (bytes <= s->bytes) return s->data;
  size_t size = (bytes + bytes / 4 + 4095) & ~size_t(4095);
  void *p = nullptr;
  if (posix_memalign(&p, 4096, size) != 0) return nullptr;
  free(s->data);
  s->data = p;
  s->bytes = size;
  return p;
}

}  // namespace kilat

namespace {

// Holds the context for one op.
struct Hold {
  Pool *pool;
  explicit Hold(kilat_cpu *cpu) : pool(cpu->context.pool) { pool_lock(pool); }
  ~Hold() { pool_unlock(pool); }
};

const Table *table_of(int isa) {
  switch (isa) {
    case KILAT_ISA_PLAIN: return &kPlain;
#if defined(__x86_64__)
    case KILAT_ISA_AVX2: return &kAvx2;
    case KILAT_ISA_AVX512: return &kAvx512;
    case KILAT_ISA_AVX512_BF16: return &kAvx512Bf16;
#endif
    default: return nullptr;
  }
}

struct PackJob {
  const Linear *w;
  const char *weight;
  int64_t stride;
};

// One panel. A pair of bf16 is moved as 4 bytes.
void pack_unit(void *raw, int unit, int) {
  const PackJob &job = *static_cast<const PackJob *>(raw);
  const Linear &w = *job.w;
  uint32_t *out = reinterpret_cast<uint32_t *>(w.data + unit * w.panel_bytes);
  for (int c = 0; c < PANEL; c++) {
    int64_t column = int64_t(unit) * PANEL + c;
    if (column >= w.n) {
      for (int64_t s = 0; s < w.steps; s++) out[s * PANEL + c] = 0;
      continue;
    }
    int64_t element = w.dtype == KILAT_F32 ? 4 : 2;
    const char *row = job.weight + column * job.stride * element;
    int64_t whole = w.k * element / 4;
    for (int64_t s = 0; s < whole; s++) memcpy(&out[s * PANEL + c], row + s * 4, 4);
    if (whole < w.steps) {
      uint16_t last;
      memcpy(&last, row + whole * 4, 2);
      out[whole * PANEL + c] = last;
    }
  }
}

struct RowsJob {
  Context *c;
  const Linear *w;
  kilat_rows_fn rows;
  void *user;
  std::atomic<bool> failed;
};

// One panel, in squares of 32 that stay in the nearest cache.
void pack_rows_unit(void *raw, int unit, int worker) {
  RowsJob &job = *static_cast<RowsJob *>(raw);
  const Linear &w = *job.w;
  int64_t element = w.dtype == KILAT_F32 ? 4 : 2, row_bytes = w.k * element, first = int64_t(unit) * PANEL;
  int64_t count = w.n - first < PANEL ? w.n - first : int64_t(PANEL), whole = row_bytes / 4;
  char *rows = static_cast<char *>(scratch_get(&job.c->worker[worker], size_t(PANEL * row_bytes + 4)));
  if (!rows) {
    job.failed = true;
    return;
  }
  job.rows(job.user, first, count, rows);
  uint32_t *out = reinterpret_cast<uint32_t *>(w.data + unit * w.panel_bytes);
  if (count < PANEL) memset(out, 0, size_t(w.panel_bytes));
  for (int64_t s = 0; s < whole; s += PANEL) {
    int64_t end = s + PANEL < whole ? s + PANEL : whole;
    for (int64_t c = 0; c < count; c++)
      for (int64_t i = s; i < end; i++) memcpy(&out[i * PANEL + c], rows + c * row_bytes + i * 4, 4);
  }
  for (int64_t c = 0; whole < w.steps && c < count; c++) {
    uint16_t last;
    memcpy(&last, rows + c * row_bytes + whole * 4, 2);
    out[whole * PANEL + c] = last;
  }
}

float bias_at(const void *bias, int dtype, int64_t i) {
  float x;
  if (dtype == KILAT_F32) {
    memcpy(&x, static_cast<const char *>(bias) + i * 4, 4);
  } else {
    uint16_t half;
    memcpy(&half, static_cast<const char *>(bias) + i * 2, 2);
    uint32_t whole = uint32_t(half) << 16;
    memcpy(&x, &whole, 4);
  }
  return x;
}

void lay_out(Linear *w, int dtype, int64_t n, int64_t k, bool bias) {
  w->dtype = dtype;
  w->n_parts = 0;
  w->n = n;
  w->k = k;
  w->steps = dtype == KILAT_F32 ? k : (k + 1) / 2;
  w->panels = (n + PANEL - 1) / PANEL;
  w->panel_bytes = w->steps * PANEL * 4;
  w->bytes = w->panels * w->panel_bytes + (bias ? w->panels * PANEL * 4 : 0);
}

void place(Linear *w, int dtype, char *memory, const void *bias) {
  w->data = memory;
  w->bias = bias ? reinterpret_cast<float *>(memory + w->panels * w->panel_bytes) : nullptr;
  for (int64_t i = 0; bias && i < w->panels * PANEL; i++) w->bias[i] = i < w->n ? bias_at(bias, dtype, i) : 0.0f;
}

bool touch(Scratch *s, int64_t bytes) {
  if (!scratch_get(s, size_t(bytes))) return false;
  memset(s->data, 0, s->bytes);
  return true;
}

int run_linear(kilat_cpu *cpu, const kilat_linear *w, bool gated, const void *x, int64_t stride, int64_t rows, void *out) {
  if (rows <= 0) return 0;
  Context *c = &cpu->context;
  if (w->linear.n_parts == 0) return c->table->linear(c, &w->linear, gated, x, stride, rows, out);
  return c->table->quant_linear(c, &w->linear, gated, static_cast<const bf16 *>(x), stride, rows, static_cast<bf16 *>(out));
}

}  // namespace

extern "C" {

int kilat_cpu_abi(void) { return KILAT_CPU_ABI; }

int kilat_cpu_best_isa(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) return KILAT_ISA_AVX512_BF16;
  if (avx512) return KILAT_ISA_AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return KILAT_ISA_AVX2;
#endif
  return KILAT_ISA_PLAIN;
}

const char *kilat_cpu_isa_name(int isa) {
  static const char *const kNames[KILAT_ISA_COUNT] = {"plain", "avx2", "avx512", "avx512-bf16"};
  return isa >= 0 && isa < KILAT_ISA_COUNT ? kNames[isa] : "?";
}

kilat_cpu *kilat_cpu_create(int threads, int isa) {
  if (threads < 1 || isa < 0 || isa > kilat_cpu_best_isa() || !table_of(isa)) return nullptr;
  kilat_cpu *cpu = new (std::nothrow) kilat_cpu;
  if (!cpu) return nullptr;
  cpu->context.table = table_of(isa);
  cpu->context.threads = threads;
  cpu->context.worker = new (std::nothrow) Scratch[threads];
  cpu->context.pool = cpu->context.worker ? pool_create(threads) : nullptr;
  if (!cpu->context.pool) {
    delete[] cpu->context.worker;
    delete cpu;
    return nullptr;
  }
  return cpu;
}

void kilat_cpu_destroy(kilat_cpu *cpu) {
  if (!cpu) return;
  pool_destroy(cpu->context.pool);
  for (int i = 0; i < cpu->context.threads; i++) free(cpu->context.worker[i].data);
  free(cpu->context.shared.data);
  arena_close(&cpu->context.arena);
  delete[] cpu->context.worker;
  delete cpu;
}

// Upper bounds over all instruction sets: vectors of 16 floats, fp32 elements. The sizes follow linear.h, attention_*.h and sample.h.
int kilat_cpu_reserve(kilat_cpu *cpu, const kilat_most *most) {
  Hold hold(cpu);
  Context &c = cpu->context;
  const int64_t lanes = 16, dim = (most->head_dim + 31) / 32 * 32, group = most->n_q / most->n_kv;
  const int64_t rows = group > 192 ? group : 192, state = rows + lanes + rows * (lanes + dim) + lanes;
  int64_t linear = (most->inputs + 1 + lanes) * 4 * (64 + lanes);
  int64_t attention = 4 * (rows * dim + 2 * 64 * dim + 2 * 8 * 64 + 2 * state);
  int64_t splits = (most->keys + 255) / 256, partial = c.threads * 4 * splits * state * 4;
  int64_t blocks = most->tokens * 64 + 64, sample = 14 * most->vocab + (128 << 10);
  if (partial > 16 << 20) partial = 16 << 20;
  int64_t shared = blocks + partial > sample ? blocks + partial : sample;
  for (int i = 0; i < c.threads; i++)
    if (!touch(&c.worker[i], linear > attention ? linear : attention)) return -1;
  return touch(&c.shared, shared) ? 0 : -1;
}

int64_t kilat_cpu_scratch_bytes(const kilat_cpu *cpu) {
  int64_t bytes = int64_t(cpu->context.shared.bytes);
  for (int i = 0; i < cpu->context.threads; i++) bytes += int64_t(cpu->context.worker[i].bytes);
  return bytes;
}

kilat_linear *kilat_linear_pack(kilat_cpu *cpu, int dtype, const void *weight, int64_t stride, int64_t n, int64_t k,
                                const void *bias) {
  kilat_linear *out = new (std::nothrow) kilat_linear;
  if (!out) return nullptr;
  Linear &w = out->linear;
  lay_out(&w, dtype, n, k, bias != nullptr);
  Hold hold(cpu);
  out->memory = arena_get(&cpu->context.arena, w.bytes);
  if (!out->memory.data) {
    delete out;
    return nullptr;
  }
  place(&w, dtype, out->memory.data, bias);
  PackJob job = {&w, static_cast<const char *>(weight), stride};
  pool_run(cpu->context.pool, int(w.panels), pack_unit, &job);
  return out;
}

int64_t kilat_linear_size(int dtype, int64_t n, int64_t k, int has_bias) {
  Linear w;
  lay_out(&w, dtype, n, k, has_bias != 0);
  return w.bytes;
}

kilat_linear *kilat_linear_pack_rows(kilat_cpu *cpu, int dtype, int64_t n, int64_t k, kilat_rows_fn rows, void *user,
                                     const void *bias, void *memory) {
  kilat_linear *out = new (std::nothrow) kilat_linear;
  if (!out) return nullptr;
  lay_out(&out->linear, dtype, n, k, bias != nullptr);
  place(&out->linear, dtype, static_cast<char *>(memory), bias);
  out->memory = {nullptr, nullptr};
  Hold hold(cpu);
  RowsJob job = {&cpu->context, &out->linear, rows, user, {false}};
  pool_run(cpu->context.pool, int(out->linear.panels), pack_rows_unit, &job);
  if (!job.failed) return out;
  delete out;
  return nullptr;
}

void kilat_linear_free(kilat_linear *w) {
  if (!w) return;
  if (w->memory.chunk) arena_put(w->memory);
  delete w;
}

int64_t kilat_linear_bytes(const kilat_linear *w) { return w->linear.bytes; }

int kilat_block_values(int type) {
  const QuantType *t = quant_type(type);
  return t ? t->values : 0;
}

int kilat_block_bytes(int type) {
  const QuantType *t = quant_type(type);
  return t ? t->block_bytes : 0;
}

int64_t kilat_linear_quant_size(const kilat_blocks *parts, int n_parts, int64_t k, int has_bias) {
  Linear w;
  return quant_plan(&w, parts, n_parts, k, has_bias != 0) ? w.bytes : 0;
}

kilat_linear *kilat_linear_pack_quant(kilat_cpu *cpu, const kilat_blocks *parts, int n_parts, int64_t k, const void *bias,
                                      void *memory) {
  kilat_linear *out = new (std::nothrow) kilat_linear;
  if (!out) return nullptr;
  Linear &w = out->linear;
  Hold hold(cpu);
  out->memory = {static_cast<char *>(memory), nullptr};
  if (!quant_plan(&w, parts, n_parts, k, bias != nullptr)) out->memory.data = nullptr;
  else if (!memory) out->memory = arena_get(&cpu->context.arena, w.bytes);
  if (!out->memory.data) {
    delete out;
    return nullptr;
  }
  quant_fill(cpu->context.pool, &w, parts, bias != nullptr, out->memory.data);
  for (int64_t i = 0; bias && i < quant_bias_floats(w); i++) w.bias[i] = i < w.n ? bias_at(bias, KILAT_BF16, i) : 0.0f;
  return out;
}

int kilat_linear_gather(kilat_cpu *cpu, const kilat_linear *w, const int32_t *ids, int64_t rows, void *out) {
  Hold hold(cpu);
  return quant_gather(cpu->context.pool, &w->linear, ids, rows, static_cast<bf16 *>(out)) ? 0 : -1;
}

int kilat_linear_run(kilat_cpu *cpu, const kilat_linear *w, const void *x, int64_t stride, int64_t rows, void *out) {
  Hold hold(cpu);
  return run_linear(cpu, w, false, x, stride, rows, out);
}

int kilat_gated_linear_can(const kilat_linear *w) {
  for (int i = 0; i < w->linear.n_parts; i++)
    if (w->linear.parts[i].n % PANEL != 0) return 0;
  return w->linear.n % (2 * PANEL) == 0 && !w->linear.bias;
}

int kilat_gated_linear_run(kilat_cpu *cpu, const kilat_linear *w, const void *x, int64_t stride, int64_t rows, void *out) {
  Hold hold(cpu);
  return run_linear(cpu, w, true, x, stride, rows, out);
}

void kilat_rms_norm(kilat_cpu *cpu, int dtype, const void *x, int64_t stride, int64_t rows, int64_t h, const void *weight,
                    double eps, void *out) {
  Hold hold(cpu);
  NormArgs args = {x, stride, rows, h, nullptr, weight, float(eps), out};
  cpu->context.table->norm[dtype](&cpu->context, &args);
}

void kilat_add_rms_norm(kilat_cpu *cpu, int dtype, const void *x, int64_t stride, void *residual, int64_t rows, int64_t h,
                        const void *weight, double eps, void *out) {
  Hold hold(cpu);
  NormArgs args = {x, stride, rows, h, residual, weight, float(eps), out};
  cpu->context.table->norm[dtype](&cpu->context, &args);
}

void kilat_silu_mul(kilat_cpu *cpu, int dtype, const void *gate_up, int64_t stride, int64_t rows, int64_t n, void *out) {
  Hold hold(cpu);
  cpu->context.table->silu_mul[dtype](&cpu->context, gate_up, stride, rows, n, out);
}

void kilat_greedy(kilat_cpu *cpu, int dtype, const void *x, int64_t stride, int64_t rows, int64_t n, int64_t *ids, float *top) {
  Hold hold(cpu);
  cpu->context.table->greedy[dtype](&cpu->context, x, stride, rows, n, ids, top);
}

int64_t kilat_sample_row(kilat_cpu *cpu, const float *logits, int64_t n, const kilat_filter *filter) {
  Hold hold(cpu);
  return cpu->context.table->sample_row(&cpu->context, logits, n, filter);
}

void kilat_rope_write(kilat_cpu *cpu, int dtype, const void *qkv, int64_t stride, int64_t tokens, const kilat_heads *heads,
                      const float *cos_sin, const int32_t *positions, const int32_t *slots, const kilat_kv *kv,
                      const void *norm_q, const void *norm_k, double eps, void *q) {
  Hold hold(cpu);
  RopeArgs args = {qkv, stride, tokens, *heads, cos_sin, positions, slots, *kv, norm_q, norm_k, float(eps), q};
  cpu->context.table->rope_write[dtype](&cpu->context, &args);
}

int kilat_attention(kilat_cpu *cpu, int dtype, const void *q, const kilat_heads *heads, const kilat_kv *kv,
                    const kilat_rows *rows, double scale, int64_t window, void *out) {
  Hold hold(cpu);
  AttentionArgs args = {q, *heads, *kv, *rows, float(scale), window, out};
  return cpu->context.table->attention[dtype](&cpu->context, &args);
}

}  // extern "C"
