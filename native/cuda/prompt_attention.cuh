// prompt_attention.cuh: attention of many tokens, whose keys and values are all in the session's pages.
//
// The queries of a K/V head are numbered token by token; a block takes up to eight of them. They see the spans that a single token sees
// (attention.cuh) and share the loads of keys and values, as long as their spans begin alike. A warp has the keys that it would have of a
// single token, and everything is added in the same order.
#pragma once

#include "attention.cuh"
#include "prompt.h"

namespace kilat_cuda {

// A head's numbers that are there.
struct PlainHead {
  const __nv_bfloat16 *at;
  static constexpr unsigned tag = 0;
  __device__ uint32_t load(int i) const { return uint32_t(__bfloat16_as_ushort(at[i])) << 16; }
  __device__ unsigned wrong(uint32_t) const { return 0; }
};

// One block: queries of a token are rotated where they lie, keys and values go to the pages.
template <int kBlocks>
__device__ inline void rotate_token(const Prompt &p, int layer, int row) {
  const ModelView &m = p.model;
  const int dim = m.head_dim, position = p.first + row;
  __nv_bfloat16 *heads = p.qkv + int64_t(row) * (m.q_heads + 2 * m.kv_heads) * dim;
  const __nv_bfloat16 *norms = m.qk_norms ? m.qk_norms + int64_t(layer) * 2 * dim : nullptr;
#pragma unroll 1
  for (int head = threadIdx.x / 32; head < m.q_heads + 2 * m.kv_heads; head += kWarps) {
    const int number = head - m.q_heads, side = number >= m.kv_heads;  // of keys and values: 0, 1
    __nv_bfloat16 *place = heads + head * dim, *page = nullptr;
    if (number >= 0) page = page_of(m, p.session, layer, number % m.kv_heads) + (int64_t(side) * p.session.context + position) * dim;
    rotate_head<kBlocks>(m, PlainHead{place}, norms && !side ? norms + (number >= 0 ? dim : 0) : nullptr,
                         side ? nullptr : p.session.rope + int64_t(position) * m.rotary, place, page);
  }
}

// Queries that share spans: `first` ... `end` - 1 of those of the block, which begin with number `number` of the K/V head.
struct Queries {
  int number, per_token;  // per_token: query heads of a K/V head
  int first, end;
  int from, size, splits;  // spans begin at from + split * size
  int last;                // position of the last query
  __device__ int row_of(int query) const { return (number + query) / per_token; }
};

// The queries from `first` on of at most `n` that share spans.
__device__ inline Queries queries_from(const Prompt &p, int window, int number, int first, int n) {
  Queries q{number, p.model.q_heads / p.model.kv_heads, first, first, 0, 0, 0, 0};
  for (; q.end < n; ++q.end) {
    const Span span = span_of(p.first + q.row_of(q.end), window, p.session.max_splits, 0), next = span_of(p.first + q.row_of(q.end), window, p.session.max_splits, 1);
    if (q.end == first)
      q.from = span.begin, q.size = next.begin - span.begin;
    else if (span.begin != q.from || next.begin - span.begin != q.size)
      break;
    q.splits = span.splits, q.last = p.first + q.row_of(q.end);
  }
  return q;
}

// What Attend has to know of a span of some queries.
struct SpanKeys {
  static constexpr bool kOwn = false;
  const ModelView *m;
  const __nv_bfloat16 *page;
  int context, warp_, begin_, end_, queries_, limit_;
  __device__ const ModelView &model() const { return *m; }
  __device__ int warp() const { return warp_; }
  __device__ int begin() const { return begin_; }
  __device__ int end() const { return end_; }
  __device__ int queries() const { return queries_; }
  __device__ int limit() const { return limit_; }

  // The rows of the round from `base` on; zeros beyond the end.
  template <int kHeld, int kBlocks>
  __device__ void load(int base, bool values, uint4 (&to)[kHeld][kBlocks]) const {
    const int lane = threadIdx.x % 32, at = lane % 4 * 8, dim = m->head_dim;
#pragma unroll
    for (int o = 0; o < kHeld; ++o) {
      const int position = base + o * kGroupKeys + lane / 4;
      const __nv_bfloat16 *from = page + (int64_t(values ? context : 0) + position) * dim + at;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const bool on = position < end_ && j * 32 + at < dim;
        to[o][j] = on ? *reinterpret_cast<const uint4 *>(from + j * 32) : make_uint4(0, 0, 0, 0);
      }
    }
  }
};

// Shared memory of a block: queries [8, dim] bf16; of each warp and each query sums, maximum and total [dim + 2]; the same of each span.
__host__ __device__ constexpr int attention_bytes(int dim, int queries, int splits) {
  return kHeads * dim * 2 + (kWarps + splits) * queries * (dim + 2) * 4;
}

// The sums of the spans first ... first + n - 1, on kParts warps each, as add_parts gives them; four elements at a time.
template <int kParts>
__device__ inline void add_span_warps(const float *parts, float *spans, int first, int n, int queries, int dim) {
  const int part = dim + 2, quads = dim / 4, stride = queries * part;
  for (int e = threadIdx.x; e < n * queries * quads; e += kThreads) {
    const int i = e % quads * 4, query = e / quads % queries, span = e / quads / queries;
    const float *from = parts + (span * kParts * queries + query) * part;
    float top = -INFINITY, total = 0;
    float2 low = make_float2(0, 0), high = make_float2(0, 0);
#pragma unroll
    for (int k = 0; k < kParts; ++k) top = fmaxf(top, from[k * stride + dim]);
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const float weight = exp2f(from[k * stride + dim] - top);
      const float2 a = *reinterpret_cast<const float2 *>(from + k * stride + i), b = *reinterpret_cast<const float2 *>(from + k * stride + i + 2);
      low.x = fmaf(a.x, weight, low.x), low.y = fmaf(a.y, weight, low.y);
      high.x = fmaf(b.x, weight, high.x), high.y = fmaf(b.y, weight, high.y);
      total = fmaf(from[k * stride + dim + 1], weight, total);
    }
    float *to = spans + ((first + span) * queries + query) * part;
    *reinterpret_cast<float2 *>(to + i) = low, *reinterpret_cast<float2 *>(to + i + 2) = high;
    if (i == 0) to[dim] = top, to[dim + 1] = total;
  }
}

// Element i of a query from its spans, added as add_spans does: four sums, of every fourth span.
__device__ inline float add_query_spans(const float *spans, int stride, int splits, int dim, int i) {
  float top = -INFINITY, sum[4] = {0, 0, 0, 0}, total[4] = {0, 0, 0, 0};
  for (int k = 0; k < splits; ++k) top = fmaxf(top, spans[k * stride + dim]);
  for (int base = 0; base < splits; base += 4)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (base + k >= splits) continue;
      const float *from = spans + (base + k) * stride, weight = exp2f(from[dim] - top);
      sum[k] = fmaf(from[i], weight, sum[k]), total[k] = fmaf(from[dim + 1], weight, total[k]);
    }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) / ((total[0] + total[1]) + (total[2] + total[3]));
}

// Up to `most` queries of a K/V head, from number `number` on. `work` is shared memory of attention_bytes.
template <int kBlocks>
__device__ inline void attend_queries(const Prompt &p, int layer, int kv_head, int number, int most, char *work) {
  const ModelView &m = p.model;
  const int dim = m.head_dim, part = dim + 2, per_token = m.q_heads / m.kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n = min(most, p.rows * per_token - number), width = (m.q_heads + 2 * m.kv_heads) * dim;
  const Staged staged{reinterpret_cast<__nv_bfloat16 *>(work), nullptr, nullptr};
  float *parts = reinterpret_cast<float *>(staged.queries + kHeads * dim), *spans = parts + kWarps * most * part;
  const __nv_bfloat16 *page = page_of(m, p.session, layer, kv_head);
  for (int e = threadIdx.x * 8; e < n * dim; e += kThreads * 8) {
    const int query = number + e / dim, row = query / per_token, head = kv_head * per_token + query % per_token;
    *reinterpret_cast<uint4 *>(staged.queries + e) = *reinterpret_cast<const uint4 *>(p.qkv + int64_t(row) * width + head * dim + e % dim);
  }
  __syncthreads();
  for (int first = 0; first < n;) {
    const Queries q = queries_from(p, m.windows ? m.windows[layer] : 0, number, first, n);
    // a span of 32 keys is of four warps, so that two of them are attended to at once
    const int warps = q.size < kGroupKeys ? kWarps / 2 : kWarps, at_once = kWarps / warps;
    const auto keys_from = [&](int split) {
      const int begin = q.from + (split + warp / warps) * q.size, end = min(begin + q.size, q.last + 1), query = lane / 4;
      const int limit = query >= q.first && query < q.end ? min(end, p.first + q.row_of(query) + 1) : 0;
      return SpanKeys{&m, page, p.session.context, warp % warps, begin, end, n, limit};
    };
    Attend<kBlocks, SpanKeys> attend(keys_from(0));
    for (int split = 0; split < q.splits; split += at_once) {
      if (split + warp / warps < q.splits) {
        attend.run(staged);
        attend.store(parts + warp * most * part, part, 0, n);
      }
      __syncthreads();
      attend.restart(keys_from(split + at_once));  // beyond the last span there are no keys
      const int there = min(at_once, q.splits - split);
      if (at_once == 2)
        add_span_warps<kWarps / 2>(parts, spans, split, there, most, dim);
      else
        add_span_warps<kWarps>(parts, spans, split, there, most, dim);
      __syncthreads();
    }
    for (int e = threadIdx.x; e < (q.end - first) * dim; e += kThreads) {
      const int i = e % dim, query = first + e / dim, head = kv_head * per_token + (number + query) % per_token;
      const int splits = (p.first + q.row_of(query) - q.from) / q.size + 1;  // in the block's other spans it has no key
      const float value = add_query_spans(spans + query * part, most * part, splits, dim, i);
      p.attended[(int64_t(q.row_of(query)) * m.q_heads + head) * dim + i] = __float2bfloat16_rn(value);
    }
    first = q.end;
  }
}

}  // namespace kilat_cuda
