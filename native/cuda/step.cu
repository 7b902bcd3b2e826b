// step.cu: a whole forward pass of one token as one kernel: as many blocks as the device has processors.
//
// A layer is five phases: norm + QKV | rotation, pages, attention | output product + residual | norm + gate, up, SiLU | down product +
// residual. Every phase reads all of a vector that the one before wrote in parts. The vectors are exchanged without barriers
// (exchange.cuh), and the stream of weights (stream.cuh) does not notice.
#include "attention_item.cuh"
#include "product.cuh"
#include "sample.cuh"

namespace kilat_cuda {

namespace {

__device__ inline bool is_normed(int kind) { return kind == kQkv || kind == kGateUp || kind == kHead; }

// Tag of what the phase of a matrix writes, of which words take 16 bits; what attention writes has the one above that of the qkv matrix.
__device__ inline unsigned tag_of(const Step &step, int index) { return step.first_tag + 2 * index; }

// The words that the phase of a matrix reads.
struct Words {
  const uint32_t *at;
  unsigned tag;
};

__device__ inline Words words_of(const Step &step, int index) {
  const SessionView &s = step.session;
  const int kind = kind_of(step.model, index), n = step.model.shape[kind].columns;
  const uint32_t *base = kind == kOut ? s.attended : kind == kGateUp ? s.between : kind == kDown ? s.gated : s.entering;
  const unsigned tag = tag_of(step, index - 1) + (kind == kOut);
  return {base + int64_t(index / kLayerMatrices % 2) * n, tag & 0xffffu};
}

// Brings a vector [n], once it is there, as bf16 to shared memory; each(values of four elements) on the thread that has them.
// `waits` false: it is there, from an earlier launch. What is not there yet is asked for again all at once: a trip takes long, not a load.
template <class Each>
__device__ inline void gather(const Step &step, int index, bool waits, __nv_bfloat16 *to, const Each &each) {
  constexpr int kAtOnce = 8, kStride = kThreads * 4;
  const int n = step.model.shape[kind_of(step.model, index)].columns;
  const Words from = words_of(step, index);
#pragma unroll 1
  for (int first = thread_here() * 4; first < n; first += kAtOnce * kStride) {
    uint4 words[kAtOnce];
    unsigned missing = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      words[i] = make_uint4(0, 0, 0, 0);  // registers that are only written sometimes would be kept through all layers
      if (first + i * kStride < n) missing |= 1u << i;
    }
    for (Patience patience;; patience.round()) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (missing >> i & 1) words[i] = load_words(from.at + first + i * kStride);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (!waits || has_tag(words[i], from.tag)) missing &= ~(1u << i);
      if (missing == 0) break;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kStride;
      if (at >= n) continue;
      const uint2 pairs = make_uint2(pair_of_words(words[i].x, words[i].y), pair_of_words(words[i].z, words[i].w));
      *reinterpret_cast<uint2 *>(to + at) = pairs;
      each(pairs);
    }
  }
}

// The pass's token, which the host may not know yet.
__device__ inline int token_of(const Step &step) { return step.taken ? __ldcg(step.taken) : step.id; }

// The same from the embedding.
template <class Each>
__device__ inline void gather_embedded(const Step &step, __nv_bfloat16 *to, const Each &each) {
  const int id = token_of(step);
#pragma unroll 1
  for (int at = thread_here() * 4; at < step.model.hidden; at += kThreads * 4) {
    const uint2 pairs = make_uint2(embedded(step.model, id, at), embedded(step.model, id, at + 2));
    *reinterpret_cast<uint2 *>(to + at) = pairs;
    each(pairs);
  }
}

// What the layer or the head that `index` begins normalizes, into shared memory: x / rms(x), rounded, times the norm's weight, rounded.
// Threads keep to their own elements. `keep`: the vector is also written to session.layers.
__device__ inline void normalized(const Step &step, int index, bool waits, bool keep, __nv_bfloat16 *to, float *scratch) {
  const ModelView &m = step.model;
  const int n = m.hidden, thread = thread_here();
  const __nv_bfloat16 *norm = norm_of(m, index);
  uint2 weights[kVectors];  // in registers before the vector is there
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = (i * kThreads + thread) * 4;
    weights[i] = at < n ? __ldg(reinterpret_cast<const uint2 *>(norm + at)) : make_uint2(0, 0);
  }
  float squares = 0;
  const auto add = [&](const uint2 &p) { squares += squares_of(p); };
  if (index == 0)
    gather_embedded(step, to, add);
  else
    gather(step, index, waits, to, add);
  const float scale = rsqrtf(block_sum(squares, scratch) / n + m.norm_eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = (i * kThreads + thread) * 4;
    if (at >= n) continue;
    uint2 *place = reinterpret_cast<uint2 *>(to + at);
    const uint2 x = *place, w = weights[i];
    if (keep) *reinterpret_cast<uint2 *>(step.session.layers + int64_t(index / kLayerMatrices) * n + at) = x;
    *place = scaled(x, scale, w);
  }
}

// The vector of a phase as bf16 in shared memory, zeros up to whole units.
__device__ inline void stage(const Step &step, int index, __nv_bfloat16 *to, float *scratch) {
  const int kind = kind_of(step.model, index);
  const Shape &shape = step.model.shape[kind];
  if (is_normed(kind)) {
    const bool keep = step.session.layers && blockIdx.x == 0 && kind != kGateUp;
    normalized(step, index, index != step.first_matrix, keep, to, scratch);
  } else {
    gather(step, index, true, to, [](const uint2 &) {});
  }
  for (int i = shape.columns + thread_here(); i < shape.units * kUnitColumns; i += kThreads) to[i] = __float2bfloat16_rn(0);
  sync_threads();
}

// An element of the residual stream before the phase of the output (kOut) or down matrix adds to it.
__device__ inline float residual_of(const Step &step, int index, int at) {
  const ModelView &m = step.model;
  if (index == kOut) {
    const uint32_t pair = embedded(m, token_of(step), at & ~1);
    return at & 1 ? high(pair) : low(pair);
  }
  return number_of(load_word(words_of(step, index - 1).at + at));
}

// A phase's own rows of the residual stream, which a thread reads before the product, so that nothing waits for it after.
struct Residual {
  int first_tile;
  float value;
};

// What becomes of the sums of a block's tiles first ... first + n - 1.
template <class Get>
__device__ inline void finish_tiles(const Step &step, int index, int first, int n, const Residual &own, const Get &get) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int kind = kind_of(m, index), rows = m.shape[kind].rows, layer = index / kLayerMatrices;
  const unsigned tag = tag_of(step, index) & 0xffffu;
  const float *bias = bias_of(m, index);
  if (kind == kGateUp) {
    uint32_t *gated = s.gated + int64_t(layer % 2) * m.inner;
    for (int e = threadIdx.x; e < n * 8; e += kThreads) {
      const int row = e % 8, local = e / 8, at = (first + local) * kTileRows + row, out = (first + local) * 8 + row;
      const float value = gated_of(get(local, row), get(local, row + 8), bias, at);
      if (out < m.inner) store_word(gated + out, value, tag);
    }
    return;
  }
  for (int e = threadIdx.x; e < n * kTileRows; e += kThreads) {
    const int row = e % kTileRows, local = e / kTileRows, at = (first + local) * kTileRows + row;
    if (at >= rows) continue;
    const float value = rounded(get(local, row) + (bias ? bias[at] : 0));
    if (kind == kQkv) {
      store_word(s.qkv + int64_t(layer % 2) * rows + at, value, tag);
    } else if (kind == kHead) {
      s.logits[at] = value;
    } else {
      uint32_t *to = kind == kOut ? s.between + int64_t(layer % 2) * m.hidden : s.entering + int64_t((layer + 1) % 2) * m.hidden;
      const bool read = first == own.first_tile && e < kThreads;
      store_word(to + at, (read ? own.value : residual_of(step, index, at)) + value, tag);
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

// Takes a copy: the barriers and clocks of the layers stay in registers.
__device__ __noinline__ void draw_next(const Step &step, Grid grid, char *work) {
  Sampler(step, grid, share_of_block(step), work).run();
}

// The part of a pass that the computing warps do.
__device__ inline void compute(const Step &step, const Rings &rings, const MatrixPlace *matrices, char *work, float *scratch) {
  const ModelView &m = step.model;
  const int head = m.layers * kLayerMatrices;
  Stream stream(step, rings, Cursor(step, matrices, threadIdx.x / 32, step.first_matrix, head));
  Grid grid(step);
  grid.mark();
  Turn turn;
  // there are no more items than blocks. It lies in shared memory: registers are what the products need
  static_assert(kWarps * sizeof(float) + sizeof(AttentionItem) <= kScratch * sizeof(float), "the item lies behind the sums of warps");
  AttentionItem &item = *reinterpret_cast<AttentionItem *>(scratch + kWarps);
  if (threadIdx.x == 0) item = item_of(step, blockIdx.x);
  sync_threads();
#pragma unroll 1
  for (int index = step.first_matrix; index <= head; turn.next(m.shape[kind_of(m, index++)])) {
    const int kind = kind_of(m, index);
    int begin, end;
    tiles_of_rank(m.shape[kind], turn.rank(kind), begin, end);
    if (kind == kQkv) set_span(step, index / kLayerMatrices, item);  // all threads write the same
    Residual own{begin, 0};
    if (!is_normed(kind) && begin * kTileRows + int(threadIdx.x) < min(end * kTileRows, m.hidden))
      own.value = residual_of(step, index, begin * kTileRows + threadIdx.x);
    if (index != step.first_matrix && step.lockstep && kind == kQkv) grid.sync();
    stage(step, index, reinterpret_cast<__nv_bfloat16 *>(work), scratch);
    const int used = m.shape[kind].units * kUnitColumns * 2;
    grid.mark();
    product(step, stream, matrices[index], m.shape[kind], begin, end, shared_address(work), reinterpret_cast<float *>(work + used),
            step.work_bytes - used, [&](int first, int n, const auto &get) { finish_tiles(step, index, first, n, own, get); });
    grid.mark();
    if (kind == kQkv) {
      if (item.exists()) attend_item(step, index / kLayerMatrices, item, tag_of(step, index), stream, work, step.work_bytes);
      grid.mark();
    }
  }
  if (step.draw.wanted) draw_next(step, grid, work);
  grid.mark();
}

__global__ void __launch_bounds__(kBlockThreads, 1) pass_kernel(const __grid_constant__ Step step) {
  char *shared = shared_memory();
  const int head = step.model.layers * kLayerMatrices, n_slots = kWarps * step.slots;
  char *work = shared + n_slots * step.slot_bytes, *barriers = work + step.work_bytes;
  float *scratch = reinterpret_cast<float *>(barriers + n_slots * 16);
  MatrixPlace *matrices = reinterpret_cast<MatrixPlace *>(scratch + kScratch);
  const Rings rings{shared_address(shared), shared_address(barriers)};
  for (int i = threadIdx.x; i <= head; i += kBlockThreads) matrices[i] = step.model.matrices[i];
#if KILAT_BULK
  init_rings(step, rings);
#endif
  __syncthreads();
  if (threadIdx.x < kThreads) {
    compute(step, rings, matrices, work, scratch);
    return;
  }
#if KILAT_BULK
  const int warp = threadIdx.x % 32;
  if (warp < kWarps) fill_rings(step, rings, Cursor(step, matrices, warp, step.first_matrix, head));
#endif
}

__global__ void __launch_bounds__(kThreads, 1) sample_kernel(const __grid_constant__ Step step) {
  Grid grid(step);
  Sampler(step, grid, share_of_block(step), shared_memory()).run();
}

using Kernel = void (*)(Step);

cudaError_t launch(Kernel kernel, const Step &step, int blocks, int threads, int shared_bytes, cudaStream_t stream) {
  void *arguments[] = {const_cast<Step *>(&step)};
  return cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(threads), arguments, shared_bytes, stream);
}

}  // namespace

cudaError_t launch_pass(const Step &step, int blocks, int shared_bytes, cudaStream_t stream) {
  return launch(pass_kernel, step, blocks, kBlockThreads, shared_bytes, stream);
}

cudaError_t launch_sample(const Step &step, int blocks, int shared_bytes, cudaStream_t stream) {
  return launch(sample_kernel, step, blocks, kThreads, shared_bytes, stream);
}

int barriers_of_pass(const Step &step) {
  const int layers = step.first_matrix == 0 ? step.model.layers : 0;
  return (step.lockstep && layers ? layers - 1 : 0) + (step.draw.wanted ? barriers_of(step.draw, step.model.vocab) : 0);
}

int tags_of_pass(const Step &step) { return 2 * (step.model.layers * kLayerMatrices + 1); }

int barriers_of_sample(const Step &step) { return barriers_of(step.draw, step.model.vocab); }

cudaError_t prepare_kernels(int shared_bytes) {
  for (Kernel kernel : {pass_kernel, sample_kernel}) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kilat_cuda
