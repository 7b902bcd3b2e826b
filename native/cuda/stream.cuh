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

// A place in a warp's sequence of chunks.
class Cursor {
 public:
  // At the warp's first chunk of the matrices `index` ... `last`; `matrices` is the table in shared memory.
  __device__ Cursor(const Step &step, const MatrixPlace *matrices, int index, int last)
      : turn_(index), matrices_(matrices), index_(index), last_(last) {
    enter(step.model);
  }

  __device__ bool at_end() const { return index_ > last_; }
  __device__ int bytes() const { return min(1 << chunk_shift_, units_ - first_unit()) * unit_bytes_; }
  __device__ const char *source() const { return base_ + (int64_t(tile_) * units_ + first_unit()) * unit_bytes_; }

  __device__ void advance(const ModelView &m) {
    chunk_ += kWarps;
    if (to_tile()) return;
    ++index_, turn_.next();
    enter(m);
  }

 private:
  __device__ int first_unit() const { return chunk_ << chunk_shift_; }

  // At the first chunk of matrix index_, or of the next one of which the warp has any.
  __device__ void enter(const ModelView &m) {
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

  Turn turn_;
  const MatrixPlace *matrices_;
  const char *base_;
  int index_, last_, tile_, end_, chunk_, chunks_, units_, unit_bytes_, chunk_shift_;
};

// A warp's ring, and where it is filled from.
class Stream {
 public:
  // All threads of the block; has a barrier of the block.
  __device__ Stream(const Step &step, const Cursor &from, uint32_t ring, uint32_t barriers) : cursor_(from) {
    const int warp = threadIdx.x / 32;
    ring_ = ring + warp * step.slots * step.slot_bytes;
    barriers_ = barriers + warp * step.slots * 8;
#if KILAT_BULK
    if (threadIdx.x % 32 == 0)
#pragma unroll 1
      for (int i = 0; i < step.slots; ++i) barrier_init(barriers_ + i * 8, 1);
    barrier_init_visible();
    policy_ = policy_read_once();
#endif
    __syncthreads();
#pragma unroll 1
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

  // Brings `n` chunks beyond the ring to the device's cache: for a phase that will not take any for a while.
  __device__ void look_ahead(const ModelView &m, int n) const {
#if KILAT_BULK
    Cursor ahead = cursor_;
#pragma unroll 1
    for (; n > 0 && !ahead.at_end(); --n, ahead.advance(m))
      if (threadIdx.x % 32 == 0) prefetch_bulk(ahead.source(), ahead.bytes());
#endif
  }

 private:
  __device__ void issue(const Step &step, int slot) {
    if (!cursor_.at_end()) {
      const uint32_t to = ring_ + slot * step.slot_bytes;
#if KILAT_BULK
      if (threadIdx.x % 32 == 0) copy_bulk(to, cursor_.source(), cursor_.bytes(), barriers_ + slot * 8, policy_);
#else
      for (int i = threadIdx.x % 32 * 16; i < cursor_.bytes(); i += 512) copy_16(to + i, cursor_.source() + i);
#endif
      cursor_.advance(step.model);
    }
#if !KILAT_BULK
    copy_commit();  // without copies too: it keeps the count of groups
#endif
  }

  Cursor cursor_;
  uint64_t policy_;
  uint32_t ring_, barriers_;
  int slot_ = 0, parity_ = 0;
};

}  // namespace kilat_cuda
