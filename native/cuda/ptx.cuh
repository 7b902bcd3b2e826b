// ptx.cuh: the few instructions that C++ has no name for. The tests have another version of them, for the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "layout.h"

#ifdef KILAT_EMULATED
#include "../tests/emulated/ptx.h"
#else

// Bulk copies that complete on a barrier in shared memory exist from sm_90 on; before, and with KILAT_NO_BULK, lanes copy 16 bytes each.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(KILAT_NO_BULK)
#define KILAT_BULK 1
#else
#define KILAT_BULK 0
#endif

namespace kilat_cuda {

__device__ inline uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

#if KILAT_BULK
__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_init_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One thread: the barrier's phase ends when copies have brought so many bytes.
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void copy_bulk(uint32_t to, const void *from, int bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ inline void prefetch_bulk(const void *from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ inline uint64_t policy_read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Whether the phase of this parity has ended.
__device__ inline bool barrier_test(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
__device__ inline void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
#endif

// 16 bytes to shared memory, or zeros if not `on` (then nothing is read).
__device__ inline void copy_16(uint32_t to, const void *from, bool on = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(on ? 16 : 0) : "memory");
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8], bf16 with fp32 sums.
__device__ inline void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c [16, 8] += a [16, 8] b [8, 8].
__device__ inline void multiply_8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}
// An 8 x 8 matrix of bf16, of which lane 4 r + c has elements 2 c and 2 c + 1 of row r, transposed.
__device__ inline uint32_t transposed(uint32_t v) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

__device__ inline uint4 load_shared(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ inline uint2 load_shared_8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}

__device__ inline void add_release(unsigned *at, unsigned n) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(n) : "memory");
}
__device__ inline unsigned load_acquire(const unsigned *at) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

constexpr unsigned kMostPolls = 1u << 22;  // seconds: a block is gone, and an error is better than a device that hangs

// A barrier of the threads that compute.
__device__ inline void sync_threads() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// Words and tagged numbers (exchange.cuh) past the processor's own cache.
__device__ inline uint4 load_words(const uint32_t *p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
// The same of 16 bytes that are there all at once, or not at all: one access, not four words.
__device__ inline uint4 load_words_4(const void *p) {
  uint64_t lo, hi;
  asm volatile(
      "{\n"
      ".reg .b128 v;\n"
      "ld.relaxed.gpu.global.b128 v, [%2];\n"
      "mov.b128 {%0, %1}, v;\n"
      "}\n"
      : "=l"(lo), "=l"(hi)
      : "l"(p)
      : "memory");
  return make_uint4(uint32_t(lo), uint32_t(lo >> 32), uint32_t(hi), uint32_t(hi >> 32));
}
__device__ inline void store_words_4(void *p, const uint4 &v) {
  asm volatile(
      "{\n"
      ".reg .b128 v;\n"
      "mov.b128 v, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], v;\n"
      "}\n" ::"l"(p),
      "l"(uint64_t(v.y) << 32 | v.x), "l"(uint64_t(v.w) << 32 | v.z)
      : "memory");
}
__device__ inline uint32_t load_word(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void store_bits(uint32_t *p, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}

// The thread's number, of which the compiler does not know that it is the same in every layer: otherwise it computes all addresses once,
// before the first layer, and keeps them in local memory.
__device__ inline int thread_here() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

// The block's dynamic shared memory.
__device__ inline char *shared_memory() {
  extern __shared__ __align__(128) char bytes[];
  return bytes;
}

}  // namespace kilat_cuda
#endif

namespace kilat_cuda {

// Elements of a bf16 pair as fp32.
__device__ inline float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
__device__ inline uint32_t pair_of(float lo, float hi) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t *>(&p);
}

}  // namespace kilat_cuda
