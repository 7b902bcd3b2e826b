// What a model computes, read from config.json or GGUF metadata. A field that may change the math and is not known is refused.
#pragma once

#include <string>
#include <vector>

#include "gguf.h"
#include "json.h"
#include "rope.h"

namespace kilat {

struct Config {
  std::string architecture;  // llama, mistral, qwen2, qwen3
  int64_t vocab = 0, hidden = 0, inner = 0, layers = 0, q_heads = 0, kv_heads = 0, head_dim = 0, max_context = 0;
  double eps = 0;
  Rope rope = {};
  bool qkv_bias = false, out_bias = false, mlp_bias = false, qk_norm = false, tied = false;
  bool stored_f32 = false;       // the checkpoint says that it is fp32
  bool paired = false;           // GGUF files of llama: rows of q and k are stored as rotating pairs
  int64_t block_rows = 0, block_cols = 0;  // fp8 checkpoints: the blocks of weight_scale_inv
  std::vector<int64_t> windows;  // of each layer; 0: none
  std::vector<int32_t> end_ids;
  int32_t bos_id = -1;
};

// Both throw Error (KILAT_BAD_FILE, KILAT_UNSUPPORTED). `generation` is generation_config.json, or null.
Config config_of_json(const Json &json, const Json *generation);
Config config_of_gguf(const Gguf &file, const char *name);

}  // namespace kilat
