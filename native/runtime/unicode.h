// What the tokenizer needs of Unicode: three classes of characters, and normalization form C.
#pragma once

#include <stdint.h>

#include <string>
#include <string_view>
#include <vector>

namespace kilat {

struct CodeRange {
  uint32_t first, last;
};
struct CombiningRange {
  uint32_t first, last, combining_class;
};
struct Decomposition {
  uint32_t code, first, second, composes;
};

// Sorted by code point; in the generated unicode_tables.cpp.
extern const CodeRange kLetters[], kNumbers[], kSpaces[];
extern const CombiningRange kCombining[];
extern const Decomposition kDecompositions[];
extern const int kLettersCount, kNumbersCount, kSpacesCount, kCombiningCount, kDecompositionsCount;

enum class CharKind : uint8_t { Other, Letter, Number, Space };

CharKind kind_of(uint32_t code);

// Code point at text[*at], which moves behind it. A byte that begins no valid character is U+FFFD.
uint32_t next_code(std::string_view text, size_t *at);
void append_code(uint32_t code, std::string *out);

// Normalization form C (Unicode Standard Annex 15).
std::string nfc(std::string_view text);

}  // namespace kilat
