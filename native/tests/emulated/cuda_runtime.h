// cuda_runtime.h: as much of CUDA as native/cuda uses, on the host, so that its kernels are tested where there is no device.
//
// Every thread of a cooperative launch is a fibre; fibres change at every meeting of threads and at every look at memory that another
// thread writes, in an order drawn from a seed. A launch in which nothing moves any more ends the process with a message.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <utility>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

using std::max;
using std::min;

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float3 { float x, y, z; };
struct dim3 {
  unsigned x, y = 1, z = 1;
  dim3(unsigned n = 1) : x(n) {}
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }

namespace kilat_emulated {

// What a running kernel sees of its place.
struct Place {
  dim3 thread, block, blocks;
};
extern Place *here;

void yield();             // lets other threads run
void meet_warp();         // waits for the 32 threads of the warp
void meet(int id, int n); // waits for n threads of the block
[[noreturn]] void trap(const char *what);
uint64_t *lane_words();   // [32, 8]: where lanes of the warp leave values for each other
char *shared();           // of the block

// Runs `body` on every thread of a launch: all of them at once, block after block, or thread after thread.
void run_together(dim3 blocks, dim3 threads, size_t shared_bytes, void (*body)(void *), void *argument);
void run_blocks(dim3 blocks, dim3 threads, size_t shared_bytes, void (*body)(void *), void *argument);
void run_apart(dim3 blocks, dim3 threads, void (*body)(void *), void *argument);

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<A> *>(arguments[I])...);
}
template <class... A>
struct Bound {
  void (*kernel)(A...);
  void **arguments;
  static void run(void *bound) {
    const Bound &b = *static_cast<Bound *>(bound);
    call(b.kernel, b.arguments, std::index_sequence_for<A...>());
  }
};

// Leaves a value for the other lanes and takes that of lane `from`.
template <class T>
T exchange(T value, int from) {
  static_assert(sizeof(T) <= 8, "a word");
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  lane_words()[here->thread.x % 32 * 8] = word;
  meet_warp();
  memcpy(&value, lane_words() + from * 8, sizeof value);
  meet_warp();
  return value;
}

}  // namespace kilat_emulated

#define threadIdx (kilat_emulated::here->thread)
#define blockIdx (kilat_emulated::here->block)
#define gridDim (kilat_emulated::here->blocks)
#define blockDim (dim3(256))  // of the kernels that pack weights; the others do not ask

inline void __syncthreads() { kilat_emulated::meet(0, 0); }
inline void __syncwarp() { kilat_emulated::meet_warp(); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __trap() { kilat_emulated::trap("a kernel gave up"); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return kilat_emulated::exchange(value, int(threadIdx.x % 32) ^ mask);
}
template <class T>
T __ldg(const T *p) { return *p; }
template <class T>
T __ldcg(const T *p) {
  kilat_emulated::yield();
  return *p;
}
template <class T>
void __stcg(T *p, T v) { *p = v; }
template <class T>
T atomicAdd(T *p, T v) { return std::exchange(*p, *p + v); }
inline unsigned atomicInc(unsigned *p, unsigned most) { return std::exchange(*p, *p >= most ? 0 : *p + 1); }
inline unsigned atomicOr(unsigned *p, unsigned v) { return std::exchange(*p, *p | v); }
inline uint32_t __float_as_uint(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline float __uint_as_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> ((selector >> 4 * i & 7) * 8) & 255) << 8 * i;
  return out;
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned long long __float2ull_rn(float x) { return static_cast<unsigned long long>(nearbyintf(x)); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline long long clock64() { return 0; }

// The runtime's calls.
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaHostAllocMapped = 2, cudaHostAllocPortable = 1, cudaStreamNonBlocking = 1, cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
typedef struct CUstream_st *cudaStream_t;
struct cudaDeviceProp {
  char name[32];
  int major, minor, multiProcessorCount;
  size_t sharedMemPerBlockOptin;
};
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device);
template <class T>
cudaError_t cudaMalloc(T **p, size_t bytes) { return cudaMalloc(reinterpret_cast<void **>(p), bytes); }
inline cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
inline cudaError_t cudaFreeHost(void *p) { return cudaFree(p); }
inline cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) { return *device = host, cudaSuccess; }
inline cudaError_t cudaMemset(void *p, int value, size_t bytes) { return memset(p, value, bytes), cudaSuccess; }
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) { return memcpy(to, from, bytes), cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t = nullptr) {
  return memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows, cudaMemcpyKind,
                                     cudaStream_t = nullptr) {
  for (size_t i = 0; i < rows; ++i) memcpy(static_cast<char *>(to) + i * to_pitch, static_cast<const char *>(from) + i * from_pitch, width);
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int *n) { return *n = 1, cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { return *s = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t) { return "emulated"; }
template <class T>
cudaError_t cudaFuncSetAttribute(T *, int, int) { return cudaSuccess; }
// Threads of kernels without shared memory have nothing to say to each other.
template <class... A>
cudaError_t cudaLaunchKernel(void (*kernel)(A...), dim3 blocks, dim3 threads, void **arguments, size_t shared_bytes, cudaStream_t) {
  kilat_emulated::Bound<A...> bound{kernel, arguments};
  if (shared_bytes)
    kilat_emulated::run_blocks(blocks, threads, shared_bytes, bound.run, &bound);
  else
    kilat_emulated::run_apart(blocks, threads, bound.run, &bound);
  return cudaSuccess;
}
template <class... A>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(A...), dim3 blocks, dim3 threads, void **arguments, size_t shared_bytes, cudaStream_t) {
  kilat_emulated::Bound<A...> bound{kernel, arguments};
  kilat_emulated::run_together(blocks, threads, shared_bytes, bound.run, &bound);
  return cudaSuccess;
}
