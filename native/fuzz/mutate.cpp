// Drives readers.cpp where there is no libFuzzer: valid small files, changed at random, for a number of executions.
//
//   fuzz_readers [EXECUTIONS] [SEED]      prints what it did; a finding ends the process in a sanitizer's report
#include <stdio.h>
#include <stdlib.h>

#include <string>
#include <vector>

#include "../tests/tiny_gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

namespace {

typedef std::vector<uint8_t> Input;

struct Random {
  uint64_t state;
  uint64_t next() {
    state += 0x9E3779B97F4A7C15u;
    uint64_t z = state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  size_t below(size_t n) { return n ? size_t(next() % n) : 0; }
};

Input with_kind(uint8_t kind, const std::string &text) {
  Input in(1, kind);
  in.insert(in.end(), text.begin(), text.end());
  return in;
}

std::string length_first(const std::string &json, const std::string &data) {
  uint64_t n = json.size();
  return std::string(reinterpret_cast<char *>(&n), 8) + json + data;
}

// A one-layer qwen3 checkpoint of hidden size 8.
std::string small_safetensors() {
  struct {
    const char *name, *shape;
    int values;
  } tensors[] = {{"model.embed_tokens.weight", "16,8", 128},
                 {"model.norm.weight", "8", 8},
                 {"model.layers.0.input_layernorm.weight", "8", 8},
                 {"model.layers.0.post_attention_layernorm.weight", "8", 8},
                 {"model.layers.0.self_attn.q_proj.weight", "8,8", 64},
                 {"model.layers.0.self_attn.k_proj.weight", "4,8", 32},
                 {"model.layers.0.self_attn.v_proj.weight", "4,8", 32},
                 {"model.layers.0.self_attn.o_proj.weight", "8,8", 64},
                 {"model.layers.0.self_attn.q_norm.weight", "4", 4},
                 {"model.layers.0.self_attn.k_norm.weight", "4", 4},
                 {"model.layers.0.mlp.gate_proj.weight", "8,8", 64},
                 {"model.layers.0.mlp.up_proj.weight", "8,8", 64},
                 {"model.layers.0.mlp.down_proj.weight", "8,8", 64}};
  std::string json = "{\"__metadata__\":{\"format\":\"pt\"}";
  int at = 0;
  for (auto &t : tensors) {
    json += std::string(",\"") + t.name + "\":{\"dtype\":\"BF16\",\"shape\":[" + t.shape + "],\"data_offsets\":[" +
            std::to_string(at) + "," + std::to_string(at + 2 * t.values) + "]}";
    at += 2 * t.values;
  }
  return length_first(json + "}", std::string(size_t(at), '\1'));
}

std::vector<Input> seeds() {
  const std::string config =
      "{\"model_type\":\"qwen3\",\"hidden_size\":8,\"intermediate_size\":8,\"num_hidden_layers\":1,\"num_attention_heads\":2,"
      "\"num_key_value_heads\":1,\"head_dim\":4,\"vocab_size\":16,\"max_position_embeddings\":64,\"rms_norm_eps\":1e-6,"
      "\"tie_word_embeddings\":true,\"eos_token_id\":[1,2],\"dtype\":\"bfloat16\",\"rope_parameters\":{\"rope_type\":\"llama3\","
      "\"rope_theta\":1e4,\"factor\":4.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":32}"
      "}";
  const std::string weights = small_safetensors();
  uint16_t n = uint16_t(config.size());
  std::string both = std::string(reinterpret_cast<char *>(&n), 2) + config + weights;
  tiny_file gguf = tiny_gguf();
  std::vector<Input> found = {with_kind(0, std::string(reinterpret_cast<char *>(gguf.data), gguf.size)), with_kind(1, weights),
                              with_kind(2, both), with_kind(3, both)};
  free(gguf.data);
  return found;
}

// Bytes in front of the data of a seed: where changes matter most.
size_t header_bytes(const Input &in) {
  if (in[0] != 0) return in.size();
  size_t offset, bytes;
  tiny_file f = tiny_header(&offset, &bytes);
  free(f.data);
  return f.size + 1;
}

void change(Random *r, Input *in, size_t header) {
  static const uint64_t kOdd[] = {0,
                                  1,
                                  2,
                                  7,
                                  8,
                                  31,
                                  32,
                                  255,
                                  256,
                                  65535,
                                  1u << 16,
                                  0x7fffffff,
                                  0x80000000u,
                                  0xffffffffu,
                                  1ull << 32,
                                  1ull << 62,
                                  ~0ull >> 1,
                                  ~0ull,
                                  0x7ff0000000000000u,
                                  1000,
                                  30,
                                  12};
  static const char kSigns[] = "{}[]\",:0123456789-+.eE \\u\ntfn";
  size_t limit = header < in->size() ? header : in->size();
  size_t at = r->below(r->below(8) ? limit : in->size());
  if (in->empty()) return;
  switch (r->below(9)) {
    case 0: (*in)[at] ^= uint8_t(1 << r->below(8)); break;
    case 1: (*in)[at] = uint8_t(r->next()); break;
    case 2: case 3: {
      uint64_t v = kOdd[r->below(sizeof kOdd / sizeof *kOdd)];
      for (size_t i = 0, width = size_t(1) << r->below(4); i < width && at + i < in->size(); i++)
        (*in)[at + i] = uint8_t(v >> 8 * i);
      break;
    }
    case 4: in->resize(r->below(4) ? at : in->size() - r->below(40 < in->size() ? 40 : in->size())); break;
    case 5: in->insert(in->begin() + long(at), uint8_t(r->next())); break;
    case 6:
      in->erase(in->begin() + long(at), in->begin() + long(at + r->below(in->size() - at < 24 ? in->size() - at : 24)));
      break;
    case 7: {
      size_t from = r->below(limit), n = r->below(in->size() - from < 48 ? in->size() - from : 48);
      Input piece(in->begin() + long(from), in->begin() + long(from + n));
      for (size_t i = 0; i < n && at + i < in->size(); i++) (*in)[at + i] = piece[i];
      break;
    }
    default: (*in)[at] = uint8_t(kSigns[r->below(sizeof kSigns - 1)]); break;
  }
}

}  // namespace

int main(int argc, char **argv) {
  long executions = argc > 1 ? atol(argv[1]) : 100000;
  Random random = {argc > 2 ? strtoull(argv[2], nullptr, 10) : 1};
  std::vector<Input> all = seeds();
  std::vector<size_t> headers;
  for (const Input &in : all) headers.push_back(header_bytes(in)), LLVMFuzzerTestOneInput(in.data(), in.size());
  for (long i = 0; i < executions; i++) {
    size_t pick = random.below(all.size());
    Input in = all[pick];
    for (size_t n = 1 + random.below(4); n > 0 && !in.empty(); n--) change(&random, &in, headers[pick]);
    if (!in.empty() && random.below(50)) in[0] = uint8_t(pick);
    LLVMFuzzerTestOneInput(in.data(), in.size());
  }
  printf("readers: %ld executions without a finding\n", executions);
  return 0;
}
