// step.cu: a whole forward pass as one kernel: as many blocks as the device has processors, in step with each other by barriers of the grid.
//
// A layer is five phases: norm + QKV | rotation, pages, attention | output product + residual | norm + gate, up, SiLU | down product +
// residual. Every phase reads all of a vector that the one before wrote in parts, hence a barrier before each; the stream of weights
// (stream.cuh) does not notice them.
#include "attention.cuh"
#include "product.cuh"
#include "sample.cuh"

namespace kilat_cuda {

namespace {

constexpr int kAttentionChunks = 2;  // of every warp's weights that come to the device's cache during attention
constexpr int kVectors = 4;  // of 8 elements that a thread has of a normalized vector: hidden <= 512 * 8 * 4

// A vector [n] of bf16 spread over the block, 8 elements per thread and round.
struct Piece {
  uint4 v[kVectors];

  template <class Load>
  __device__ void load(int n, Load from) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = (i * kThreads + threadIdx.x) * 8;
      v[i] = at < n ? from(at) : make_uint4(0, 0, 0, 0);
    }
  }
  template <class Store>
  __device__ void store(int n, Store to) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = (i * kThreads + threadIdx.x) * 8;
      if (at < n) to(at, v[i]);
    }
  }
};

__device__ inline uint4 load_constant(const __nv_bfloat16 *p) { return __ldg(reinterpret_cast<const uint4 *>(p)); }

// x / rms(x), rounded, times weight, rounded: in place.
__device__ void normalize(Piece &x, const Piece &weight, int n, float eps, float *scratch) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float f[8];
    unpack(x.v[i], f);
    for (int k = 0; k < 8; ++k) squares += f[k] * f[k];
  }
  const float scale = rsqrtf(block_sum(squares, scratch) / n + eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float f[8], w[8];
    unpack(x.v[i], f);
    unpack(weight.v[i], w);
    for (int k = 0; k < 8; ++k) f[k] = rounded(f[k] * scale) * w[k];
    x.v[i] = make_uint4(pair_of(f[0], f[1]), pair_of(f[2], f[3]), pair_of(f[4], f[5]), pair_of(f[6], f[7]));
  }
}

// Eight elements of a token's embedding.
__device__ inline uint4 embedded(const ModelView &m, int id, int at) {
  if (m.embedding) return load_constant(m.embedding + int64_t(id) * m.hidden + at);
  const char *head = m.matrices[m.layers * kLayerMatrices].at();
  uint32_t w[4];
  for (int i = 0; i < 4; ++i)
    w[i] = __ldg(reinterpret_cast<const uint32_t *>(head + bf16_pair_at(m.shape[kHead].units, id, at + 2 * i)));
  return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ inline const __nv_bfloat16 *norm_of(const ModelView &m, int index) {
  const int layer = index / kLayerMatrices, second = kind_of(m, index) == kGateUp;
  return m.norms + (int64_t(layer) * 2 + second) * m.hidden;
}

__device__ inline bool is_normed(int kind) { return kind == kQkv || kind == kGateUp || kind == kHead; }

// Whatever a phase reads of this launch's vectors, into shared memory `to` (one token), zeros up to whole units.
__device__ inline void zero_tail(__nv_bfloat16 *to, int n, int units) {
  for (int i = n + threadIdx.x; i < units * kUnitColumns; i += kThreads) to[i] = __float2bfloat16_rn(0);
}

__device__ void stage_one(const Step &step, int index, const Piece &weight, __nv_bfloat16 *to, float *scratch) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int kind = kind_of(m, index), n = m.shape[kind].columns;
  const auto put = [&](int at, const uint4 &v) { *reinterpret_cast<uint4 *>(to + at) = v; };
  if (!is_normed(kind)) {
    const __nv_bfloat16 *from = kind == kOut ? s.attended : s.gated;
    for (int at = threadIdx.x * 8; at < n; at += kThreads * 8) put(at, load_fresh(from + at));
  } else {
    Piece x;
    const __nv_bfloat16 *from = s.residual + int64_t(kind == kHead ? step.head_row : 0) * m.hidden;
    if (index == 0) {
      x.load(n, [&](int at) { return embedded(m, step.ids[0], at); });
      if (blockIdx.x == 0) x.store(n, [&](int at, const uint4 &v) { *reinterpret_cast<uint4 *>(s.residual + at) = v; });
    } else {
      x.load(n, [&](int at) { return load_fresh(from + at); });
    }
    if (s.layers && blockIdx.x == 0 && kind != kGateUp)
      x.store(n, [&](int at, const uint4 &v) {
        *reinterpret_cast<uint4 *>(s.layers + int64_t(index / kLayerMatrices) * m.hidden + at) = v;
      });
    normalize(x, weight, n, m.norm_eps, scratch);
    x.store(n, put);
  }
  zero_tail(to, n, m.shape[kind].units);
  __syncthreads();
}

// Several tokens: block r normalizes token r into global memory.
__device__ void stage_many(const Step &step, int index, const Piece &weight, float *scratch) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int n = m.hidden;
  for (int row = blockIdx.x; row < step.rows; row += gridDim.x) {
    Piece x;
    __nv_bfloat16 *residual = s.residual + int64_t(row) * n;
    if (index == 0) {
      x.load(n, [&](int at) { return embedded(m, step.ids[row], at); });
      x.store(n, [&](int at, const uint4 &v) { *reinterpret_cast<uint4 *>(residual + at) = v; });
    } else {
      x.load(n, [&](int at) { return load_fresh(residual + at); });
    }
    if (s.layers && row == step.rows - 1 && kind_of(m, index) == kQkv)
      x.store(n, [&](int at, const uint4 &v) {
        *reinterpret_cast<uint4 *>(s.layers + int64_t(index / kLayerMatrices) * n + at) = v;
      });
    normalize(x, weight, n, m.norm_eps, scratch);
    x.store(n, [&](int at, const uint4 &v) { *reinterpret_cast<uint4 *>(s.normed + int64_t(row) * n + at) = v; });
  }
}

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

// What becomes of the sums of a block's tiles first ... first + n - 1.
template <bool kMany, class Get>
__device__ inline void finish_tiles(const Step &step, int index, int first, int n, const Get &get) {
  constexpr int kColumns = kMany ? kRows : 1;
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int kind = kind_of(m, index), rows = m.shape[kind].rows, layer = index / kLayerMatrices;
  const float *bias = kind != kHead && m.biases[kind] ? m.biases[kind] + int64_t(layer) * m.shape[kind].tiles * kTileRows : nullptr;
  if (kind == kGateUp) {  // rows 0-7 of a tile are gates, rows 8-15 the ups of the same outputs
    for (int e = threadIdx.x; e < n * 8 * kColumns; e += kThreads) {
      const int token = e % kColumns, row = e / kColumns % 8, local = e / kColumns / 8, at = (first + local) * kTileRows + row;
      const float gate = rounded(get(local, row, token) + (bias ? bias[at] : 0));
      const float up = rounded(get(local, row + 8, token) + (bias ? bias[at + 8] : 0));
      const int out = (first + local) * 8 + row;
      if (token < step.rows && out < m.inner) s.gated[int64_t(token) * m.inner + out] = __float2bfloat16_rn(rounded(silu(gate)) * up);
    }
    return;
  }
  for (int e = threadIdx.x; e < n * kTileRows * kColumns; e += kThreads) {
    const int token = e % kColumns, row = e / kColumns % kTileRows, local = e / kColumns / kTileRows;
    const int at = (first + local) * kTileRows + row;
    if (token >= step.rows || at >= rows) continue;
    const float value = rounded(get(local, row, token) + (bias ? bias[at] : 0));
    if (kind == kQkv) {
      s.qkv[int64_t(token) * rows + at] = __float2bfloat16_rn(value);
    } else if (kind == kHead) {
      s.logits[at] = value;
    } else {
      __nv_bfloat16 *residual = s.residual + int64_t(token) * m.hidden + at;
      *residual = __float2bfloat16_rn(load_fresh_bf16(residual) + value);
    }
  }
}

__device__ inline Share share_of_block(const Step &step) {
  const ModelView &m = step.model;
  int begin, end;
  tiles_of_rank(m.shape[kHead], blockIdx.x, begin, end);
  const int first = begin * kTileRows;
  return {step.session.logits + first, first, min(end * kTileRows, m.vocab) - first};
}

template <bool kMany>
__global__ void __launch_bounds__(kThreads, 1) pass_kernel(const __grid_constant__ Step step) {
  extern __shared__ __align__(128) char shared[];
  __shared__ float scratch[32];
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int head = m.layers * kLayerMatrices, last = kMany ? head - 1 : head;
  char *work = shared + kWarps * step.slots * step.slot_bytes;
  char *barriers = work + step.work_bytes;
  MatrixPlace *matrices = reinterpret_cast<MatrixPlace *>(barriers + kWarps * step.slots * 8);
  for (int i = threadIdx.x; i <= head; i += kThreads) matrices[i] = m.matrices[i];
  __syncthreads();
  Stream stream(step, Cursor(step, matrices, step.first_matrix, last), shared_address(shared), shared_address(barriers));
  Grid grid(step);
  grid.mark();
  Turn turn(step.first_matrix);
#pragma unroll 1
  for (int index = step.first_matrix; index <= last; ++index, turn.next()) {
    const int kind = kind_of(m, index), columns = m.shape[kind].columns;
    Piece weight;
    if (is_normed(kind)) weight.load(columns, [&](int at) { return load_constant(norm_of(m, index) + at); });
    if (index != step.first_matrix) grid.sync();
    Vectors x{shared_address(work), kind == kOut ? s.attended : kind == kDown ? s.gated : s.normed, columns, step.rows};
    float *sums = reinterpret_cast<float *>(work);
    int sum_bytes = step.work_bytes;
    if constexpr (kMany) {
      if (is_normed(kind)) {
        stage_many(step, index, weight, scratch);
        grid.sync();
      }
    } else {
      stage_one(step, index, weight, reinterpret_cast<__nv_bfloat16 *>(work), scratch);
      const int used = m.shape[kind].units * kUnitColumns * 2;
      sums += used / 4, sum_bytes -= used;
    }
    int begin, end;
    tiles_of_rank(m.shape[kind], turn.rank(kind), begin, end);
    product<kMany>(step, stream, matrices[index], m.shape[kind], begin, end, x, sums, sum_bytes,
                   [&](int first, int n, const auto &get) { finish_tiles<kMany>(step, index, first, n, get); });
    if (kind == kQkv) {
      stream.look_ahead(m, kAttentionChunks);
      grid.sync();
      attention(step, index / kLayerMatrices, work, step.work_bytes);
    }
  }
  grid.mark();
  if constexpr (!kMany) {
    if (step.draw.wanted) Sampler(step, grid, share_of_block(step), work).run();
  }
  grid.mark();
}

__global__ void __launch_bounds__(kThreads, 1) sample_kernel(const __grid_constant__ Step step) {
  extern __shared__ __align__(128) char shared[];
  Grid grid(step);
  Sampler(step, grid, share_of_block(step), shared).run();
}

cudaError_t launch(const void *kernel, const Step &step, int blocks, int shared_bytes, cudaStream_t stream) {
  void *arguments[] = {const_cast<Step *>(&step)};
  return cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(kThreads), arguments, shared_bytes, stream);
}

const void *pass_of(const Step &step) {
  return step.rows > 1 ? reinterpret_cast<const void *>(pass_kernel<true>) : reinterpret_cast<const void *>(pass_kernel<false>);
}

}  // namespace

cudaError_t launch_pass(const Step &step, int blocks, int shared_bytes, cudaStream_t stream) {
  return launch(pass_of(step), step, blocks, shared_bytes, stream);
}

cudaError_t launch_sample(const Step &step, int blocks, int shared_bytes, cudaStream_t stream) {
  return launch(reinterpret_cast<const void *>(sample_kernel), step, blocks, shared_bytes, stream);
}

int barriers_of_pass(const Step &step) {
  const int layers = step.first_matrix == 0 ? step.model.layers : 0;
  if (step.rows > 1) return layers * 7 - 1;
  return layers * 5 + (step.draw.wanted ? barriers_of(step.draw, step.model.vocab) : 0);
}

int barriers_of_sample(const Step &step) { return barriers_of(step.draw, step.model.vocab); }

cudaError_t prepare_kernels(int shared_bytes) {
  for (const void *kernel : {reinterpret_cast<const void *>(pass_kernel<true>), reinterpret_cast<const void *>(pass_kernel<false>),
                             reinterpret_cast<const void *>(sample_kernel)}) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kilat_cuda
