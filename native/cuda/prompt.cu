// prompt.cu: see prompt.h. Tokens get the same bits as one at a time (step.cu): every sum is added in the same order.
#include "prompt.h"

#include <algorithm>

#include "grid.cuh"
#include "prompt_attention.cuh"
#include "prompt_product.cuh"

namespace kilat_cuda {

namespace {

// A block for every token.
__global__ void __launch_bounds__(kThreads) embed_kernel(const __grid_constant__ Prompt p, const __grid_constant__ PromptIds ids) {
  const int row = blockIdx.x;
  for (int at = threadIdx.x * 2; at < p.model.hidden; at += kThreads * 2)
    *reinterpret_cast<uint32_t *>(p.residual + int64_t(row) * p.model.hidden + at) = embedded(p.model, ids.at[row], at);
}

// A block for every token: what the matrix `index` multiplies.
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ Prompt p, int index) {
  const int n = p.model.hidden, row = blockIdx.x;
  const __nv_bfloat16 *norm = norm_of(p.model, index), *from = p.residual + int64_t(row) * n;
  const bool keep = p.session.layers && row == p.rows - 1 && kind_of(p.model, index) == kQkv;
  uint2 x[kVectors];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = (i * kThreads + threadIdx.x) * 4;
    if (at < n) x[i] = *reinterpret_cast<const uint2 *>(from + at), squares += squares_of(x[i]);
  }
  const float scale = rsqrtf(block_sum(squares, reinterpret_cast<float *>(shared_memory())) / n + p.model.norm_eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = (i * kThreads + threadIdx.x) * 4;
    if (at >= n) continue;
    if (keep) *reinterpret_cast<uint2 *>(p.session.layers + int64_t(index / kLayerMatrices) * n + at) = x[i];
    *reinterpret_cast<uint2 *>(p.normed + int64_t(row) * n + at) = scaled(x[i], scale, *reinterpret_cast<const uint2 *>(norm + at));
  }
}

__global__ void __launch_bounds__(kThreads) rotate_kernel(const __grid_constant__ Prompt p, int layer) {
  if (p.model.head_dim <= 128)
    rotate_token<4>(p, layer, blockIdx.x);
  else
    rotate_token<8>(p, layer, blockIdx.x);
}

// A block for every `most` queries of a K/V head; those that have most to read begin first.
template <int kBlocks>
__global__ void __launch_bounds__(kThreads) attend_kernel(const __grid_constant__ Prompt p, int layer, int most) {
  const int block = gridDim.x - 1 - blockIdx.x, heads = p.model.kv_heads;
  attend_queries<kBlocks>(p, layer, block % heads, block / heads * most, most, shared_memory());
}

using Product = void (*)(Prompt, int, MatrixPlace, int, int);
using Attention = void (*)(Prompt, int, int);
constexpr Product kProducts[4][2] = {{product_kernel<kBf16, 1>, product_kernel<kBf16, 2>},
                                     {product_kernel<kFp8, 1>, product_kernel<kFp8, 2>},
                                     {product_kernel<kQ4, 1>, product_kernel<kQ4, 2>},
                                     {product_kernel<kQ4Min, 1>, product_kernel<kQ4Min, 2>}};
constexpr Attention kAttention[3] = {attend_kernel<2>, attend_kernel<4>, attend_kernel<8>};
constexpr int kNormBytes = kWarps * 4;

// Units that are in shared memory or on their way to it; less than two are too few for a product.
int stages_of(int format, int tiles, int shared_limit) {
  return std::min(kMostStages, (shared_limit - total_bytes(tiles)) / stage_bytes(format, tiles));
}

// Launches in order on a stream, until one fails.
class Launcher {
 public:
  Launcher(const Prompt &prompt, const PromptFit &fit, cudaStream_t stream) : p_(prompt), fit_(fit), stream_(stream) {}
  cudaError_t error() const { return error_; }

  template <class... A, class... B>
  void run(void (*kernel)(A...), int blocks, int shared_bytes, B... rest) {
    run_as(kernel, blocks, shared_bytes, A(rest)...);
  }

  // Of a matrix by all tokens.
  void product(int index, MatrixPlace matrix) {
    const Shape &shape = p_.model.shape[index % kLayerMatrices];
    const int across = (p_.rows + kTokens - 1) / kTokens, format = matrix.format();
    const auto blocks = [&](int tiles) { return (shape.tiles + tiles * kWarps - 1) / (tiles * kWarps) * across; };
    const auto rounds = [&](int tiles) { return (blocks(tiles) + fit_.blocks - 1) / fit_.blocks; };
    // the larger block is the faster one per row, unless it leaves more of the device idle
    const bool large = stages_of(format, 2, fit_.shared_limit) >= 2 && 20 * rounds(2) <= 11 * rounds(1);
    const int tiles = large ? 2 : 1, stages = stages_of(format, tiles, fit_.shared_limit);
    int parts = 1;  // blocks that share the columns
    while (!large && parts < kWarps && blocks(1) * parts * 2 <= fit_.blocks) parts *= 2;
    run(kProducts[format][tiles - 1], blocks(tiles) * parts, stages * stage_bytes(format, tiles) + total_bytes(tiles), p_, index, matrix, stages,
        parts);
  }

  void attend(int layer) {
    const ModelView &m = p_.model;
    const int queries = p_.rows * (m.q_heads / m.kv_heads), most = fit_.attention_queries;
    run(kAttention[m.head_dim <= 64 ? 0 : m.head_dim <= 128 ? 1 : 2], (queries + most - 1) / most * m.kv_heads,
        attention_bytes(m.head_dim, most, p_.session.max_splits), p_, layer, most);
  }

 private:
  template <class... A>
  void run_as(void (*kernel)(A...), int blocks, int shared_bytes, A... values) {
    if (error_ != cudaSuccess) return;
    void *arguments[] = {&values...};
    error_ = cudaLaunchKernel(kernel, dim3(unsigned(blocks)), dim3(kThreads), arguments, size_t(shared_bytes), stream_);
  }

  const Prompt &p_;
  const PromptFit &fit_;
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace

PromptFit fit_prompt(const ModelView &model, const MatrixPlace *matrices, int blocks, int shared_limit, int max_splits) {
  PromptFit fit{blocks, shared_limit, kHeads, blocks / 2, int64_t(blocks / 2) * kWarps * total_bytes(1) / 4};
  while (fit.attention_queries > 0 && attention_bytes(model.head_dim, fit.attention_queries, max_splits) > shared_limit) --fit.attention_queries;
  for (int i = 0; i < model.layers * kLayerMatrices; ++i)
    if (stages_of(matrices[i].format(), 1, shared_limit) < 2) fit.attention_queries = 0;
  return fit;
}

cudaError_t prepare_prompt(int shared_limit) {
  cudaError_t error = cudaSuccess;
  const auto raise = [&](auto *kernel) {
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_limit);
  };
  for (const auto &format : kProducts)
    for (Product kernel : format) raise(kernel);
  for (Attention kernel : kAttention) raise(kernel);
  return error;
}

cudaError_t launch_prompt(const Prompt &p, const PromptIds &ids, const MatrixPlace *matrices, const PromptFit &fit, cudaStream_t stream) {
  Launcher launch(p, fit, stream);
  launch.run(embed_kernel, p.rows, 0, p, ids);
  for (int layer = 0; layer < p.model.layers; ++layer) {
    const int index = layer * kLayerMatrices;
    launch.run(norm_kernel, p.rows, kNormBytes, p, index + kQkv);
    launch.product(index + kQkv, matrices[index + kQkv]);
    launch.run(rotate_kernel, p.rows, kNormBytes, p, layer);  // its warps meet: it is one of the kernels with shared memory
    launch.attend(layer);
    launch.product(index + kOut, matrices[index + kOut]);
    launch.run(norm_kernel, p.rows, kNormBytes, p, index + kGateUp);
    launch.product(index + kGateUp, matrices[index + kGateUp]);
    launch.product(index + kDown, matrices[index + kDown]);
  }
  return launch.error();
}

}  // namespace kilat_cuda
