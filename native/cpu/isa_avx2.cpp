// The kernels for one instruction set; the build gives this file, and no other, the flags for it.
#define KILAT_ISA avx2
#define KILAT_TABLE kAvx2
#define KILAT_DP 0
// Register tiles of the products: rows times vectors of accumulators that fit the register file.
#define TALL_ROWS 6
#define TALL_VECTORS 2
#define WIDE_ROWS 3
#define WIDE_VECTORS 4
// Rows of a tile with quantized weights.
#define QUANT_ROWS 2
#define KILAT_SIMD "simd_avx2.h"

#include "isa.h"
