// The weights of a model as the CPU kernels want them.
#pragma once

#include <vector>

#include "../cpu/kilat_layers.h"
#include "backend.h"
#include "region.h"

namespace kilat {

// Everything lies in one region; packed linears also own a few bytes of the heap each.
struct CpuWeights {
  Region region;
  int64_t embedding_bytes = 0, linear_bytes = 0, small_bytes = 0;
  int32_t embedding_type = 0;
  const char *embedding = nullptr;  // [vocab] rows as stored, or of the dtype
  int64_t embedding_row_bytes = 0;
  bool stored = false;       // block formats stay as they are
  bool gather_head = false;  // the embedding is the head, and there is no second copy of it
  void *norm = nullptr;
  kilat_linear *head = nullptr;
  std::vector<kilat_layer> layers;
  ~CpuWeights();
};

// Throws Error (KILAT_NO_MEMORY). dtype: KILAT_F32 or KILAT_BF16.
void load_weights(const kilat_model_desc &desc, kilat_cpu *cpu, int dtype, CpuWeights *out);

// n values of a stored row -> the dtype.
void convert_row(int32_t type, const void *data, int64_t n, int dtype, void *out);

}  // namespace kilat
