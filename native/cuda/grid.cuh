// grid.cuh: barriers of the grid, and sums over a block.
#pragma once

#include "exchange.cuh"

namespace kilat_cuda {

// Barriers of one launch. The counter in memory only grows (and wraps); the host knows where it stands when a launch begins.
class Grid {
 public:
  __device__ explicit Grid(const Step &step) : session_(step.session), passed_(step.barriers) {}

  // All threads: what any thread of the grid wrote before, every thread may read after (past L1).
  __device__ void sync() {
    sync_threads();
    ++passed_;
    if (threadIdx.x == 0) {
      add_release(session_.barrier, 1);
      const unsigned target = passed_ * gridDim.x;
      for (Patience patience; int(load_acquire(session_.barrier) - target) < 0;) patience.round();
    }
    sync_threads();
  }

  // Block 0 notes its clock.
  __device__ void mark() {
    if (session_.trace && blockIdx.x == 0 && threadIdx.x == 0) session_.trace[marks_++] = clock64();
  }

 private:
  const SessionView &session_;
  unsigned passed_;
  int marks_ = 0;
};

// Sum over the block, the same bits on every thread; `scratch` is 32 values of shared memory. Two barriers.
template <class T>
__device__ inline T block_sum(T value, T *scratch) {
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  sync_threads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  sync_threads();
  T total = 0;
  for (int i = 0; i < kWarps; ++i) total += scratch[i];
  return total;
}

__device__ inline unsigned long long block_max(unsigned long long value, unsigned long long *scratch) {
  for (int d = 16; d > 0; d /= 2) value = max(value, __shfl_xor_sync(~0u, value, d));
  sync_threads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  sync_threads();
  unsigned long long top = 0;
  for (int i = 0; i < kWarps; ++i) top = max(top, scratch[i]);
  return top;
}

// Sum of the values of threads 0 ... this one; `scratch` is kThreads values of shared memory.
__device__ inline unsigned long long block_scan(unsigned long long value, unsigned long long *scratch) {
  for (int d = 1; d < kThreads; d *= 2) {
    sync_threads();
    scratch[threadIdx.x] = value;
    sync_threads();
    if (int(threadIdx.x) >= d) value += scratch[threadIdx.x - d];
  }
  sync_threads();
  return value;
}

}  // namespace kilat_cuda
