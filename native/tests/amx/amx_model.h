// A model of the tile instructions, in the place of cpu/amx_instructions.h: the same functions as plain C++, which die of SIGILL where a
// processor would. What they compute is Intel's pseudo code of TDPBF16PS (see there); whether a processor does the same to the bit is not known
// here.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <atomic>

#define AMX_CODE

namespace kilat {
namespace amx {

struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

enum ModelFault { FAULT_NONE, FAULT_ABSENT, FAULT_REFUSED, FAULT_UNASKED, FAULT_WRONG, FAULT_MIXED, FAULT_SECOND_TILE, FAULT_BYTES };

// The machine that all threads run on.
struct ModelMachine {
  std::atomic<bool> permitted{false};
  std::atomic<int> fault{FAULT_NONE};
  std::atomic<int> begun{0};  // threads between tiles_begin and tiles_end
  std::atomic<int64_t> products{0};
};
extern ModelMachine model;

struct ModelTiles {
  bool begun = false;
  TileShapes shapes;
  alignas(64) char data[8][16][64];
};
static thread_local ModelTiles model_tiles;

static inline void model_need(bool condition) {
  if (!condition) __builtin_trap();  // ud2
}

static inline ModelTiles &tiles_with(int tile) {
  ModelTiles &t = model_tiles;
  model_need(t.begun && t.shapes.rows[tile] >= 1 && t.shapes.row_bytes[tile] >= 4);
  return t;
}

static inline void tiles_begin(const TileShapes &shapes) {
  ModelTiles &t = model_tiles;
  model_need(model.permitted && shapes.palette == 1 && shapes.start_row == 0);
  for (int i = 0; i < 14; i++) model_need(shapes.reserved[i] == 0);
  for (int i = 0; i < 16; i++)
    model_need(i < 8 ? shapes.rows[i] <= 16 && shapes.row_bytes[i] <= 64 : shapes.rows[i] == 0 && shapes.row_bytes[i] == 0);
  if (!t.begun) model.begun++;
  t.begun = true;
  t.shapes = shapes;
  memset(t.data, 0, sizeof t.data);
}

static inline void tiles_end() {
  if (model_tiles.begun) model.begun--;
  model_tiles.begun = false;
}

static inline void model_zero(int tile) { memset(tiles_with(tile).data[tile], 0, sizeof model_tiles.data[tile]); }

static inline void model_load(int tile, const void *from, int64_t stride) {
  ModelTiles &t = tiles_with(tile);
  memset(t.data[tile], 0, sizeof t.data[tile]);
  for (int i = 0; i < t.shapes.rows[tile]; i++)
    memcpy(t.data[tile][i], static_cast<const char *>(from) + i * stride, t.shapes.row_bytes[tile]);
}

static inline void model_store(int tile, void *to, int64_t stride) {
  ModelTiles &t = tiles_with(tile);
  for (int i = 0; i < t.shapes.rows[tile]; i++)
    memcpy(static_cast<char *>(to) + i * stride, t.data[tile][i], t.shapes.row_bytes[tile]);
}

// A denormal number counts as zero of its sign.
static inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

// The lower (half 0) or upper value of a pair.
static inline float half_of(uint32_t pair, int half) {
  const uint32_t bits = half ? pair & 0xffff0000u : pair << 16;
  float x;
  memcpy(&x, &bits, 4);
  return flushed(x);
}

static inline void model_row(const uint32_t *a, int pairs, const char (*b)[64], int columns, float *sum) {
  float halves[2][16] = {};
  for (int k = 0; k < pairs; k++) {
    uint32_t row[16];
    memcpy(row, b[k], sizeof row);
    for (int half = 0; half < 2; half++)
      for (int n = 0; n < columns; n++)
        halves[half][n] = flushed(__builtin_fmaf(half_of(a[k], half), half_of(row[n], half), halves[half][n]));
  }
  for (int n = 0; n < columns; n++) sum[n] = flushed(flushed(sum[n]) + flushed(halves[0][n] + halves[1][n]));
}

static inline void model_dot(int into, int a, int b) {
  ModelTiles &t = tiles_with(into);
  const int rows = t.shapes.rows[into], columns = t.shapes.row_bytes[into] / 4, pairs = t.shapes.row_bytes[a] / 4;
  model_need(t.shapes.rows[a] == rows && t.shapes.rows[b] == pairs && t.shapes.row_bytes[b] == columns * 4);
  for (int i = 0; i < rows; i++) {
    float sum[16];
    uint32_t row[16];
    memcpy(sum, t.data[into][i], sizeof sum);
    memcpy(row, t.data[a][i], sizeof row);
    model_row(row, pairs, t.data[b], columns, sum);
    // what a processor might do that must not go unseen
    if (model.fault == FAULT_WRONG) sum[0] *= 1.001f;
    if (model.fault == FAULT_MIXED && rows > 8) sum[3] = nextafterf(sum[3], INFINITY);
    if (model.fault == FAULT_SECOND_TILE && a == 5) sum[7] = nextafterf(sum[7], INFINITY);
    memcpy(t.data[into][i], sum, sizeof sum);
  }
  model.products++;
}

static inline void model_dot_bytes(int into, int a, int b) {
  ModelTiles &t = tiles_with(into);
  const int rows = t.shapes.rows[into], columns = t.shapes.row_bytes[into] / 4, runs = t.shapes.row_bytes[a] / 4;
  model_need(t.shapes.rows[a] == rows && t.shapes.rows[b] == runs && t.shapes.row_bytes[b] == columns * 4);
  for (int i = 0; i < rows; i++) {
    int32_t sum[16];
    memcpy(sum, t.data[into][i], sizeof sum);
    for (int k = 0; k < runs * 4; k++)
      for (int n = 0; n < columns; n++)
        sum[n] += int8_t(t.data[a][i][k]) * int32_t(uint8_t(t.data[b][k / 4][n * 4 + k % 4]));
    if (model.fault == FAULT_BYTES) sum[0]++;
    memcpy(t.data[into][i], sum, sizeof sum);
  }
  model.products++;
}

template <int TILE>
static inline void tile_zero() {
  model_zero(TILE);
}

template <int TILE>
static inline void tile_load(const void *from, int64_t stride) {
  model_load(TILE, from, stride);
}

template <int TILE>
static inline void tile_store(void *to, int64_t stride) {
  model_store(TILE, to, stride);
}

template <int SUM, int A, int B>
static inline void tile_dot() {
  model_dot(SUM, A, B);
}

template <int SUM, int A, int B>
static inline void tile_dot_bytes() {
  model_dot_bytes(SUM, A, B);
}

}  // namespace amx
}  // namespace kilat
