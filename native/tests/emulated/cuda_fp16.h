// cuda_fp16.h: see cuda_bf16.h.
#pragma once

#include "cuda_runtime.h"

struct __half { _Float16 value; };
struct __half2 { __half x, y; };

inline float __half2float(__half h) { return float(h.value); }
inline __half __float2half_rn(float x) { return {_Float16(x)}; }
inline __half __ushort_as_half(uint16_t bits) {
  __half h;
  memcpy(&h, &bits, 2);
  return h;
}
inline float2 __half22float2(__half2 h) { return {float(h.x.value), float(h.y.value)}; }
