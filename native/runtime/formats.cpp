#include "formats.h"

#include <string.h>

#include "backend.h"
#include "bytes.h"

namespace kilat {

namespace {

const Format kFormats[] = {
    {KILAT_TYPE_F32, "F32", 1, 4, true},       {KILAT_TYPE_F16, "F16", 1, 2, true},
    {KILAT_TYPE_Q4_0, "Q4_0", 32, 18, true},   {KILAT_TYPE_Q4_1, "Q4_1", 32, 20, true},
    {KILAT_TYPE_Q5_0, "Q5_0", 32, 22, true},   {KILAT_TYPE_Q5_1, "Q5_1", 32, 24, true},
    {KILAT_TYPE_Q8_0, "Q8_0", 32, 34, true},   {9, "Q8_1", 32, 40, false},
    {10, "Q2_K", 256, 84, false},              {11, "Q3_K", 256, 110, false},
    {KILAT_TYPE_Q4_K, "Q4_K", 256, 144, true}, {KILAT_TYPE_Q5_K, "Q5_K", 256, 176, true},
    {KILAT_TYPE_Q6_K, "Q6_K", 256, 210, true}, {15, "Q8_K", 256, 292, false},
    {16, "IQ2_XXS", 256, 66, false},           {17, "IQ2_XS", 256, 74, false},
    {18, "IQ3_XXS", 256, 98, false},           {19, "IQ1_S", 256, 50, false},
    {20, "IQ4_NL", 32, 18, false},             {21, "IQ3_S", 256, 110, false},
    {22, "IQ2_S", 256, 82, false},             {23, "IQ4_XS", 256, 136, false},
    {24, "I8", 1, 1, false},                   {25, "I16", 1, 2, false},
    {26, "I32", 1, 4, false},                  {27, "I64", 1, 8, false},
    {28, "F64", 1, 8, false},                  {29, "IQ1_M", 256, 56, false},
    {KILAT_TYPE_BF16, "BF16", 1, 2, true},     {34, "TQ1_0", 256, 54, false},
    {35, "TQ2_0", 256, 66, false},             {39, "MXFP4", 32, 17, false},
    {40, "NVFP4", 64, 36, false},              {41, "Q1_0", 128, 18, false},
    {KILAT_TYPE_F8_E4M3, "F8_E4M3", 1, 1, false},
};

float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

float half_at(const uint8_t *p) {
  uint32_t h = number_at<uint16_t>(reinterpret_cast<const char *>(p)), sign = (h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // a multiple of 2^-24 scaled exactly, which also serves numbers below 2^-14
  if (rest < 0x400) {
    float x = float(rest) * 5.9604644775390625e-8f;
    return sign ? -x : x;
  }
  return float_of(sign | ((rest << 13) + 0x38000000));
}

void low_high(const uint8_t *q, int8_t *low, int8_t *high, int n) {
  for (int i = 0; i < n; i++) low[i] = int8_t(q[i] & 15), high[i] = int8_t(q[i] >> 4);
}

// Fifth bits of 32 values, bit i for value i.
void add_fifth(const uint8_t *p, int8_t *q) {
  uint32_t bits = number_at<uint32_t>(reinterpret_cast<const char *>(p));
  for (int i = 0; i < 32; i++) q[i] = int8_t(q[i] | int8_t((bits >> i & 1) << 4));
}

void times(float d, const int8_t *q, int n, int less, float *out) {
  for (int i = 0; i < n; i++) out[i] = d * float(q[i] - less);
}

void times_plus(float d, const int8_t *q, int n, float m, float *out) {
  for (int i = 0; i < n; i++) out[i] = d * float(q[i]) + m;
}

void q4(const uint8_t *p, bool with_min, float *out) {
  int8_t q[32];
  low_high(p + (with_min ? 4 : 2), q, q + 16, 16);
  if (with_min) times_plus(half_at(p), q, 32, half_at(p + 2), out);
  else times(half_at(p), q, 32, 8, out);
}

void q5(const uint8_t *p, bool with_min, float *out) {
  int8_t q[32];
  const uint8_t *fifth = p + (with_min ? 4 : 2);
  low_high(fifth + 4, q, q + 16, 16);
  add_fifth(fifth, q);
  if (with_min) times_plus(half_at(p), q, 32, half_at(p + 2), out);
  else times(half_at(p), q, 32, 16, out);
}

void q8(const uint8_t *p, float *out) { times(half_at(p), reinterpret_cast<const int8_t *>(p + 2), 32, 0, out); }

// Scale and minimum of one of the 8 groups of a K block: 6 bits each in 12 bytes.
void scale_min(const uint8_t *s, int g, int *scale, int *minimum) {
  if (g < 4) {
    *scale = s[g] & 63;
    *minimum = s[g + 4] & 63;
  } else {
    *scale = (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
    *minimum = s[g + 4] >> 4 | (s[g] >> 6) << 4;
  }
}

void q45_k(const uint8_t *p, bool fifth, float *out) {
  float d = half_at(p), m = half_at(p + 2);
  const uint8_t *scales = p + 4, *high = p + 16, *q = p + (fifth ? 48 : 16);
  for (int pair = 0; pair < 4; pair++, q += 32) {
    int8_t v[64];
    low_high(q, v, v + 32, 32);
    for (int g = 2 * pair; g < 2 * pair + 2; g++, out += 32) {
      int8_t *values = v + (g & 1) * 32;
      for (int i = 0; fifth && i < 32; i++) values[i] = int8_t(values[i] | (high[i] >> g & 1) << 4);
      int scale, minimum;
      scale_min(scales, g, &scale, &minimum);
      times_plus(d * float(scale), values, 32, -(m * float(minimum)), out);
    }
  }
}

void q6_k(const uint8_t *p, float *out) {
  const uint8_t *low = p, *high = p + 128;
  const int8_t *scales = reinterpret_cast<const int8_t *>(p + 192);
  float d = half_at(p + 208);
  for (int half = 0; half < 2; half++, low += 64, high += 32, scales += 8, out += 128) {
    int8_t q[128];
    low_high(low, q, q + 64, 64);
    for (int part = 0; part < 4; part++)
      for (int i = 0; i < 32; i++) q[part * 32 + i] = int8_t(q[part * 32 + i] | (high[i] >> (2 * part) & 3) << 4);
    for (int g = 0; g < 8; g++) times(d * float(scales[g]), q + g * 16, 16, 32, out + g * 16);
  }
}

}  // namespace

const Format *format_of(int64_t type) {
  for (const Format &f : kFormats)
    if (f.type == type) return &f;
  return nullptr;
}

void widen_row(int32_t type, const void *data, int64_t n, float *out) {
  const uint8_t *p = static_cast<const uint8_t *>(data);
  switch (type) {
    case KILAT_TYPE_F32: memcpy(out, p, size_t(n) * 4); return;
    case KILAT_TYPE_F16:
      for (int64_t i = 0; i < n; i++) out[i] = half_at(p + 2 * i);
      return;
    case KILAT_TYPE_BF16:
      for (int64_t i = 0; i < n; i++)
        out[i] = float_of(uint32_t(number_at<uint16_t>(reinterpret_cast<const char *>(p + 2 * i))) << 16);
      return;
    default: break;
  }
  const Format *f = format_of(type);
  for (int64_t i = 0; i < n; i += f->items, p += f->bytes, out += f->items) switch (type) {
      case KILAT_TYPE_Q4_0: q4(p, false, out); break;
      case KILAT_TYPE_Q4_1: q4(p, true, out); break;
      case KILAT_TYPE_Q5_0: q5(p, false, out); break;
      case KILAT_TYPE_Q5_1: q5(p, true, out); break;
      case KILAT_TYPE_Q8_0: q8(p, out); break;
      case KILAT_TYPE_Q4_K: q45_k(p, false, out); break;
      case KILAT_TYPE_Q5_K: q45_k(p, true, out); break;
      case KILAT_TYPE_Q6_K: q6_k(p, out); break;
      default: break;
    }
}

}  // namespace kilat
