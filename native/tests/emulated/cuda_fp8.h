// cuda_fp8.h: see cuda_bf16.h.
#pragma once

#include "cuda_runtime.h"

struct __nv_fp8_e4m3 {
  uint8_t __x;
  explicit operator float() const {
    const int exponent = __x >> 3 & 15, mantissa = __x & 7;
    if (exponent == 15 && mantissa == 7) return NAN;
    const float size = exponent ? ldexpf(float(8 + mantissa), exponent - 10) : ldexpf(float(mantissa), -9);
    return __x & 128 ? -size : size;
  }
};
