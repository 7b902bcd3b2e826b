// Rotary frequencies and tables, to the bit those of the Python package (nn/rotary.py): fp32 steps in its order, functions in fp64.
#pragma once

#include <stdint.h>

namespace kilat {

enum class RopeScaling { None, Linear, Llama3, Yarn };

struct Rope {
  int64_t dim;  // rotated elements of a head, even
  double theta;
  RopeScaling scaling = RopeScaling::None;
  double factor = 1, low_freq = 1, high_freq = 1, original_context = 0;  // original_context 0: the model's
  double beta_fast = 32, beta_slow = 1, attention_factor = 0;            // attention_factor 0: what YaRN says
};

// out [dim / 2]; returns the factor on cosines and sines.
float inverse_frequencies(const Rope &rope, int64_t max_context, float *out);

}  // namespace kilat
