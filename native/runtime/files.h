// The files of a model: mapped, checked, and described for a backend.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "bytes.h"
#include "config.h"
#include "gguf.h"
#include "safetensors.h"

namespace kilat {

// A whole file, mapped for reading.
class Mapping {
 public:
  explicit Mapping(const std::string &path);  // throws Error
  Mapping(Mapping &&other) noexcept : bytes(other.bytes) { other.bytes = {}; }
  Mapping(const Mapping &) = delete;
  ~Mapping();
  Bytes bytes;
};

// A model's description. Its pointers lead into the files and into this object, which may not be moved.
struct Source {
  Config config;
  kilat_model_desc desc = {};
  int64_t parameters = 0, tensor_bytes = 0;
  uint64_t identity = 0;  // of config, tensor table and the start of every tensor: what a snapshot must agree with
  Gguf gguf;              // empty for safetensors
  std::vector<kilat_layer_desc> layers;
  std::vector<float> frequencies;
  std::vector<Mapping> maps;
};

// All throw Error. `name` begins the texts of errors.
std::unique_ptr<Source> open_source(const std::string &path);
std::unique_ptr<Source> source_of_gguf(Bytes file, const char *name);
std::unique_ptr<Source> source_of_safetensors(Bytes config, const Bytes *generation, const std::vector<Bytes> &shards);

}  // namespace kilat
