// The tile instructions of Intel's AMX. Tests put a model of them in the place of this file (native/tests/amx/amx_model.h).
//
// Written out, for the compilers' own intrinsics hide from them what is read: gcc 12's _tile_loadconfig names 8 of the 64 bytes, so the
// rest of a shape on the stack may be dropped as never read, and the first tile load then dies of SIGILL; its _tile_loadd may move ahead of
// the stores that fill what it loads. Operands are in the order of AT&T syntax, the destination last.
#pragma once

#include <stdint.h>

#define AMX_CODE __attribute__((target("amx-tile,amx-bf16,amx-int8")))

namespace kilat {
namespace amx {

// What LDTILECFG loads; palette 1 is eight tiles of at most 16 rows of 64 bytes.
struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Shapes and contents of the tiles are each thread's own; all tiles become zero.
AMX_CODE static inline void tiles_begin(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }

// Until then every change of threads saves 8 KiB, and a core that idles stays out of its deep sleep.
AMX_CODE static inline void tiles_end() { asm volatile("tilerelease" ::: "memory"); }

template <int TILE>
AMX_CODE static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// Rows are `stride` bytes apart.
template <int TILE>
AMX_CODE static inline void tile_load(const void *from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
AMX_CODE static inline void tile_store(void *to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// SUM [rows][16] fp32 += A [rows][16 pairs of bf16] times B [16 pairs][16]. Of a row of A and a column of B first the products of the lower
// halves are added up, beside them those of the upper halves, each in the order of k with one rounding an addition; then the two sums are
// added, and that to SUM. Denormal numbers count as zero and become zero; rounding is to even, whatever MXCSR says. (Intel 64 and IA-32
// Architectures Software Developer's Manual, volume 2, TDPBF16PS.)
template <int SUM, int A, int B>
AMX_CODE static inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// SUM [rows][16] of 32-bit integers += A [rows][16 runs of 4 signed bytes] times B [16 runs of 4 unsigned bytes][16].
template <int SUM, int A, int B>
AMX_CODE static inline void tile_dot_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

}  // namespace amx
}  // namespace kilat
