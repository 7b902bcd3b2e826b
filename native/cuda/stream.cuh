// stream.cuh: the weights of a whole pass as one stream into shared memory.
//
// Every warp has a ring of slots and brings its own chunks: the chunks of a block's tiles, counted through, go to its warps in turn.
// Weights do not depend on anything that a pass computes, so the stream runs ahead over the end of a matrix and over barriers of the
// grid as far as the rings reach; memory stays busy while blocks wait for each other.
#pragma once

#include "ptx.cuh"
#include "step.h"

namespace kilat_cuda {

// The tiles of a matrix that the block of this rank works on.
__device__ inline void tiles_of_rank(const Shape &s, int rank, int &begin, int &end) {
  begin = s.share * rank + min(rank, s.extra);
  end = begin + s.share + (rank < s.extra);
}

// Ranks of a block: they turn from matrix to matrix, so that the tiles more fall on all blocks alike. The head's ranks are the blocks'
// numbers: its outputs are in their order.
class Turn {
 public:
  __device__ explicit Turn(int index) : rank_((blockIdx.x + index * kStep) % gridDim.x) {}
  __device__ void next() {
    rank_ += kStep;
    while (rank_ >= int(gridDim.x)) rank_ -= gridDim.x;
  }
  __device__ int rank(int kind) const { return kind == kHead ? int(blockIdx.x) : rank_; }

 private:
  static constexpr int kStep = 37;
  int rank_;
};

__device__ inline int kind_of(const ModelView &m, int index) {
  return index == m.layers * kLayerMatrices ? kHead : index % kLayerMatrices;
}

// Where a warp is in the stream.
class Stream {
 public:
  __device__ explicit Stream(const Step &step) : turn_(step.first_matrix) {}

  // All threads of the block; ends with a barrier of the block. `matrices` is the table in shared memory.
  __device__ void start(const Step &step, const MatrixPlace *matrices, uint32_t ring, uint32_t barriers, int last_matrix) {
    matrices_ = matrices;
    last_ = last_matrix;
    const int warp = threadIdx.x / 32;
    ring_ = ring + warp * step.slots * step.slot_bytes;
    barriers_ = barriers + warp * step.slots * 8;
#if KILAT_BULK
    if (threadIdx.x % 32 == 0)
      for (int i = 0; i < step.slots; ++i) barrier_init(barriers_ + i * 8, 1);
    barrier_init_visible();
    policy_ = policy_read_once();
#endif
    __syncthreads();
    index_ = step.first_matrix;
    enter_matrix(step);
    for (int i = 0; i < step.slots; ++i) issue(step, i);
  }

  // The next chunk of this warp is in shared memory at the address returned.
  __device__ uint32_t wait(const Step &step) {
#if KILAT_BULK
    barrier_wait(barriers_ + slot_ * 8, parity_);
#else
    switch (step.slots) {  // all copies but the last slots - 1 groups are there
      case 1: copy_wait<0>(); break;
      case 2: copy_wait<1>(); break;
      case 3: copy_wait<2>(); break;
      default: copy_wait<3>(); break;
    }
    __syncwarp();
#endif
    return ring_ + slot_ * step.slot_bytes;
  }

  // This warp has read its chunk: fill the slot again.
  __device__ void release(const Step &step) {
    __syncwarp();
    issue(step, slot_);
    if (++slot_ == step.slots) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  // At the first chunk of matrix index_, or of the next one of which the warp has any.
  __device__ void enter_matrix(const Step &step) {
    const ModelView &m = step.model;
    for (; index_ <= last_; ++index_, turn_.next()) {
      const int kind = kind_of(m, index_), format = matrices_[index_].format();
      tiles_of_rank(m.shape[kind], turn_.rank(kind), tile_, end_);
      units_ = m.shape[kind].units;
      unit_bytes_ = unit_bytes(format);
      chunk_shift_ = chunk_shift(format, m.narrow);
      chunks_ = (units_ + (1 << chunk_shift_) - 1) >> chunk_shift_;
      base_ = matrices_[index_].at();
      chunk_ = threadIdx.x / 32;
      if (to_tile()) return;
    }
  }

  // Chunks beyond the end of a tile are the next one's; false beyond the last tile.
  __device__ bool to_tile() {
    for (; chunk_ >= chunks_; chunk_ -= chunks_) ++tile_;
    return tile_ < end_;
  }

  __device__ void issue(const Step &step, int slot) {
    if (index_ > last_) {
#if !KILAT_BULK
      copy_commit();  // keeps the count of groups
#endif
      return;
    }
    const int first = chunk_ << chunk_shift_;
    const int bytes = min(1 << chunk_shift_, units_ - first) * unit_bytes_;
    const char *from = base_ + (int64_t(tile_) * units_ + first) * unit_bytes_;
    const uint32_t to = ring_ + slot * step.slot_bytes;
#if KILAT_BULK
    if (threadIdx.x % 32 == 0) copy_bulk(to, from, bytes, barriers_ + slot * 8, policy_);
#else
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512) copy_16(to + i, from + i);
    copy_commit();
#endif
    chunk_ += kWarps;
    if (to_tile()) return;
    ++index_, turn_.next();
    enter_matrix(step);
  }

  Turn turn_;
  const MatrixPlace *matrices_;
  const char *base_;
  uint64_t policy_;
  uint32_t ring_, barriers_;
  int slot_ = 0, parity_ = 0;
  int index_, last_, tile_, end_, chunk_, chunks_, units_, unit_bytes_, chunk_shift_;
};

}  // namespace kilat_cuda
