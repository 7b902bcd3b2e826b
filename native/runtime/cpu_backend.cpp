// The CPU backend: the whole forward pass as one call, on the kernels of native/cpu, so the bits are the engine's.
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
  kilat_decoder decoder() const {
    return {weights.layers.data(), desc.n_layers, desc.hidden, desc.inner, {desc.q_heads, desc.kv_heads, desc.head_dim, desc.rotary},
            desc.norm_eps, desc.qk_norm_eps, dtype};
  }
};

// Activations of a chunk: [kChunk or less, ...] each.
struct kilat_device_session {
  kilat_device_model *model;
  int64_t context, chunk;
  Region region;
  int64_t kv_bytes = 0, activation_bytes = 0, table_bytes = 0, logit_bytes = 0;
  char *kv, *x, *residual, *normed, *room, *logits;
  float *wide_logits, *cos_sin, *kept;  // kept: nullptr unless layers are kept
  int32_t *positions, *row_start, *kv_len, *page_table;
  int64_t passing = 0;  // tokens of the pass that goes on now
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
  const int64_t e = m.element_bytes(), row = s->chunk * e;
  s->kv_bytes = s->activation_bytes = s->table_bytes = s->logit_bytes = 0;
  Cutter c = {at};
  c.group = &s->kv_bytes;
  c.take(&s->kv, d.n_layers * 2 * s->context * m.kv_width() * e);
  c.group = &s->activation_bytes;
  for (char **buffer : {&s->x, &s->residual}) c.take(buffer, row * d.hidden);
  c.take(&s->normed, d.hidden * e);
  kilat_decoder decoder = m.decoder();
  c.take(&s->room, kilat_layers_room(&decoder, s->chunk, 1));
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

// What enters layer `layer`, of the last token that is passing.
void keep(void *user, int64_t layer, const void *entering) {
  Session *s = static_cast<Session *>(user);
  const Model &m = *s->model;
  const char *last = static_cast<const char *>(entering) + (s->passing - 1) * m.desc.hidden * m.element_bytes();
  widen(s, last, m.desc.hidden, s->kept + layer * m.desc.hidden);
}

// One chunk of a prompt or one step: n tokens from position `first` on. False when memory for scratch is exhausted. With `last` the
// logits of the last token are computed, otherwise only K and V.
bool pass(Session *s, int64_t n, int64_t first, bool last) {
  const Model &m = *s->model;
  const kilat_model_desc &d = m.desc;
  for (int64_t i = 0; i < n; i++) s->positions[i] = int32_t(first + i);
  s->row_start[0] = 0;
  s->row_start[1] = int32_t(n);
  s->kv_len[0] = int32_t(first + n);
  s->page_table[0] = 0;
  const int64_t side = s->context * m.kv_width();
  kilat_pass p = {};
  p.cos_sin = s->cos_sin;
  p.positions = p.slots = s->positions;  // the session's keys and values are one page a layer
  p.rows = {s->row_start, s->kv_len, s->page_table, 1, 1};
  p.kv = {s->kv, 2 * side, side, m.kv_width(), d.head_dim, s->context};
  p.layer_stride = 2 * side;
  p.tokens = n;
  p.wanted = last ? KILAT_LAST_OF_ROWS : KILAT_NO_TOKEN;
  if (s->kept) p.seen = keep, p.user = s;
  s->passing = n;
  kilat_decoder decoder = m.decoder();
  if (kilat_layers_run(m.owner.cpu, &decoder, &p, s->x, s->residual, s->room)) return false;
  if (!last) return true;
  s->passing = 1;
  kilat_add_rms_norm(m.owner.cpu, m.dtype, s->x, d.hidden, s->residual, 1, d.hidden, m.weights.norm, d.norm_eps, s->normed);
  if (s->kept) keep(s, d.n_layers, s->residual);
  return kilat_linear_run(m.owner.cpu, m.weights.head, s->normed, d.hidden, 1, s->logits) == 0;
}

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

// Nothing is begun early: a processor that computes is not waited for.
int forward(Session *s, const int32_t *ids, int64_t n, int64_t first, const kilat_draw *draw, const kilat_draw *, int32_t *next,
            kilat_failure *f) {
  for (int64_t done = 0; done < n; done += s->chunk) {
    int64_t count = n - done < s->chunk ? n - done : s->chunk;
    embed(s, ids + done, count);
    if (!pass(s, count, first + done, done + count == n))
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
