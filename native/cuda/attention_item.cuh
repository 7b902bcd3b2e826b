// attention_item.cuh: attention of a single token, with the context split over blocks.
//
// Keys and values that are older than the pass come with the stream of weights, and are in registers before the item waits for its
// queries. Little code matters here as much as little work: every instruction of it runs once per layer, out of a cold instruction cache.
#pragma once

#include "attention.cuh"
#include "stream.cuh"

namespace kilat_cuda {

// Where a head's numbers come from: words with a tag, which are waited for.
struct TaggedHead {
  const uint32_t *at;
  unsigned tag;
  __device__ uint32_t load(int i) const { return load_word(at + i); }
  __device__ unsigned wrong(uint32_t word) const { return (word ^ tag) & 0xffffu; }
};

template <int kBlocks>
__device__ inline void stage_heads(const Step &step, int layer, const AttentionItem &t, unsigned tag, const Staged &to) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int dim = m.head_dim, width = (m.q_heads + 2 * m.kv_heads) * dim, own = t.span.end > step.position ? 2 : 0;
  const uint32_t *qkv = s.qkv + int64_t(layer % 2) * width;
  const __nv_bfloat16 *norms = m.qk_norms ? m.qk_norms + int64_t(layer) * 2 * dim : nullptr;
#pragma unroll 1
  for (int task = thread_here() / 32; task < t.heads + own; task += kWarps) {
    const bool query = task < t.heads;
    const int side = query ? 0 : task - t.heads, head = query ? t.first_head + task : m.q_heads + side * m.kv_heads + t.kv_head;
    __nv_bfloat16 *place = query ? to.queries + task * dim : side ? to.value : to.key, *page = nullptr;
    if (!query && t.first_head == t.kv_head * (m.q_heads / m.kv_heads))
      page = page_of(m, s, layer, t.kv_head) + (int64_t(side) * s.context + step.position) * dim;
    rotate_head<kBlocks>(m, TaggedHead{qkv + head * dim, tag}, norms && !side ? norms + (query ? 0 : dim) : nullptr,
                         side ? nullptr : s.rope + int64_t(step.position) * m.rotary, place, page);
  }
}

// What Attend has to know of an item of a single token.
struct ItemKeys {
  static constexpr bool kOwn = true;  // the span's last key may not be in the pages yet
  const Step &step;
  const AttentionItem &t;
  Stream &stream;
  __device__ const ModelView &model() const { return step.model; }
  __device__ int warp() const { return thread_here() / 32; }
  __device__ int begin() const { return t.span.begin; }
  __device__ int end() const { return t.span.end; }
  __device__ int stored() const { return stored_end(step, t.span); }
  __device__ int queries() const { return t.heads; }
  __device__ int limit() const { return t.span.end; }  // keys before this are seen by the lane's query, number lane / 4

  // The stored rows of the round from `base` on, zeros for all others. Odd rows are read by pairs of blocks the other way round: eight
  // lanes that read two rows then meet all banks.
  template <int kHeld, int kBlocks>
  __device__ void load(int base, bool values, uint4 (&to)[kHeld][kBlocks]) const {
    const int end = stored(), dim = step.model.head_dim, row = thread_here() % 32 / 4, at = thread_here() % 4 * 8, odd = row % 2;
#pragma unroll
    for (int o = 0; o < kHeld; ++o)
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) to[o][j] = make_uint4(0, 0, 0, 0);
    if (base >= end) return;
    const bool apart = past_is_cut(step);
    uint32_t from = stream.wait(step) + (row * dim + at) * 2;
    if (values && !apart) from += round_bytes(dim);
#pragma unroll
    for (int o = 0; o < kHeld; ++o) {
      if (base + o * kGroupKeys + row >= end) continue;
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        const int first = (j + odd) * 32, second = (j + 1 - odd) * 32;
        uint4 a = make_uint4(0, 0, 0, 0), b = a;
        if (first + at < dim) a = load_shared(from + (o * 8 * dim + first) * 2);
        if (second + at < dim) b = load_shared(from + (o * 8 * dim + second) * 2);
        to[o][j] = odd ? b : a, to[o][j + 1] = odd ? a : b;
      }
    }
    if (values || apart) stream.release(step);
  }
};

// Where an item's result goes: words, or where the context has several spans, this span's part [kHeads, dim] of those of all spans.
struct Result {
  uint32_t *words;
  Partial *spans;
  unsigned tag, span_tag;  // 16 bits; 32 bits, for a span may have been written last long ago
};

// The block's warps together. `parts` is shared memory for the sums of `at_once` heads.
template <int kBlocks>
__device__ inline void add_warps(const Step &step, const AttentionItem &t, Attend<kBlocks, ItemKeys> &attend, float *parts, int at_once,
                                 const Result &result) {
  constexpr int kAcross = kThreads / (kBlocks * 32);  // heads side by side
  const int dim = step.model.head_dim, part = dim + 2, thread = thread_here(), i = thread % (kBlocks * 32);
#pragma unroll 1
  for (int first = 0; first < t.heads; first += at_once) {
    const int n = min(at_once, t.heads - first);
    attend.store(parts + thread / 32 * part, kWarps * part, first, n);
    sync_threads();
#pragma unroll 1
    for (int h = thread / (kBlocks * 32); h < n && i < dim; h += kAcross) {
      const float3 r = add_parts<kWarps>(parts + h * kWarps * part, part, dim, i);
      if (t.span.splits == 1) {
        store_word(result.words + (first + h) * dim + i, r.x / r.z, result.tag);
      } else {
        store_partial(result.spans + (t.split * kHeads + first + h) * dim + i, r, result.span_tag);
      }
    }
    sync_threads();
  }
}

// Adds the spans of an item's heads in a fixed order: the block of each span does a share of the elements. Four lanes have an element,
// each every fourth span.
template <int kEach>
__device__ inline void add_spans(const Step &step, const AttentionItem &t, const Result &result) {
  const int dim = step.model.head_dim, n = t.heads * dim, splits = t.span.splits, share = (n + splits - 1) / splits;
  const int end = min(n, (t.split + 1) * share), thread = thread_here(), lane = thread % 4;
#pragma unroll 1
  for (int base = t.split * share; base < end; base += kThreads / 4) {
    const int e = base + thread / 4;
    Partial part[kEach];
#pragma unroll 1
    for (Patience patience;; patience.round()) {
      unsigned wrong = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int split = lane + 4 * j;
        part[j] = {0, -INFINITY, 0, result.span_tag};
        if (split < splits && e < end) part[j] = load_partial(result.spans + split * kHeads * dim + e);
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) wrong |= part[j].tag ^ result.span_tag;
      if (wrong == 0) break;
    }
    __syncwarp();
    float top = -INFINITY, sum = 0, total = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) top = fmaxf(top, part[j].top);
#pragma unroll
    for (int d = 1; d < 4; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float weight = exp2f(part[j].top - top);
      sum = fmaf(part[j].sum, weight, sum), total = fmaf(part[j].total, weight, total);
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) sum += __shfl_xor_sync(~0u, sum, d), total += __shfl_xor_sync(~0u, total, d);
    if (lane == 0 && e < end) store_word(result.words + e, sum / total, result.tag);
  }
}

// One item, which exists. The layer's qkv words have the tag `tag` (of which words take 16 bits); results have tag + 1. `work` is shared
// memory of `work_bytes`.
template <int kBlocks>
__device__ inline void attend_item(const Step &step, int layer, const AttentionItem &t, unsigned tag, Stream &stream, char *work,
                                   int work_bytes) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int dim = m.head_dim, part = dim + 2;
  Staged staged;
  staged.queries = reinterpret_cast<__nv_bfloat16 *>(work);
  staged.key = staged.queries + kHeads * dim, staged.value = staged.key + dim;
  float *parts = reinterpret_cast<float *>(staged.value + dim);
  const int at_once = (work_bytes - int(reinterpret_cast<char *>(parts) - work)) / (kWarps * part * 4);
  Attend<kBlocks, ItemKeys> attend({step, t, stream});
  stage_heads<kBlocks>(step, layer, t, tag & 0xffffu, staged);
  sync_threads();
  const Result result{s.attended + (int64_t(layer % 2) * m.q_heads + t.first_head) * dim,
                      s.partial + int64_t(t.group) * s.max_splits * kHeads * dim, (tag + 1) & 0xffffu, tag + 1};
  attend.run(staged);
  add_warps(step, t, attend, parts, at_once, result);
  // waits for other blocks' items, which wait for nothing
  if (t.span.splits > 16)
    add_spans<8>(step, t, result);
  else if (t.span.splits > 1)
    add_spans<4>(step, t, result);
}

// Of large heads; apart, for it takes more registers than the layers have to spare. The stream comes and goes as a copy: what others may
// point to would not be in registers.
__device__ __noinline__ Stream attend_large(const Step &step, int layer, const AttentionItem &t, unsigned tag, Stream stream, char *work,
                                            int work_bytes) {
  attend_item<8>(step, layer, t, tag, stream, work, work_bytes);
  return stream;
}

__device__ inline void attend_item(const Step &step, int layer, const AttentionItem &t, unsigned tag, Stream &stream, char *work,
                                   int work_bytes) {
  if (step.model.head_dim <= 64)
    attend_item<2>(step, layer, t, tag, stream, work, work_bytes);
  else if (step.model.head_dim <= 128)
    attend_item<4>(step, layer, t, tag, stream, work, work_bytes);
  else
    stream = attend_large(step, layer, t, tag, stream, work, work_bytes);
}

}  // namespace kilat_cuda
