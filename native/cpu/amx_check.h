// Whether the tiles of this machine do what amx_linear.h and amx_quant.h count on: products that are right, and for a row the same bits
// alone, among others, in either tile, and beside one that is not a number.
#pragma once

enum { CHECK_ROWS = TILE_ROWS, CHECK_STEPS = 2 * TILE_STEPS + 5, CHECK_K = 2 * CHECK_STEPS - 1, CHECK_COLUMNS = 2 * PANEL };

struct CheckData {
  bf16 x[CHECK_ROWS][CHECK_K + 1];
  alignas(64) bf16 panels[2][CHECK_STEPS][PANEL][2];
  alignas(64) char packed[CHECK_ROWS * 3 * TILE_LINE];
};

// Numbers of many magnitudes; some are zero, minus zero or denormal.
static bf16 check_value(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  const uint32_t r = *state >> 8;
  if (r % 61 == 0) return bf16{uint16_t(r >> 8 & 0x8000)};
  if (r % 67 == 0) return bf16{uint16_t((r >> 8 & 0x807f) | 1)};
  return bf16{uint16_t((r >> 8 & 0x807f) | (120 + r % 8) << 7)};
}

static double wide(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static void check_fill(CheckData *d) {
  uint32_t state = 1;
  for (int i = 0; i < CHECK_ROWS; i++)
    for (int k = 0; k < CHECK_K; k++) d->x[i][k] = check_value(&state);
  for (int j = 0; j < CHECK_COLUMNS; j++)
    for (int k = 0; k < 2 * CHECK_STEPS; k++)
      d->panels[j / PANEL][k / 2][j % PANEL][k % 2] = k < CHECK_K ? check_value(&state) : bf16{0};
}

// sums [rows][CHECK_COLUMNS] of rows first .. first + rows - 1, in one tile of up to 16, or in two.
AMX_CODE static void check_product(CheckData *d, int first, int rows, int tiles, float *sums) {
  TileRows t(rows);
  t.tiles = tiles;
  t.height = rows / tiles;
  tile_rows(d->x[first], CHECK_K + 1, t, CHECK_K, d->packed);
  const char *panels[2] = {reinterpret_cast<const char *>(d->panels[0]), reinterpret_cast<const char *>(d->panels[1])};
  TileProduct p = {d->packed, t.height, {panels[0], panels[1]}, CHECK_STEPS, false, sums, CHECK_COLUMNS};
  tiles_begin(shapes_of(t.height));
  if (tiles == 1) tile_product<1, 2>(p);
  for (int i = 0; tiles == 2 && i < 2; i++) {
    p.panel[0] = panels[i];
    p.sums = sums + i * PANEL;
    tile_product<2, 1>(p);
  }
  tiles_end();
}

// Within what a fixed order of CHECK_K fp32 additions may differ from the exact sum.
static bool check_right(const CheckData &d, const float *sums) {
  for (int i = 0; i < CHECK_ROWS; i++)
    for (int j = 0; j < CHECK_COLUMNS; j++) {
      double exact = 0, terms = 0;
      for (int k = 0; k < CHECK_K; k++) {
        const double term = wide(d.x[i][k]) * wide(d.panels[j / PANEL][k / 2][j % PANEL][k % 2]);
        exact += term;
        terms += fabs(term);
      }
      if (!(fabs(sums[i * CHECK_COLUMNS + j] - exact) <= CHECK_K * 0x1p-24 * terms + 1e-30)) return false;
    }
  return true;
}

// Sums of products of bytes, which are exact.
AMX_CODE static bool check_bytes(int height, int inputs) {
  char a[TILE_ROWS][GROUP];
  alignas(64) char b[GROUP_STEPS][PANEL][4];
  alignas(64) int32_t sums[TILE_ROWS][PANEL];
  uint32_t state = 2;
  for (int i = 0; i < height; i++)
    for (int k = 0; k < inputs; k++) a[i][k] = char(int((state = state * 1664525u + 1013904223u) >> 24) % 255 - 127);
  for (int k = 0; k < inputs; k++)
    for (int j = 0; j < PANEL; j++) b[k / 4][j][k % 4] = char((state = state * 1664525u + 1013904223u) >> 24);
  tiles_begin(quant_shapes_of(height, inputs));
  byte_sums(a[0], b[0][0], sums[0]);
  tiles_end();
  for (int i = 0; i < height; i++)
    for (int j = 0; j < PANEL; j++) {
      int32_t exact = 0;
      for (int k = 0; k < inputs; k++) exact += int8_t(a[i][k]) * int32_t(uint8_t(b[k / 4][j][k % 4]));
      if (sums[i][j] != exact) return false;
    }
  return true;
}

static bool check() {
  for (int height = 1; height <= TILE_ROWS; height++)
    if (!check_bytes(height, GROUP) || !check_bytes(height, GROUP / 2)) return false;
  CheckData d;
  check_fill(&d);
  float all[CHECK_ROWS][CHECK_COLUMNS], some[CHECK_ROWS][CHECK_COLUMNS];
  check_product(&d, 0, CHECK_ROWS, 1, all[0]);
  if (!check_right(d, all[0])) return false;
  for (int i = 0; i < CHECK_ROWS; i++) {
    check_product(&d, i, 1, 1, some[0]);
    if (memcmp(some[0], all[i], sizeof all[i]) != 0) return false;
  }
  for (int rows = 1; rows <= CHECK_ROWS; rows++)
    for (int tiles = 1; tiles <= 2 - rows % 2; tiles++) {
      check_product(&d, CHECK_ROWS - rows, rows, tiles, some[0]);
      if (memcmp(some[0], all[CHECK_ROWS - rows], size_t(rows) * sizeof all[0]) != 0) return false;
    }
  for (int k = 0; k < CHECK_K; k += 3) d.x[5][k] = bf16{uint16_t(k % 2 ? 0x7fc0 : 0xff80)};  // not a number, minus infinity
  check_product(&d, 0, CHECK_ROWS, 1, some[0]);
  return memcmp(some, all, 5 * sizeof all[0]) == 0 && memcmp(some[6], all[6], (CHECK_ROWS - 6) * sizeof all[0]) == 0;
}
