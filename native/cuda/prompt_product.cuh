// prompt_product.cuh: a matrix times the vectors of many tokens.
//
// A block has 8 kTiles tiles of rows and kTokens tokens; a warp kTiles of the tiles and all of the tokens. The weights lie in memory as
// the tensor cores take them (layout.h), so they come to shared memory as they are, a unit of columns at a time, some units ahead.
// An output's sum has the order of a single token's (product.cuh): the units of chunks j, j + 8, ... one after another, as one sum, then
// those sums in order of j. The total of them lies in shared memory, for registers are what the products need. Where there are fewer
// blocks than processors, some blocks share the columns: each has some of the sums, and the last one to end adds all of them.
#pragma once

#include "product.cuh"
#include "prompt.h"

namespace kilat_cuda {

constexpr int kTokens = 64, kColumnTiles = kTokens / 8;
constexpr int kMostStages = 6;
constexpr int kVectorBytes = kTokens * kUnitColumns * 2;  // of a unit of all tokens

__host__ __device__ constexpr int stage_bytes(int format, int tiles) { return tiles * kWarps * unit_bytes(format) + kVectorBytes; }
// Floats between the totals of a token and of the next: warps write them without conflicts of banks.
__host__ __device__ constexpr int total_stride(int tiles) { return tiles * kWarps * kTileRows + 4; }
__host__ __device__ constexpr int total_bytes(int tiles) { return total_stride(tiles) * kTokens * 4; }

// The units of a tile in the order in which they are added.
struct UnitWalk {
  int units, shift, chunk = 0, unit = 0;  // unit: of the chunk
  __device__ int first() const { return chunk << shift; }
  __device__ int count() const { return min(1 << shift, units - first()); }
  __device__ int chunks() const { return (units + (1 << shift) - 1) >> shift; }
  // The last unit of a sum.
  __device__ bool ends_sum() const { return unit + 1 == count() && chunk + kWarps >= chunks(); }
  __device__ void next() {
    if (++unit < count()) return;
    unit = 0, chunk += kWarps;
    if (chunk >= chunks()) chunk = chunk % kWarps + 1;
  }
  // Units of the sums begin ... end - 1.
  __device__ int units_of(int begin, int end) const {
    int n = 0;
    for (int sum = begin; sum < min(end, chunks()); ++sum)
      for (int c = sum; c < chunks(); c += kWarps) n += min(1 << shift, units - (c << shift));
    return n;
  }
};

// Where a block is in the matrix, and what it multiplies with.
struct ProductPlace {
  const char *matrix;
  const Shape &shape;
  int first_tile, first_token, rows;  // rows: tokens of the pass
  const __nv_bfloat16 *vectors;
};

// Starts the copies of a unit to the stage at `to`: the numbers of all tiles, their scales, the tokens' columns. A token's eight pieces
// of 16 bytes are exchanged by halves in odd tokens: eight lanes that read two tokens then meet all banks.
template <int kFormat, int kTiles>
__device__ inline void load_unit(const ProductPlace &p, const UnitWalk &at, uint32_t to) {
  constexpr int kBytes = unit_bytes(kFormat), kPieces = number_bytes(kFormat) / 16, kScales = scale_bytes(kFormat) / 16;
  constexpr int kAtOnce = kThreads / kPieces;  // tiles
  const int thread = threadIdx.x, units = p.shape.units;
  {
    const int tile = thread / kPieces;
    const char *from = p.matrix + (int64_t(p.first_tile + tile) * units + at.first()) * kBytes + at.unit * number_bytes(kFormat) + thread % kPieces * 16;
#pragma unroll
    for (int i = 0; i < kTiles * kWarps / kAtOnce; ++i) {
      const bool on = p.first_tile + tile + i * kAtOnce < p.shape.tiles;
      copy_16(to + (i * kThreads + thread) * 16, on ? from + int64_t(i) * kAtOnce * units * kBytes : p.matrix, on);
    }
    to += kTiles * kWarps * number_bytes(kFormat);
  }
  if constexpr (kScales > 0) {
    const int tile = p.first_tile + thread / kScales;
    if (thread < kTiles * kWarps * kScales) {
      const char *from = p.matrix + (int64_t(tile) * units + at.first()) * kBytes + at.count() * number_bytes(kFormat) +
                         at.unit * scale_bytes(kFormat) + thread % kScales * 16;
      copy_16(to + thread * 16, tile < p.shape.tiles ? from : p.matrix, tile < p.shape.tiles);
    }
    to += kTiles * kWarps * scale_bytes(kFormat);
  }
#pragma unroll
  for (int i = 0; i < kVectorBytes / 16 / kThreads; ++i) {
    const int token = (i * kThreads + thread) / 8, piece = thread % 8, column = (at.first() + at.unit) * kUnitColumns + piece * 8;
    const bool on = p.first_token + token < p.rows && column < p.shape.columns;
    const __nv_bfloat16 *from = on ? p.vectors + int64_t(p.first_token + token) * p.shape.columns + column : p.vectors;
    copy_16(to + token * 128 + (piece ^ token % 2 * 4) * 16, from, on);
  }
}

// The right operand's columns 32 `group` ... of eight tokens of a stage.
__device__ inline uint4 operand_of(uint32_t vectors, int column_tile, int group) {
  const int lane = threadIdx.x % 32, token = column_tile * 8 + lane / 4;
  return load_shared(vectors + token * 128 + ((group * 4 + lane % 4) ^ token % 2 * 4) * 16);
}

// A warp's sums.
template <int kFormat, int kTiles>
struct UnitSums {
  float sum[kTiles][kColumnTiles][4];
  float other[kFormat == kBf16 ? kTiles : 1][kColumnTiles][4];  // second sums of bf16 numbers
};

// `numbers` and `scales`: of the warp's first tile in a stage.
template <int kFormat, int kTiles>
__device__ inline void multiply_unit(UnitSums<kFormat, kTiles> &sums, const UnitWalk &at, uint32_t numbers, uint32_t scales, uint32_t vectors) {
  const int lane = threadIdx.x % 32;
  numbers += lane * 16;
  if constexpr (kFormat == kBf16) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      uint4 w[kTiles][2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) w[m][0] = load_shared(numbers + m * 2048 + group * 1024), w[m][1] = load_shared(numbers + m * 2048 + group * 1024 + 512);
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        const uint4 v = operand_of(vectors, n, group);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          multiply(sums.sum[m][n], w[m][0].x, w[m][0].y, w[m][0].z, w[m][0].w, v.x, v.y);
          multiply(sums.other[m][n], w[m][1].x, w[m][1].y, w[m][1].z, w[m][1].w, v.z, v.w);
        }
      }
    }
    // the second sums are of four units, or at a chunk's end of one
    if (at.unit / 4 * 4 + 4 <= at.count() && at.unit % 4 != 3) return;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.sum[m][n][i] += sums.other[m][n][i], sums.other[m][n][i] = 0;
  } else {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const uint32_t tile = numbers + m * number_bytes(kFormat);
      const uint4 a = load_shared(tile), b = kFormat == kFp8 ? load_shared(tile + 512) : make_uint4(0, 0, 0, 0);
      const uint32_t scale = scales + m * scale_bytes(kFormat) + (kFormat == kFp8 ? 0 : lane / 4 * (scale_bytes(kFormat) / 8));
      const uint2 s = load_shared_8(scale);
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        const uint4 x0 = operand_of(vectors, n, 0), x1 = operand_of(vectors, n, 1);
        if constexpr (kFormat == kFp8)
          multiply_unit_fp8(sums.sum[m][n], a, b, s, x0, x1);
        else
          multiply_unit_q4<kFormat == kQ4Min>(sums.sum[m][n], a, s, kFormat == kQ4Min ? load_shared_8(scale + 8) : make_uint2(0, 0), x0, x1);
      }
    }
  }
}

// Adds a warp's sums to the totals of its rows and of the first `tokens` tokens; `first`: there are none yet.
template <int kTiles>
__device__ inline void add_totals(float (&sum)[kTiles][kColumnTiles][4], bool first, int tokens, float *totals) {
  const int lane = threadIdx.x % 32;
  float *to = totals + lane % 4 * 2 * total_stride(kTiles) + threadIdx.x / 32 * kTiles * kTileRows + lane / 4;
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float *place = to + (n * 8 + i % 2) * total_stride(kTiles) + m * kTileRows + i / 2 * 8;
        if (n * 8 < tokens) *place = (first ? 0.0f : *place) + sum[m][n][i];
        sum[m][n][i] = 0;
      }
}

// What becomes of a block's totals.
template <int kTiles>
__device__ inline void finish_totals(const Prompt &p, int index, int first_tile, int first_token, const float *totals) {
  constexpr int kBlockRows = kTiles * kWarps * kTileRows;
  const ModelView &m = p.model;
  const int kind = kind_of(m, index), rows = m.shape[kind].rows, n = min(kTokens, p.rows - first_token);
  const float *bias = bias_of(m, index);
  if (kind == kGateUp) {
    for (int e = threadIdx.x; e < n * kBlockRows / 2; e += kThreads) {
      const int token = e / (kBlockRows / 2), at = e % (kBlockRows / 2), out = first_tile * 8 + at, row = at / 8 * kTileRows + at % 8;
      if (out >= m.inner) continue;
      const float *from = totals + token * total_stride(kTiles) + row;
      p.gated[int64_t(first_token + token) * m.inner + out] = __float2bfloat16_rn(gated_of(from[0], from[8], bias, first_tile * kTileRows + row));
    }
    return;
  }
  // of the last token the head reads words
  const bool words = kind == kDown && index / kLayerMatrices == m.layers - 1 && first_token + n == p.rows;
  for (int e = threadIdx.x; e < n * kBlockRows; e += kThreads) {
    const int token = e / kBlockRows, at = first_tile * kTileRows + e % kBlockRows;
    if (at >= rows) continue;
    const float value = rounded(totals[token * total_stride(kTiles) + e % kBlockRows] + (bias ? bias[at] : 0));
    __nv_bfloat16 *to = (kind == kQkv ? p.qkv : p.residual) + int64_t(first_token + token) * rows + at;
    const float sum = kind == kQkv ? value : __bfloat162float(*to) + value;
    *to = __float2bfloat16_rn(sum);
    if (words && token == n - 1) store_word(p.session.entering + int64_t(m.layers % 2) * m.hidden + at, sum, p.tag);
  }
}

// The group's `sums` sums, in order, to the totals of the block, which is the last of `parts` that arrived; false for the others.
template <int kTiles>
__device__ inline bool add_group(const Prompt &p, int group, int parts, int sums, int tokens, const float *from, float *totals, int *word) {
  constexpr int kStride = total_stride(kTiles), kQuads = kTiles * kWarps * kTileRows / 4;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *word = atomicInc(p.arrived + group, unsigned(parts - 1)) == unsigned(parts - 1);
  __syncthreads();
  if (!*word) return false;
  __threadfence();
  for (int e = threadIdx.x; e < tokens * kQuads; e += kThreads) {
    const int at = e / kQuads * kStride + e % kQuads * 4;
    uint4 v[kWarps];
#pragma unroll
    for (int j = 0; j < kWarps; ++j)
      v[j] = j < sums ? __ldcg(reinterpret_cast<const uint4 *>(from + j * (total_bytes(kTiles) / 4) + at)) : make_uint4(0, 0, 0, 0);
    float total[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < kWarps; ++j) {
      total[0] += __uint_as_float(v[j].x), total[1] += __uint_as_float(v[j].y);
      total[2] += __uint_as_float(v[j].z), total[3] += __uint_as_float(v[j].w);
    }
    for (int i = 0; i < 4; ++i) totals[at + i] = total[i];
  }
  return true;
}

// `shared_by` blocks for every kTiles * 8 tiles and kTokens tokens, those of the same tiles one after another.
template <int kFormat, int kTiles>
__global__ void __launch_bounds__(kThreads, 1) product_kernel(const __grid_constant__ Prompt p, int index, MatrixPlace matrix, int stages, int shared_by) {
  constexpr int kStage = stage_bytes(kFormat, kTiles);
  const int parts = kTiles == 1 ? shared_by : 1;  // the larger blocks are taken where there are enough of them
  const int kind = kind_of(p.model, index), across = (p.rows + kTokens - 1) / kTokens, warp = threadIdx.x / 32;
  const int group = int(blockIdx.x) / parts, first_sum = int(blockIdx.x) % parts * (kWarps / parts);
  const Shape &shape = p.model.shape[kind];
  const ProductPlace place{matrix.at(), shape, group / across * kTiles * kWarps, group % across * kTokens, p.rows,
                           kind == kOut ? p.attended : kind == kDown ? p.gated : p.normed};
  char *shared = shared_memory();
  const uint32_t ring = shared_address(shared);
  float *totals = reinterpret_cast<float *>(shared + stages * kStage), *sums_of_group = p.sums + int64_t(group) * kWarps * (total_bytes(kTiles) / 4);
  UnitWalk ahead{shape.units, chunk_shift(kFormat, p.model.narrow), first_sum}, at = ahead;
  const int n = parts == 1 ? shape.units : at.units_of(first_sum, first_sum + kWarps / parts), tokens = min(kTokens, p.rows - place.first_token);
  int loaded = 0, to = 0;
  const auto load = [&] {
    if (loaded++ < n) load_unit<kFormat, kTiles>(place, ahead, ring + to * kStage), ahead.next();
    to = to + 1 == stages ? 0 : to + 1;
    copy_commit();  // without copies too: it keeps the count of groups
  };
  for (int i = 0; i < stages - 1; ++i) load();
  UnitSums<kFormat, kTiles> sums{};
  for (int unit = 0, from = 0; unit < n; ++unit, from = from + 1 == stages ? 0 : from + 1) {
    switch (stages) {
      case 2: copy_wait<0>(); break;
      case 3: copy_wait<1>(); break;
      case 4: copy_wait<2>(); break;
      case 5: copy_wait<3>(); break;
      default: copy_wait<4>(); break;
    }
    __syncthreads();
    load();
    const uint32_t stage = ring + from * kStage, scales = stage + kTiles * kWarps * number_bytes(kFormat);
    multiply_unit<kFormat, kTiles>(sums, at, stage + warp * kTiles * number_bytes(kFormat), scales + warp * kTiles * scale_bytes(kFormat),
                                   stage + kTiles * kWarps * unit_bytes(kFormat));
    if (at.ends_sum()) {
      const int sum = at.chunk % kWarps;
      if (parts == 1)
        add_totals<kTiles>(sums.sum, sum == 0, tokens, totals);
      else
        add_totals<kTiles>(sums.sum, true, tokens, sums_of_group + sum * (total_bytes(kTiles) / 4));
    }
    at.next();
  }
  __syncthreads();
  if (parts > 1 && !add_group<kTiles>(p, group, parts, min(kWarps, at.chunks()), tokens, sums_of_group, totals, reinterpret_cast<int *>(shared)))
    return;
  __syncthreads();
  finish_totals<kTiles>(p, index, place.first_tile, place.first_token, totals);
}

}  // namespace kilat_cuda
