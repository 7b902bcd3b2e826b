// The header of a GGUF file (versions 2 and 3): metadata and tensor table. The file is not trusted: every count, length and offset
// is checked before it is used. Layout: the GGUF specification in the ggml repository (docs/gguf.md).
#pragma once

#include <string_view>
#include <vector>

#include "bytes.h"

namespace kilat {

enum GgufType { GGUF_BOOL = 7, GGUF_STRING = 8, GGUF_ARRAY = 9 };  // the others are numbers

// Numbers are both in `integer` (floats cut off) and `real`. Arrays: `count` items of `item_type`, stored in `raw`.
struct GgufValue {
  std::string_view key;
  int type = 0, item_type = 0;
  int64_t integer = 0;
  double real = 0;
  std::string_view text;
  size_t count = 0;
  Bytes raw;
  bool is_integer() const { return type <= 5 || type == 10 || type == 11; }
  bool is_number() const { return type != GGUF_BOOL && type != GGUF_STRING && type != GGUF_ARRAY; }
};

struct GgufTensor {
  std::string_view name;
  int32_t type;
  int64_t rows, cols;  // cols: values of a row; rows: product of the other dimensions
  int dims;
  Bytes data;
};

// Views into the file, which must live as long.
struct Gguf {
  std::vector<GgufValue> values;    // sorted by key
  std::vector<GgufTensor> tensors;  // sorted by name
  const GgufValue *find(std::string_view key) const;
  const GgufTensor *tensor(std::string_view name) const;
};

// Throws Error whose text begins with `name`.
Gguf read_gguf(Bytes file, const char *name);

// The strings of an array of strings, which was checked when it was read.
std::vector<std::string_view> strings_of(const GgufValue &array);

}  // namespace kilat
