// session.cu: buffers of one stream.
#include <algorithm>
#include <utility>
#include <vector>

#include "model.h"

namespace kilat_cuda {

namespace {

void carve(kilat_device_session &s, int64_t context, bool keep_layers, Carver &c) {
  const ModelView &m = s.model->view;
  SessionView &v = s.view;
  const int64_t groups = int64_t(m.kv_heads) * ((m.q_heads / m.kv_heads + 7) / 8), rows = std::min<int64_t>(context, kPromptRows);
  v.context = int(context);
  v.max_splits = s.model->max_splits;
  v.kv = c.take<__nv_bfloat16>(int64_t(m.layers) * m.kv_heads * 2 * context * m.head_dim);
  s.kv_bytes = c.used();
  v.rope = c.take<float>(context * m.rotary);
  s.table_bytes = c.used() - s.kv_bytes;
  for (auto [vector, n] : {std::pair{&v.entering, m.hidden}, {&v.between, m.hidden}, {&v.qkv, m.shape[kQkv].rows},
                           {&v.attended, m.shape[kOut].columns}, {&v.gated, m.inner}})
    *vector = c.take<uint32_t>(int64_t(2) * n);
  s.logits_stride = int64_t(m.shape[kHead].tiles) * kTileRows;
  v.logits = c.take<float>(kPassPlaces * s.logits_stride);
  v.layers = keep_layers ? c.take<__nv_bfloat16>(int64_t(m.layers + 1) * m.hidden) : nullptr;
  const int64_t qkv = m.shape[kQkv].rows, attended = m.shape[kOut].columns;
  s.prompt_rows = int(rows);
  s.prompt.residual = c.take<__nv_bfloat16>(rows * m.hidden);
  s.prompt.normed = c.take<__nv_bfloat16>(rows * m.hidden);
  s.prompt.qkv = s.prompt.gated = c.take<__nv_bfloat16>(rows * std::max<int64_t>(qkv + attended, m.inner));
  s.prompt.attended = s.prompt.qkv + rows * qkv;
  s.activation_bytes = c.used() - s.kv_bytes - s.table_bytes;
  v.partial = reinterpret_cast<Partial *>(c.take<uint4>(groups * v.max_splits * 8 * m.head_dim));
  v.tops = c.take<unsigned long long>(2 * s.model->blocks);
  v.bins = c.take<unsigned long long>(4 * 256);
  v.barrier = c.take<unsigned>(1);
  v.drawn = c.take<int>(kPlaces);
  s.prompt.sums = c.take<float>(s.model->prompt.sums);
  s.prompt.arrived = c.take<unsigned>(s.model->prompt.groups);
  s.trace = c.take<long long>(kTraceClocks(m.layers));
  s.scratch_bytes = c.used() - s.kv_bytes - s.table_bytes - s.activation_bytes;
}

}  // namespace

int create_session(kilat_device_model *m, int64_t context, int64_t flags, kilat_device_session &s, kilat_failure *f) {
  s.model = m;
  Carver sizes(nullptr);
  carve(s, context, flags & KILAT_KEEP_LAYERS, sizes);
  cudaError_t error = cudaSetDevice(m->device);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void **>(&s.arena), sizes.used());
  if (error == cudaSuccess) error = cudaMemset(s.arena, 0, sizes.used());
  if (error == cudaSuccess)
    error = cudaHostAlloc(reinterpret_cast<void **>(&s.result), kPlaces * sizeof *s.result, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != cudaSuccess) return fail_cuda(f, error, "memory for a session on the device");
  std::fill(s.result, s.result + kPlaces, 0);
  Carver places(s.arena);
  carve(s, context, flags & KILAT_KEEP_LAYERS, places);
  void *result = nullptr;
  error = cudaHostGetDevicePointer(&result, s.result, 0);
  s.view.result = static_cast<unsigned long long *>(result);
  kilat_model_desc rope{};
  rope.rotary = m->view.rotary, rope.inverse_frequencies = m->frequencies.data(), rope.rope_factor = m->rope_factor;
  std::vector<float> table(size_t(context * m->view.rotary));
  kilat_rope_table(&rope, context, table.data());
  if (error == cudaSuccess) error = cudaMemcpy(const_cast<float *>(s.view.rope), table.data(), table.size() * 4, cudaMemcpyHostToDevice);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  return error == cudaSuccess ? KILAT_OK : fail_cuda(f, error, "filling a session on the device");
}

}  // namespace kilat_cuda
