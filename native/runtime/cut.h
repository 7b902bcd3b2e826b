// How text is cut into pieces before its bytes are joined: the regular expressions of byte-level tokenizers, written out.
#pragma once

#include <vector>

#include "unicode.h"

namespace kilat {

// A character of a text that is being cut.
struct Char {
  uint32_t code;
  uint32_t begin;  // in bytes
  CharKind kind;
};

struct Cut {
  const char *name;
  bool first_digits;   // every number character is a piece of its own, before the rest is cut
  bool modern;         // Llama 3's and Qwen2's expression, else GPT-2's
  int digits;          // of a number in one piece
  bool nfc, whole_words, bos;
};

inline const Cut kCuts[] = {
    {"gpt-2", false, false, 0, false, false, false},   {"smollm", true, false, 0, false, false, false},
    {"qwen2", false, true, 1, true, false, false},     {"llama-bpe", false, true, 3, false, true, true},
    {"llama-v3", false, true, 3, false, true, true},   {"llama3", false, true, 3, false, true, true},
};

// Cuts chars[begin, end) where the expression of the kind of tokenizer would; each function returns the end of one match, or its
// start.
class Cutter {
 public:
  Cutter(const std::vector<Char> &chars, size_t end, const Cut &cut) : c_(chars), end_(end), cut_(cut) {}

  size_t next(size_t at) const {
    if (size_t n = contraction(at)) return at + n;
    return cut_.modern ? modern(at) : classic(at);
  }

 private:
  const std::vector<Char> &c_;
  const size_t end_;
  const Cut &cut_;

  bool is(size_t at, CharKind kind) const { return at < end_ && c_[at].kind == kind; }
  bool newline(size_t at) const { return at < end_ && (c_[at].code == '\r' || c_[at].code == '\n'); }

  size_t run(size_t at, CharKind kind) const {
    while (is(at, kind)) at++;
    return at;
  }

  uint32_t folded(size_t at) const {
    if (at >= end_) return 0;
    uint32_t code = c_[at].code;
    if (!cut_.modern) return code;
    if (code == 0x17f) return 's';  // the long s is an s to an expression that ignores case
    return code - 'A' < 26 ? code | 32 : code;
  }

  // 's 't 're 've 'm 'll 'd: how many characters, 0 for none.
  size_t contraction(size_t at) const {
    if (c_[at].code != '\'') return 0;
    uint32_t a = folded(at + 1), b = folded(at + 2);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
  }

  // \s+(?!\S)|\s+: a run of spaces leaves its last one to the word that follows.
  size_t spaces(size_t at) const {
    size_t end = run(at, CharKind::Space);
    return end < end_ && end - at > 1 ? end - 1 : end;
  }

  size_t classic(size_t at) const {
    size_t from = c_[at].code == ' ' && at + 1 < end_ ? at + 1 : at;
    if (is(from, CharKind::Space)) return spaces(at);
    return run(from, c_[from].kind);
  }

  size_t modern(size_t at) const {
    CharKind kind = c_[at].kind;
    if (kind == CharKind::Letter) return run(at, kind);
    bool opens = kind != CharKind::Number && !newline(at);  // any one sign or space before letters belongs to them
    if (opens && is(at + 1, CharKind::Letter)) return run(at + 1, CharKind::Letter);
    if (kind == CharKind::Number) {
      size_t end = at;
      while (is(end, CharKind::Number) && end - at < size_t(cut_.digits)) end++;
      return end;
    }
    size_t signs = c_[at].code == ' ' ? at + 1 : at;
    if (is(signs, CharKind::Other)) {
      size_t end = run(signs, CharKind::Other);
      while (newline(end)) end++;
      return end;
    }
    size_t end = run(at, CharKind::Space), last = end;
    while (last > at && !newline(last - 1)) last--;
    return last > at ? last : spaces(at);  // up to the last line break of the run, if it has one
  }
};

}  // namespace kilat
