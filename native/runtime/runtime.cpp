// The C API: handles, checks, errors. The numbers are the backend's, the files files.h's, the text tokenizer.h's.
#include <string.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "error.h"
#include "files.h"
#include "handles.h"
#include "sampling.h"

using namespace kilat;

namespace {

const int64_t kDefaultContext = 4096;

void open_model(const char *path, const kilat_options *given, kilat_model *m) {
  kilat_options options = {};
  if (given) options = *given;
  if (!path) fail(KILAT_BAD_ARGUMENT, "path is null");
  if (options.threads < 0 || options.threads > 1024) fail(KILAT_BAD_ARGUMENT, "threads is %d, allowed 0 to 1024", options.threads);
  if (options.dtype < 0 || options.dtype > KILAT_DTYPE_BF16 || options.weights < 0 || options.weights > KILAT_WEIGHTS_WIDE)
    fail(KILAT_BAD_ARGUMENT, "options have a dtype or weights that this version does not know");
  if (options.device == KILAT_DEVICE_CUDA && kilat_cuda_backend) m->backend = kilat_cuda_backend();
  else if (options.device == KILAT_DEVICE_CUDA)
    fail(KILAT_UNSUPPORTED, "this library was built without CUDA: build one with `make -C native CUDA=...`, or use the CPU");
  else if (options.device == KILAT_DEVICE_CPU) m->backend = kilat_cpu_backend();
  else fail(KILAT_BAD_ARGUMENT, "device is %d, known are 0 (CPU) and 1 (CUDA)", options.device);

  std::unique_ptr<Source> source = open_source(path);
  kilat_model_desc &d = source->desc;
  d.dtype = options.dtype ? options.dtype : source->config.stored_f32 ? KILAT_DTYPE_F32 : KILAT_DTYPE_BF16;
  d.weights = options.weights;
  if (source->gguf.tensors.empty()) m->tokenizer_error = "the tokenizer of a model directory is not read, only that of a GGUF file";
  else m->read_tokenizer(source->gguf);
  kilat_failure failure = {};
  if (int status = m->backend->model_build(&d, &options, &m->device, &failure)) fail(status, "%s", failure.text);
  m->take_facts(*source);
}

kilat_draw draw_of(const kilat_sampling &s, int64_t position) {
  bool fits =
      s.temperature >= 0 && s.temperature <= 1e6 && s.top_p > 0 && s.top_p <= 1 && s.min_p >= 0 && s.min_p <= 1 && s.top_k >= 0;
  if (!fits)
    fail(KILAT_BAD_ARGUMENT,
         "sampling is out of range: temperature %g (0 or more), top_p %g (above 0, up to 1), min_p %g (0 to 1), top_k %lld (0 or "
         "more)",
         s.temperature, s.top_p, s.min_p, static_cast<long long>(s.top_k));
  return {s.temperature, s.top_p, s.min_p, uniform(s.seed, position), s.top_k};
}

void forward(kilat_session *s, const int32_t *ids, int64_t n, const kilat_sampling *sampling, int32_t *next) {
  if (!ids || n < 1 || (sampling && !next)) fail(KILAT_BAD_ARGUMENT, "no ids, fewer than one, or no place for the next id");
  if (n > s->context - s->n_tokens())
    fail(KILAT_CONTEXT_FULL, "%lld tokens and %lld more do not fit the session's context of %lld: create it with a larger one",
         static_cast<long long>(s->n_tokens()), static_cast<long long>(n), static_cast<long long>(s->context));
  for (int64_t i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= s->model->vocab)
      fail(KILAT_BAD_ARGUMENT, "id %d is outside the vocabulary of %lld", ids[i], static_cast<long long>(s->model->vocab));
  const int64_t upto = s->n_tokens() + n;
  const bool ahead = s->runs_ahead && sampling && upto < s->context;
  kilat_draw draw, after;
  if (sampling) draw = draw_of(*sampling, upto);
  if (ahead) after = draw_of(*sampling, upto + 1);
  kilat_failure failure = {};
  int32_t drawn = 0;
  s->has_logits = false;
  int status = s->model->backend->forward(s->device, ids, n, s->n_tokens(), sampling ? &draw : nullptr,
                                           ahead ? &after : nullptr, &drawn, &failure);
  // Logits that are not finite were computed all the same: the tokens are there.
  if (status && status != KILAT_NOT_FINITE) fail(status, "%s", failure.text);
  s->ids.insert(s->ids.end(), ids, ids + n);  // reserved at creation
  s->has_logits = true;
  if (status) fail(status, "%s", failure.text);
  if (sampling) *next = drawn;
}

void need_logits(const kilat_session *s) {
  if (!s->has_logits) fail(KILAT_NO_LOGITS, "there are no logits: give the session tokens first");
}

}  // namespace

kilat_model::~kilat_model() {
  if (device) backend->model_free(device);
}

void kilat_model::read_tokenizer(const Gguf &file) {
  try {
    tokenizer = make_tokenizer(file);
  } catch (const Error &e) {
    tokenizer_error = e.failure.text;  // the model is of use without
  }
}

void kilat_model::take_facts(const Source &source) {
  const kilat_model_desc &d = source.desc;
  architecture = source.config.architecture;
  end_ids = source.config.end_ids;
  vocab = d.vocab;
  hidden = d.hidden;
  layers = d.n_layers;
  identity = source.identity;
  const char *kernels = backend->model_kernels(device);
  info = {architecture.c_str(), kernels,       d.vocab,           d.hidden,
          d.inner,              d.n_layers,    d.q_heads,         d.kv_heads,
          d.head_dim,           d.max_context, source.parameters, source.tensor_bytes,
          d.dtype,              backend->model_weights(device),   source.config.bos_id,
          int32_t(end_ids.size()), end_ids.data()};
  std::string set = std::string(kernels) + "/" + std::to_string(d.dtype) + "/" + std::to_string(info.weights);
  for (char c : set) identity = (identity ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
}

kilat_session::~kilat_session() {
  if (device) model->backend->session_free(device);
}

extern "C" {

int kilat_version(void) { return KILAT_VERSION; }

const char *kilat_status_name(int status) {
  static const char *const kNames[] = {"ok",        "bad argument", "bad file",     "unsupported", "no memory",    "context full",
                                       "no logits", "not finite",   "bad snapshot", "too small",   "device failed"};
  return status >= 0 && status <= KILAT_DEVICE_FAILED ? kNames[status] : "unknown status";
}

int kilat_fail(kilat_failure *failure, int status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure->text, sizeof failure->text, format, arguments);
  va_end(arguments);
  return status;
}

int kilat_open(const char *path, const kilat_options *options, kilat_model **out) {
  if (!out) return KILAT_BAD_ARGUMENT;
  kilat_model *m = *out = new (std::nothrow) kilat_model;
  if (!m) return KILAT_NO_MEMORY;
  return guard_any(m, [&] { open_model(path, options, m); });
}

void kilat_close(kilat_model *model) { delete model; }

const char *kilat_model_error(const kilat_model *m) { return m ? m->error.text : "the handle is null"; }
const char *kilat_session_error(const kilat_session *s) { return s ? s->error.text : "the handle is null"; }

int kilat_model_info(const kilat_model *m, kilat_info *out) {
  if (!m || !m->device || !out) return KILAT_BAD_ARGUMENT;
  *out = m->info;
  return KILAT_OK;
}

int kilat_memory_report(const kilat_model *m, const kilat_session *s, kilat_memory *out, int capacity, int *n) {
  if (!n || capacity < 0 || (capacity > 0 && !out) || (m && !m->device) || (s && !s->device)) return KILAT_BAD_ARGUMENT;
  int count = 0;
  auto room = [&] { return count < capacity ? capacity - count : 0; };
  auto place = [&] { return room() ? out + count : nullptr; };
  if (m) count += m->backend->model_memory(m->device, place(), room());
  if (m && m->tokenizer) {
    if (room()) *place() = {"tokenizer", m->tokenizer->memory_bytes(), 0};
    count++;
  }
  if (s) {
    count += s->model->backend->session_memory(s->device, place(), room());
    if (room()) *place() = {"tokens", int64_t(s->ids.capacity() * sizeof(int32_t)), 0};
    count++;
  }
  *n = count;
  return count > capacity ? KILAT_TOO_SMALL : KILAT_OK;
}

int kilat_session_create(kilat_model *m, const kilat_session_options *given, kilat_session **out) {
  if (!out) return KILAT_BAD_ARGUMENT;
  kilat_session *s = *out = new (std::nothrow) kilat_session;
  if (!s) return KILAT_NO_MEMORY;
  return guard_any(s, [&] {
    if (!m || !m->device) fail(KILAT_BAD_ARGUMENT, "there is no model");
    kilat_session_options options = {};
    if (given) options = *given;
    int64_t most = m->info.max_context;
    s->context = options.context ? options.context : most < kDefaultContext ? most : kDefaultContext;
    if (s->context < 1 || s->context > most)
      fail(KILAT_BAD_ARGUMENT, "context is %lld, allowed 1 to %lld, the length that the model was trained for",
           static_cast<long long>(s->context), static_cast<long long>(most));
    s->model = m;
    s->keeps_layers = options.flags & KILAT_KEEP_LAYERS;
    s->runs_ahead = options.flags & KILAT_RUN_AHEAD && !s->keeps_layers;
    s->ids.reserve(size_t(s->context));
    kilat_failure failure = {};
    if (int status = m->backend->session_create(m->device, s->context, options.flags, &s->device, &failure))
      fail(status, "%s", failure.text);
  });
}

void kilat_session_close(kilat_session *session) { delete session; }
int64_t kilat_tokens(const kilat_session *s) { return s ? s->n_tokens() : 0; }
int64_t kilat_context(const kilat_session *s) { return s ? s->context : 0; }

int kilat_prefill(kilat_session *s, const int32_t *ids, int64_t n, const kilat_sampling *sampling, int32_t *next) {
  return guard(s, [&] { forward(s, ids, n, sampling, next); });
}

int kilat_step(kilat_session *s, int32_t id, const kilat_sampling *sampling, int32_t *next) {
  return guard(s, [&] { forward(s, &id, 1, sampling, next); });
}

int kilat_sample(kilat_session *s, const kilat_sampling *sampling, int32_t *next) {
  return guard(s, [&] {
    if (!sampling || !next) fail(KILAT_BAD_ARGUMENT, "sampling or the place for the id is null");
    need_logits(s);
    kilat_draw draw = draw_of(*sampling, s->n_tokens());
    kilat_failure failure = {};
    if (int status = s->model->backend->sample(s->device, &draw, next, &failure)) fail(status, "%s", failure.text);
  });
}

int kilat_logits(kilat_session *s, float *out) {
  return guard(s, [&] {
    if (!out) fail(KILAT_BAD_ARGUMENT, "out is null");
    need_logits(s);
    kilat_failure failure = {};
    if (int status = s->model->backend->logits_read(s->device, out, &failure)) fail(status, "%s", failure.text);
  });
}

int kilat_layers(kilat_session *s, float *out) {
  return guard(s, [&] {
    if (!out || !s->keeps_layers) fail(KILAT_BAD_ARGUMENT, "out is null, or the session was created without KILAT_KEEP_LAYERS");
    need_logits(s);
    kilat_failure failure = {};
    if (int status = s->model->backend->layers_read(s->device, out, &failure)) fail(status, "%s", failure.text);
  });
}

int kilat_rewind(kilat_session *s, int64_t n) {
  return guard(s, [&] {
    if (n < 0 || n > s->n_tokens())
      fail(KILAT_BAD_ARGUMENT, "cannot keep %lld of %lld tokens", static_cast<long long>(n), static_cast<long long>(s->n_tokens()));
    s->has_logits = s->has_logits && n == s->n_tokens();
    s->ids.resize(size_t(n));
  });
}

int kilat_encode(kilat_model *m, const char *text, int64_t n_bytes, int special, int32_t *out, int64_t capacity, int64_t *n) {
  return guard(m, [&] {
    if (!text || n_bytes < 0 || !n || capacity < 0 || (capacity > 0 && !out))
      fail(KILAT_BAD_ARGUMENT, "a null pointer or a negative size");
    if (!m->tokenizer) fail(KILAT_UNSUPPORTED, "%s", m->tokenizer_error.c_str());
    std::vector<int32_t> ids = m->tokenizer->encode({text, size_t(n_bytes)}, special != 0);
    *n = int64_t(ids.size());
    if (*n > capacity)
      fail(KILAT_TOO_SMALL, "the text has %zu ids, there is room for %lld", ids.size(), static_cast<long long>(capacity));
    memcpy(out, ids.data(), ids.size() * sizeof(int32_t));
  });
}

int kilat_token_bytes(kilat_model *m, int32_t id, const char **bytes, int64_t *n_bytes) {
  return guard(m, [&] {
    if (!bytes || !n_bytes || id < 0 || id >= m->vocab)
      fail(KILAT_BAD_ARGUMENT, "a null pointer, or id %d outside the vocabulary", id);
    if (!m->tokenizer) fail(KILAT_UNSUPPORTED, "%s", m->tokenizer_error.c_str());
    std::string_view found = m->tokenizer->bytes(id);
    *bytes = found.data();
    *n_bytes = int64_t(found.size());
  });
}

}  // extern "C"
