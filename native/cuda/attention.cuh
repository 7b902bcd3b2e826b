// attention.cuh: norm and rotation of queries and keys, the write of K and V, and attention with the context split over blocks.
//
// An item is (token, up to eight query heads of one K/V head, a span of positions). Spans depend on the token's position only, so a
// token gets the same bits alone and in a prompt. Both products run on the tensor cores, on groups of eight keys; probabilities are split
// into two bf16 numbers, which are rows h and h + 8 of the left operand, so they keep sixteen bits. Keys and values that are older than
// the pass are on their way to registers before the item waits for its queries. Little code matters here as much as little work: every
// instruction of it runs once per layer, out of a cold instruction cache.
#pragma once

#include "exchange.cuh"

namespace kilat_cuda {

constexpr int kHeads = 8;             // query heads of an item
constexpr int kGroupKeys = kWarps * 8;  // of a group of every warp

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
  Span span = span_of(step.first + t.row, window, step.session.max_splits, t.split);
  if (t.row >= step.rows) span.splits = 0;
  t.span = span;
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
  for (int at = thread_here() * 128; at < n; at += kThreads * 128) {
    prefetch_line(from + at), prefetch_line(from + side + at);
  }
}

// One warp: a head of `from` (words with a tag), normalized if `norm`, and rotated if `rope`, rounded to bf16, to shared memory and, if
// `page`, to global memory. All loads are started before the first is used.
template <int kBlocks>
__device__ inline void rotate_head(const ModelView &m, const uint32_t *from, unsigned tag, const __nv_bfloat16 *norm, const float *rope,
                                   __nv_bfloat16 *to, __nv_bfloat16 *page) {
  const int lane = thread_here() % 32, dim = m.head_dim, half = rope ? m.rotary / 2 : 0;
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
  for (int task = thread_here() / 32; task < t.heads + 2 * own; task += kWarps) {
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

// A warp's keys of an item: lane 4 g + t has of key g of a group elements 8 t ... 8 t + 7 of every 32 (the order of the weights,
// layout.h), and of head g the scores of keys 2 t and 2 t + 1.
template <int kBlocks>
class Attend {
 public:
  // Starts to load the first keys and values.
  __device__ Attend(const Step &step, int layer, const AttentionItem &t)
      : step_(step), t_(t), page_(page_of(step, layer, t.kv_head)), thread_(thread_here()), base_(t.span.begin + thread_ / 32 * 8) {
    load(page_, keys_), load(value_page(), values_);
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) sum_[i][k] = 0;
  }

  __device__ void run(const Staged &staged) {
    const int lane = thread_ % 32;
    const float scale = rsqrtf(float(step_.model.head_dim)) * 1.4426950408889634f;  // the softmax is in powers of two
#pragma unroll 1
    while (base_ < t_.span.end) {
      if (base_ + (kHeld - 1) * kGroupKeys + 8 > step_.first) take_own(staged);
      float score[kHeld][4];
      multiply_keys(staged.queries, score);
      const int base = base_;
      base_ += kHeld * kGroupKeys;
      const bool more = base_ < t_.span.end;
      if (more) load(page_, keys_);
#pragma unroll
      for (int o = 0; o < kHeld; ++o) {
        const int first = base + o * kGroupKeys + lane % 4 * 2;
        score[o][0] = first < t_.span.end ? score[o][0] * scale : -INFINITY;
        score[o][1] = first + 1 < t_.span.end ? score[o][1] * scale : -INFINITY;
      }
      add_values(score);
      if (more) load(value_page(), values_);
    }
  }

  // Sums, maximum and total of the warp's keys for each head to `parts` [heads, kWarps, dim + 2]: heads first ... first + n - 1.
  __device__ void store(float *parts, int first, int n) {
    const int lane = thread_ % 32, g = lane / 4, dim = step_.model.head_dim, h = g - first;
    float total = total_;
    for (int d = 1; d < 4; d *= 2) total += __shfl_xor_sync(~0u, total, d);
    if (h < 0 || h >= n) return;
    float *to = parts + (h * kWarps + thread_ / 32) * (dim + 2);
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      const int at = i / 4 * 32 + lane % 4 * 8 + i % 4 * 2;
      if (at < dim) *reinterpret_cast<float2 *>(to + at) = make_float2(sum_[i][0] + sum_[i][2], sum_[i][1] + sum_[i][3]);
    }
    if (lane % 4 == 0) *reinterpret_cast<float2 *>(to + dim) = make_float2(top_, total);
  }

 private:
  static constexpr int kHeld = kBlocks <= 2 ? 4 : kBlocks <= 4 ? 2 : 1;  // groups whose keys and values a warp has in registers

  __device__ const __nv_bfloat16 *value_page() const { return page_ + int64_t(step_.session.context) * step_.model.head_dim; }

  // The older rows of the groups from base_ on; zeros for all others.
  __device__ void load(const __nv_bfloat16 *page, uint4 (&to)[kHeld][kBlocks]) const {
    const int lane = thread_ % 32, at = lane % 4 * 8, dim = step_.model.head_dim, end = min(t_.span.end, step_.first);
#pragma unroll
    for (int o = 0; o < kHeld; ++o) {
      const int position = base_ + o * kGroupKeys + lane / 4;
      const __nv_bfloat16 *from = page + int64_t(position) * dim + at;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const bool on = position < end && j * 32 + at < dim;
        to[o][j] = on ? *reinterpret_cast<const uint4 *>(from + j * 32) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // The rows of the groups from base_ on that are the pass's own.
  __device__ void take_own(const Staged &staged) {
    const int lane = thread_ % 32, at = lane % 4 * 8, dim = step_.model.head_dim;
#pragma unroll
    for (int o = 0; o < kHeld; ++o) {
      const int position = base_ + o * kGroupKeys + lane / 4, from = (position - step_.first) * dim + at;
      if (position < step_.first || position >= t_.span.end) continue;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if (j * 32 + at >= dim) continue;
        keys_[o][j] = *reinterpret_cast<const uint4 *>(staged.keys + from + j * 32);
        values_[o][j] = *reinterpret_cast<const uint4 *>(staged.values + from + j * 32);
      }
    }
  }

  __device__ void multiply_keys(const __nv_bfloat16 *queries, float (&score)[kHeld][4]) const {
    const int lane = thread_ % 32, g = lane / 4, at = lane % 4 * 8, dim = step_.model.head_dim;
#pragma unroll
    for (int o = 0; o < kHeld; ++o)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[o][i] = 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      uint4 q = make_uint4(0, 0, 0, 0);
      if (g < t_.heads && j * 32 + at < dim) q = *reinterpret_cast<const uint4 *>(queries + g * dim + j * 32 + at);
#pragma unroll
      for (int o = 0; o < kHeld; ++o) multiply(score[o], q.x, 0, q.y, 0, keys_[o][j].x, keys_[o][j].y);
#pragma unroll
      for (int o = 0; o < kHeld; ++o) multiply(score[o], q.z, 0, q.w, 0, keys_[o][j].z, keys_[o][j].w);
    }
  }

  // Values weighted by exp2 of the scores of the lane's head and its two keys of each group.
  __device__ void add_values(const float (&score)[kHeld][4]) {
    float top = -INFINITY, total = 0;
#pragma unroll
    for (int o = 0; o < kHeld; ++o) top = fmaxf(top, fmaxf(score[o][0], score[o][1]));
    for (int d = 1; d < 4; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    top = fmaxf(top, top_);  // finite: the first group has a key
    const float keep = exp2f(top_ - top);
    uint32_t upper[kHeld], lower[kHeld];
#pragma unroll
    for (int o = 0; o < kHeld; ++o) {
      const float p = exp2f(score[o][0] - top), q = exp2f(score[o][1] - top);
      total += p + q;
      upper[o] = pair_of(p, q), lower[o] = pair_of(p - low(upper[o]), q - high(upper[o]));
    }
    top_ = top, total_ = total_ * keep + total;
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      float(&sum)[4] = sum_[i];
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] *= keep;
      if constexpr (kHeld == 1) {
        multiply_8(sum, upper[0], lower[0], transposed(value_words(0, i)));
      } else {
#pragma unroll
        for (int o = 0; o < kHeld; o += 2)
          multiply(sum, upper[o], lower[o], upper[o + 1], lower[o + 1], transposed(value_words(o, i)), transposed(value_words(o + 1, i)));
      }
    }
  }

  // Word i of what the lane has of a group's values.
  __device__ uint32_t value_words(int o, int i) const {
    const uint4 &v = values_[o][i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
  }

  const Step &step_;
  const AttentionItem &t_;
  const __nv_bfloat16 *page_;
  const int thread_;
  int base_;                // the first position of the groups that are held
  uint4 keys_[kHeld][kBlocks], values_[kHeld][kBlocks];
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

// Where an item's result goes: words, or where the context has several spans, this span's part [kHeads, dim] of those of all spans.
struct Result {
  uint32_t *words;
  Partial *spans;
  unsigned tag, span_tag;  // 16 bits; 32 bits, for a span may have been written last long ago
};

// The block's warps together. `parts` is shared memory for the sums of `at_once` heads.
template <int kBlocks>
__device__ inline void add_warps(const Step &step, const AttentionItem &t, Attend<kBlocks> &attend, float *parts, int at_once,
                                 const Result &result) {
  constexpr int kAcross = kThreads / (kBlocks * 32);  // heads side by side
  const int dim = step.model.head_dim, part = dim + 2, thread = thread_here(), i = thread % (kBlocks * 32);
#pragma unroll 1
  for (int first = 0; first < t.heads; first += at_once) {
    const int n = min(at_once, t.heads - first);
    attend.store(parts, first, n);
    sync_threads();
#pragma unroll 1
    for (int h = thread / (kBlocks * 32); h < n && i < dim; h += kAcross) {
      const float3 r = add_parts(parts + h * kWarps * part, part, dim, i);
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
      sum += part[j].sum * weight, total += part[j].total * weight;
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) sum += __shfl_xor_sync(~0u, sum, d), total += __shfl_xor_sync(~0u, total, d);
    if (lane == 0 && e < end) store_word(result.words + e, sum / total, result.tag);
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
  Attend<kBlocks> attend(step, layer, t);
  stage_heads<kBlocks>(step, layer, t, tag & 0xffffu, staged);
  sync_threads();
  const Result result{s.attended + ((int64_t(layer % 2) * kRows + t.row) * m.q_heads + t.first_head) * dim,
                      s.partial + (int64_t(t.row) * head_groups(m) + t.group) * s.max_splits * kHeads * dim, (tag + 1) & 0xffffu, tag + 1};
  attend.run(staged);
  add_warps(step, t, attend, parts, at_once, result);
  // Waits for other blocks' items, of numbers less than max_splits away. A block's own are a whole grid apart, so of all items that are
  // waited for, the one with the least number belongs to a block that does not wait.
  if (t.span.splits > 16)
    add_spans<8>(step, t, result);
  else if (t.span.splits > 1)
    add_spans<4>(step, t, result);
}

// Of large heads; apart, for it takes more registers than the layers have to spare.
__device__ __noinline__ void attend_large(const Step &step, int layer, const AttentionItem &t, unsigned tag, char *work, int work_bytes) {
  attend_item<8>(step, layer, t, tag, work, work_bytes);
}

__device__ inline void attend_item(const Step &step, int layer, const AttentionItem &t, unsigned tag, char *work, int work_bytes) {
  if (step.model.head_dim <= 64)
    attend_item<2>(step, layer, t, tag, work, work_bytes);
  else if (step.model.head_dim <= 128)
    attend_item<4>(step, layer, t, tag, work, work_bytes);
  else
    attend_large(step, layer, t, tag, work, work_bytes);
}

}  // namespace kilat_cuda
