// attention.cuh: norm and rotation of queries and keys, the write of K and V, and attention with the context split over blocks.
//
// An item is (token, up to four query heads of one K/V head, a span of positions). Spans depend on the token's position only, so a token
// gets the same bits alone and in a prompt. The block that finishes last of a token's heads adds the spans, in order.
#pragma once

#include "ptx.cuh"
#include "step.h"

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

// One warp: a head of `from` (global, bf16) normalized if `norm`, and rotated if `rope`; put(i, value rounded to bf16). All loads are
// started before the first is used.
template <class Put>
__device__ inline void rotate_head(const ModelView &m, const __nv_bfloat16 *from, const __nv_bfloat16 *norm, const float *rope, Put put) {
  constexpr int kMost = 8;  // elements of a lane: heads of up to 256
  const int lane = threadIdx.x % 32, dim = m.head_dim, half = rope ? m.rotary / 2 : 0;
  float own[kMost], other[kMost], c[kMost], s[kMost];
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    const int i = lane + 32 * k, j = i < half ? i : i - half;
    const bool turns = i < 2 * half;
    own[k] = i < dim ? load_fresh_bf16(from + i) : 0;
    other[k] = turns ? load_fresh_bf16(from + (i < half ? i + half : j)) : 0;
    c[k] = turns ? rope[j] : 1;
    s[k] = turns ? (i < half ? -rope[half + j] : rope[half + j]) : 0;
  }
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
__device__ inline void stage_heads(const Step &step, int layer, const AttentionItem &t, float *queries, __nv_bfloat16 *keys,
                                   __nv_bfloat16 *values) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int dim = m.head_dim, warp = threadIdx.x / 32, width = (m.q_heads + 2 * m.kv_heads) * dim;
  const float scale = rsqrtf(float(dim)) * 1.4426950408889634f;  // the softmax is in powers of two
  const __nv_bfloat16 *norms = m.qk_norms ? m.qk_norms + int64_t(layer) * 2 * dim : nullptr;
  const int own_first = max(step.first, t.span.begin), own = max(0, t.span.end - own_first);
  for (int task = warp; task < kHeads + 2 * own; task += kWarps) {
    if (task < kHeads) {
      float *to = queries + task * dim;
      if (task < t.heads)
        rotate_head(m, s.qkv + int64_t(t.row) * width + (t.first_head + task) * dim, norms,
                    s.rope + int64_t(step.first + t.row) * m.rotary, [&](int i, float v) { to[i] = v * scale; });
      else
        for (int i = threadIdx.x % 32; i < dim; i += 32) to[i] = 0;
      continue;
    }
    const int position = own_first + (task - kHeads) / 2, row = position - step.first, side = (task - kHeads) % 2;
    const __nv_bfloat16 *from = s.qkv + int64_t(row) * width + (m.q_heads + side * m.kv_heads + t.kv_head) * dim;
    __nv_bfloat16 *to = (side ? values : keys) + row * dim;
    __nv_bfloat16 *page = s.kv + ((int64_t(layer) * m.kv_heads + t.kv_head) * 2 + side) * s.context * dim + int64_t(position) * dim;
    const bool write = row == t.row && t.first_head == t.kv_head * (m.q_heads / m.kv_heads);
    rotate_head(m, from, side || !norms ? nullptr : norms + dim, side ? nullptr : s.rope + int64_t(position) * m.rotary,
                [&](int i, float v) {
                  const __nv_bfloat16 b = __float2bfloat16_rn(v);
                  to[i] = b;
                  if (write) page[i] = b;
                });
  }
}

// What a lane has of an item: of eight elements of each head the weighted sum, the maximum and total of the lane's keys.
struct LaneState {
  float sum[kHeads][8], top[kHeads], total[kHeads];
};

__device__ inline float scaled(float x, float top, float other) { return top == -INFINITY ? 0.f : x * exp2f(top - other); }

__device__ inline void unpack(const uint4 &v, float (&out)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; ++i) out[2 * i] = low(words[i]), out[2 * i + 1] = high(words[i]);
}

// Keys begin + first, begin + first + stride, ... of the span; `lanes` lanes share a key.
__device__ inline void attend(const Step &step, const AttentionItem &t, const float *queries, const __nv_bfloat16 *own_keys,
                              const __nv_bfloat16 *own_values, const __nv_bfloat16 *page, int lanes, LaneState &state) {
  const int dim = step.model.head_dim, at = threadIdx.x % lanes * 8;
  const int keys_per_step = kThreads / lanes, key0 = t.span.begin + threadIdx.x / lanes;
  const int64_t side = int64_t(step.session.context) * dim;
  const bool on = at < dim;
  for (int h = 0; h < kHeads; ++h) {
    state.top[h] = -INFINITY, state.total[h] = 0;
    for (int i = 0; i < 8; ++i) state.sum[h][i] = 0;
  }
  // all lanes of a warp take part in every round
  for (int base = t.span.begin; base < t.span.end; base += keys_per_step * kAhead) {
    const int begin = base - t.span.begin + key0;
    uint4 k[kAhead], v[kAhead];
    for (int n = 0; n < kAhead; ++n) {
      const int position = begin + n * keys_per_step;
      k[n] = v[n] = make_uint4(0, 0, 0, 0);
      if (!on || position >= t.span.end) continue;
      const bool own = position >= step.first;
      const int64_t old = int64_t(position) * dim + at, fresh = int64_t(position - step.first) * dim + at;
      k[n] = *reinterpret_cast<const uint4 *>(own ? own_keys + fresh : page + old);
      v[n] = *reinterpret_cast<const uint4 *>(own ? own_values + fresh : page + side + old);
    }
    float score[kAhead][kHeads];
    for (int n = 0; n < kAhead; ++n) {
      float x[8];
      unpack(k[n], x);
      for (int h = 0; h < kHeads; ++h) {
        const float4 q0 = on ? *reinterpret_cast<const float4 *>(queries + h * dim + at) : make_float4(0, 0, 0, 0);
        const float4 q1 = on ? *reinterpret_cast<const float4 *>(queries + h * dim + at + 4) : make_float4(0, 0, 0, 0);
        score[n][h] = ((x[0] * q0.x + x[1] * q0.y) + (x[2] * q0.z + x[3] * q0.w)) +
                      ((x[4] * q1.x + x[5] * q1.y) + (x[6] * q1.z + x[7] * q1.w));
      }
    }
    for (int d = lanes / 2; d > 0; d /= 2)
      for (int n = 0; n < kAhead; ++n)
        for (int h = 0; h < kHeads; ++h) score[n][h] += __shfl_xor_sync(~0u, score[n][h], d);
    for (int h = 0; h < kHeads; ++h) {
      float top = state.top[h];
      for (int n = 0; n < kAhead; ++n)
        if (begin + n * keys_per_step < t.span.end) top = fmaxf(top, score[n][h]);
      if (top == -INFINITY) continue;
      const float keep = scaled(1, state.top[h], top);
      state.total[h] *= keep, state.top[h] = top;
      for (int i = 0; i < 8; ++i) state.sum[h][i] *= keep;
      for (int n = 0; n < kAhead; ++n) {
        if (begin + n * keys_per_step >= t.span.end) continue;
        const float p = exp2f(score[n][h] - top);
        state.total[h] += p;
        float x[8];
        unpack(v[n], x);
        for (int i = 0; i < 8; ++i) state.sum[h][i] += p * x[i];
      }
    }
  }
  for (int d = lanes; d < 32; d *= 2) {  // add the keys that other lanes of the warp had
    for (int h = 0; h < kHeads; ++h) {
      const float other = __shfl_xor_sync(~0u, state.top[h], d), top = fmaxf(state.top[h], other);
      const float mine = scaled(1, state.top[h], top), theirs = scaled(1, other, top);
      state.total[h] = state.total[h] * mine + __shfl_xor_sync(~0u, state.total[h], d) * theirs;
      for (int i = 0; i < 8; ++i) state.sum[h][i] = state.sum[h][i] * mine + __shfl_xor_sync(~0u, state.sum[h][i], d) * theirs;
      state.top[h] = top;
    }
  }
}

// Adds `n` parts (sums, then maximum and total, `stride` floats apart) of element i: the sum, maximum and total of all. Loads are
// started sixteen parts at a time: their latency is what this costs.
template <bool kFresh>
__device__ inline float3 add_parts(const float *parts, int n, int stride, int dim, int i) {
  const auto get = [&](const float *p) { return kFresh ? __ldcg(p) : *p; };
  float top = -INFINITY, sum = 0, total = 0;
  for (int first = 0; first < n; first += 16) {
    float tops[16], sums[16], totals[16], here = top;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float *p = parts + (first + k) * stride;
      const bool on = first + k < n;
      tops[k] = on ? get(p + dim) : -INFINITY, sums[k] = on ? get(p + i) : 0, totals[k] = on ? get(p + dim + 1) : 0;
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) here = fmaxf(here, tops[k]);
    const float keep = scaled(1, top, here);
    sum *= keep, total *= keep, top = here;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const float weight = scaled(1, tops[k], top);
      sum += sums[k] * weight, total += totals[k] * weight;
    }
  }
  return make_float3(sum, top, total);
}

// The block's items of a layer. `work` is shared memory of `work_bytes`; ends with a barrier of the block.
__device__ inline void attention(const Step &step, int layer, char *work, int work_bytes) {
  const ModelView &m = step.model;
  const SessionView &s = step.session;
  const int dim = m.head_dim, part = dim + 2, per_kv = m.q_heads / m.kv_heads, subs = (per_kv + kHeads - 1) / kHeads;
  const int groups = m.kv_heads * subs, total = step.rows * groups * s.max_splits;
  const int window = m.windows ? m.windows[layer] : 0;
  const int lanes = dim <= 64 ? 8 : dim <= 128 ? 16 : 32;
  float *queries = reinterpret_cast<float *>(work);
  __nv_bfloat16 *keys = reinterpret_cast<__nv_bfloat16 *>(queries + kHeads * dim), *values = keys + step.rows * dim;
  float *parts = reinterpret_cast<float *>(values + step.rows * dim);
  const int space = work_bytes - int(reinterpret_cast<char *>(parts) - work);
  const int at_once = min(kHeads, space / (kWarps * part * 4));
  __shared__ bool last_split;
  for (int item = blockIdx.x; item < total; item += gridDim.x) {
    AttentionItem t;
    t.split = item % s.max_splits, t.group = item / s.max_splits % groups, t.row = item / s.max_splits / groups;
    t.kv_head = t.group / subs;
    t.first_head = t.kv_head * per_kv + t.group % subs * kHeads;
    t.heads = min(kHeads, (t.kv_head + 1) * per_kv - t.first_head);
    t.span = span_of(step.first + t.row, window, s.max_splits, t.split);
    if (t.split >= t.span.splits) continue;
    stage_heads(step, layer, t, queries, keys, values);
    __syncthreads();
    LaneState state;
    attend(step, t, queries, keys, values, s.kv + (int64_t(layer) * m.kv_heads + t.kv_head) * 2 * s.context * dim, lanes, state);
    float *mine = s.partial + int64_t(t.row * groups + t.group) * s.max_splits * kHeads * part;
    __nv_bfloat16 *out = s.attended + (int64_t(t.row) * m.q_heads + t.first_head) * dim;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int first = 0; first < t.heads; first += at_once) {
      const int n = min(at_once, t.heads - first);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h < first || h >= first + n || lane >= lanes || lane * 8 >= dim) continue;
        float *to = parts + ((h - first) * kWarps + warp) * part;
        for (int i = 0; i < 8; ++i) to[lane * 8 + i] = state.sum[h][i];
        if (lane == 0) to[dim] = state.top[h], to[dim + 1] = state.total[h];
      }
      __syncthreads();
      for (int e = threadIdx.x; e < n * dim; e += kThreads) {
        const int h = first + e / dim, i = e % dim;
        const float3 r = add_parts<false>(parts + (h - first) * kWarps * part, kWarps, part, dim, i);
        if (t.span.splits == 1) {
          out[h * dim + i] = __float2bfloat16_rn(r.x / r.z);
        } else {
          float *to = mine + (t.split * kHeads + h) * part;
          to[i] = r.x;
          if (i == 0) to[dim] = r.y, to[dim + 1] = r.z;
        }
      }
      __syncthreads();
    }
    if (t.span.splits == 1) continue;
    if (threadIdx.x == 0) {
      __threadfence();
      unsigned *done = s.partial_done + t.row * groups + t.group;
      last_split = atomicAdd(done, 1) == unsigned(t.span.splits - 1);
      if (last_split) *done = 0;
      __threadfence();
    }
    __syncthreads();
    if (last_split)
      for (int e = threadIdx.x; e < t.heads * dim; e += kThreads) {
        const float3 r = add_parts<true>(mine + e / dim * part, t.span.splits, kHeads * part, dim, e % dim);
        out[e] = __float2bfloat16_rn(r.x / r.z);
      }
    __syncthreads();
  }
}

}  // namespace kilat_cuda
