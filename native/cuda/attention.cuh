// attention.cuh: norm and rotation of queries and keys, and a warp's share of attention.
//
// The order of all sums depends on the span only (span.cuh), so a token gets the same bits alone (attention_item.cuh) and in a prompt
// (prompt_attention.cuh). Both products run on the tensor cores; probabilities are split into two bf16 numbers, which are rows h and
// h + 8 of the left operand, so they keep sixteen bits.
#pragma once

#include "exchange.cuh"
#include "span.cuh"

namespace kilat_cuda {

// One warp: a head of `from` (load(i): element i as the upper half of a word; wrong(word): 0 once it is there; `tag`: such a word),
// normalized if `norm`, and rotated if `rope`, rounded to bf16, to `to` and, if `page`, to global memory. All
// loads are started before the first is used, and all numbers are read before the first is written.
template <int kBlocks, class Head>
__device__ inline void rotate_head(const ModelView &m, const Head &from, const __nv_bfloat16 *norm, const float *rope, __nv_bfloat16 *to,
                                   __nv_bfloat16 *page) {
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
      words[k] = i < dim ? from.load(i) : from.tag;
      others[k] = i < 2 * half ? from.load(i < half ? i + half : i - half) : from.tag;
    }
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) wrong |= from.wrong(words[k]) | from.wrong(others[k]);
    if (wrong == 0) break;
  }
  __syncwarp();
  float scale = 1;
  if (norm) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) squares = fmaf(number_of(words[k]), number_of(words[k]), squares);
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
    const __nv_bfloat16 turned = __float2bfloat16_rn(fmaf(own, c[k], (i < half ? -other : other) * s[k]));
    to[i] = turned;
    if (page) page[i] = turned;
  }
}

// In shared memory: queries [8, dim]; a single token's own key and value [dim] each.
struct Staged {
  __nv_bfloat16 *queries, *key, *value;
};

// A warp's keys of an item: lane 4 g + t has of key g of a group elements 8 t ... 8 t + 7 of every 32 (the order of the weights,
// layout.h), and of head g the scores of keys 2 t and 2 t + 1. `Keys` knows of which positions and brings them, a round's keys first.
template <int kBlocks, class Keys>
class Attend {
 public:
  // Starts to load the first keys and values.
  __device__ explicit Attend(const Keys &of) : of_(of), lane_(thread_here() % 32) { start(); }

  // The same of other keys.
  __device__ void restart(const Keys &of) { of_ = of, start(); }

  __device__ void run(const Staged &staged) {
    const float scale = rsqrtf(float(of_.model().head_dim)) * 1.4426950408889634f;  // the softmax is in powers of two
#pragma unroll 1
    while (base_ < of_.end()) {
      if constexpr (Keys::kOwn)
        if (base_ + (kHeld - 1) * kGroupKeys + 8 > of_.stored()) take_own(staged);
      float score[kHeld][4];
      multiply_keys(staged.queries, score);
      const int base = base_;
      base_ += kHeld * kGroupKeys;
      const bool more = base_ < of_.end();
      if (more) of_.load(base_, false, keys_);
#pragma unroll
      for (int o = 0; o < kHeld; ++o) {
        const int first = base + o * kGroupKeys + lane_ % 4 * 2;
        score[o][0] = first < of_.limit() ? score[o][0] * scale : -INFINITY;
        score[o][1] = first + 1 < of_.limit() ? score[o][1] * scale : -INFINITY;
      }
      add_values(score);
      if (more) of_.load(base_, true, values_);
    }
  }

  // Sums, maximum and total of the warp's keys for queries first ... first + n - 1 to `parts`: query q's [dim + 2] begin `stride` (q - first)
  // floats further.
  __device__ void store(float *parts, int stride, int first, int n) {
    const int dim = of_.model().head_dim, h = lane_ / 4 - first;
    float total = total_;
    for (int d = 1; d < 4; d *= 2) total += __shfl_xor_sync(~0u, total, d);
    if (h < 0 || h >= n) return;
    float *to = parts + h * stride;
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      const int at = i / 4 * 32 + lane_ % 4 * 8 + i % 4 * 2;
      if (at < dim) *reinterpret_cast<float2 *>(to + at) = make_float2(sum_[i][0] + sum_[i][2], sum_[i][1] + sum_[i][3]);
    }
    if (lane_ % 4 == 0) *reinterpret_cast<float2 *>(to + dim) = make_float2(top_, total);
  }

 private:
  static constexpr int kHeld = held_groups(kBlocks * 32);

  __device__ void start() {
    base_ = of_.begin() + of_.warp() * 8, top_ = -INFINITY, total_ = 0;
    of_.load(base_, false, keys_), of_.load(base_, true, values_);
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) sum_[i][k] = 0;
  }

  // The token's own key and value, if they are among the groups from base_ on.
  __device__ void take_own(const Staged &staged) {
    const int at = lane_ % 4 * 8, dim = of_.model().head_dim;
#pragma unroll
    for (int o = 0; o < kHeld; ++o) {
      const int position = base_ + o * kGroupKeys + lane_ / 4;
      if (position < of_.stored() || position >= of_.end()) continue;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if (j * 32 + at >= dim) continue;
        keys_[o][j] = *reinterpret_cast<const uint4 *>(staged.key + j * 32 + at);
        values_[o][j] = *reinterpret_cast<const uint4 *>(staged.value + j * 32 + at);
      }
    }
  }

  __device__ void multiply_keys(const __nv_bfloat16 *queries, float (&score)[kHeld][4]) const {
    const int g = lane_ / 4, at = lane_ % 4 * 8, dim = of_.model().head_dim;
#pragma unroll
    for (int o = 0; o < kHeld; ++o)
#pragma unroll
      for (int i = 0; i < 4; ++i) score[o][i] = 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      uint4 q = make_uint4(0, 0, 0, 0);
      if (g < of_.queries() && j * 32 + at < dim) q = *reinterpret_cast<const uint4 *>(queries + g * dim + j * 32 + at);
#pragma unroll
      for (int o = 0; o < kHeld; ++o) multiply(score[o], q.x, 0, q.y, 0, keys_[o][j].x, keys_[o][j].y);
#pragma unroll
      for (int o = 0; o < kHeld; ++o) multiply(score[o], q.z, 0, q.w, 0, keys_[o][j].z, keys_[o][j].w);
    }
  }

  // Values weighted by exp2 of the scores of the lane's head and its two keys of each group.
  __device__ void add_values(const float (&score)[kHeld][4]) {
    const float before = top_;
    float top = -INFINITY, total = 0;
#pragma unroll
    for (int o = 0; o < kHeld; ++o) top = fmaxf(top, fmaxf(score[o][0], score[o][1]));
    for (int d = 1; d < 4; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    top = fmaxf(top, top_);
    top_ = top, top = against(top);
    const float keep = exp2f(before - top);
    uint32_t upper[kHeld], lower[kHeld];
#pragma unroll
    for (int o = 0; o < kHeld; ++o) {
      const float p = exp2f(score[o][0] - top), q = exp2f(score[o][1] - top);
      total += p + q;
      upper[o] = pair_of(p, q), lower[o] = pair_of(p - low(upper[o]), q - high(upper[o]));
    }
    total_ = fmaf(total_, keep, total);
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

  // A maximum as what exponents are taken against. A single token's is finite, for the first group has a key; that of a prompt's token
  // may see none of them.
  __device__ static float against(float top) {
    if constexpr (Keys::kOwn) return top;
    return top == -INFINITY ? 0 : top;
  }

  // Word i of what the lane has of a group's values.
  __device__ uint32_t value_words(int o, int i) const {
    const uint4 &v = values_[o][i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
  }

  Keys of_;
  const int lane_;
  int base_;                // the first position of the groups that are held
  uint4 keys_[kHeld][kBlocks], values_[kHeld][kBlocks];
  float sum_[kBlocks * 4][4];  // heads by elements: of the upper and of the lower parts of probabilities
  float top_, total_;
};

// Adds the parts (sums, then maximum and total, `stride` floats apart) that kParts warps have of element i: the sum, maximum and total.
// One of them has a key at least; parts of warps that have none change no bit.
template <int kParts>
__device__ inline float3 add_parts(const float *parts, int stride, int dim, int i) {
  float top = -INFINITY, sum = 0, total = 0;
#pragma unroll
  for (int k = 0; k < kParts; ++k) top = fmaxf(top, parts[k * stride + dim]);
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
    const float weight = exp2f(parts[k * stride + dim] - top);  // 0 for a warp that had no key
    sum = fmaf(parts[k * stride + i], weight, sum), total = fmaf(parts[k * stride + dim + 1], weight, total);
  }
  return make_float3(sum, top, total);
}

}  // namespace kilat_cuda
