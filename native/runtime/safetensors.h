// The header of a safetensors file. The file is not trusted. Layout: the format section of the safetensors repository's README.
#pragma once

#include <string>
#include <vector>

#include "bytes.h"

namespace kilat {

// type: a KILAT_TYPE_..., or -1 for one that no model here uses. A vector has one row.
struct SafeTensor {
  std::string name;
  int32_t type;
  int64_t rows, cols;
  int dims;
  Bytes data;  // in the file
};

// The tensors, sorted by name. Throws Error whose text begins with `name`.
std::vector<SafeTensor> read_safetensors(Bytes file, const char *name);

}  // namespace kilat
