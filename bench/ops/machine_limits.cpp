// Prints what this machine's cores and memory can do, as JSON: the limits that bench_cpu_ops.py compares with.
//   g++ -O2 -std=c++17 -march=native -pthread machine_limits.cpp -o limits && ./limits THREADS
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <thread>
#include <vector>

static double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

template <class F>
static double best_s(int threads, int repeats, F work) {
  double best = 1e30;
  for (int r = 0; r < repeats; r++) {
    std::vector<std::thread> pool;
    double start = now_s();
    for (int i = 0; i < threads; i++) pool.emplace_back(work, i);
    for (auto &t : pool) t.join();
    double took = now_s() - start;
    if (took < best) best = took;
  }
  return best;
}

static const long kSteps = 4000000;

#if defined(__AVX512BF16__)
static const double kPairFlops = 20.0 * 64;
static void pair_products() {
  __m512 acc[20] = {};
  for (int i = 0; i < 20; i++) asm volatile("" : "+v"(acc[i]));  // or the compiler sees that all chains are the same
  __m512i x = _mm512_set1_epi32(0x3f803f80);
  for (long k = 0; k < kSteps; k++) {
    asm volatile("" : "+v"(x));
#pragma GCC unroll 20
    for (int i = 0; i < 20; i++) acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)x, (__m512bh)x);
  }
  for (int i = 0; i < 20; i++) asm volatile("" ::"v"(acc[i]));
}
#else
static const double kPairFlops = 0;
static void pair_products() {}
#endif

#if defined(__AVX512F__)
typedef __m512 Vector;
static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
static Vector ones() { return _mm512_set1_ps(1); }
#else
typedef __m256 Vector;
static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
static Vector ones() { return _mm256_set1_ps(1); }
#endif

static void fp32_products() {
  Vector acc[12] = {}, x = ones();
  for (int i = 0; i < 12; i++) asm volatile("" : "+v"(acc[i]));
  for (long k = 0; k < kSteps; k++) {
    asm volatile("" : "+v"(x));
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) acc[i] = multiply_add(x, x, acc[i]);
  }
  for (int i = 0; i < 12; i++) asm volatile("" ::"v"(acc[i]));
}

static void read_all(const char *p, long bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (long i = 0; i < bytes; i += 128) {
    _mm_prefetch(p + i + 4096, _MM_HINT_T0);
    _mm_prefetch(p + i + 4096 + 64, _MM_HINT_T0);
    a = _mm256_xor_si256(a, _mm256_load_si256((const __m256i *)(p + i)));
    b = _mm256_xor_si256(b, _mm256_load_si256((const __m256i *)(p + i + 32)));
    c = _mm256_xor_si256(c, _mm256_load_si256((const __m256i *)(p + i + 64)));
    d = _mm256_xor_si256(d, _mm256_load_si256((const __m256i *)(p + i + 96)));
  }
  a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  asm volatile("" ::"x"(a));
}

int main(int argc, char **argv) {
  int threads = argc > 1 ? atoi(argv[1]) : 1, repeats = 5;
  const long bytes = 512l << 20;
  char *memory = static_cast<char *>(aligned_alloc(2 << 20, bytes));
  if (!memory) return 1;
  madvise(memory, bytes, MADV_HUGEPAGE);
  memset(memory, 1, bytes);
  double pairs = best_s(threads, repeats, [](int) { pair_products(); });
  double fp32 = best_s(threads, repeats, [](int) { fp32_products(); });
  double read = best_s(threads, repeats, [=](int i) { read_all(memory + bytes / threads * i, bytes / threads / 128 * 128); });
  printf("{\"bf16_gflops\": %.1f, \"fp32_gflops\": %.1f, \"read_gb_s\": %.1f}\n", threads * kSteps * kPairFlops / pairs * 1e-9,
         threads * kSteps * 12.0 * sizeof(Vector) / 4 * 2 / fp32 * 1e-9, bytes / read * 1e-9);
  free(memory);
  return 0;
}
