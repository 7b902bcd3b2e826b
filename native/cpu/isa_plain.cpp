// The kernels for one instruction set; the build gives this file, and no other, the flags for it.
#define KILAT_ISA plain
#define KILAT_TABLE kPlain
#define KILAT_DP 0
// Register tiles of the products: rows times vectors of accumulators that fit the register file.
#define TALL_ROWS 4
#define TALL_VECTORS 2
#define WIDE_ROWS 2
#define WIDE_VECTORS 4
// Rows of a tile with quantized weights.
#define QUANT_ROWS 1
#define KILAT_SIMD "simd_plain.h"

#include "isa.h"
