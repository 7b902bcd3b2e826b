// exchange.cuh: vectors that blocks write in parts and all blocks read, without a barrier.
//
// A bf16 number lies in the upper half of a 32-bit word whose lower half is the tag of the phase that wrote it; a number and its tag are
// one store, so who sees the tag has the number. Readers load what they need and load again what is not there yet: one trip through the
// device's cache instead of a fence, an atomic and a poll before it. Partial sums of attention are fp32, three beside a 32-bit tag.
//
// A word is written again two layers later at the earliest. In between lies a phase to which every block contributes and for which all
// wait (the host asks for a barrier per layer where a matrix is too small for that), so no reader is that late.
#pragma once

#include "ptx.cuh"
#include "step.h"

namespace kilat_cuda {

__device__ inline void store_word(uint32_t *p, float value, unsigned tag) {
  store_bits(p, (uint32_t(__bfloat16_as_ushort(__float2bfloat16_rn(value))) << 16) | tag);
}
__device__ inline float number_of(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }
// Two words' numbers as a bf16 pair.
__device__ inline uint32_t pair_of_words(uint32_t lo, uint32_t hi) { return __byte_perm(lo, hi, 0x7632); }

__device__ inline bool has_tag(const uint4 &v, unsigned tag) {
  return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 0xffffu) == 0;
}

// Counts rounds of a wait.
class Patience {
 public:
  __device__ void round() {
    if (++polls_ == kMostPolls) __trap();
  }

 private:
  unsigned polls_ = 0;
};

// An element of a span's attention: its sum, and the maximum and total of its head's scores. The tag travels in the same store.
struct alignas(16) Partial {
  float sum, top, total;
  unsigned tag;
};
__device__ inline void store_partial(Partial *p, const float3 &v, unsigned tag) {
  store_words_4(p, make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), tag));
}
__device__ inline Partial load_partial(const Partial *p) {
  const uint4 v = load_words_4(p);
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), v.w};
}

}  // namespace kilat_cuda
