// ptx.h: the other version of native/cuda/ptx.cuh. Copies are there at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../cuda/layout.h"

#define KILAT_BULK 1

namespace kilat_cuda {

constexpr unsigned kMostPolls = 100000;

inline char *shared_memory() { return kilat_emulated::shared(); }
inline uint32_t shared_address(const void *p) { return uint32_t(static_cast<const char *>(p) - shared_memory()); }
template <class T>
T *shared_at(uint32_t at) { return reinterpret_cast<T *>(shared_memory() + at); }
inline int thread_here() { return int(threadIdx.x); }
inline void sync_threads() { kilat_emulated::meet(1, kThreads); }
inline long clock() {
  static long ticks = 0;
  return ticks += 100;
}

// A barrier is the number of phases that have ended: all of them wait for one arrival.
inline void barrier_init(uint32_t barrier, int) { *shared_at<uint64_t>(barrier) = 0; }
inline void barrier_init_visible() {}
inline void barrier_arrive(uint32_t barrier) { ++*shared_at<uint64_t>(barrier); }
inline bool barrier_test(uint32_t barrier, int parity) {
  kilat_emulated::yield();
  return int(*shared_at<uint64_t>(barrier) & 1) != parity;
}
inline void barrier_wait(uint32_t barrier, int parity) {
  for (unsigned polls = 0; !barrier_test(barrier, parity);)
    if (++polls == kMostPolls) kilat_emulated::trap("a barrier's phase does not end");
}
// No other thread runs before the copies that follow.
inline void barrier_expect(uint32_t barrier, int) { barrier_arrive(barrier); }
inline void copy_bulk(uint32_t to, const void *from, int bytes, uint32_t, uint64_t) {
  if (bytes % 16 || to % 16 || reinterpret_cast<uintptr_t>(from) % 16) kilat_emulated::trap("a bulk copy is not aligned");
  memcpy(shared_at<char>(to), from, size_t(bytes));
}
inline void copy_16(uint32_t to, const void *from, bool on = true) {
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16) kilat_emulated::trap("a copy of 16 bytes is not aligned");
  if (on)
    memcpy(shared_at<char>(to), from, 16);
  else
    memset(shared_at<char>(to), 0, 16);
}
inline void copy_commit() {}
template <int kPending>
void copy_wait() {}
inline void prefetch_bulk(const void *, int) {}
inline uint64_t policy_read_once() { return 0; }

inline float half_of(uint64_t word, int i) { return __uint_as_float(uint32_t(word >> 16 * i & 0xffff) << 16); }

// Element (row, k) of the left operand and (k, column) of the right one, as lanes left them: words 0 ... 3 and 4, 5.
inline float left_of(int row, int k) {
  return half_of(kilat_emulated::lane_words()[(row % 8 * 4 + k % 8 / 2) * 8 + row / 8 + k / 8 * 2], k % 2);
}
inline float right_of(int k, int column) { return half_of(kilat_emulated::lane_words()[(column * 4 + k % 8 / 2) * 8 + 4 + k / 8], k % 2); }

inline void multiply_of(float (&c)[4], int depth, const uint32_t (&words)[6]) {
  const int lane = int(threadIdx.x % 32);
  for (int i = 0; i < 6; ++i) kilat_emulated::lane_words()[lane * 8 + i] = words[i];
  kilat_emulated::meet_warp();
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < depth; ++k) c[i] += left_of(lane / 4 + i / 2 * 8, k) * right_of(k, lane % 4 * 2 + i % 2);
  kilat_emulated::meet_warp();
}
inline void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply_of(c, 16, {a0, a1, a2, a3, b0, b1});
}
inline void multiply_8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) { multiply_of(c, 8, {a0, a1, 0, 0, b, 0}); }
inline uint32_t transposed(uint32_t v) {
  const int lane = int(threadIdx.x % 32), row = lane / 4;
  kilat_emulated::lane_words()[lane * 8] = v;
  kilat_emulated::meet_warp();
  uint32_t out = 0;
  for (int i = 0; i < 2; ++i) {
    const int column = lane % 4 * 2 + i;
    out |= uint32_t(kilat_emulated::lane_words()[(column * 4 + row / 2) * 8] >> row % 2 * 16 & 0xffff) << 16 * i;
  }
  kilat_emulated::meet_warp();
  return out;
}

inline uint4 load_shared(uint32_t at) {
  if (at % 16) kilat_emulated::trap("a load of shared memory is not aligned");
  return *shared_at<uint4>(at);
}
inline uint2 load_shared_8(uint32_t at) { return *shared_at<uint2>(at); }
inline void add_release(unsigned *at, unsigned n) { *at += n; }
inline unsigned load_acquire(const unsigned *at) { return __ldcg(at); }
inline uint4 load_words(const uint32_t *p) { return __ldcg(reinterpret_cast<const uint4 *>(p)); }
inline uint4 load_words_4(const void *p) { return __ldcg(static_cast<const uint4 *>(p)); }
inline uint32_t load_word(const uint32_t *p) { return __ldcg(p); }
inline void store_words_4(void *p, const uint4 &v) { *static_cast<uint4 *>(p) = v; }
inline void store_bits(uint32_t *p, uint32_t word) { *p = word; }

}  // namespace kilat_cuda
