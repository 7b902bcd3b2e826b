// attention.cuh: norm and rotation of queries and keys, the write of K and V, and attention with the context split over blocks.
//
// An item is (token, up to four query heads of one K/V head, a span of positions). Spans depend on the token's position only, so a token
// gets the same bits alone and in a prompt. The block that finishes last of a token's heads adds the spans, in order.
#pragma once

#include "exchange.cuh"

namespace kilat_cuda {

constexpr int kHeads = 4;   // query heads of an item
constexpr int kAhead = 4;   // keys that a lane has in flight

// Positions that one item covers.
struct Span {
  int splits, begin, end;
};

__device__ inline Span span_of(int position, int window, int max_splits, int split) {
  const int from = window > 0 ? max(0, position + 1 - window) : 0, n = position + 1 - from;
  const int size = max(32, ((n + max_splits - 1) / max_splits + 31) / 32 * 32);
  Span s;
  s.splits = (n + size - 1) / size;
  s.begin = from + split * size;
  s.end = min(s.begin + size, position + 1);
  return s;
}

// One warp: a head of `from` (words with a tag) normalized if `norm`, and rotated if `rope`; put(i, value rounded to bf16). All loads are
// started before the first is used.
template <class Put>
__device__ inline void rotate_head(const ModelView &m, const uint32_t *from, unsigned tag, const __nv_bfloat16 *norm, const float *rope,
                                   Put put) {
  constexpr int kMost = 8;  // elements of a lane: heads of up to 256
  const int lane = threadIdx.x % 32, dim = m.head_dim, half = rope ? m.rotary / 2 : 0;
  uint32_t words[kMost], others[kMost];
  float own[kMost], other[kMost], c[kMost], s[kMost];
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    const int i = lane + 32 * k, j = i < half ? i : i - half;
    const bool turns = i < 2 * half;
    c[k] = turns ? rope[j] : 1;
    s[k] = turns ? (i < half ? -rope[half + j] : rope[half + j]) : 0;
  }
  for (Patience patience;; patience.round()) {
    unsigned wrong = 0;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const int i = lane + 32 * k;
      words[k] = i < dim ? load_word(from + i) : tag;
      others[k] = i < 2 * half ? load_word(from + (i < half ? i + half : i - half)) : tag;
      wrong |= (words[k] ^ tag) | (others[k] ^ tag);
    }
    if ((wrong & 0xffffu) == 0) break;
  }
#pragma unroll
  for (int k = 0; k < kMost; ++k) own[k] = number_of(words[k]), other[k] = number_of(others[k]);
  __syncwarp();
  if (norm) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < kMost; ++k) squares += own[k] * own[k];
    for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
    const float scale = rsqrtf(squares / dim + m.qk_norm_eps);
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const int i = lane + 32 * k;
      if (i >= dim) continue;
      own[k] = rounded(rounded(own[k] * scale) * __bfloat162float(norm[i]));
      if (i < 2 * half) other[k] = rounded(rounded(other[k] * scale) * __bfloat162float(norm[i < half ? i + half : i - half]));
    }
  }
#pragma unroll
  for (int k = 0; k < kMost; ++k)
    if (lane + 32 * k < dim) put(lane + 32 * k, rounded(own[k] * c[k] + other[k] * s[k]));
}

struct AttentionItem {
  int row, kv_head, first_head, heads, split, group;
  Span span;
};

// Shared memory of an item: queries fp32 [4, dim]; the pass's own keys and values bf16 [rows, dim] each; partial sums of warps.
__device__ inline void stage_heads(const Step &step, int layer, const AttentionItem &t, unsigned tag, float *queries,
                                   __nv_bfloat16 *keys, __nv_bfloat16 *values) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int dim = m.head_dim, warp = threadIdx.x / 32, width = (m.q_heads + 2 * m.kv_heads) * dim;
  const uint32_t *qkv = s.qkv + int64_t(layer % 2) * kRows * width;
  const float scale = rsqrtf(float(dim)) * 1.4426950408889634f;  // the softmax is in powers of two
  const __nv_bfloat16 *norms = m.qk_norms ? m.qk_norms + int64_t(layer) * 2 * dim : nullptr;
  const int own_first = max(step.first, t.span.begin), own = max(0, t.span.end - own_first);
  for (int task = warp; task < kHeads + 2 * own; task += kWarps) {
    if (task < kHeads) {
      float *to = queries + task * dim;
      if (task < t.heads)
        rotate_head(m, qkv + int64_t(t.row) * width + (t.first_head + task) * dim, tag, norms,
                    s.rope + int64_t(step.first + t.row) * m.rotary, [&](int i, float v) { to[i] = v * scale; });
      else
        for (int i = threadIdx.x % 32; i < dim; i += 32) to[i] = 0;
      continue;
    }
    const int position = own_first + (task - kHeads) / 2, row = position - step.first, side = (task - kHeads) % 2;
    const uint32_t *from = qkv + int64_t(row) * width + (m.q_heads + side * m.kv_heads + t.kv_head) * dim;
    __nv_bfloat16 *to = (side ? values : keys) + row * dim;
    __nv_bfloat16 *page = s.kv + ((int64_t(layer) * m.kv_heads + t.kv_head) * 2 + side) * s.context * dim + int64_t(position) * dim;
    const bool write = row == t.row && t.first_head == t.kv_head * (m.q_heads / m.kv_heads);
    rotate_head(m, from, tag, side || !norms ? nullptr : norms + dim, side ? nullptr : s.rope + int64_t(position) * m.rotary,
                [&](int i, float v) {
                  const __nv_bfloat16 b = __float2bfloat16_rn(v);
                  to[i] = b;
                  if (write) page[i] = b;
                });
  }
}

__device__ inline float scaled(float x, float top, float other) { return top == -INFINITY ? 0.f : x * exp2f(top - other); }

__device__ inline void unpack(const uint4 &v, float (&out)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) out[2 * i] = low(words[i]), out[2 * i + 1] = high(words[i]);
}

// Attention of an item's heads over keys that `kLanes` lanes share, each with eight elements of every head. A lane computes its share of
// sixteen scores (four keys, four heads), and ends with the sums of kScores of them, number lane * 16 / kLanes on: as many exponentials.
template <int kLanes>
class Attend {
 public:
  __device__ Attend(const Step &step, const AttentionItem &t, const float *queries)
      : step_(step), t_(t), queries_(queries), lane_(threadIdx.x % kLanes), on_(lane_ * 8 < step.model.head_dim) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[h][i] = 0;
#pragma unroll
    for (int j = 0; j < kScores; ++j) top_[j] = -INFINITY, total_[j] = 0;
  }

  // All positions of the span; the block's groups of lanes take them in turn.
  __device__ void run(const __nv_bfloat16 *own_keys, const __nv_bfloat16 *own_values, const __nv_bfloat16 *page) {
    constexpr int kAtOnce = kThreads / kLanes;
    const int dim = step_.model.head_dim;
    const int64_t side = int64_t(step_.session.context) * dim;
    for (int base = t_.span.begin; base < t_.span.end; base += kAtOnce * kAhead) {
      const int first = base + threadIdx.x / kLanes;
      uint4 k[kAhead], v[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int position = first + n * kAtOnce;
        k[n] = v[n] = make_uint4(0, 0, 0, 0);
        if (!on_ || position >= t_.span.end) continue;
        const bool own = position >= step_.first;
        const int64_t at = int64_t(own ? position - step_.first : position) * dim + lane_ * 8;
        k[n] = *reinterpret_cast<const uint4 *>((own ? own_keys : page) + at);
        v[n] = *reinterpret_cast<const uint4 *>((own ? own_values : page + side) + at);
      }
      float score[kAhead * kHeads];
      multiply_keys(k, score);
      float weight[kScores], keep[kScores];
      soften(score, first, weight, keep);
      add_values(v, weight, keep);
    }
  }

  // Adds what other lanes of the warp had; then every lane has eight elements of the sums, and top and total of head h.
  __device__ void finish(float (&tops)[kHeads], float (&totals)[kHeads]) {
#pragma unroll
    for (int j = 0; j < kScores; ++j)  // the four keys of a head
      for (int d = kLanes / 4; d < kLanes; d *= 2) total_[j] += __shfl_xor_sync(~0u, total_[j], d);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) tops[h] = of_score(top_, h), totals[h] = of_score(total_, h);
#pragma unroll
    for (int d = kLanes; d < 32; d *= 2)
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float other = __shfl_xor_sync(~0u, tops[h], d), top = fmaxf(tops[h], other);
        const float mine = scaled(1, tops[h], top), theirs = scaled(1, other, top);
        totals[h] = totals[h] * mine + __shfl_xor_sync(~0u, totals[h], d) * theirs;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[h][i] = sum[h][i] * mine + __shfl_xor_sync(~0u, sum[h][i], d) * theirs;
        tops[h] = top;
      }
  }

  float sum[kHeads][8];

 private:
  static constexpr int kScores = kLanes == 8 ? 2 : 1;  // score n * 4 + h is of key n, head h

  // Score e, which a lane of the group has, on all of its lanes.
  __device__ static float of_score(const float (&x)[kScores], int e) {
    return __shfl_sync(~0u, x[kLanes == 8 ? e % 2 : 0], kLanes == 8 ? e / 2 : kLanes == 16 ? e : e * 2, kLanes);
  }

  __device__ void multiply_keys(const uint4 (&k)[kAhead], float (&score)[kAhead * kHeads]) const {
    const int dim = step_.model.head_dim;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float4 zero = make_float4(0, 0, 0, 0), *q = reinterpret_cast<const float4 *>(queries_ + h * dim + lane_ * 8);
      const float4 q0 = on_ ? q[0] : zero, q1 = on_ ? q[1] : zero;
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        float x[8];
        unpack(k[n], x);
        score[n * kHeads + h] = ((x[0] * q0.x + x[1] * q0.y) + (x[2] * q0.z + x[3] * q0.w)) +
                                ((x[4] * q1.x + x[5] * q1.y) + (x[6] * q1.z + x[7] * q1.w));
      }
    }
    int width = kAhead * kHeads;
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) {  // halves of the scores go to halves of the lanes
      const bool upper = lane_ & d;
      if (width == 1) {
        score[0] += __shfl_xor_sync(~0u, score[0], d);
        continue;
      }
      width /= 2;
#pragma unroll
      for (int i = 0; i < kAhead * kHeads / 2; ++i) {
        if (i >= width) continue;
        const float mine = upper ? score[i + width] : score[i], theirs = upper ? score[i] : score[i + width];
        score[i] = mine + __shfl_xor_sync(~0u, theirs, d);
      }
    }
  }

  // Weights exp2(score - top) of the lane's scores, and what sums made under the old top are to be multiplied by.
  __device__ void soften(const float (&score)[kAhead * kHeads], int first, float (&weight)[kScores], float (&keep)[kScores]) {
    const int n = lane_ / (kLanes / kAhead);
    const bool there = first + n * (kThreads / kLanes) < t_.span.end;
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      float top = there ? score[j] : -INFINITY;
      for (int d = kLanes / 4; d < kLanes; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      top = fmaxf(top, top_[j]);
      weight[j] = there ? exp2f(score[j] - top) : 0;
      keep[j] = scaled(1, top_[j], top);
      total_[j] = total_[j] * keep[j] + weight[j];
      top_[j] = top;
    }
  }

  __device__ void add_values(const uint4 (&v)[kAhead], const float (&weight)[kScores], const float (&keep)[kScores]) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float k = of_score(keep, h);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[h][i] *= k;
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      float x[8];
      unpack(v[n], x);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float w = of_score(weight, n * kHeads + h);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[h][i] += w * x[i];
      }
    }
  }

  const Step &step_;
  const AttentionItem &t_;
  const float *queries_;
  const int lane_;
  const bool on_;
  float top_[kScores], total_[kScores];
};

// Adds the parts (sums, then maximum and total, `stride` floats apart) that the warps have of element i: the sum, maximum and total.
__device__ inline float3 add_parts(const float *parts, int stride, int dim, int i) {
  float top = -INFINITY, sum = 0, total = 0;
#pragma unroll
  for (int k = 0; k < kWarps; ++k) top = fmaxf(top, parts[k * stride + dim]);
#pragma unroll
  for (int k = 0; k < kWarps; ++k) {
    const float weight = scaled(1, parts[k * stride + dim], top);
    sum += parts[k * stride + i] * weight, total += parts[k * stride + dim + 1] * weight;
  }
  return make_float3(sum, top, total);
}

// Shared memory of an item's warps: for each of `at_once` heads and each warp the sums [head_dim], maximum and total.
struct Parts {
  float *at;
  int at_once;
};

// Where an item's result goes: words, or where the context has several spans, tagged sums of this span.
struct Result {
  uint32_t *words;
  TaggedFloat *spans;
  unsigned tag, span_tag;  // 16 bits; 32 bits, for a span may have been written last long ago
};

template <int kLanes>
__device__ inline void attend_span(const Step &step, const AttentionItem &t, int layer, const float *queries, const __nv_bfloat16 *keys,
                                   const __nv_bfloat16 *values, const Parts &parts, const Result &result) {
  const SessionView &s = step.session;
  const int dim = step.model.head_dim, part = dim + 2, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Attend<kLanes> a(step, t, queries);
  a.run(keys, values, s.kv + (int64_t(layer) * step.model.kv_heads + t.kv_head) * 2 * s.context * dim);
  float tops[kHeads], totals[kHeads];
  a.finish(tops, totals);
  for (int first = 0; first < t.heads; first += parts.at_once) {
    const int n = min(parts.at_once, t.heads - first);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < first || h >= first + n || lane >= kLanes || lane * 8 >= dim) continue;
      float *to = parts.at + ((h - first) * kWarps + warp) * part;
#pragma unroll
      for (int i = 0; i < 8; i += 2) *reinterpret_cast<float2 *>(to + lane * 8 + i) = make_float2(a.sum[h][i], a.sum[h][i + 1]);
      if (lane == 0) to[dim] = tops[h], to[dim + 1] = totals[h];
    }
    sync_threads();
    for (int e = threadIdx.x; e < n * dim; e += kThreads) {
      const int h = first + e / dim, i = e % dim;
      const float3 r = add_parts(parts.at + (h - first) * kWarps * part, part, dim, i);
      if (t.span.splits == 1) {
        store_word(result.words + h * dim + i, r.x / r.z, result.tag);
      } else {
        TaggedFloat *to = result.spans + (t.split * kHeads + h) * part;
        store_tagged(to + i, r.x, result.span_tag);
        if (i == 0) store_tagged(to + dim, r.y, result.span_tag), store_tagged(to + dim + 1, r.z, result.span_tag);
      }
    }
    sync_threads();
  }
}

// Adds the spans of an item's heads, in the same order on every device: the block of each span does a share of the elements. Groups of
// kGroup lanes take elements in turn, a lane of the group one span.
template <int kGroup>
__device__ inline void add_spans(const Step &step, const AttentionItem &t, const Result &result) {
  constexpr int kAtOnce = 4;
  const int dim = step.model.head_dim, part = dim + 2, n = t.heads * dim, share = (n + t.span.splits - 1) / t.span.splits;
  const int end = min(n, (t.split + 1) * share), group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const bool on = lane < t.span.splits;
  for (int base = t.split * share; base < end; base += kAtOnce * (kThreads / kGroup)) {
    TaggedFloat sum[kAtOnce], top[kAtOnce], total[kAtOnce];
    for (Patience patience;; patience.round()) {
      bool there = true;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int e = base + j * (kThreads / kGroup) + group;
        const TaggedFloat *from = result.spans + (lane * kHeads + e / dim) * part;
        sum[j] = {0, result.span_tag}, top[j] = {-INFINITY, result.span_tag}, total[j] = {0, result.span_tag};
        if (on && e < end) sum[j] = load_tagged(from + e % dim), top[j] = load_tagged(from + dim), total[j] = load_tagged(from + dim + 1);
        there &= sum[j].tag == result.span_tag && top[j].tag == result.span_tag && total[j].tag == result.span_tag;
      }
      if (there) break;
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      float most = top[j].value;
      for (int d = kGroup / 2; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
      const float weight = scaled(1, top[j].value, most);
      float x = sum[j].value * weight, all = total[j].value * weight;
      for (int d = kGroup / 2; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d), all += __shfl_xor_sync(~0u, all, d);
      const int e = base + j * (kThreads / kGroup) + group;
      if (lane == 0 && e < end) store_word(result.words + e, x / all, result.tag);
    }
  }
}

// Old keys and values of a span to the device's cache: they do not wait for this step.
__device__ inline void look_ahead(const Step &step, const AttentionItem &t, const __nv_bfloat16 *page) {
  const int dim = step.model.head_dim, n = max(0, min(t.span.end, step.first) - t.span.begin) * dim * 2;
  const char *from = reinterpret_cast<const char *>(page + int64_t(t.span.begin) * dim);
  const int64_t side = int64_t(step.session.context) * dim * 2;
  for (int at = threadIdx.x * 128; at < n; at += kThreads * 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + side + at));
  }
}

// The block's items of a layer, whose qkv words have the tag `tag` (of which words take 16 bits); results have tag + 1. `work` is shared
// memory of `work_bytes`.
__device__ __noinline__ void attention(const Step &step, int layer, unsigned tag, char *work, int work_bytes) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int dim = m.head_dim, part = dim + 2, per_kv = m.q_heads / m.kv_heads, subs = (per_kv + kHeads - 1) / kHeads;
  const int groups = m.kv_heads * subs, total = step.rows * groups * s.max_splits, window = m.windows ? m.windows[layer] : 0;
  float *queries = reinterpret_cast<float *>(work);
  __nv_bfloat16 *keys = reinterpret_cast<__nv_bfloat16 *>(queries + kHeads * dim), *values = keys + step.rows * dim;
  Parts parts{reinterpret_cast<float *>(values + step.rows * dim), 0};
  parts.at_once = min(kHeads, (work_bytes - int(reinterpret_cast<char *>(parts.at) - work)) / (kWarps * part * 4));
  for (int item = blockIdx.x; item < total; item += gridDim.x) {
    AttentionItem t;
    t.split = item % s.max_splits, t.group = item / s.max_splits % groups, t.row = item / s.max_splits / groups;
    t.kv_head = t.group / subs;
    t.first_head = t.kv_head * per_kv + t.group % subs * kHeads;
    t.heads = min(kHeads, (t.kv_head + 1) * per_kv - t.first_head);
    t.span = span_of(step.first + t.row, window, s.max_splits, t.split);
    if (t.split >= t.span.splits) continue;
    look_ahead(step, t, s.kv + (int64_t(layer) * m.kv_heads + t.kv_head) * 2 * s.context * dim);
    stage_heads(step, layer, t, tag & 0xffffu, queries, keys, values);
    sync_threads();
    const Result result{s.attended + ((int64_t(layer % 2) * kRows + t.row) * m.q_heads + t.first_head) * dim,
                        s.partial + int64_t(t.row * groups + t.group) * s.max_splits * kHeads * part, (tag + 1) & 0xffffu, tag + 1};
    if (dim <= 64)
      attend_span<8>(step, t, layer, queries, keys, values, parts, result);
    else if (dim <= 128)
      attend_span<16>(step, t, layer, queries, keys, values, parts, result);
    else
      attend_span<32>(step, t, layer, queries, keys, values, parts, result);
    // Waits for other blocks' items, of numbers less than max_splits away. A block's own are a whole grid apart, so of all items that
    // are waited for, the one with the least number belongs to a block that does not wait.
    if (t.span.splits > 16)
      add_spans<32>(step, t, result);
    else if (t.span.splits > 1)
      add_spans<16>(step, t, result);
  }
}

}  // namespace kilat_cuda
