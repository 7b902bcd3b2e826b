// Quantized weights: what a packed one looks like, and what packs it. The kernels for it are in quant_tile.h and quant_linear.h.
//
// A panel holds 32 output columns as one stream: for each group of 32 inputs a record of scales and then of quants, and before every
// eighth group, for the formats with blocks of 256, a header. Everything is a plane of 32 lanes, one lane a column:
//   header   K_MIN: d, dmin; K_HALVES: d (fp16)
//   scales   PLAIN: d; WITH_MIN: d, min (fp16); K_MIN: scale, min (uint8); K_HALVES: the scales of inputs 0-15 and 16-31 (int8)
//   quants   unsigned; step s is inputs 4 s .. 4 s + 3 of the group, a byte each in a lane of 4 bytes
//     8 bits: 8 planes, one a step (the format's signed byte + 128)
//     fewer: 4 planes of low nibbles: plane p has step 2 p in the low and step 2 p + 1 in the high half of each byte; then
//       5 bits: 1 plane, bit s of a byte is the high bit of step s
//       6 bits: 2 planes, plane p has in bits 2 i, 2 i + 1 of a byte the high bits of step 4 p + i
#pragma once

#include <stdint.h>

#include "kilat_cpu.h"
#include "pool.h"

namespace kilat {

struct bf16;
struct Linear;

// Columns of a panel, of quantized and other weights.
enum { PANEL = 32 };

enum { GROUP = 32, GROUP_STEPS = GROUP / 4, PLANE = PANEL * 4, HEADER_GROUPS = 8 };

enum QuantScales { PLAIN, WITH_MIN, K_MIN, K_HALVES };

constexpr int header_bytes_of(QuantScales s) { return s == K_MIN ? 4 * PANEL : s == K_HALVES ? 2 * PANEL : 0; }
constexpr int scale_bytes_of(QuantScales s) { return s == WITH_MIN ? 4 * PANEL : 2 * PANEL; }
constexpr int quant_bytes_of(int bits) { return bits * GROUP * PANEL / 8; }

struct QuantType {
  int ggml;  // number of the type in GGUF
  int values, block_bytes;
  int bits;
  int offset_bits;  // 2^offset_bits is subtracted from a stored quant; 0: nothing is, the format has minimums
  QuantScales scales;
};

// nullptr for a type that is not supported.
const QuantType *quant_type(int ggml);

// Rows of one type: columns first .. first + n - 1 of the output, panels first_panel .. of the weight.
struct QuantPart {
  const QuantType *type;
  int64_t first, n, first_panel, panels, panel_bytes;
  char *data;  // panels * panel_bytes, 64-byte aligned
};

// Set everything of w but its memory; false when the parts do not fit k or are not supported.
bool quant_plan(Linear *w, const kilat_blocks *parts, int n_parts, int64_t k, bool bias);

// Length of w->bias: a tile loads whole vectors from any column on.
int64_t quant_bias_floats(const Linear &w);

// Take `memory` of w->bytes and write the panels there; the bias is left to the caller.
void quant_fill(Pool *pool, Linear *w, const kilat_blocks *parts, bool bias, char *memory);

// out [rows, k] = rows ids[r], each value rounded once; they are there.
void quant_gather(Pool *pool, const Linear *w, const int32_t *ids, int64_t rows, bf16 *out);

}  // namespace kilat
