// A small JSON reader (RFC 8259). The text is not trusted: depth is bounded, and memory by a constant times the text's size.
#pragma once

#include <stdint.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kilat {

struct Json {
  enum Kind { Null, Bool, Integer, Real, String, Array, Object };
  Kind kind = Null;
  bool flag = false;
  int64_t integer = 0;  // of Integer; a number without fraction that fits
  double real = 0;      // of Integer and Real
  std::string text;
  std::vector<Json> items;
  std::vector<std::pair<std::string, Json>> members;  // in the order of the text, no name twice

  // The member called `name`, or nullptr; also when this is not an object.
  const Json *find(std::string_view name) const;
  bool is_number() const { return kind == Integer || kind == Real; }
  // Null, false, 0, "", [] or {}.
  bool is_empty() const;
};

// Throws Error (KILAT_BAD_FILE) that begins with `what` when text is not one JSON value.
Json parse_json(std::string_view text, const char *what);

}  // namespace kilat
