#include "rope.h"

#include <math.h>

#include "backend.h"

namespace kilat {

namespace {

float clamp01(float x) { return x < 0 ? 0.0f : x > 1 ? 1.0f : x; }

// Long wavelengths are stretched by the factor, short ones kept, a smooth ramp between.
void llama3(const Rope &rope, int64_t n, float *f) {
  const float turn = float(2 * M_PI), context = float(rope.original_context);
  for (int64_t i = 0; i < n; i++) {
    float wavelength = (1.0f / f[i]) * turn;
    float ramp = clamp01(((1.0f / wavelength) * context - float(rope.low_freq)) / float(rope.high_freq - rope.low_freq));
    float stretched = (1.0f - ramp) * f[i] / float(rope.factor);
    f[i] = stretched + ramp * f[i];
  }
}

// Slow dimensions are interpolated, fast ones kept (arXiv:2309.00071).
void yarn(const Rope &rope, int64_t n, float *f) {
  auto dimension_of = [&](double rotations) {
    return double(rope.dim) * log(rope.original_context / (rotations * 2 * M_PI)) / (2 * log(rope.theta));
  };
  double low = floor(dimension_of(rope.beta_fast)), high = ceil(dimension_of(rope.beta_slow));
  low = low > 0 ? low : 0;
  high = high < double(rope.dim - 1) ? high : double(rope.dim - 1);
  double width = high - low > 0.001 ? high - low : 0.001;
  for (int64_t i = 0; i < n; i++) {
    float ramp = clamp01((float(i) - float(low)) / float(width));
    float slow = f[i] / float(rope.factor) * ramp;
    f[i] = slow + f[i] * (1.0f - ramp);
  }
}

}  // namespace

float inverse_frequencies(const Rope &given, int64_t max_context, float *out) {
  Rope rope = given;
  if (rope.original_context <= 0) rope.original_context = double(max_context);
  int64_t n = rope.dim / 2;
  for (int64_t i = 0; i < n; i++) {
    float exponent = float(2 * i) / float(rope.dim);
    out[i] = 1.0f / float(pow(double(float(rope.theta)), double(exponent)));
  }
  switch (rope.scaling) {
    case RopeScaling::None: return 1.0f;
    case RopeScaling::Linear:
      for (int64_t i = 0; i < n; i++) out[i] = out[i] / float(rope.factor);
      return 1.0f;
    case RopeScaling::Llama3: llama3(rope, n, out); return 1.0f;
    case RopeScaling::Yarn:
      yarn(rope, n, out);
      if (rope.attention_factor > 0) return float(rope.attention_factor);
      return rope.factor > 1 ? float(0.1 * log(rope.factor) + 1.0) : 1.0f;
  }
  return 1.0f;
}

}  // namespace kilat

extern "C" void kilat_rope_table(const kilat_model_desc *desc, int64_t positions, float *out) {
  int64_t half = desc->rotary / 2;
  for (int64_t p = 0; p < positions; p++, out += desc->rotary)
    for (int64_t i = 0; i < half; i++) {
      float angle = float(p) * desc->inverse_frequencies[i];
      out[i] = float(cos(double(angle))) * desc->rope_factor;
      out[half + i] = float(sin(double(angle))) * desc->rope_factor;
    }
}
