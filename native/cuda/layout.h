// layout.h: how weights lie in device memory, known to the packer, the stream and the products.
//
// A matrix [rows, k] is cut into tiles of 16 rows; a tile into units of 64 columns; some units make a chunk, which one copy brings to
// shared memory. Tiles, and chunks within a tile, lie one after another: reading a matrix is reading memory in order. Within a unit
// values have the order in which mma.m16n8k16 takes its left operand: what a lane loads as 16 bytes is what it multiplies.
//
// Columns: a group of 32 is two products; thread t = lane % 4 of a quad has columns 8 t ... 8 t + 7 of it, the first four in the
// first product. So its share of the right operand is 16 contiguous bytes of a bf16 vector.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace kilat_cuda {

enum Format : int { kBf16 = 0, kFp8 = 1, kQ4 = 2, kQ4Min = 3 };

constexpr int kWarps = 8;  // that compute
constexpr int kThreads = kWarps * 32;
constexpr int kBlockThreads = kThreads + 32;  // and one that brings the weights
constexpr int kTileRows = 16;
constexpr int kUnitColumns = 64;
constexpr int kScratch = 32;  // floats of shared memory: of warps for sums over a block, then the block's item of attention
constexpr int kMostHidden = kThreads * 4 * 8;  // what the registers of a block hold of a vector

// Bytes of a unit's numbers, and of the scales that lie behind the numbers of its chunk.
//   kFp8    2 fp32 (rows 0-7, rows 8-15), then 8 bytes nobody reads: sizes of copies are multiples of 16
//   kQ4     f16 scales per group of 32 columns: for g in 0..7: group 0 of rows g, g + 8; group 1 of rows g, g + 8
//   kQ4Min  as kQ4, and the minima in the same order after the scales of each g
__host__ __device__ constexpr int number_bytes(int format) { return format == kBf16 ? 2048 : format == kFp8 ? 1024 : 512; }
__host__ __device__ constexpr int scale_bytes(int format) {
  return format == kBf16 ? 0 : format == kFp8 ? 16 : format == kQ4 ? 64 : 128;
}
__host__ __device__ constexpr int unit_bytes(int format) { return number_bytes(format) + scale_bytes(format); }

// Units of a whole chunk, as a power of two; a tile's last chunk may have fewer. `narrow` models have small slots.
__host__ __device__ constexpr int chunk_shift(int format, bool narrow) {
  return format == kBf16 ? (narrow ? 1 : 2) : format == kFp8 ? (narrow ? 2 : 3) : 3;
}

// A matrix. Of its tiles every block has `share`, and `extra` blocks have one more.
struct Shape {
  int rows, columns;
  int tiles, units;
  int share, extra;
};

inline Shape shape_of(int64_t rows, int64_t columns, int blocks) {
  const int tiles = int((rows + kTileRows - 1) / kTileRows), units = int((columns + kUnitColumns - 1) / kUnitColumns);
  return {int(rows), int(columns), tiles, units, tiles / blocks, tiles % blocks};
}

__host__ __device__ inline int64_t matrix_bytes(const Shape &s, int format) {
  return int64_t(s.tiles) * s.units * unit_bytes(format);
}

// Byte of a bf16 matrix at which columns k, k + 1 of a row lie (k even).
__device__ inline int64_t bf16_pair_at(int units, int64_t row, int k) {
  const int r = int(row % kTileRows), e = k % 8;
  const int step = (k % 64) / 32 * 2 + e / 4, lane = (r % 8) * 4 + (k % 32) / 8, word = e % 4 / 2 * 2 + r / 8;
  return (row / kTileRows * units + k / 64) * 2048 + step * 512 + lane * 16 + word * 4;
}

// Groups of eight keys that a warp attends to in a round: their keys and values are in its registers (span.cuh).
__host__ __device__ constexpr int held_groups(int head_dim) { return head_dim <= 64 ? 4 : head_dim <= 128 ? 2 : 1; }
// Of the keys, or of the values, of a round.
__host__ __device__ constexpr int round_bytes(int head_dim) { return held_groups(head_dim) * 8 * head_dim * 2; }

// The matrices of a layer in the order in which they are read, and the head.
enum Kind : int { kQkv = 0, kOut = 1, kGateUp = 2, kDown = 3, kHead = 4 };
constexpr int kLayerMatrices = 4;

}  // namespace kilat_cuda
