// The CPU backend: the whole forward pass as one call, on the kernels of native/cpu. The order of operations is that of the
// package's decoder (nn/decoder.py) with the same kernels, so the bits are the engine's.
#include <math.h>
#include <sched.h>
#include <string.h>

#include <memory>
#include <mutex>
#include <new>

#include "cpu_weights.h"
#include "error.h"
#include "formats.h"

namespace kilat {

namespace {

const int64_t kChunk = 512;  // tokens of a prompt that go through the layers together

int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

struct CpuOwner {
  kilat_cpu *cpu = nullptr;
  ~CpuOwner() { kilat_cpu_destroy(cpu); }
};

}  // namespace

}  // namespace kilat

using namespace kilat;

struct kilat_device_model {
  kilat_model_desc desc;  // its pointers into files are not used after the build
  std::vector<float> frequencies;
  int dtype, isa;
  CpuOwner owner;
  CpuWeights weights;  // after the owner, so that it goes first
  std::mutex reserving;
  char kernels[48];

  int64_t element_bytes() const { return dtype == KILAT_F32 ? 4 : 2; }
  int64_t kv_width() const { return desc.kv_heads * desc.head_dim; }
};

// Activations of a chunk: [kChunk or less, ...] each.
struct kilat_device_session {
  kilat_device_model *model;
  int64_t context, chunk;
  Region region;
  int64_t kv_bytes = 0, activation_bytes = 0, table_bytes = 0, logit_bytes = 0;
  char *kv, *x, *residual, *normed, *qkv, *q, *attended, *gate_up, *inner, *logits;
  float *wide_logits, *cos_sin, *kept;  // kept: nullptr unless layers are kept
  int32_t *positions, *row_start, *kv_len, *page_table;
};

namespace {

typedef kilat_device_model Model;
typedef kilat_device_session Session;

// Takes each buffer of a session: with `at` null it only counts.
struct Cutter {
  Region *at;
  int64_t *group = nullptr;
  template <class T>
  void take(T **out, int64_t bytes) {
    *group += Region::room(bytes);
    if (at) *out = static_cast<T *>(at->take(bytes));
  }
};

int64_t cut(Session *s, Region *at, bool keep_layers) {
  const Model &m = *s->model;
  const kilat_model_desc &d = m.desc;
  const int64_t e = m.element_bytes(), row = s->chunk * e, q = d.q_heads * d.head_dim;
  s->kv_bytes = s->activation_bytes = s->table_bytes = s->logit_bytes = 0;
  Cutter c = {at};
  c.group = &s->kv_bytes;
  c.take(&s->kv, d.n_layers * 2 * s->context * m.kv_width() * e);
  c.group = &s->activation_bytes;
  for (char **buffer : {&s->x, &s->residual, &s->normed}) c.take(buffer, row * d.hidden);
  c.take(&s->qkv, row * (q + 2 * m.kv_width()));
  c.take(&s->q, row * q);
  c.take(&s->attended, row * q);
  bool gated = kilat_gated_linear_can(m.weights.layers[0].gate_up);
  c.take(&s->gate_up, gated ? 0 : row * 2 * d.inner);
  c.take(&s->inner, row * d.inner);
  s->kept = nullptr;
  if (keep_layers) c.take(&s->kept, (d.n_layers + 1) * d.hidden * 4);
  c.group = &s->table_bytes;
  c.take(&s->cos_sin, s->context * d.rotary * 4);
  c.take(&s->positions, s->chunk * 4);
  c.take(&s->row_start, 2 * 4);
  c.take(&s->kv_len, 4);
  c.take(&s->page_table, 4);
  c.group = &s->logit_bytes;
  c.take(&s->logits, d.vocab * e);
  c.take(&s->wide_logits, d.vocab * 4);
  return s->kv_bytes + s->activation_bytes + s->table_bytes + s->logit_bytes;
}

void embed(Session *s, const int32_t *ids, int64_t n) {
  const Model &m = *s->model;
  const CpuWeights &w = m.weights;
  if (w.gather_head) {
    kilat_linear_gather(m.owner.cpu, w.head, ids, n, s->x);  // the runtime has checked the ids
    return;
  }
  for (int64_t i = 0; i < n; i++)
    convert_row(w.embedding_type, w.embedding + ids[i] * w.embedding_row_bytes, m.desc.hidden, m.dtype,
                s->x + i * m.desc.hidden * m.element_bytes());
}

void widen(const Session *s, const char *from, int64_t n, float *out) {
  widen_row(s->model->dtype == KILAT_F32 ? KILAT_TYPE_F32 : KILAT_TYPE_BF16, from, n, out);
}

// What enters layer `layer`, of the last of n tokens.
void keep(Session *s, int64_t layer, const char *stream, int64_t n) {
  const Model &m = *s->model;
  if (s->kept) widen(s, stream + (n - 1) * m.desc.hidden * m.element_bytes(), m.desc.hidden, s->kept + layer * m.desc.hidden);
}

// One chunk of a prompt or one step, on its way through the layers.
class Pass {
 public:
  Pass(Session *s, int64_t n, int64_t first) : s_(*s), m_(*s->model), d_(m_.desc), cpu_(m_.owner.cpu), n_(n), first_(first) {
    for (int64_t i = 0; i < n; i++) s_.positions[i] = int32_t(first + i);
  }

  // false when memory for scratch is exhausted. With `last` the logits of the last token are computed, otherwise only K and V.
  bool run(bool last) {
    const CpuWeights &w = m_.weights;
    for (int64_t i = 0; i < d_.n_layers; i++) {
      const CpuLayer &l = w.layers[size_t(i)];
      enter(l.norm_in, i);
      if (!keys_and_values(l, i)) return false;
      // Past this point of the last layer only the last token matters, and only where logits are wanted.
      if (i + 1 == d_.n_layers && !last) return true;
      if (i + 1 == d_.n_layers) narrow();
      if (!attend(l, i) || !mlp(l)) return false;
    }
    kilat_add_rms_norm(cpu_, m_.dtype, s_.x, d_.hidden, stream_, n_, d_.hidden, w.norm, d_.norm_eps, s_.normed);
    keep(&s_, d_.n_layers, stream_, n_);
    return kilat_linear_run(cpu_, w.head, s_.normed, d_.hidden, 1, s_.logits) == 0;
  }

 private:
  Session &s_;
  Model &m_;
  const kilat_model_desc &d_;
  kilat_cpu *cpu_;
  int64_t n_, first_;
  char *stream_ = nullptr, *q_ = nullptr;  // of the tokens that are still on their way

  void enter(const void *norm, int64_t layer) {
    if (layer == 0) {
      memcpy(s_.residual, s_.x, size_t(n_ * d_.hidden * m_.element_bytes()));
      stream_ = s_.residual;
      kilat_rms_norm(cpu_, m_.dtype, s_.x, d_.hidden, n_, d_.hidden, norm, d_.norm_eps, s_.normed);
    } else {
      kilat_add_rms_norm(cpu_, m_.dtype, s_.x, d_.hidden, stream_, n_, d_.hidden, norm, d_.norm_eps, s_.normed);
    }
    keep(&s_, layer, stream_, n_);
  }

  kilat_kv view(int64_t layer) const {
    int64_t side = s_.context * m_.kv_width();
    return {s_.kv + layer * 2 * side * m_.element_bytes(), 2 * side, side, m_.kv_width(), d_.head_dim, s_.context};
  }

  bool keys_and_values(const CpuLayer &l, int64_t layer) {
    const int64_t width = d_.q_heads * d_.head_dim + 2 * m_.kv_width();
    if (kilat_linear_run(cpu_, l.qkv, s_.normed, d_.hidden, n_, s_.qkv)) return false;
    kilat_heads heads = {d_.q_heads, d_.kv_heads, d_.head_dim, d_.rotary};
    kilat_kv kv = view(layer);
    kilat_rope_write(cpu_, m_.dtype, s_.qkv, width, n_, &heads, s_.cos_sin, s_.positions, s_.positions, &kv, l.q_norm, l.k_norm,
                     d_.qk_norm_eps, s_.q);
    q_ = s_.q;
    return true;
  }

  void narrow() {
    q_ = s_.q + (n_ - 1) * d_.q_heads * d_.head_dim * m_.element_bytes();
    stream_ += (n_ - 1) * d_.hidden * m_.element_bytes();
    first_ += n_ - 1;
    n_ = 1;
  }

  bool attend(const CpuLayer &l, int64_t layer) {
    s_.row_start[0] = 0;
    s_.row_start[1] = int32_t(n_);
    s_.kv_len[0] = int32_t(first_ + n_);
    s_.page_table[0] = 0;
    kilat_heads heads = {d_.q_heads, d_.kv_heads, d_.head_dim, d_.rotary};
    kilat_rows rows = {s_.row_start, s_.kv_len, s_.page_table, 1, 1};
    kilat_kv kv = view(layer);
    if (kilat_attention(cpu_, m_.dtype, q_, &heads, &kv, &rows, pow(double(d_.head_dim), -0.5), l.window, s_.attended))
      return false;
    if (kilat_linear_run(cpu_, l.o, s_.attended, d_.q_heads * d_.head_dim, n_, s_.x)) return false;
    kilat_add_rms_norm(cpu_, m_.dtype, s_.x, d_.hidden, stream_, n_, d_.hidden, l.norm_mid, d_.norm_eps, s_.normed);
    return true;
  }

  bool mlp(const CpuLayer &l) {
    if (kilat_gated_linear_can(l.gate_up)) {
      if (kilat_gated_linear_run(cpu_, l.gate_up, s_.normed, d_.hidden, n_, s_.inner)) return false;
    } else {
      if (kilat_linear_run(cpu_, l.gate_up, s_.normed, d_.hidden, n_, s_.gate_up)) return false;
      kilat_silu_mul(cpu_, m_.dtype, s_.gate_up, 2 * d_.inner, n_, d_.inner, s_.inner);
    }
    return kilat_linear_run(cpu_, l.down, s_.inner, d_.inner, n_, s_.x) == 0;
  }
};

int sample(Session *s, const kilat_draw *draw, int32_t *next, kilat_failure *f) {
  const Model &m = *s->model;
  int64_t id;
  float top;
  kilat_greedy(m.owner.cpu, m.dtype, s->logits, m.desc.vocab, 1, m.desc.vocab, &id, &top);
  if (!isfinite(top))
    return kilat_fail(f, KILAT_NOT_FINITE,
                      "the model's output is not finite (NaN or infinity); its weights or dtype may be at fault");
  if (draw->temperature > 0) {
    widen(s, s->logits, m.desc.vocab, s->wide_logits);
    kilat_filter filter = {draw->temperature, draw->top_p, draw->min_p, draw->u, draw->top_k};
    if (kilat_sample_rows(m.owner.cpu, s->wide_logits, m.desc.vocab, 1, m.desc.vocab, &filter, &id)) return kilat_fail(f, KILAT_NO_MEMORY, "no memory to sample");
  }
  *next = int32_t(id);
  return KILAT_OK;
}

int forward(Session *s, const int32_t *ids, int64_t n, int64_t first, const kilat_draw *draw, int32_t *next, kilat_failure *f) {
  for (int64_t done = 0; done < n; done += s->chunk) {
    int64_t count = n - done < s->chunk ? n - done : s->chunk;
    embed(s, ids + done, count);
    if (!Pass(s, count, first + done).run(done + count == n))
      return kilat_fail(f, KILAT_NO_MEMORY, "no scratch memory for a forward pass");
  }
  return draw ? sample(s, draw, next, f) : int(KILAT_OK);
}

void build(const kilat_model_desc *desc, const kilat_options *options, Model *m) {
  m->desc = *desc;
  m->frequencies.assign(desc->inverse_frequencies, desc->inverse_frequencies + desc->rotary / 2);
  m->desc.inverse_frequencies = m->frequencies.data();
  m->dtype = desc->dtype == KILAT_DTYPE_F32 ? int(KILAT_F32) : int(KILAT_BF16);
  m->isa = kilat_cpu_best_isa();
  for (int64_t i = 0; i < desc->n_layers; i++)
    if (desc->layers[i].q.type == KILAT_TYPE_F8_E4M3) fail(KILAT_UNSUPPORTED, "fp8 checkpoints need a CUDA device");
  int threads = options->threads > 0 ? options->threads : processors();
  m->owner.cpu = kilat_cpu_create(threads, m->isa);
  if (!m->owner.cpu) fail(KILAT_NO_MEMORY, "cannot start %d threads", threads);
  kilat_cpu_pin(m->owner.cpu);
  snprintf(m->kernels, sizeof m->kernels, "cpu-%s", kilat_cpu_isa_name(m->isa));
  load_weights(*desc, m->owner.cpu, m->dtype, &m->weights);
}

int model_build(const kilat_model_desc *desc, const kilat_options *options, kilat_device_model **out, kilat_failure *f) {
  try {
    std::unique_ptr<Model> m(new Model);
    build(desc, options, m.get());
    *out = m.release();
    return KILAT_OK;
  } catch (const Error &e) {
    *f = e.failure;
    return e.status;
  } catch (const std::bad_alloc &) {
    return kilat_fail(f, KILAT_NO_MEMORY, "memory is exhausted");
  }
}

void model_free(Model *m) { delete m; }
const char *model_kernels(const Model *m) { return m->kernels; }
int model_weights(const Model *m) { return m->weights.stored ? KILAT_WEIGHTS_STORED : KILAT_WEIGHTS_WIDE; }

struct Report {
  kilat_memory *out;
  int capacity, n;
  void add(const char *owner, int64_t bytes) {
    if (n < capacity) out[n] = {owner, bytes, 0};
    n++;
  }
};

int model_memory(const Model *m, kilat_memory *out, int capacity) {
  Report r = {out, capacity, 0};
  const CpuWeights &w = m->weights;
  r.add("weights", w.linear_bytes + w.small_bytes);
  r.add("embedding", w.embedding_bytes);
  r.add("scratch", kilat_cpu_scratch_bytes(m->owner.cpu) + w.region.bytes() - w.region.used());
  return r.n;
}

int session_create(Model *m, int64_t context, int64_t flags, Session **out, kilat_failure *f) {
  std::unique_ptr<Session> s(new (std::nothrow) Session);
  if (!s) return kilat_fail(f, KILAT_NO_MEMORY, "memory is exhausted");
  const kilat_model_desc &d = m->desc;
  s->model = m;
  s->context = context;
  s->chunk = context < kChunk ? context : kChunk;
  bool keep_layers = flags & KILAT_KEEP_LAYERS;
  int64_t bytes = cut(s.get(), nullptr, keep_layers), widest = d.hidden > d.inner ? d.hidden : d.inner;
  if (d.q_heads * d.head_dim > widest) widest = d.q_heads * d.head_dim;
  kilat_most most = {widest, s->chunk, context, d.vocab, d.q_heads, d.kv_heads, d.head_dim};
  bool reserved;
  {
    std::lock_guard<std::mutex> lock(m->reserving);
    reserved = kilat_cpu_reserve(m->owner.cpu, &most) == 0;
  }
  if (!reserved || !s->region.open(bytes))
    return kilat_fail(f, KILAT_NO_MEMORY,
                      "a session of %lld tokens needs %lld bytes of memory, which the system does not give: use a smaller context",
                      static_cast<long long>(context), static_cast<long long>(bytes));
  // now, so that no later write waits for the system, and so that a lack of memory shows here
  kilat_cpu_touch(m->owner.cpu, s->region.data(), s->region.bytes());
  cut(s.get(), &s->region, keep_layers);
  kilat_rope_table(&d, context, s->cos_sin);
  *out = s.release();
  return KILAT_OK;
}

void session_free(Session *s) { delete s; }

int session_memory(const Session *s, kilat_memory *out, int capacity) {
  Report r = {out, capacity, 0};
  r.add("kv", s->kv_bytes);
  r.add("activations", s->activation_bytes + s->region.bytes() - s->region.used());
  r.add("tables", s->table_bytes);
  r.add("logits", s->logit_bytes);
  return r.n;
}

int logits_read(Session *s, float *out, kilat_failure *) {
  widen(s, s->logits, s->model->desc.vocab, out);
  return KILAT_OK;
}

int layers_read(Session *s, float *out, kilat_failure *) {
  memcpy(out, s->kept, size_t((s->model->desc.n_layers + 1) * s->model->desc.hidden) * 4);
  return KILAT_OK;
}

// Of each layer the first n tokens of K, then of V; then the logits.
int64_t state_bytes(const Session *s, int64_t n) {
  const Model &m = *s->model;
  return (m.desc.n_layers * 2 * n * m.kv_width() + m.desc.vocab) * m.element_bytes();
}

template <class Copy>
void state_walk(Session *s, int64_t n, Copy copy) {
  const Model &m = *s->model;
  const int64_t e = m.element_bytes(), part = n * m.kv_width() * e, side = s->context * m.kv_width() * e;
  int64_t at = 0;
  for (int64_t i = 0; i < m.desc.n_layers * 2; i++, at += part) copy(s->kv + i * side, at, size_t(part));
  copy(s->logits, at, size_t(m.desc.vocab * e));
}

int state_read(Session *s, int64_t n, void *out, kilat_failure *) {
  state_walk(s, n, [out](char *own, int64_t at, size_t bytes) { memcpy(static_cast<char *>(out) + at, own, bytes); });
  return KILAT_OK;
}

int state_write(Session *s, int64_t n, const void *data, kilat_failure *) {
  state_walk(s, n, [data](char *own, int64_t at, size_t bytes) { memcpy(own, static_cast<const char *>(data) + at, bytes); });
  return KILAT_OK;
}

const kilat_backend kBackend = {model_build,    model_free,     model_kernels, model_weights, model_memory, session_create,
                                session_free,   session_memory, forward,       sample,        logits_read,  layers_read,
                                state_bytes,    state_read,     state_write};

}  // namespace

extern "C" const kilat_backend *kilat_cpu_backend(void) { return &kBackend; }
