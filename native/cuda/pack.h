// pack.h: weights as files have them to weights as the kernels read them, on the device.
#pragma once

#include <cuda_bf16.h>

#include "../runtime/backend.h"
#include "layout.h"

namespace kilat_cuda {

// A tensor whose bytes (and fp8 scales) were copied to the device as they are.
struct Source {
  const uint8_t *data;
  int64_t rows, columns, row_bytes;
  int type, paired_heads, head_dim;
  const uint8_t *scales;
  int scale_type, block_rows, block_columns;
};

// Device format that holds a stored type exactly (4-bit scales are rounded to f16 where the file has two levels of them).
int stored_format(const kilat_tensor &t);

// Writes rows of `source` to half-tiles first + step * i, i = 0, 1, ..., of a matrix that was filled with zeros.
struct Target {
  char *matrix;
  int format, units;
  bool narrow;
  int first_half, half_step;
};
cudaError_t pack(const Source &source, const Target &target, cudaStream_t stream);

// All values of `source` in order as bf16, or rounded to bf16 and stored as fp32.
cudaError_t widen(const Source &source, __nv_bfloat16 *out, cudaStream_t stream);
cudaError_t widen(const Source &source, float *out, cudaStream_t stream);

}  // namespace kilat_cuda
