// Views of mapped files, and checked reading from them.
#pragma once

#include <stdint.h>
#include <string.h>

#include <string_view>

namespace kilat {

struct Bytes {
  const char *data = nullptr;
  size_t size = 0;
};

// A number stored little-endian at an address that may have any alignment.
template <class T>
inline T number_at(const char *p) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian, and so must be the machine");
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}

// Whether text is UTF-8 without surrogates, overlong forms or code points past U+10FFFF.
inline bool is_utf8(std::string_view text) {
  const unsigned char *p = reinterpret_cast<const unsigned char *>(text.data()), *end = p + text.size();
  while (p < end) {
    if (end - p >= 8 && !(number_at<uint64_t>(reinterpret_cast<const char *>(p)) & 0x8080808080808080u)) {
      p += 8;
      continue;
    }
    unsigned c = *p;
    if (c < 0x80) {
      p++;
      continue;
    }
    int n = c >= 0xc2 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
    if (n == 0 || end - p < n) return false;
    for (int i = 1; i < n; i++)
      if ((p[i] & 0xc0) != 0x80) return false;
    if ((c == 0xe0 && p[1] < 0xa0) || (c == 0xed && p[1] > 0x9f) || (c == 0xf0 && p[1] < 0x90) || (c == 0xf4 && p[1] > 0x8f))
      return false;
    p += n;
  }
  return true;
}

}  // namespace kilat
