// Included once per instruction set, with its macros set: all kernels, in a namespace of their own so that no function compiled
// for one processor can be linked in place of another's.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "context.h"

namespace kilat {
namespace KILAT_ISA {

#define INLINE static inline __attribute__((always_inline))

typedef int32_t int32_unaligned __attribute__((aligned(1), may_alias));
typedef float float_aliasing __attribute__((aligned(1), may_alias));

static inline bf16 round_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if (x != x) return bf16{0x7fc0};
  return bf16{uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

#include KILAT_SIMD

#include "vector_math.h"
// (order matters from here on)
#include "product.h"
#include "units.h"
#include "linear_tile.h"
#include "linear.h"
#include "quant_tile.h"
#include "quant_linear.h"
#include "norm.h"
#include "greedy.h"
#include "sample.h"
#include "rope_write.h"
#include "attention_state.h"
#include "attention_products.h"
#include "attention.h"
#include "attention_plan.h"

}  // namespace KILAT_ISA

extern const Table KILAT_TABLE = {
    KILAT_ISA::linear,
    KILAT_ISA::quant_linear,
    {KILAT_ISA::norm<float>, KILAT_ISA::norm<bf16>},
    {KILAT_ISA::silu_mul<float>, KILAT_ISA::silu_mul<bf16>},
    {KILAT_ISA::greedy<float>, KILAT_ISA::greedy<bf16>},
    KILAT_ISA::sample_rows,
    {KILAT_ISA::rope_write<float>, KILAT_ISA::rope_write<bf16>},
    {KILAT_ISA::attention<float>, KILAT_ISA::attention<bf16>},
};

}  // namespace kilat
