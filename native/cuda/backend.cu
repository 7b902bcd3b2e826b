// backend.cu: what the runtime asks of a device (runtime/backend.h), with CUDA.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "model.h"
#include "trace.h"

namespace {

using namespace kilat_cuda;
using Model = kilat_device_model;
using Session = kilat_device_session;

void model_free(Model *m) {
  if (!m) return;
  if (m->arena) cudaFree(m->arena);
  delete m;
}

int model_build(const kilat_model_desc *desc, const kilat_options *options, Model **out, kilat_failure *f) {
  *out = nullptr;
  Model *m = new (std::nothrow) Model;
  if (!m) return kilat_fail(f, KILAT_NO_MEMORY, "memory is exhausted");
  int status;
  try {
    status = build_model(*desc, options, *m, f);
  } catch (const std::bad_alloc &) {
    status = kilat_fail(f, KILAT_NO_MEMORY, "memory is exhausted");
  }
  if (status == KILAT_OK)
    *out = m;
  else
    model_free(m);
  return status;
}

const char *model_kernels(const Model *m) { return m->kernels; }
int model_weights(const Model *m) { return m->weights; }

// Fills a report of owners.
class Report {
 public:
  Report(kilat_memory *out, int capacity) : out_(out), capacity_(capacity) {}
  void add(const char *owner, int64_t host, int64_t device) {
    if (n_ < capacity_) out_[n_] = {owner, host, device};
    ++n_;
  }
  int n() const { return n_; }

 private:
  kilat_memory *out_;
  int capacity_, n_ = 0;
};

int model_memory(const Model *m, kilat_memory *out, int capacity) {
  Report r(out, capacity);
  r.add("weights", 0, m->weight_bytes);
  if (m->embedding_bytes) r.add("embedding", 0, m->embedding_bytes);
  r.add("tables", 0, m->table_bytes);
  return r.n();
}

void session_free(Session *s) {
  if (!s) return;
  if (s->stream) {
    cudaStreamSynchronize(s->stream);
    cudaStreamDestroy(s->stream);
  }
  if (s->result) cudaFreeHost(s->result);
  if (s->arena) cudaFree(s->arena);
  delete s;
}

int session_create(Model *m, int64_t context, int64_t flags, Session **out, kilat_failure *f) {
  *out = nullptr;
  Session *s = new (std::nothrow) Session;
  if (!s) return kilat_fail(f, KILAT_NO_MEMORY, "memory is exhausted");
  int status;
  try {
    status = create_session(m, context, flags, *s, f);
  } catch (const std::bad_alloc &) {
    status = kilat_fail(f, KILAT_NO_MEMORY, "memory is exhausted");
  }
  if (status == KILAT_OK)
    *out = s;
  else
    session_free(s);
  return status;
}

int session_memory(const Session *s, kilat_memory *out, int capacity) {
  Report r(out, capacity);
  r.add("kv", 0, s->kv_bytes);
  r.add("activations", 0, s->activation_bytes);
  r.add("tables", 0, s->table_bytes);
  r.add("scratch", kPlaces * sizeof *s->result, s->scratch_bytes);
  return r.n();
}

DrawView draw_view(const kilat_draw *draw) {
  DrawView d{};
  if (!draw) return d;
  d.wanted = 1;
  d.temperature = float(draw->temperature);
  d.min_p_log = draw->min_p > 0 ? float(std::log(draw->min_p)) : -INFINITY;
  d.top_p = draw->top_p;
  d.top_k = int(std::min<int64_t>(draw->top_k, INT32_MAX));
  d.u24 = unsigned(std::lround(draw->u * 16777216.0));
  return d;
}

float *logits_of(const Session *s, int place) { return s->view.logits + place * s->logits_stride; }

// `logits`, `place`: where these and the id are left, or the logits are.
Step step_of(const Session *s, int logits, int place) {
  Step step{};
  step.model = s->model->view, step.session = s->view;
  step.session.logits = logits_of(s, logits), step.session.result += place, step.session.drawn += place;
  step.slots = s->model->slots, step.slot_bytes = s->model->slot_bytes, step.work_bytes = s->model->work_bytes;
  step.pace = s->model->pace;
  return step;
}

// Queues a launch; the counter of barriers is kept in step with it.
cudaError_t queue(Session *s, Step &step, bool only_sample) {
  step.barriers = s->barriers, step.number = ++s->launches;
  step.first_tag = s->tags, step.lockstep = s->model->lockstep;
  const cudaError_t error = (only_sample ? launch_sample : launch_pass)(step, s->model->blocks, s->model->shared_bytes, s->stream);
  if (error != cudaSuccess) return error;
  // only when all words are written anew: an old tag may not come round again
  if (!only_sample && step.first_matrix == 0) s->tags += unsigned(tags_of_pass(step));
  s->barriers += unsigned(only_sample ? barriers_of_sample(step) : barriers_of_pass(step));
  return cudaSuccess;
}

// The id that launch `number` draws: it appears in host memory, which is seen sooner than the end of the launch.
int await(Session *s, int place, unsigned number, int32_t *next, kilat_failure *f) {
  constexpr double kPatience_s = 0.1;
  auto asked = std::chrono::steady_clock::now();
  for (unsigned spins = 1;; ++spins) {
    const unsigned long long word = *const_cast<volatile unsigned long long *>(s->result + place);
    if (unsigned(word >> 32) == number) {
      const int id = int(unsigned(word)) - 2;
      if (id < 0)
        return kilat_fail(f, KILAT_NOT_FINITE, "the model's output is not finite (NaN or infinity); its weights or dtype may be at fault");
      *next = id;
      return KILAT_OK;
    }
    if (spins % (1u << 16)) continue;
    // asking the driver takes longer than anything else here: not within a step that goes well
    const auto now = std::chrono::steady_clock::now();
    if (std::chrono::duration<double>(now - asked).count() < kPatience_s) continue;
    asked = now;
    const cudaError_t error = cudaStreamQuery(s->stream);
    if (error != cudaErrorNotReady && error != cudaSuccess) return fail_cuda(f, error, "a step on the device");
  }
}

int finish(Session *s, kilat_failure *f) {
  const cudaError_t error = cudaStreamSynchronize(s->stream);
  return error == cudaSuccess ? KILAT_OK : fail_cuda(f, error, "a step on the device");
}

// Queues the layers for many tokens; step `head` is to begin at the head.
cudaError_t queue_prompt(Session *s, const int32_t *ids, int n, int64_t first, Step &head) {
  Prompt p = s->prompt;
  p.model = s->model->view, p.session = s->view;
  p.rows = n, p.first = int(first);
  p.tag = (s->tags - 1) & 0xffffu;  // the last pass's highest: no later pass waits for it
  PromptIds places;
  std::copy(ids, ids + n, places.at);
  head.first_matrix = p.model.layers * kLayerMatrices;
  return launch_prompt(p, places, s->model->matrices.data(), s->model->prompt, s->stream);
}

// Queues the pass of ids [n]; `number` is that of its last launch.
cudaError_t queue_forward(Session *s, const int32_t *ids, int64_t n, int64_t first, const kilat_draw *draw, unsigned &number) {
  Step step = step_of(s, s->place, s->place);
  cudaError_t error = cudaSuccess;
  if (n == 1) {
    step.id = *ids, step.position = int(first);
  } else {
    for (int64_t done = 0, rows; done < n && error == cudaSuccess; done += rows) {
      rows = std::min<int64_t>(s->prompt_rows, n - done);
      error = queue_prompt(s, ids + done, int(rows), first + done, step);
    }
  }
  step.draw = draw_view(draw);
  if (error == cudaSuccess) error = queue(s, step, false);
  number = step.number;
  return error;
}

// Queues the pass of the id that the last one draws, at `position`. Only its own place and the keys and values of its position change, which
// nobody reads who does not ask for it.
cudaError_t queue_ahead(Session *s, int64_t position, const kilat_draw &draw) {
  const int place = s->place ^ 1;
  Step step = step_of(s, place, place);
  step.taken = s->view.drawn + s->place, step.position = int(position);
  step.draw = draw_view(&draw);
  const cudaError_t error = queue(s, step, false);
  if (error == cudaSuccess) s->ahead = {true, step.number, -1, position, draw};
  return error;
}

int forward(Session *s, const int32_t *ids, int64_t n, int64_t first, const kilat_draw *draw, const kilat_draw *after, int32_t *next,
            kilat_failure *f) {
  const Ahead ahead = std::exchange(s->ahead, {});
  unsigned number = ahead.number;
  s->place ^= 1;
  cudaError_t error = cudaSetDevice(s->model->device);
  if (error == cudaSuccess && !(n == 1 && draw && ahead.is_for(*ids, first, *draw))) error = queue_forward(s, ids, n, first, draw, number);
  if (error == cudaSuccess && after) error = queue_ahead(s, first + n, *after);
  if (error != cudaSuccess) return fail_cuda(f, error, "starting a step on the device");
  if (!draw) return finish(s, f);
  const int status = await(s, s->place, number, next, f);
  if (status == KILAT_OK)
    s->ahead.id = *next;
  else
    s->ahead = {};
  return status;
}

int sample(Session *s, const kilat_draw *draw, int32_t *next, kilat_failure *f) {
  Step step = step_of(s, s->place, kDrawPlace);
  step.draw = draw_view(draw);
  cudaError_t error = cudaSetDevice(s->model->device);
  if (error == cudaSuccess) error = queue(s, step, true);
  return error == cudaSuccess ? await(s, kDrawPlace, step.number, next, f) : fail_cuda(f, error, "starting to sample on the device");
}

// Waits for what is queued, then copies.
int copy(const Session *s, void *to, const void *from, int64_t bytes, cudaMemcpyKind kind, kilat_failure *f) {
  cudaError_t error = cudaMemcpyAsync(to, from, size_t(bytes), kind, s->stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(s->stream);
  return error == cudaSuccess ? KILAT_OK : fail_cuda(f, error, "copying between host and device");
}

int logits_read(Session *s, float *out, kilat_failure *f) {
  return copy(s, out, logits_of(s, s->place), int64_t(s->model->view.vocab) * 4, cudaMemcpyDeviceToHost, f);
}

int layers_read(Session *s, float *out, kilat_failure *f) {
  if (!s->view.layers) return kilat_fail(f, KILAT_BAD_ARGUMENT, "the session was created without KILAT_KEEP_LAYERS");
  const int64_t n = int64_t(s->model->view.layers + 1) * s->model->view.hidden;
  // the upper half of the buffer takes the bf16 numbers, which are then spread from the front: no number is overwritten unread
  uint16_t *packed = reinterpret_cast<uint16_t *>(out) + n;
  const int status = copy(s, packed, s->view.layers, n * 2, cudaMemcpyDeviceToHost, f);
  if (status != KILAT_OK) return status;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = uint32_t(packed[i]) << 16;
    memcpy(out + i, &bits, 4);
  }
  return KILAT_OK;
}

// A snapshot: for each layer, K/V head and side the positions in order, then the logits.
int64_t kv_row_bytes(const Session *s) { return int64_t(s->model->view.head_dim) * 2; }
int64_t kv_rows(const Session *s) { return int64_t(s->model->view.layers) * s->model->view.kv_heads * 2; }

int64_t state_bytes(const Session *s, int64_t n) { return kv_rows(s) * n * kv_row_bytes(s) + int64_t(s->model->view.vocab) * 4; }

int copy_kv(Session *s, int64_t n, char *host, bool to_host, kilat_failure *f) {
  const size_t width = size_t(n * kv_row_bytes(s)), pitch = size_t(s->view.context * kv_row_bytes(s)), rows = size_t(kv_rows(s));
  if (n == 0) return KILAT_OK;
  cudaError_t error = to_host ? cudaMemcpy2DAsync(host, width, s->view.kv, pitch, width, rows, cudaMemcpyDeviceToHost, s->stream)
                              : cudaMemcpy2DAsync(s->view.kv, pitch, host, width, width, rows, cudaMemcpyHostToDevice, s->stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(s->stream);
  return error == cudaSuccess ? KILAT_OK : fail_cuda(f, error, "copying a session's state");
}

int state_read(Session *s, int64_t n, void *out, kilat_failure *f) {
  char *to = static_cast<char *>(out);
  const int status = copy_kv(s, n, to, true, f);
  return status == KILAT_OK ? logits_read(s, reinterpret_cast<float *>(to + kv_rows(s) * n * kv_row_bytes(s)), f) : status;
}

int state_write(Session *s, int64_t n, const void *data, kilat_failure *f) {
  char *from = const_cast<char *>(static_cast<const char *>(data));
  s->ahead = {};
  const int status = copy_kv(s, n, from, false, f);
  if (status != KILAT_OK) return status;
  return copy(s, logits_of(s, s->place), from + kv_rows(s) * n * kv_row_bytes(s), int64_t(s->model->view.vocab) * 4, cudaMemcpyHostToDevice, f);
}

const kilat_backend backend = {model_build,    model_free,  model_kernels, model_weights, model_memory, session_create, session_free, session_memory,
                               forward,        sample,      logits_read,   layers_read,   state_bytes,  state_read,     state_write};

}  // namespace

extern "C" const kilat_backend *kilat_cuda_backend(void) { return &backend; }

extern "C" void kilat_cuda_trace(kilat_device_session *s, int on) { s->view.trace = on ? s->trace : nullptr; }

extern "C" int kilat_cuda_trace_read(kilat_device_session *s, long long *out, int capacity) {
  const int n = std::min(capacity, s->model->view.layers * 9 + 4);  // of a step of one token
  if (cudaStreamSynchronize(s->stream) != cudaSuccess) return 0;
  return cudaMemcpy(out, s->trace, n * sizeof(long long), cudaMemcpyDeviceToHost) == cudaSuccess ? n : 0;
}
