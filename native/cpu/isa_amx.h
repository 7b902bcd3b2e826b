// The kernels of AMX: products on tiles, and everything else as kAvx512Bf16 has it. What the instructions are is included first.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <immintrin.h>

#include "amx_choice.h"

namespace kilat {
namespace amx {

#define INLINE static inline __attribute__((always_inline))
#define KILAT_DP 1
#define QUANT_ROWS 1  // the register tiles of quant_tile.h are not used here

typedef int32_t int32_unaligned __attribute__((aligned(1), may_alias));
typedef float float_aliasing __attribute__((aligned(1), may_alias));

#include "simd_avx512.h"

#include "vector_math.h"
// (order matters from here on)
#include "units.h"
#include "product.h"
#include "quant_tile.h"
#include "quant_linear.h"
#include "amx_linear.h"
#include "amx_quant.h"
#include "amx_check.h"

static Table table() {
  Table t = kAvx512Bf16;
  t.linear = linear;
  t.quant_linear = quant_tile_linear;
  return t;
}

}  // namespace amx

const Table *amx_table() {
  static const Table table = amx::table();
  return &table;
}

bool amx_sound() { return amx::check(); }

}  // namespace kilat
