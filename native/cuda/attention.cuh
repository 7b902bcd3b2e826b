// attention.cuh: norm and rotation of queries and keys, the write of K and V, and attention with the context split over blocks.
//
// An item is (token, up to eight query heads of one K/V head, a span of positions). Spans depend on the token's position only, so a
// token gets the same bits alone and in a prompt. Both products run on the tensor cores, eight keys per warp and round; probabilities
// are split into two bf16 numbers, which are rows h and h + 8 of the left operand, so they keep sixteen bits. Little code matters here as
// much as little work: every instruction of it runs once per layer, out of a cold instruction cache.
#pragma once

#include "exchange.cuh"

namespace kilat_cuda {

constexpr int kHeads = 8;             // query heads of an item
constexpr int kRoundKeys = kWarps * 8;

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

struct AttentionItem {
  int row, group, split;  // token of the pass, number of the heads' group, number of the span
  int kv_head, first_head, heads;
  Span span;              // of a layer
  __device__ bool exists() const { return split < span.splits; }
};

__device__ inline int head_groups(const ModelView &m) { return m.kv_heads * ((m.q_heads / m.kv_heads + kHeads - 1) / kHeads); }
__device__ inline int items_of(const Step &step) { return step.rows * head_groups(step.model) * step.session.max_splits; }

// Item `number` without its span.
__device__ inline AttentionItem item_of(const Step &step, int number) {
  const ModelView &m = step.model;
  const int per_kv = m.q_heads / m.kv_heads, subs = (per_kv + kHeads - 1) / kHeads, groups = m.kv_heads * subs;
  AttentionItem t{};
  t.split = number % step.session.max_splits, t.group = number / step.session.max_splits % groups;
  t.row = number / step.session.max_splits / groups;
  t.kv_head = t.group / subs;
  t.first_head = t.kv_head * per_kv + t.group % subs * kHeads;
  t.heads = min(kHeads, (t.kv_head + 1) * per_kv - t.first_head);
  return t;
}

__device__ inline void set_span(const Step &step, int layer, AttentionItem &t) {
  const int window = step.model.windows ? step.model.windows[layer] : 0;
  t.span = span_of(step.first + t.row, window, step.session.max_splits, t.split);
  if (t.row >= step.rows) t.span.splits = 0;
}

// Keys of a K/V head, its values `context` positions further.
__device__ inline __nv_bfloat16 *page_of(const Step &step, int layer, int kv_head) {
  return step.session.kv + (int64_t(layer) * step.model.kv_heads + kv_head) * 2 * step.session.context * step.model.head_dim;
}

// Old keys and values of a span to the device's cache: they do not wait for this step.
__device__ inline void look_ahead(const Step &step, int layer, const AttentionItem &t) {
  const int dim = step.model.head_dim, n = max(0, min(t.span.end, step.first) - t.span.begin) * dim * 2;
  const char *from = reinterpret_cast<const char *>(page_of(step, layer, t.kv_head) + int64_t(t.span.begin) * dim);
  const int64_t side = int64_t(step.session.context) * dim * 2;
#pragma unroll 1
  for (int at = threadIdx.x * 128; at < n; at += kThreads * 128) {
    prefetch_line(from + at), prefetch_line(from + side + at);
  }
}

// One warp: a head of `from` (words with a tag), normalized if `norm`, and rotated if `rope`, rounded to bf16, to shared memory and, if
// `page`, to global memory. All loads are started before the first is used.
template <int kBlocks>
__device__ inline void rotate_head(const ModelView &m, const uint32_t *from, unsigned tag, const __nv_bfloat16 *norm, const float *rope,
                                   __nv_bfloat16 *to, __nv_bfloat16 *page) {
  const int lane = threadIdx.x % 32, dim = m.head_dim, half = rope ? m.rotary / 2 : 0;
  uint32_t words[kBlocks], others[kBlocks];
  float c[kBlocks], s[kBlocks];
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    const int i = lane + 32 * k, j = i < half ? i : i - half;
    const bool turns = i < 2 * half;
    c[k] = turns ? rope[j] : 1;
    s[k] = turns ? rope[half + j] : 0;
  }
#pragma unroll 1
  for (Patience patience;; patience.round()) {
    unsigned wrong = 0;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      const int i = lane + 32 * k;
      words[k] = i < dim ? load_word(from + i) : tag;
      others[k] = i < 2 * half ? load_word(from + (i < half ? i + half : i - half)) : tag;
    }
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) wrong |= (words[k] ^ tag) | (others[k] ^ tag);
    if ((wrong & 0xffffu) == 0) break;
  }
  __syncwarp();
  float scale = 1;
  if (norm) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) squares += number_of(words[k]) * number_of(words[k]);
    for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
    scale = rsqrtf(squares / dim + m.qk_norm_eps);
  }
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    const int i = lane + 32 * k;
    if (i >= dim) continue;
    float own = number_of(words[k]), other = number_of(others[k]);
    if (norm) {
      own = rounded(rounded(own * scale) * __bfloat162float(norm[i]));
      if (i < 2 * half) other = rounded(rounded(other * scale) * __bfloat162float(norm[i < half ? i + half : i - half]));
    }
    const __nv_bfloat16 turned = __float2bfloat16_rn(own * c[k] + (i < half ? -other : other) * s[k]);
    to[i] = turned;
    if (page) page[i] = turned;
  }
}

// Shared memory of an item: queries [8, dim]; the pass's own keys and values [rows, dim] each; then sums of warps.
struct Staged {
  __nv_bfloat16 *queries, *keys, *values;
};

template <int kBlocks>
__device__ inline void stage_heads(const Step &step, int layer, const AttentionItem &t, unsigned tag, const Staged &to) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int dim = m.head_dim, width = (m.q_heads + 2 * m.kv_heads) * dim;
  const uint32_t *qkv = s.qkv + int64_t(layer % 2) * kRows * width;
  const __nv_bfloat16 *norms = m.qk_norms ? m.qk_norms + int64_t(layer) * 2 * dim : nullptr;
  const int own_first = max(step.first, t.span.begin), own = max(0, t.span.end - own_first);
#pragma unroll 1
  for (int task = threadIdx.x / 32; task < t.heads + 2 * own; task += kWarps) {
    const bool query = task < t.heads;
    const int number = task - t.heads, side = query ? 0 : number % 2, position = query ? step.first + t.row : own_first + number / 2;
    const int row = position - step.first, head = query ? t.first_head + task : m.q_heads + side * m.kv_heads + t.kv_head;
    __nv_bfloat16 *place = query ? to.queries + task * dim : (side ? to.values : to.keys) + row * dim, *page = nullptr;
    if (!query && row == t.row && t.first_head == t.kv_head * (m.q_heads / m.kv_heads))
      page = page_of(step, layer, t.kv_head) + (int64_t(side) * s.context + position) * dim;
    rotate_head<kBlocks>(m, qkv + int64_t(row) * width + head * dim, tag, norms && !side ? norms + (query ? 0 : dim) : nullptr,
                         side ? nullptr : s.rope + int64_t(position) * m.rotary, place, page);
  }
}

__device__ inline float scaled(float x, float top, float other) { return top == -INFINITY ? 0.f : x * exp2f(top - other); }

// A warp's keys of an item: lane 4 g + t has of key g elements 8 t ... 8 t + 7 of every 32 (the order of the weights, layout.h), and of
// head g the scores of keys 2 t and 2 t + 1.
template <int kBlocks>
class Attend {
 public:
  __device__ Attend(const Step &step, const AttentionItem &t, const Staged &staged) : step_(step), t_(t), staged_(staged) {
    const int lane = threadIdx.x % 32, g = lane / 4, at = lane % 4 * 8, dim = step.model.head_dim;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      query_[j] = make_uint4(0, 0, 0, 0);
      if (g < t.heads && j * 32 + at < dim) query_[j] = *reinterpret_cast<const uint4 *>(staged.queries + g * dim + j * 32 + at);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum_[j * 4 + r][i] = 0;
    }
  }

  __device__ void run(const __nv_bfloat16 *page) {
    const int lane = threadIdx.x % 32, at = lane % 4 * 8, dim = step_.model.head_dim;
    const int64_t side = int64_t(step_.session.context) * dim;
    const float scale = rsqrtf(float(dim)) * 1.4426950408889634f;  // the softmax is in powers of two
#pragma unroll 1
    for (int base = t_.span.begin + threadIdx.x / 32 * 8; base < t_.span.end; base += kRoundKeys) {
      const int position = base + lane / 4;
      const bool own = position >= step_.first, there = position < t_.span.end;
      const int64_t row = int64_t(own ? position - step_.first : position) * dim + at;
      const __nv_bfloat16 *keys = (own ? staged_.keys : page) + row, *values = (own ? staged_.values : page + side) + row;
      uint4 k[kBlocks], v[kBlocks];
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const bool on = there && j * 32 + at < dim;
        k[j] = on ? *reinterpret_cast<const uint4 *>(keys + j * 32) : make_uint4(0, 0, 0, 0);
        v[j] = on ? *reinterpret_cast<const uint4 *>(values + j * 32) : make_uint4(0, 0, 0, 0);
      }
      float score[4] = {0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        multiply(score, query_[j].x, 0, query_[j].y, 0, k[j].x, k[j].y);
        multiply(score, query_[j].z, 0, query_[j].w, 0, k[j].z, k[j].w);
      }
      const int first = base + lane % 4 * 2;
      const float a = first < t_.span.end ? score[0] * scale : -INFINITY, b = first + 1 < t_.span.end ? score[1] * scale : -INFINITY;
      add_values(a, b, v);
    }
  }

  // Sums, maximum and total of the warp's keys for each head to `parts` [heads, kWarps, dim + 2]: heads first ... first + n - 1.
  __device__ void store(float *parts, int first, int n) {
    const int lane = threadIdx.x % 32, g = lane / 4, dim = step_.model.head_dim, h = g - first;
    float total = total_;
    for (int d = 1; d < 4; d *= 2) total += __shfl_xor_sync(~0u, total, d);
    if (h < 0 || h >= n) return;
    float *to = parts + (h * kWarps + threadIdx.x / 32) * (dim + 2);
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      const int at = i / 4 * 32 + lane % 4 * 8 + i % 4 * 2;
      if (at < dim) *reinterpret_cast<float2 *>(to + at) = make_float2(sum_[i][0] + sum_[i][2], sum_[i][1] + sum_[i][3]);
    }
    if (lane % 4 == 0) *reinterpret_cast<float2 *>(to + dim) = make_float2(top_, total);
  }

 private:
  // Values weighted by exp2 of the scores of the lane's head and its two keys.
  __device__ void add_values(float a, float b, const uint4 (&v)[kBlocks]) {
    float top = fmaxf(a, b);
    for (int d = 1; d < 4; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    top = fmaxf(top, top_);  // finite: the warp has a key
    const float keep = scaled(1, top_, top), p = exp2f(a - top), q = exp2f(b - top);
    top_ = top, total_ = total_ * keep + (p + q);
    const uint32_t upper = pair_of(p, q), lower = pair_of(p - low(upper), q - high(upper));
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const uint32_t words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float(&sum)[4] = sum_[j * 4 + r];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] *= keep;
        multiply_8(sum, upper, lower, transposed(words[r]));
      }
    }
  }

  const Step &step_;
  const AttentionItem &t_;
  const Staged &staged_;
  uint4 query_[kBlocks];
  float sum_[kBlocks * 4][4];  // heads by elements: of the upper and of the lower parts of probabilities
  float top_ = -INFINITY, total_ = 0;
};

// Adds the parts (sums, then maximum and total, `stride` floats apart) that the warps have of element i: the sum, maximum and total.
__device__ inline float3 add_parts(const float *parts, int stride, int dim, int i) {
  float top = -INFINITY, sum = 0, total = 0;
#pragma unroll
  for (int k = 0; k < kWarps; ++k) top = fmaxf(top, parts[k * stride + dim]);
#pragma unroll
  for (int k = 0; k < kWarps; ++k) {
    const float weight = exp2f(parts[k * stride + dim] - top);  // 0 for a warp that had no key
    sum += parts[k * stride + i] * weight, total += parts[k * stride + dim + 1] * weight;
  }
  return make_float3(sum, top, total);
}

// Where an item's result goes: words, or where the context has several spans, tagged sums of this span.
struct Result {
  uint32_t *words;
  TaggedFloat *spans;
  unsigned tag, span_tag;  // 16 bits; 32 bits, for a span may have been written last long ago
};

// The block's warps together. `parts` is shared memory for the sums of `at_once` heads.
template <int kBlocks>
__device__ inline void add_warps(const Step &step, const AttentionItem &t, Attend<kBlocks> &attend, float *parts, int at_once,
                                 const Result &result) {
  constexpr int kAcross = kThreads / (kBlocks * 32);  // heads side by side
  const int dim = step.model.head_dim, part = dim + 2, i = threadIdx.x % (kBlocks * 32);
#pragma unroll 1
  for (int first = 0; first < t.heads; first += at_once) {
    const int n = min(at_once, t.heads - first);
    attend.store(parts, first, n);
    sync_threads();
#pragma unroll 1
    for (int h = threadIdx.x / (kBlocks * 32); h < n && i < dim; h += kAcross) {
      const float3 r = add_parts(parts + h * kWarps * part, part, dim, i);
      if (t.span.splits == 1) {
        store_word(result.words + (first + h) * dim + i, r.x / r.z, result.tag);
      } else {
        TaggedFloat *to = result.spans + (t.split * kHeads + first + h) * part;
        store_tagged(to + i, r.x, result.span_tag);
        if (i == 0) store_tagged(to + dim, r.y, result.span_tag), store_tagged(to + dim + 1, r.z, result.span_tag);
      }
    }
    sync_threads();
  }
}

// Adds the spans of an item's heads in a fixed order: the block of each span does a share of the elements. Groups of kGroup lanes take
// elements in turn, a lane of the group one span.
template <int kGroup>
__device__ inline void add_spans(const Step &step, const AttentionItem &t, const Result &result) {
  constexpr int kAtOnce = 4;
  const int dim = step.model.head_dim, part = dim + 2, n = t.heads * dim, share = (n + t.span.splits - 1) / t.span.splits;
  const int end = min(n, (t.split + 1) * share), group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const bool on = lane < t.span.splits;
  const float per_head = 1.0f / dim;  // (e + 1/2) / dim is far from a whole number
#pragma unroll 1
  for (int base = t.split * share; base < end; base += kAtOnce * (kThreads / kGroup)) {
    TaggedFloat sum[kAtOnce], top[kAtOnce], total[kAtOnce];
#pragma unroll 1
    for (Patience patience;; patience.round()) {
      bool there = true;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int e = base + j * (kThreads / kGroup) + group, h = int((e + 0.5f) * per_head);
        const TaggedFloat *from = result.spans + (lane * kHeads + h) * part;
        sum[j] = {0, result.span_tag}, top[j] = {-INFINITY, result.span_tag}, total[j] = {0, result.span_tag};
        if (on && e < end) sum[j] = load_tagged(from + (e - h * dim)), top[j] = load_tagged(from + dim), total[j] = load_tagged(from + dim + 1);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        there &= sum[j].tag == result.span_tag && top[j].tag == result.span_tag && total[j].tag == result.span_tag;
      if (there) break;
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      float most = top[j].value;
#pragma unroll
      for (int d = kGroup / 2; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
      const float weight = scaled(1, top[j].value, most);
      float x = sum[j].value * weight, all = total[j].value * weight;
#pragma unroll
      for (int d = kGroup / 2; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d), all += __shfl_xor_sync(~0u, all, d);
      const int e = base + j * (kThreads / kGroup) + group;
      if (lane == 0 && e < end) store_word(result.words + e, x / all, result.tag);
    }
  }
}

// One item, which exists. The layer's qkv words have the tag `tag` (of which words take 16 bits); results have tag + 1. `work` is shared
// memory of `work_bytes`.
template <int kBlocks>
__device__ inline void attend_item(const Step &step, int layer, const AttentionItem &t, unsigned tag, char *work, int work_bytes) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int dim = m.head_dim, part = dim + 2;
  Staged staged;
  staged.queries = reinterpret_cast<__nv_bfloat16 *>(work);
  staged.keys = staged.queries + kHeads * dim, staged.values = staged.keys + step.rows * dim;
  float *parts = reinterpret_cast<float *>(staged.values + step.rows * dim);
  const int at_once = (work_bytes - int(reinterpret_cast<char *>(parts) - work)) / (kWarps * part * 4);
  stage_heads<kBlocks>(step, layer, t, tag & 0xffffu, staged);
  sync_threads();
  const Result result{s.attended + ((int64_t(layer % 2) * kRows + t.row) * m.q_heads + t.first_head) * dim,
                      s.partial + (int64_t(t.row) * head_groups(m) + t.group) * s.max_splits * kHeads * part, (tag + 1) & 0xffffu, tag + 1};
  Attend<kBlocks> attend(step, t, staged);
  attend.run(page_of(step, layer, t.kv_head));
  add_warps(step, t, attend, parts, at_once, result);
  // Waits for other blocks' items, of numbers less than max_splits away. A block's own are a whole grid apart, so of all items that are
  // waited for, the one with the least number belongs to a block that does not wait.
  if (t.span.splits > 16)
    add_spans<32>(step, t, result);
  else if (t.span.splits > 1)
    add_spans<16>(step, t, result);
}

__device__ inline void attend_item(const Step &step, int layer, const AttentionItem &t, unsigned tag, char *work, int work_bytes) {
  if (step.model.head_dim <= 64)
    attend_item<2>(step, layer, t, tag, work, work_bytes);
  else if (step.model.head_dim <= 128)
    attend_item<4>(step, layer, t, tag, work, work_bytes);
  else
    attend_item<8>(step, layer, t, tag, work, work_bytes);
}

}  // namespace kilat_cuda
