// The C entry points: detection, contexts, packed weights, and the hand-over to the kernels of the chosen instruction set.
#include "kilat_cpu.h"

#include <stdlib.h>
#include <string.h>

#include <new>

#include "amx_choice.h"
#include "context.h"
#include "pack.h"

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
    case KILAT_ISA_AMX: return amx_table();
#endif
    default: return nullptr;
  }
}

// Bytes that a thread touches at a time: pages of the system are no larger, so that none is cleared by two threads.
const int64_t kTouched = 2 << 20;

// Bytes of keys and values that products fetch for attention at most: they stay in a cache beside the weights that stream through.
const int64_t kFed = 12 << 20;

struct TouchJob {
  char *memory;
  int64_t bytes;
};

void touch_unit(void *raw, int unit, int) {
  const TouchJob &job = *static_cast<const TouchJob *>(raw);
  int64_t begin = unit * kTouched, end = begin + kTouched < job.bytes ? begin + kTouched : job.bytes;
  for (int64_t i = begin; i < end; i += 4096) static_cast<volatile char *>(job.memory)[i] = 0;
}

struct Rows {
  const char *first;
  int64_t bytes;
};

const void *row_of(void *user, int64_t row, void *) {
  const Rows &rows = *static_cast<const Rows *>(user);
  return rows.first + row * rows.bytes;
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
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    return amx_state() == AMX_USED ? KILAT_ISA_AMX : KILAT_ISA_AVX512_BF16;
  if (avx512) return KILAT_ISA_AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return KILAT_ISA_AVX2;
#endif
  return KILAT_ISA_PLAIN;
}

const char *kilat_cpu_isa_name(int isa) {
  static const char *const kNames[KILAT_ISA_COUNT] = {"plain", "avx2", "avx512", "avx512-bf16", "amx"};
  return isa >= 0 && isa < KILAT_ISA_COUNT ? kNames[isa] : "?";
}

const char *kilat_cpu_amx_note(void) {
#if defined(__x86_64__)
  if (kilat_cpu_best_isa() != KILAT_ISA_AVX512_BF16) return "";
  if (amx_state() == AMX_REFUSED) return "the system does not let this process use the processor's AMX tiles";
  if (amx_state() == AMX_UNSOUND) return "the processor's AMX tiles failed the check of their products";
#endif
  return "";
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

// Upper bounds over all instruction sets: vectors of 16 floats, fp32 elements. The sizes follow linear.h, amx_linear.h, attention_*.h and
// sample.h.
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
  int64_t worker = linear > attention ? linear : attention;
  for (int i = 0; i < c.threads; i++)
    if (!touch(&c.worker[i], worker > sample ? worker : sample)) return -1;
  return touch(&c.shared, blocks + partial) ? 0 : -1;
}

int kilat_cpu_pin(kilat_cpu *cpu) { return pool_pin(cpu->context.pool); }

void kilat_cpu_touch(kilat_cpu *cpu, void *memory, int64_t bytes) {
  Hold hold(cpu);
  TouchJob job = {static_cast<char *>(memory), bytes};
  pool_run(cpu->context.pool, int((bytes + kTouched - 1) / kTouched), touch_unit, &job);
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
  plain_plan(&w, dtype, n, k, bias != nullptr);
  Hold hold(cpu);
  out->memory = arena_get(&cpu->context.arena, w.bytes);
  if (!out->memory.data) {
    delete out;
    return nullptr;
  }
  plain_place(&w, out->memory.data, bias);
  Rows rows = {static_cast<const char *>(weight), stride * (dtype == KILAT_F32 ? 4 : 2)};
  if (plain_fill(&cpu->context, &w, row_of, &rows)) return out;
  arena_put(out->memory);
  delete out;
  return nullptr;
}

int64_t kilat_linear_size(int dtype, int64_t n, int64_t k, int has_bias) {
  Linear w;
  plain_plan(&w, dtype, n, k, has_bias != 0);
  return w.bytes;
}

kilat_linear *kilat_linear_pack_rows(kilat_cpu *cpu, int dtype, int64_t n, int64_t k, kilat_row_fn row, void *user,
                                     const void *bias, void *memory) {
  kilat_linear *out = new (std::nothrow) kilat_linear;
  if (!out) return nullptr;
  plain_plan(&out->linear, dtype, n, k, bias != nullptr);
  plain_place(&out->linear, static_cast<char *>(memory), bias);
  out->memory = {nullptr, nullptr};
  Hold hold(cpu);
  if (plain_fill(&cpu->context, &out->linear, row, user)) return out;
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
  for (int64_t r = 0; r < rows; r++)
    if (ids[r] < 0 || ids[r] >= w->linear.n) return -1;
  Hold hold(cpu);
  if (w->linear.n_parts == 0) plain_gather(cpu->context.pool, &w->linear, ids, rows, out);
  else quant_gather(cpu->context.pool, &w->linear, ids, rows, static_cast<bf16 *>(out));
  return 0;
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

void kilat_follow_up(kilat_cpu *cpu, const kilat_linear *w) {
  Hold hold(cpu);
  cpu->context.after = w ? &w->linear : nullptr;
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

int kilat_sample_rows(kilat_cpu *cpu, const float *logits, int64_t stride, int64_t rows, int64_t n, const kilat_filter *filters,
                      int64_t *ids) {
  Hold hold(cpu);
  cpu->context.table->sample_rows(&cpu->context, logits, stride, rows, n, filters, ids);
  for (int64_t r = 0; r < rows; r++)
    if (ids[r] < 0) return -1;
  return 0;
}

void kilat_rope_write(kilat_cpu *cpu, int dtype, const void *qkv, int64_t stride, int64_t tokens, const kilat_heads *heads,
                      const float *cos_sin, const int32_t *positions, const int32_t *slots, const kilat_kv *kv,
                      const void *norm_q, const void *norm_k, double eps, void *q) {
  Hold hold(cpu);
  RopeArgs args = {qkv, stride, tokens, *heads, cos_sin, positions, slots, *kv, norm_q, norm_k, float(eps), q};
  cpu->context.table->rope_write[dtype](&cpu->context, &args);
}

void kilat_attention_ahead(kilat_cpu *cpu, int dtype, const kilat_kv *kv, const kilat_rows *rows) {
  Hold hold(cpu);
  Context &c = cpu->context;
  Feed &feed = c.feed;
  const int64_t element = dtype == KILAT_F32 ? 4 : 2;
  const bool wanted = rows && rows->rows >= 2 * c.threads && kv->side_stride == kv->page_tokens * kv->token_stride;
  feed.rows = wanted ? rows : nullptr;
  feed.base = static_cast<const char *>(kv->base);
  feed.page_tokens = kv->page_tokens;
  feed.page_stride = kv->page_stride * element;
  feed.piece_bytes = 2 * kv->side_stride * element;
  for (int i = 0; i < c.threads; i++) {
    Scratch &w = c.worker[i];
    w.page = w.left = 0;
    if (!feed.rows) continue;
    w.row = rows->rows * (c.threads - i) / c.threads - 1;  // as attention shares the rows out, the last first
    w.last_row = rows->rows * (c.threads - i - 1) / c.threads;
    w.left = kFed / c.threads / feed.piece_bytes;
  }
}

int kilat_attention(kilat_cpu *cpu, int dtype, const void *q, const kilat_heads *heads, const kilat_kv *kv,
                    const kilat_rows *rows, double scale, int64_t window, void *out) {
  Hold hold(cpu);
  AttentionArgs args = {q, *heads, *kv, *rows, float(scale), window, out};
  return cpu->context.table->attention[dtype](&cpu->context, &args);
}

}  // extern "C"
