// values.cuh: numbers of the storage formats; the block formats are those of GGUF files.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "pack.h"

namespace kilat_cuda {

// Bytes of files have no alignment.
__device__ inline float read_f16(const uint8_t *p) { return __half2float(__ushort_as_half(uint16_t(p[0] | p[1] << 8))); }
__device__ inline float read_bf16(const uint8_t *p) { return __uint_as_float(uint32_t(p[0] | p[1] << 8) << 16); }
__device__ inline float read_f32(const uint8_t *p) {
  return __uint_as_float(p[0] | p[1] << 8 | p[2] << 16 | uint32_t(p[3]) << 24);
}
__device__ inline float read_e4m3(uint8_t bits) {
  __nv_fp8_e4m3 v;
  v.__x = bits;
  return float(v);
}

// A group of 32 values of a 4-bit format: value = scale * nibble + minimum.
struct Group {
  float scale, minimum;
  const uint8_t *nibbles;
  int shift;         // of the nibbles: 0, 4
  bool in_halves;    // values 16 ... 31 are the upper nibbles of the bytes of values 0 ... 15
  __device__ int nibble(int i) const { return in_halves ? nibbles[i % 16] >> (i / 16 * 4) & 15 : nibbles[i] >> shift & 15; }
};

// Scale and minimum, six bits each, of run `i` of 32 in a block of 256 of the K formats.
__device__ inline void k_scale(const uint8_t *p, int i, int &scale, int &minimum) {
  if (i < 4) {
    scale = p[i] & 63, minimum = p[i + 4] & 63;
  } else {
    scale = (p[i + 4] & 15) | (p[i - 4] >> 6 << 4), minimum = p[i + 4] >> 4 | (p[i] >> 6 << 4);
  }
}

__device__ inline Group group_of(int type, const uint8_t *row, int64_t group) {
  if (type == KILAT_TYPE_Q4_0) {
    const uint8_t *p = row + group * 18;
    const float d = read_f16(p);
    return {d, -8 * d, p + 2, 0, true};
  }
  if (type == KILAT_TYPE_Q4_1) {
    const uint8_t *p = row + group * 20;
    return {read_f16(p), read_f16(p + 2), p + 4, 0, true};
  }
  const uint8_t *p = row + group / 8 * 144;  // Q4_K
  const int i = group % 8;
  int scale, minimum;
  k_scale(p + 4, i, scale, minimum);
  return {read_f16(p) * scale, -read_f16(p + 2) * minimum, p + 16 + i / 2 * 32, i % 2 * 4, false};
}

__device__ inline float value_5bit(const uint8_t *p, int i, bool with_minimum) {
  const uint8_t *high = p + (with_minimum ? 4 : 2), *nibbles = high + 4;
  const int q = (nibbles[i % 16] >> (i / 16 * 4) & 15) | (high[i / 8] >> (i % 8) & 1) << 4;
  return with_minimum ? read_f16(p) * q + read_f16(p + 2) : read_f16(p) * (q - 16);
}

__device__ inline float value_q5_k(const uint8_t *p, int i) {
  const int run = i / 32;
  int scale, minimum;
  k_scale(p + 4, run, scale, minimum);
  const int q = (p[48 + run / 2 * 32 + i % 32] >> (run % 2 * 4) & 15) | (p[16 + i % 32] >> run & 1) << 4;
  return read_f16(p) * scale * q - read_f16(p + 2) * minimum;
}

__device__ inline float value_q6_k(const uint8_t *p, int i) {
  const int half = i / 128, quarter = i % 128 / 32, l = i % 32;
  const uint8_t *low = p + half * 64 + quarter % 2 * 32, *high = p + 128 + half * 32;
  const int q = (low[l] >> (quarter / 2 * 4) & 15) | (high[l] >> (quarter * 2) & 3) << 4;
  return read_f16(p + 208) * float(int8_t(p[192 + i / 16])) * (q - 32);
}

// Row of the file that holds row `row` of the tensor (see kilat_tensor.paired_heads).
__device__ inline int64_t stored_row(const Source &s, int64_t row) {
  if (s.paired_heads == 0) return row;
  const int64_t in_head = row % s.head_dim, half = s.head_dim / 2;
  return row - in_head + in_head % half * 2 + in_head / half;
}

// Value of fp8 block scale at a row of the tensor.
__device__ inline float block_scale(const Source &s, int64_t row, int64_t k) {
  const int64_t at = row / s.block_rows * ((s.columns + s.block_columns - 1) / s.block_columns) + k / s.block_columns;
  return s.scale_type == KILAT_TYPE_F32 ? read_f32(s.scales + at * 4) : read_bf16(s.scales + at * 2);
}

__device__ inline float value_of(const Source &s, int64_t row, int64_t k) {
  const int64_t stored = stored_row(s, row);
  const uint8_t *p = s.data + stored * s.row_bytes;
  switch (s.type) {
    case KILAT_TYPE_F32: return read_f32(p + k * 4);
    case KILAT_TYPE_F16: return read_f16(p + k * 2);
    case KILAT_TYPE_BF16: return read_bf16(p + k * 2);
    case KILAT_TYPE_Q5_0: return value_5bit(p + k / 32 * 22, k % 32, false);
    case KILAT_TYPE_Q5_1: return value_5bit(p + k / 32 * 24, k % 32, true);
    case KILAT_TYPE_Q8_0: return read_f16(p + k / 32 * 34) * float(int8_t(p[k / 32 * 34 + 2 + k % 32]));
    case KILAT_TYPE_Q5_K: return value_q5_k(p + k / 256 * 176, k % 256);
    case KILAT_TYPE_Q6_K: return value_q6_k(p + k / 256 * 210, k % 256);
    case KILAT_TYPE_F8_E4M3: return read_e4m3(p[k]) * block_scale(s, stored, k);
    default: {
      const Group g = group_of(s.type, p, k / 32);
      return g.scale * g.nibble(k % 32) + g.minimum;
    }
  }
}

}  // namespace kilat_cuda
