// product.cuh: a block's tiles of one matrix times one vector.
//
// The tensor cores do it: a tile is the left operand, the vector fills all columns of the right one. The sum of an output: a warp adds
// the chunks j, j + 8, ... of a tile in order, then the warps' sums are added in order of j. prompt_product.cuh adds in the same order.
#pragma once

#include "exchange.cuh"
#include "stream.cuh"

namespace kilat_cuda {

// The right operand's columns `column` ... `column` + 31: `x` is the address of a bf16 vector in shared memory.
__device__ inline uint4 operand(uint32_t x, int column) { return load_shared(x + (column + threadIdx.x % 4 * 8) * 2); }

// All loads of some units are started before the first product.
template <int kUnits>
__device__ inline void multiply_units_bf16(float (&sum)[4], uint32_t at, int column, uint32_t x) {
  float other[4] = {0, 0, 0, 0};
  uint4 w[kUnits * 4], v[kUnits * 2];
  at += threadIdx.x % 32 * 16;
#pragma unroll
  for (int i = 0; i < kUnits * 2; ++i) v[i] = operand(x, column + i * 32);
#pragma unroll
  for (int i = 0; i < kUnits * 4; ++i) w[i] = load_shared(at + i * 512);
#pragma unroll
  for (int i = 0; i < kUnits * 2; ++i) {
    multiply(sum, w[2 * i].x, w[2 * i].y, w[2 * i].z, w[2 * i].w, v[i].x, v[i].y);
    multiply(other, w[2 * i + 1].x, w[2 * i + 1].y, w[2 * i + 1].z, w[2 * i + 1].w, v[i].z, v[i].w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += other[i];
}

__device__ inline void multiply_bf16(float (&sum)[4], uint32_t at, int units, int column, uint32_t x) {
  for (; units >= 4; units -= 4, at += 4 * 2048, column += 4 * kUnitColumns) multiply_units_bf16<4>(sum, at, column, x);
  for (; units > 0; --units, at += 2048, column += kUnitColumns) multiply_units_bf16<1>(sum, at, column, x);
}

// Two e4m3 numbers in bytes 1 and 3 of a word (or 0 and 2 after a shift) as bf16, exactly: the bits moved to their place are the
// number times 2^-120.
__device__ inline uint32_t widen_e4m3(uint32_t body, uint32_t sign) {
  const uint32_t small = (body & 0x07f007f0u) | (sign & 0x80008000u), factor = 0x7b807b80u;  // 2^120
  const __nv_bfloat162 wide =
      __hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&small), *reinterpret_cast<const __nv_bfloat162 *>(&factor));
  return *reinterpret_cast<const uint32_t *>(&wide);
}

__device__ inline void multiply_words_e4m3(float (&sum)[4], uint32_t w0, uint32_t w1, uint32_t b0, uint32_t b1) {
  multiply(sum, widen_e4m3(w0 >> 4, w0), widen_e4m3(w0 << 4, w0 << 8), widen_e4m3(w1 >> 4, w1), widen_e4m3(w1 << 4, w1 << 8), b0,
           b1);
}

// A unit of a tile times 64 columns of a vector.
__device__ inline void multiply_unit_fp8(float (&sum)[4], const uint4 &a, const uint4 &b, const uint2 &scales, const uint4 &x0, const uint4 &x1) {
  float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
  multiply_words_e4m3(even, a.x, a.y, x0.x, x0.y);
  multiply_words_e4m3(odd, a.z, a.w, x0.z, x0.w);
  multiply_words_e4m3(even, b.x, b.y, x1.x, x1.y);
  multiply_words_e4m3(odd, b.z, b.w, x1.z, x1.w);
  for (int i = 0; i < 4; ++i) sum[i] = fmaf(even[i] + odd[i], __uint_as_float(i < 2 ? scales.x : scales.y), sum[i]);
}

__device__ inline void multiply_fp8(float (&sum)[4], uint32_t at, int units, int column, uint32_t x) {
  const uint32_t scales = at + units * number_bytes(kFp8);
  at += threadIdx.x % 32 * 16;
#pragma unroll 2
  for (int u = 0; u < units; ++u, at += 1024, column += kUnitColumns) {
    const uint4 x0 = operand(x, column), x1 = operand(x, column + 32);
    multiply_unit_fp8(sum, load_shared(at), load_shared(at + 512), load_shared_8(scales + u * scale_bytes(kFp8)), x0, x1);
  }
}

// Nibbles i and i + 4 of a word as bf16 numbers minus `offset` (given as a bf16 pair of -(128 + what the format takes away)).
template <int kShift>
__device__ inline uint32_t widen_nibbles(uint32_t word, uint32_t offset) {
  const uint32_t raised = ((word >> kShift) & 0x000f000fu) | 0x43004300u;  // 128 + nibble
  const __nv_bfloat162 n =
      __hadd2(*reinterpret_cast<const __nv_bfloat162 *>(&raised), *reinterpret_cast<const __nv_bfloat162 *>(&offset));
  return *reinterpret_cast<const uint32_t *>(&n);
}

__device__ inline void multiply_word_q4(float (&sum)[4], uint32_t w, uint32_t offset, uint32_t b0, uint32_t b1) {
  multiply(sum, widen_nibbles<0>(w, offset), widen_nibbles<4>(w, offset), widen_nibbles<8>(w, offset), widen_nibbles<12>(w, offset),
           b0, b1);
}

__device__ inline float2 halves(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2 *>(&pair)); }

// The sums of a unit's two groups times what rows 0 ... 7 and 8 ... 15 have for each.
__device__ inline void add_groups(float (&sum)[4], const float (&first)[4], const float (&second)[4], const uint2 &factors) {
  const float2 d0 = halves(factors.x), d1 = halves(factors.y);
  for (int i = 0; i < 4; ++i) sum[i] += fmaf(first[i], i < 2 ? d0.x : d0.y, second[i] * (i < 2 ? d1.x : d1.y));
}

// A unit of a tile times 64 columns of a vector; the scales and the minima of the lane's rows.
template <bool kMinima>
__device__ inline void multiply_unit_q4(float (&sum)[4], const uint4 &w, const uint2 &scales, const uint2 &minima, const uint4 &x0, const uint4 &x1) {
  constexpr uint32_t kOffset = kMinima ? 0xc300c300u : 0xc308c308u, kOne = 0x3f803f80u;  // -128, -136; 1
  float first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
  multiply_word_q4(first, w.x, kOffset, x0.x, x0.y);
  multiply_word_q4(second, w.z, kOffset, x1.x, x1.y);
  multiply_word_q4(first, w.y, kOffset, x0.z, x0.w);
  multiply_word_q4(second, w.w, kOffset, x1.z, x1.w);
  add_groups(sum, first, second, scales);
  if constexpr (kMinima) {  // plus the group's minimum times the sum of its inputs
    float total0[4] = {0, 0, 0, 0}, total1[4] = {0, 0, 0, 0};
    multiply(total0, kOne, kOne, kOne, kOne, x0.x, x0.y);
    multiply(total1, kOne, kOne, kOne, kOne, x1.x, x1.y);
    multiply(total0, kOne, kOne, kOne, kOne, x0.z, x0.w);
    multiply(total1, kOne, kOne, kOne, kOne, x1.z, x1.w);
    add_groups(sum, total0, total1, minima);
  }
}

template <bool kMinima>
__device__ inline void multiply_q4(float (&sum)[4], uint32_t at, int units, int column, uint32_t x) {
  constexpr int kFormat = kMinima ? kQ4Min : kQ4;
  const int lane = threadIdx.x % 32;
  uint32_t scales = at + units * number_bytes(kFormat) + lane / 4 * (scale_bytes(kFormat) / 8);
  at += lane * 16;
#pragma unroll 2
  for (int u = 0; u < units; ++u, at += 512, scales += scale_bytes(kFormat), column += kUnitColumns) {
    const uint4 w = load_shared(at), x0 = operand(x, column), x1 = operand(x, column + 32);
    multiply_unit_q4<kMinima>(sum, w, load_shared_8(scales), kMinima ? load_shared_8(scales + 8) : make_uint2(0, 0), x0, x1);
  }
}

__device__ inline void multiply_chunk(float (&sum)[4], int format, uint32_t at, int units, int column, uint32_t x) {
  if (format == kBf16)
    multiply_bf16(sum, at, units, column, x);
  else if (format == kFp8)
    multiply_fp8(sum, at, units, column, x);
  else if (format == kQ4)
    multiply_q4<false>(sum, at, units, column, x);
  else
    multiply_q4<true>(sum, at, units, column, x);
}

// Tiles begin ... end - 1 of a matrix: calls finish(first tile, number of tiles, get) on all threads of the block for batches of tiles
// whose sums fit in `work`; get(tile of the batch, row in it) is the sum of an output.
template <class Finish>
__device__ void product(const Step &step, Stream &stream, const MatrixPlace &place, const Shape &shape, int begin, int end,
                        uint32_t x, float *work, int work_bytes, Finish finish) {
  const int format = place.format(), shift = chunk_shift(format, step.model.narrow), per = 1 << shift;
  const int chunks = (shape.units + per - 1) >> shift, sums = min(chunks, kWarps);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile_floats = sums * kTileRows, batch = max(1, work_bytes / (tile_floats * 4));
  int tile = begin, chunk = warp;
  for (; chunk >= chunks; chunk -= chunks) ++tile;
  for (int first = begin; first < end; first += batch) {
    const int last = min(first + batch, end);
    float sum[4] = {0, 0, 0, 0};
    while (tile < last) {
      const uint32_t at = stream.wait(step);
      multiply_chunk(sum, format, at, min(per, shape.units - chunk * per), chunk * per * kUnitColumns, x);
      stream.release(step);
      if (chunk + kWarps >= chunks) {  // the warp's last chunk of this tile
        float *to = work + (tile - first) * tile_floats + chunk % kWarps * kTileRows + lane / 4;
        if (lane % 4 == 0) to[0] = sum[0], to[8] = sum[2];
        for (int i = 0; i < 4; ++i) sum[i] = 0;
      }
      for (chunk += kWarps; chunk >= chunks; chunk -= chunks) ++tile;
    }
    sync_threads();
    const auto get = [&](int local, int row) {
      const float *from = work + local * tile_floats + row;
      float total = 0;
      for (int j = 0; j < sums; ++j) total += from[j * kTileRows];
      return total;
    };
    finish(first, last - first, get);
    sync_threads();
  }
}

}  // namespace kilat_cuda
