#include "unicode.h"

#include <algorithm>

namespace kilat {

namespace {

template <class Range>
const Range *range_of(const Range *table, int n, uint32_t code) {
  const Range *at = std::upper_bound(table, table + n, code, [](uint32_t c, const Range &r) { return c < r.first; });
  return at != table && code <= at[-1].last ? at - 1 : nullptr;
}

uint32_t class_of(uint32_t code) {
  const CombiningRange *r = code < 0x300 ? nullptr : range_of(kCombining, kCombiningCount, code);
  return r ? r->combining_class : 0;
}

// Hangul syllables compose by arithmetic.
const uint32_t kS = 0xAC00, kL = 0x1100, kV = 0x1161, kT = 0x11A7, kLs = 19, kVs = 21, kTs = 28;

void decompose(uint32_t code, std::vector<uint32_t> *out) {
  if (code < 0xC0) {
    out->push_back(code);
    return;
  }
  if (code - kS < kLs * kVs * kTs) {
    uint32_t s = code - kS;
    out->push_back(kL + s / (kVs * kTs));
    out->push_back(kV + s % (kVs * kTs) / kTs);
    if (s % kTs) out->push_back(kT + s % kTs);
    return;
  }
  const Decomposition *end = kDecompositions + kDecompositionsCount;
  const Decomposition *at =
      std::lower_bound(kDecompositions, end, code, [](const Decomposition &d, uint32_t c) { return d.code < c; });
  if (at == end || at->code != code) {
    out->push_back(code);
    return;
  }
  decompose(at->first, out);
  if (at->second) decompose(at->second, out);
}

// The pairs that compose, sorted by (first, second); made once per text that needs them.
std::vector<Decomposition> pairs() {
  std::vector<Decomposition> found;
  for (int i = 0; i < kDecompositionsCount; i++)
    if (kDecompositions[i].composes && kDecompositions[i].second) found.push_back(kDecompositions[i]);
  std::sort(found.begin(), found.end(), [](const Decomposition &a, const Decomposition &b) {
    return a.first != b.first ? a.first < b.first : a.second < b.second;
  });
  return found;
}

// 0 when the two do not compose.
uint32_t compose(const std::vector<Decomposition> &table, uint32_t a, uint32_t b) {
  if (a - kL < kLs && b - kV < kVs) return kS + ((a - kL) * kVs + (b - kV)) * kTs;
  if (a - kS < kLs * kVs * kTs && (a - kS) % kTs == 0 && b - kT - 1 < kTs - 1) return a + (b - kT);
  auto at = std::lower_bound(table.begin(), table.end(), a, [b](const Decomposition &d, uint32_t first) {
    return d.first != first ? d.first < first : d.second < b;
  });
  return at != table.end() && at->first == a && at->second == b ? at->code : 0;
}

void order(std::vector<uint32_t> *codes) {
  for (size_t i = 0; i < codes->size();) {
    size_t end = i;
    while (end < codes->size() && class_of((*codes)[end])) end++;
    std::stable_sort(codes->begin() + long(i), codes->begin() + long(end),
                     [](uint32_t a, uint32_t b) { return class_of(a) < class_of(b); });
    i = end + 1;
  }
}

}  // namespace

CharKind kind_of(uint32_t code) {
  if (code < 0x80) {
    if ((code | 32) - 'a' < 26) return CharKind::Letter;
    if (code - '0' < 10) return CharKind::Number;
    return code == ' ' || code - 9 < 5 ? CharKind::Space : CharKind::Other;
  }
  if (range_of(kLetters, kLettersCount, code)) return CharKind::Letter;
  if (range_of(kNumbers, kNumbersCount, code)) return CharKind::Number;
  return range_of(kSpaces, kSpacesCount, code) ? CharKind::Space : CharKind::Other;
}

uint32_t next_code(std::string_view text, size_t *at) {
  const unsigned char *p = reinterpret_cast<const unsigned char *>(text.data()) + *at;
  size_t left = text.size() - *at;
  unsigned c = *p;
  int n = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
  uint32_t code = n < 2 ? c : c & (0xffu >> (n + 1));
  for (int i = 1; i < n; i++) {
    if (size_t(i) >= left || (p[i] & 0xc0) != 0x80) {
      n = 0;
      break;
    }
    code = code << 6 | (p[i] & 63);
  }
  bool wrong =
      n == 0 || (n == 3 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) || (n == 4 && (code < 0x10000 || code > 0x10ffff));
  *at += wrong ? 1 : size_t(n);
  return wrong ? 0xfffd : code;
}

void append_code(uint32_t code, std::string *out) {
  if (code < 0x80) {
    out->push_back(char(code));
    return;
  }
  if (code >= 0x10000) {
    out->push_back(char(0xf0 | code >> 18));
    out->push_back(char(0x80 | (code >> 12 & 63)));
  } else if (code >= 0x800) {
    out->push_back(char(0xe0 | code >> 12));
  }
  out->push_back(code >= 0x800 ? char(0x80 | (code >> 6 & 63)) : char(0xc0 | code >> 6));
  out->push_back(char(0x80 | (code & 63)));
}

std::string nfc(std::string_view text) {
  bool plain = true;
  for (size_t i = 0; plain && i < text.size(); i++) plain = static_cast<unsigned char>(text[i]) < 0xcc;  // below U+0300
  if (plain) return std::string(text);
  std::vector<uint32_t> codes;
  for (size_t i = 0; i < text.size();) decompose(next_code(text, &i), &codes);
  order(&codes);
  const std::vector<Decomposition> table = pairs();
  std::vector<uint32_t> out;
  size_t starter = SIZE_MAX;  // where in `out` the last character of class 0 is
  uint32_t last_class = 0;
  for (uint32_t code : codes) {
    uint32_t own = class_of(code);
    bool blocked = starter == SIZE_MAX || (starter + 1 != out.size() && last_class >= own);
    uint32_t both = blocked ? 0 : compose(table, out[starter], code);
    if (both) {
      out[starter] = both;
      continue;
    }
    if (own == 0) starter = out.size();
    last_class = own;
    out.push_back(code);
  }
  std::string joined;
  for (uint32_t code : out) append_code(code, &joined);
  return joined;
}

}  // namespace kilat
