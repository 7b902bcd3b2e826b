// span.cuh: which positions a block attends to.
//
// A context is cut into spans, a span into groups of eight keys that go to the warps in turn, and some groups make a round of a warp. Spans
// depend on the token's position only, so a token gets the same bits alone and in a prompt.
#pragma once

#include "elements.cuh"

namespace kilat_cuda {

constexpr int kHeads = 8;               // query heads of an item
constexpr int kGroupKeys = kWarps * 8;  // of a group of every warp

// Positions that one item covers.
struct Span {
  int splits, begin, end;
};

__device__ inline Span span_of(int position, int window, int max_splits, int split) {
  const int from = window > 0 ? max(0, position + 1 - window) : 0, n = position + 1 - from;
  const int least = (n + max_splits - 1) / max_splits;
  // long spans grow by little at a time: then they are as many as there may be, and no block has much more to read than others
  const int size = least <= 2 * kGroupKeys ? max(32, (least + 31) / 32 * 32) : (least + 7) / 8 * 8;
  Span s;
  s.splits = (n + size - 1) / size;
  s.begin = from + split * size;
  s.end = min(s.begin + size, position + 1);
  return s;
}

// Keys of a K/V head, its values `context` positions further.
__device__ inline __nv_bfloat16 *page_of(const ModelView &m, const SessionView &s, int layer, int kv_head) {
  return s.kv + (int64_t(layer) * m.kv_heads + kv_head) * 2 * s.context * m.head_dim;
}

// An item of a single token: up to eight query heads of one K/V head, and a span.
struct AttentionItem {
  int group, split;       // number of the heads' group, number of the span
  int kv_head, first_head, heads;
  Span span;              // of a layer
  __device__ bool exists() const { return split < span.splits; }
};

__device__ inline int head_groups(const ModelView &m) { return m.kv_heads * ((m.q_heads / m.kv_heads + kHeads - 1) / kHeads); }

// Item `number` without its span.
__device__ inline AttentionItem item_of(const Step &step, int number) {
  const ModelView &m = step.model;
  const int per_kv = m.q_heads / m.kv_heads, subs = (per_kv + kHeads - 1) / kHeads;
  AttentionItem t{};
  t.split = number % step.session.max_splits, t.group = number / step.session.max_splits;
  t.kv_head = t.group / subs;
  t.first_head = t.kv_head * per_kv + t.group % subs * kHeads;
  t.heads = min(kHeads, (t.kv_head + 1) * per_kv - t.first_head);
  return t;
}

__device__ inline void set_span(const Step &step, int layer, AttentionItem &t) {
  const int window = step.model.windows ? step.model.windows[layer] : 0;
  Span span = span_of(step.position, window, step.session.max_splits, t.split);
  if (t.group >= head_groups(step.model)) span.splits = 0;
  t.span = span;
}

// Positions of a span before this are older than the pass: their keys and values are in the pages.
__device__ inline int stored_end(const Step &step, const Span &span) { return min(span.end, step.position); }

}  // namespace kilat_cuda
