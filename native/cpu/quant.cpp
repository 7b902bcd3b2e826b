// Packing of quantized weights, and reading single rows of packed ones: scalar code, the same for every instruction set.
#include "quant.h"

#include <string.h>

#include "context.h"

namespace kilat {

namespace {

// What packs is inlined into a copy for each format.
#define INLINE inline __attribute__((always_inline))

constexpr QuantType kTypes[] = {
    {2, 32, 18, 4, 3, PLAIN},       // Q4_0
    {3, 32, 20, 4, 0, WITH_MIN},    // Q4_1
    {6, 32, 22, 5, 4, PLAIN},       // Q5_0
    {7, 32, 24, 5, 0, WITH_MIN},    // Q5_1
    {8, 32, 34, 8, 7, PLAIN},       // Q8_0
    {12, 256, 144, 4, 0, K_MIN},    // Q4_K
    {13, 256, 176, 5, 0, K_MIN},    // Q5_K
    {14, 256, 210, 6, 5, K_HALVES}, // Q6_K
};

// A block taken apart: quants as stored in a panel, and its scales.
struct Block {
  uint8_t q[256];
  uint16_t d, min;                   // fp16; min of WITH_MIN, dmin of K_MIN
  uint8_t scale[16], scale_min[16];  // of a group (K_MIN) or half of one (K_HALVES, signed)
};

INLINE uint16_t half_at(const uint8_t *p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return h;
}

// 32 nibbles: the low halves of 16 bytes, then the high ones.
INLINE void read_nibbles(const uint8_t *p, uint8_t *q) {
  for (int i = 0; i < 16; i++) {
    q[i] = p[i] & 15;
    q[i + 16] = p[i] >> 4;
  }
}

INLINE void read_small(const QuantType &t, const uint8_t *p, Block *b) {
  b->d = half_at(p);
  p += 2;
  if (t.scales == WITH_MIN) {
    b->min = half_at(p);
    p += 2;
  }
  if (t.bits == 8) {
    for (int i = 0; i < 32; i++) b->q[i] = p[i] ^ 128;
    return;
  }
  uint32_t high = 0;
  if (t.bits == 5) {
    memcpy(&high, p, 4);
    p += 4;
  }
  read_nibbles(p, b->q);
  for (int i = 0; i < 32; i++) b->q[i] = uint8_t(b->q[i] | (high >> i & 1) << 4);
}

INLINE void read_k_min(const QuantType &t, const uint8_t *p, Block *b) {
  b->d = half_at(p);
  b->min = half_at(p + 2);
  const uint8_t *s = p + 4, *high = p + 16, *low = t.bits == 5 ? p + 48 : p + 16;
  for (int i = 0; i < 4; i++) {
    b->scale[i] = s[i] & 63;
    b->scale_min[i] = s[i + 4] & 63;
    b->scale[i + 4] = uint8_t((s[i + 8] & 15) | s[i] >> 6 << 4);
    b->scale_min[i + 4] = uint8_t(s[i + 8] >> 4 | s[i + 4] >> 6 << 4);
  }
  for (int i = 0; i < 256; i++) {
    int group = i / 32, at = i % 32;
    int nibble = low[group / 2 * 32 + at] >> (group % 2 * 4) & 15;
    b->q[i] = uint8_t(nibble | (t.bits == 5 ? (high[at] >> group & 1) << 4 : 0));
  }
}

INLINE void read_k_halves(const uint8_t *p, Block *b) {
  const uint8_t *low = p, *high = p + 128;
  memcpy(b->scale, p + 192, 16);
  b->d = half_at(p + 208);
  for (int i = 0; i < 256; i++) {
    int half = i / 128, at = i % 128, row = at / 32, column = at % 32;
    int nibble = low[half * 64 + row % 2 * 32 + column] >> (row / 2 * 4) & 15;
    b->q[i] = uint8_t(nibble | (high[half * 32 + column] >> (row * 2) & 3) << 4);
  }
}

INLINE void read_block(const QuantType &t, const uint8_t *p, Block *b) {
  if (t.scales == K_MIN) read_k_min(t, p, b);
  else if (t.scales == K_HALVES) read_k_halves(p, b);
  else read_small(t, p, b);
}

INLINE void put_half(char *plane, int column, uint16_t h) { memcpy(plane + column * 2, &h, 2); }
uint16_t get_half(const char *plane, int column) {
  uint16_t h;
  memcpy(&h, plane + column * 2, 2);
  return h;
}

// The quants of a step: four inputs, a byte each.
INLINE uint32_t step_at(const uint8_t *q, int step) {
  uint32_t four;
  memcpy(&four, q + step * 4, 4);
  return four;
}

// 32 quants of one column into, or out of, the planes of a group.
INLINE void put_quants(const QuantType &t, char *planes, int column, const uint8_t *q) {
  char *lane = planes + column * 4;
  auto put = [lane](int plane, uint32_t four) { memcpy(lane + plane * PLANE, &four, 4); };
  if (t.bits == 8) {
#pragma GCC unroll 8
    for (int s = 0; s < GROUP_STEPS; s++) put(s, step_at(q, s));
    return;
  }
#pragma GCC unroll 8
  for (int p = 0; p < 4; p++) put(p, (step_at(q, 2 * p) & 0x0f0f0f0f) | (step_at(q, 2 * p + 1) & 0x0f0f0f0f) << 4);
  const int high_bits = t.bits - 4, steps_a_plane = GROUP_STEPS / (high_bits ? high_bits : 1);
  const uint32_t mask = high_bits == 1 ? 0x01010101 : 0x03030303;
#pragma GCC unroll 8
  for (int p = 0; p < high_bits; p++) {
    uint32_t high = 0;
#pragma GCC unroll 8
    for (int i = 0; i < steps_a_plane; i++) high |= (step_at(q, p * steps_a_plane + i) >> 4 & mask) << (i * high_bits);
    put(4 + p, high);
  }
}

void get_quants(const QuantType &t, const char *planes, int column, uint8_t *q) {
  const uint8_t *lane = reinterpret_cast<const uint8_t *>(planes) + column * 4;
  for (int i = 0; i < GROUP; i++) {
    int s = i / 4, byte = i % 4;
    if (t.bits == 8) {
      q[i] = lane[s * PLANE + byte];
      continue;
    }
    int high = 0;
    if (t.bits == 5) high = lane[4 * PLANE + byte] >> s & 1;
    if (t.bits == 6) high = lane[(4 + s / 4) * PLANE + byte] >> (s % 4 * 2) & 3;
    q[i] = uint8_t((lane[s / 2 * PLANE + byte] >> (s % 2 * 4) & 15) | high << 4);
  }
}

INLINE void put_block(const QuantType &t, char *at, int column, const Block &b) {
  int header = header_bytes_of(t.scales), scales = scale_bytes_of(t.scales);
  if (header) put_half(at, column, b.d);
  if (t.scales == K_MIN) put_half(at + 2 * PANEL, column, b.min);
  at += header;
  for (int g = 0; g < t.values / GROUP; g++) {
    switch (t.scales) {
      case WITH_MIN: put_half(at + 2 * PANEL, column, b.min);  // fallthrough
      case PLAIN: put_half(at, column, b.d); break;
      case K_MIN:
        at[column] = char(b.scale[g]);
        at[PANEL + column] = char(b.scale_min[g]);
        break;
      case K_HALVES:
        at[column] = char(b.scale[2 * g]);
        at[PANEL + column] = char(b.scale[2 * g + 1]);
    }
    put_quants(t, at + scales, column, b.q + g * GROUP);
    at += scales + quant_bytes_of(t.bits);
  }
}

// Bytes that one block of each column takes in a panel.
constexpr int64_t packed_block_bytes(const QuantType &t) {
  return header_bytes_of(t.scales) + t.values / GROUP * (scale_bytes_of(t.scales) + quant_bytes_of(t.bits));
}

float from_half(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, bits = uint32_t(h & 0x7fff) << 13;
  if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  float x;
  memcpy(&x, &bits, 4);
  if ((h & 0x7c00) != 0x7c00) x *= 5192296858534827628530496329220096.0f;  // 2^112: the distance of the two exponents, exact
  memcpy(&bits, &x, 4);
  bits |= sign;
  memcpy(&x, &bits, 4);
  return x;
}

uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return x != x ? 0x7fc0 : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// The values of one group of one column; the roundings are those of the format's reference.
void get_values(const QuantType &t, const char *header, const char *at, int column, uint16_t *out) {
  uint8_t q[GROUP];
  get_quants(t, at + scale_bytes_of(t.scales), column, q);
  const uint8_t *bytes = reinterpret_cast<const uint8_t *>(at);
  float scale[2], min = 0.0f;
  if (t.scales == PLAIN || t.scales == WITH_MIN) {
    scale[0] = scale[1] = from_half(get_half(at, column));
    if (t.scales == WITH_MIN) min = from_half(get_half(at + 2 * PANEL, column));
  } else if (t.scales == K_MIN) {
    scale[0] = scale[1] = from_half(get_half(header, column)) * float(bytes[column]);
    min = -(from_half(get_half(header + 2 * PANEL, column)) * float(bytes[PANEL + column]));
  } else {
    float d = from_half(get_half(header, column));
    for (int i = 0; i < 2; i++) scale[i] = d * float(int8_t(bytes[i * PANEL + column]));
  }
  bool has_min = t.scales == WITH_MIN || t.scales == K_MIN;
  int offset = t.offset_bits ? 1 << t.offset_bits : 0;
  for (int i = 0; i < GROUP; i++) {
    float x = scale[i / 16] * float(int(q[i]) - offset);
    out[i] = to_bf16(has_min ? x + min : x);
  }
}

struct FillJob {
  Linear *w;
  const kilat_blocks *parts;
};

const int kPanelsAUnit = 8;

int part_of_panel(const Linear &w, int64_t panel) {
  int i = 0;
  while (panel >= w.parts[i].first_panel + w.parts[i].panels) i++;
  return i;
}

// One panel of format TYPE of the table.
template <int TYPE>
void fill_blocks(const uint8_t *rows, int64_t row_bytes, int columns, int64_t blocks, char *out) {
  constexpr const QuantType &t = kTypes[TYPE];
  for (int64_t b = 0; b < blocks; b++, out += packed_block_bytes(t))
    for (int c = 0; c < columns; c++) {
      Block block;
      read_block(t, rows + c * row_bytes + b * t.block_bytes, &block);
      put_block(t, out, c, block);
    }
}
typedef void FillBlocks(const uint8_t *rows, int64_t row_bytes, int columns, int64_t blocks, char *out);

void fill_panel(const FillJob &job, int64_t panel) {
  int index = part_of_panel(*job.w, panel);
  const QuantPart &part = job.w->parts[index];
  const QuantType &t = *part.type;
  const kilat_blocks &from = job.parts[index];
  panel -= part.first_panel;
  char *out = part.data + panel * part.panel_bytes;
  const uint8_t *rows = static_cast<const uint8_t *>(from.data) + panel * PANEL * from.row_bytes;
  const int columns = part.n - panel * PANEL < PANEL ? int(part.n - panel * PANEL) : PANEL;
  if (columns < PANEL) memset(out, 0, size_t(part.panel_bytes));
  FillBlocks *const fills[] = {fill_blocks<0>, fill_blocks<1>, fill_blocks<2>, fill_blocks<3>,
                               fill_blocks<4>, fill_blocks<5>, fill_blocks<6>, fill_blocks<7>};
  fills[&t - kTypes](rows, from.row_bytes, columns, job.w->k / t.values, out);
}

void fill_unit(void *raw, int unit, int) {
  const FillJob &job = *static_cast<FillJob *>(raw);
  for (int64_t p = int64_t(unit) * kPanelsAUnit; p < (unit + 1) * int64_t(kPanelsAUnit) && p < job.w->panels; p++)
    fill_panel(job, p);
}

struct GatherJob {
  const Linear *w;
  const int32_t *ids;
  int64_t rows;
  bf16 *out;
};

const int kRowsAUnit = 8;

void gather_unit(void *raw, int unit, int) {
  const GatherJob &job = *static_cast<GatherJob *>(raw);
  const Linear &w = *job.w;
  for (int64_t r = int64_t(unit) * kRowsAUnit; r < (unit + 1) * int64_t(kRowsAUnit) && r < job.rows; r++) {
    int i = 0;
    while (job.ids[r] >= w.parts[i].first + w.parts[i].n) i++;
    const QuantPart &part = w.parts[i];
    const QuantType &t = *part.type;
    int64_t column = job.ids[r] - part.first;
    const char *at = part.data + column / PANEL * part.panel_bytes, *header = at;
    for (int64_t g = 0; g < w.k / GROUP; g++) {
      if (g % HEADER_GROUPS == 0) {
        header = at;
        at += header_bytes_of(t.scales);
      }
      get_values(t, header, at, int(column % PANEL), reinterpret_cast<uint16_t *>(job.out + r * w.k + g * GROUP));
      at += scale_bytes_of(t.scales) + quant_bytes_of(t.bits);
    }
  }
}

}  // namespace

const QuantType *quant_type(int ggml) {
  for (const QuantType &t : kTypes)
    if (t.ggml == ggml) return &t;
  return nullptr;
}

bool quant_plan(Linear *w, const kilat_blocks *parts, int n_parts, int64_t k, bool bias) {
  if (n_parts < 1 || n_parts > KILAT_MAX_PARTS || k < 1) return false;
  w->dtype = KILAT_BF16;
  w->k = k;
  w->steps = k / 4;
  w->n = w->panels = 0;
  w->n_parts = n_parts;
  w->bytes = 0;
  w->bias = nullptr;
  for (int i = 0; i < n_parts; i++) {
    const QuantType *t = quant_type(parts[i].type);
    if (!t || parts[i].n < 1 || k % t->values || parts[i].row_bytes < k / t->values * t->block_bytes) return false;
    QuantPart &part = w->parts[i];
    part.type = t;
    part.first = w->n;
    part.n = parts[i].n;
    part.first_panel = w->panels;
    part.panels = (part.n + PANEL - 1) / PANEL;
    part.panel_bytes = k / t->values * packed_block_bytes(*t);
    w->n += part.n;
    w->panels += part.panels;
    w->bytes += part.panels * part.panel_bytes;
  }
  w->panel_bytes = w->bytes / w->panels;
  if (bias) w->bytes += quant_bias_floats(*w) * 4;
  return true;
}

int64_t quant_bias_floats(const Linear &w) { return (w.n + 2 * PANEL - 1) / PANEL * PANEL; }

void quant_fill(Pool *pool, Linear *w, const kilat_blocks *parts, bool bias, char *memory) {
  char *at = w->data = memory;
  for (int i = 0; i < w->n_parts; i++) {
    w->parts[i].data = at;
    at += w->parts[i].panels * w->parts[i].panel_bytes;
  }
  if (bias) w->bias = reinterpret_cast<float *>(at);
  FillJob job = {w, parts};
  pool_run(pool, int((w->panels + kPanelsAUnit - 1) / kPanelsAUnit), fill_unit, &job);
}

void quant_gather(Pool *pool, const Linear *w, const int32_t *ids, int64_t rows, bf16 *out) {
  GatherJob job = {w, ids, rows, out};
  pool_run(pool, int((rows + kRowsAUnit - 1) / kRowsAUnit), gather_unit, &job);
}

}  // namespace kilat
