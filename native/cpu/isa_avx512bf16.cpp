// The kernels for one instruction set; the build gives this file, and no other, the flags for it.
#define KILAT_ISA avx512bf16
#define KILAT_TABLE kAvx512Bf16
#define KILAT_DP 1
// Register tiles of the products: rows times vectors of accumulators that fit the register file.
#define TALL_ROWS 14
#define TALL_VECTORS 2
#define WIDE_ROWS 6
#define WIDE_VECTORS 4
// Rows of a tile with quantized weights.
#define QUANT_ROWS 6
#define KILAT_SIMD "simd_avx512.h"

#include "isa.h"
