// What the fuzzer calls: every reader of files, on one input. Works with libFuzzer (-fsanitize=fuzzer) and with mutate.cpp.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <vector>

#include "../runtime/error.h"
#include "../runtime/files.h"
#include "../runtime/formats.h"
#include "../runtime/tokenizer.h"

using namespace kilat;

namespace {

// Reads a little of what a description points at, as a backend would.
void touch(const kilat_tensor &t) {
  if (!t.data || t.type == KILAT_TYPE_F8_E4M3) return;
  const Format *f = format_of(t.type);
  float values[256];
  const char *last = static_cast<const char *>(t.data) + (t.rows - 1) * t.row_bytes + t.row_bytes - f->bytes;
  widen_row(t.type, t.data, f->items, values);
  widen_row(t.type, last, f->items, values);
}

void use(const Source &s) {
  for (const kilat_layer_desc &l : s.layers)
    for (const kilat_tensor *t : {&l.norm_in, &l.q, &l.k, &l.v, &l.o, &l.norm_mid, &l.gate, &l.up, &l.down, &l.q_bias}) touch(*t);
  touch(s.desc.embedding);
  touch(s.desc.norm);
  touch(s.desc.head);
}

void read_one(uint8_t kind, Bytes rest) {
  if (kind == 0) {
    std::unique_ptr<Source> s = source_of_gguf(rest, "a file");
    use(*s);
    std::unique_ptr<Tokenizer> t = make_tokenizer(s->gguf);
    t->encode("hello 12 <|270|> \xc3\xa9'll  \n x", true);
    for (int32_t id = 0; id < 8; id++) t->bytes(id);
  } else if (kind == 1) {
    read_safetensors(rest, "a file");
  } else {
    // config.json, then a safetensors file, with the length of the first in front
    if (rest.size < 2) return;
    size_t n = number_at<uint16_t>(rest.data);
    if (n > rest.size - 2) return;
    Bytes config = {rest.data + 2, n}, weights = {rest.data + 2 + n, rest.size - 2 - n};
    use(*source_of_safetensors(config, kind == 3 ? &config : nullptr, {weights}));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 1) return 0;
  // a copy of exactly this size, so that a read past its end is seen
  std::vector<char> copy(data + 1, data + size);
  try {
    read_one(data[0] % 4, {copy.data(), copy.size()});
  } catch (const Error &e) {
    if (!e.failure.text[0] || e.status == KILAT_OK) __builtin_trap();  // a refusal says why
  }
  return 0;
}
