// The storage formats of tensors: sizes, and the exact fp32 values they stand for.
#pragma once

#include <stdint.h>
#include <string.h>

namespace kilat {

// `bytes` bytes hold `items` values of one row. readable: widen_row takes it.
struct Format {
  int32_t type;
  const char *name;
  int32_t items, bytes;
  bool readable;
};

// The format with this number (those of GGUF files, and KILAT_TYPE_F8_E4M3), or nullptr.
const Format *format_of(int64_t type);

// n values of a row of whole blocks, n a multiple of the block's items, as fp32. The order of operations is that of the `gguf`
// package, so the values are the same to the bit. Not for fp8.
void widen_row(int32_t type, const void *data, int64_t n, float *out);

// Nearest bf16, ties to even; NaN stays NaN.
inline uint16_t bf16_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return uint16_t((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

}  // namespace kilat
