// elements.cuh: what passes of one token and of many do to single elements, in the same order of operations: they give the same bits.
#pragma once

#include "ptx.cuh"
#include "step.h"

namespace kilat_cuda {

constexpr int kVectors = kMostHidden / (kThreads * 4);  // of 4 elements that a thread has of a normalized vector

__device__ inline int kind_of(const ModelView &m, int index) {
  return index == m.layers * kLayerMatrices ? kHead : index % kLayerMatrices;
}

// Pairs of elements of a token's embedding.
__device__ inline uint32_t embedded(const ModelView &m, int id, int at) {
  if (m.embedding) return __ldg(reinterpret_cast<const uint32_t *>(m.embedding + int64_t(id) * m.hidden + at));
  const char *head = m.matrices[m.layers * kLayerMatrices].at();
  return __ldg(reinterpret_cast<const uint32_t *>(head + bf16_pair_at(m.shape[kHead].units, id, at)));
}

__device__ inline const __nv_bfloat16 *norm_of(const ModelView &m, int index) {
  const int layer = index / kLayerMatrices, second = kind_of(m, index) == kGateUp;
  return m.norms + (int64_t(layer) * 2 + second) * m.hidden;
}

// The biases of a matrix, or null.
__device__ inline const float *bias_of(const ModelView &m, int index) {
  const int kind = kind_of(m, index);
  if (kind == kHead || !m.biases[kind]) return nullptr;
  return m.biases[kind] + int64_t(index / kLayerMatrices) * m.shape[kind].tiles * kTileRows;
}

// Of four elements.
__device__ inline float squares_of(const uint2 &p) {
  return fmaf(low(p.x), low(p.x), high(p.x) * high(p.x)) + fmaf(low(p.y), low(p.y), high(p.y) * high(p.y));
}

// Four elements times `scale`, rounded, times a norm's weights, rounded.
__device__ inline uint2 scaled(const uint2 &x, float scale, const uint2 &w) {
  return make_uint2(pair_of(rounded(low(x.x) * scale) * low(w.x), rounded(high(x.x) * scale) * high(w.x)),
                    pair_of(rounded(low(x.y) * scale) * low(w.y), rounded(high(x.y) * scale) * high(w.y)));
}

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

// An element of the MLP from the sums of row `at` of the gate and up matrix, a gate, and of its up, eight rows further in the tile.
__device__ inline float gated_of(float gate, float up, const float *bias, int at) {
  gate = rounded(gate + (bias ? bias[at] : 0));
  up = rounded(up + (bias ? bias[at + 8] : 0));
  return rounded(silu(gate)) * up;
}

}  // namespace kilat_cuda
