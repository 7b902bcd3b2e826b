// The register tile of products with quantized weights, which unpacks their planes as it goes, and the rounding of rows of x to 8 bits.
//
// Sums of products of integers are exact, so how they are cut over registers does not matter. Each group then adds its sum times the
// two scales to an fp32 accumulator, and its minimum times the sum of the group's x: one chain per output element, in the order of k.
#pragma once

// A group of one row of x: x is about d times its quants. In a tile, the rows' XGroups come first, then the quants of step 0 of all
// rows, of step 1 ...
struct XGroup {
  float d, d_sum;                // d_sum: d times the sum of the quants
  int32_t minus_sum, minus_half[2];  // minus the sums of all quants, of the first half, of the second
};
enum { X_GROUP_BYTES = int(sizeof(XGroup)) + GROUP, QUANT_AHEAD_BYTES = 2048 };

struct QuantArgs {
  const char *a;       // rows as above
  const char *b;      // the panel
  int64_t groups;
  int offset_bits;
  bf16 *out;
  int64_t out_stride;
  const float *bias;
  int columns;  // columns of the tile that exist
};

template <int I>
struct Const {
  enum { value = I };
};
// f(Const<FIRST>()), ..., f(Const<END - 1>()).
template <int FIRST, int END, class F>
INLINE void for_each(F f) {
  if constexpr (FIRST < END) {
    f(Const<FIRST>());
    for_each<FIRST + 1, END>(f);
  }
}

// Quants of step S of W columns, from the planes of a group as packed with BITS bits; p is at the first of these columns.
template <int BITS, int S>
INLINE VI quants(const char *p) {
  if constexpr (BITS == 8) return load_i(p + S * PLANE);
  else {
    VI low = and_mask(shifted<(S % 2) * -4>(load_i(p + S / 2 * PLANE)), 0x0f0f0f0f);
    if constexpr (BITS == 5) low = or_masked(low, shifted<4 - S>(load_i(p + 4 * PLANE)), 0x10101010);
    if constexpr (BITS == 6) low = or_masked(low, shifted<4 - S % 4 * 2>(load_i(p + (4 + S / 4) * PLANE)), 0x30303030);
    return low;
  }
}

// The scales of W columns; header and p are at the first of them, in units of a column.
template <QuantScales SCALES>
INLINE VF scale_of(const char *header, const char *p, int column, int half) {
  if constexpr (SCALES == K_MIN) return mul(load_half(header + column * 2), load_u8(p + column));
  else if constexpr (SCALES == K_HALVES) return mul(load_half(header + column * 2), load_s8(p + half * PANEL + column));
  else return load_half(p + column * 2);
}
template <QuantScales SCALES>
INLINE VF min_of(const char *header, const char *p, int column) {
  if constexpr (SCALES == K_MIN)
    return sub(zero(), mul(load_half(header + 2 * PANEL + column * 2), load_u8(p + PANEL + column)));
  else return load_half(p + 2 * PANEL + column * 2);
}

template <QuantScales SCALES, int BITS, int MR>
static void quant_tile(const QuantArgs &t) {
  constexpr bool MIN = SCALES == WITH_MIN || SCALES == K_MIN;
  constexpr int HALVES = SCALES == K_HALVES ? 2 : 1, STEPS = GROUP_STEPS / HALVES;
  constexpr int64_t HEADER = header_bytes_of(SCALES), SCALE = scale_bytes_of(SCALES);
  constexpr int64_t RECORD = SCALE + quant_bytes_of(BITS);
  constexpr int NV = PANEL / W;
  VF acc[MR][NV];
  clear(acc);
  const char *a = t.a, *b = t.b, *header = t.b;
  for (int64_t g = 0; g < t.groups; g++) {
    if (HEADER && g % HEADER_GROUPS == 0) {
      header = b;
      b += HEADER;
    }
    const XGroup *x = reinterpret_cast<const XGroup *>(a);
    const char *xq = a + MR * sizeof(XGroup);
#pragma GCC unroll 32
    for (int line = 0; line < RECORD; line += 64) __builtin_prefetch(b + line + QUANT_AHEAD_BYTES, 0, 2);
    for_each<0, HALVES>([&](auto half) {
      constexpr int H = decltype(half)::value;
      VI dot[MR][NV];
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        VI start = zero_i();
        if (!MIN && !(BITS == 8 && WIDE_OFFSET)) start = shift_left(set1_i(HALVES == 2 ? &x[i].minus_half[H] : &x[i].minus_sum), t.offset_bits);
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) dot[i][j] = start;
      }
      for_each<H * STEPS, H * STEPS + STEPS>([&](auto step) {
        constexpr int S = decltype(step)::value;
        VI u[NV];
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) u[j] = quants<BITS, S>(b + SCALE + j * W * 4);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) {
          VI v = set1_i(xq + (S * MR + i) * 4);
#pragma GCC unroll 8
          for (int j = 0; j < NV; j++) dot[i][j] = dot4<BITS == 8>(dot[i][j], u[j], v);
        }
      });
#pragma GCC unroll 8
      for (int j = 0; j < NV; j++) {
        VF d = scale_of<SCALES>(header, b, j * W, H);
#pragma GCC unroll 16
        for (int i = 0; i < MR; i++) acc[i][j] = fma(mul(d, set1(x[i].d)), to_float(dot[i][j]), acc[i][j]);
        if constexpr (MIN) {
          VF least = min_of<SCALES>(header, b, j * W);
#pragma GCC unroll 16
          for (int i = 0; i < MR; i++) acc[i][j] = fma(least, set1(x[i].d_sum), acc[i][j]);
        }
      }
    });
    a += MR * X_GROUP_BYTES;
    b += RECORD;
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; j++) {
      VF y = t.bias ? add(acc[i][j], load(t.bias + j * W)) : acc[i][j];
      bf16 *to = t.out + i * t.out_stride + j * W;
      int n = t.columns - j * W;
      if (n >= W) store(to, y);
      else if (n > 0) store_n(to, y, n);
    }
  }
}

typedef void (*QuantTileFn)(const QuantArgs &);

template <QuantScales SCALES, int BITS, int MR = QUANT_ROWS>
static inline QuantTileFn pick_quant_tile(int rows) {
  if (rows == MR) return quant_tile<SCALES, BITS, MR>;
  if constexpr (MR > 1) return pick_quant_tile<SCALES, BITS, MR - 1>(rows);
  return nullptr;
}

// 32 values of x to quants; see kilat_linear_pack_quant.
static inline void round_group(const bf16 *x, int8_t *q, XGroup *out) {
  uint16_t most = 0;
  for (int i = 0; i < GROUP; i++) {
    uint16_t bits = x[i].bits & 0x7fff;
    most = bits > most ? bits : most;
  }
  uint32_t wide = uint32_t(most) << 16;
  float top;
  memcpy(&top, &wide, 4);
  bool finite = most < 0x7f80;
  if (!finite || top < 1e-30f) {
    memset(q, 0, GROUP);
    float d = finite ? 0.0f : NAN;
    *out = {d, d, 0, {0, 0}};
    return;
  }
  VF by = set1(127.0f / top);
  for (int i = 0; i < GROUP; i += W) store_s8(q + i, mul(load(x + i), by));
  int32_t sum[2] = {0, 0};
  for (int i = 0; i < GROUP / 2; i++) {
    sum[0] += q[i];
    sum[1] += q[GROUP / 2 + i];
  }
  float d = top / 127.0f;
  *out = {d, d * float(sum[0] + sum[1]), -(sum[0] + sum[1]), {-sum[0], -sum[1]}};
}

// Row i of a tile of `rows` rows.
static void round_row(const bf16 *x, int64_t groups, int rows, int i, char *tile) {
  for (int64_t g = 0; g < groups; g++) {
    int8_t q[GROUP];
    XGroup group;
    round_group(x + g * GROUP, q, &group);
    char *at = tile + g * rows * X_GROUP_BYTES;
    memcpy(at + i * sizeof group, &group, sizeof group);
    at += rows * sizeof group;
    for (int s = 0; s < GROUP_STEPS; s++) memcpy(at + (s * rows + i) * 4, q + s * 4, 4);
  }
}
