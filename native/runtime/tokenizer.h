// Byte-level BPE from the metadata of a GGUF file. Rules and results are those of the package's text/gguf_tokenizer.py.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gguf.h"

namespace kilat {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::vector<int32_t> encode(std::string_view text, bool special) const = 0;
  // Bytes of an id; a control token's are its name.
  virtual std::string_view bytes(int32_t id) const = 0;
  virtual int64_t memory_bytes() const = 0;
};

// Throws Error: KILAT_UNSUPPORTED for another kind of tokenizer, KILAT_BAD_FILE for damaged lists.
std::unique_ptr<Tokenizer> make_tokenizer(const Gguf &file);

}  // namespace kilat
