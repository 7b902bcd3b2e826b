#include "json.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "bytes.h"
#include "error.h"

namespace kilat {

namespace {

const int kMaxDepth = 64;

class Reader {
 public:
  Reader(std::string_view text, const char *what) : at_(text.data()), begin_(text.data()), end_(at_ + text.size()), what_(what) {}

  Json whole() {
    Json value = any(0);
    space();
    if (at_ != end_) wrong("something after the value");
    return value;
  }

 private:
  const char *at_, *begin_, *end_;
  const char *what_;

  [[noreturn]] void wrong(const char *found) {
    fail(KILAT_BAD_FILE, "%s is not valid JSON: %s at byte %lld", what_, found, static_cast<long long>(at_ - begin_));
  }

  void space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) at_++;
  }

  bool take(char c) {
    space();
    if (at_ == end_ || *at_ != c) return false;
    at_++;
    return true;
  }

  bool word(const char *w) {
    size_t n = strlen(w);
    if (size_t(end_ - at_) < n || memcmp(at_, w, n) != 0) return false;
    at_ += n;
    return true;
  }

  Json any(int depth) {
    if (depth > kMaxDepth) wrong("nested deeper than 64");
    space();
    if (at_ == end_) wrong("the text ends");
    Json value;
    switch (*at_) {
      case '{': object(&value, depth); return value;
      case '[': array(&value, depth); return value;
      case '"':
        value.kind = Json::String;
        value.text = string();
        return value;
      case 't': case 'f':
        value.kind = Json::Bool;
        value.flag = *at_ == 't';
        if (!word(value.flag ? "true" : "false")) wrong("an unknown word");
        return value;
      case 'n':
        if (!word("null")) wrong("an unknown word");
        return value;
      default: number(&value); return value;
    }
  }

  void object(Json *value, int depth) {
    value->kind = Json::Object;
    at_++;
    if (take('}')) return;
    do {
      space();
      if (at_ == end_ || *at_ != '"') wrong("no name of a member");
      std::string name = string();
      if (!take(':')) wrong("no colon after a name");
      value->members.emplace_back(std::move(name), any(depth + 1));
    } while (take(','));
    if (!take('}')) wrong("an object without end");
    std::vector<std::string_view> names;
    names.reserve(value->members.size());
    for (auto &member : value->members) names.push_back(member.first);
    std::sort(names.begin(), names.end());
    if (std::adjacent_find(names.begin(), names.end()) != names.end()) wrong("a name twice in an object");
  }

  void array(Json *value, int depth) {
    value->kind = Json::Array;
    at_++;
    if (take(']')) return;
    do value->items.push_back(any(depth + 1));
    while (take(','));
    if (!take(']')) wrong("an array without end");
  }

  void number(Json *value) {
    const char *first = at_;
    auto digits = [&] {
      const char *from = at_;
      while (at_ < end_ && *at_ >= '0' && *at_ <= '9') at_++;
      if (at_ == from) wrong("not a value");
    };
    if (*at_ == '-') at_++;
    bool zero = at_ < end_ && *at_ == '0', whole = true;
    const char *from = at_;
    digits();
    if (zero && at_ - from > 1) wrong("a number that begins with 0");
    if (at_ < end_ && *at_ == '.') {
      whole = false;
      at_++;
      digits();
    }
    if (at_ < end_ && (*at_ == 'e' || *at_ == 'E')) {
      whole = false;
      at_++;
      if (at_ < end_ && (*at_ == '+' || *at_ == '-')) at_++;
      digits();
    }
    if (at_ - first > 400) wrong("a number of more than 400 characters");
    std::string copy(first, at_);
    value->real = strtod(copy.c_str(), nullptr);
    value->kind = Json::Real;
    if (!whole) return;
    errno = 0;
    value->integer = strtoll(copy.c_str(), nullptr, 10);
    if (errno == 0) value->kind = Json::Integer;
  }

  unsigned hex4() {
    if (end_ - at_ < 4) wrong("an escape without end");
    unsigned code = 0;
    for (int i = 0; i < 4; i++, at_++) {
      char c = *at_;
      unsigned digit = c >= '0' && c <= '9'                 ? unsigned(c - '0')
                       : (c | 32) >= 'a' && (c | 32) <= 'f' ? unsigned((c | 32) - 'a') + 10
                                                            : 16;
      if (digit > 15) wrong("an escape that is not hexadecimal");
      code = code * 16 + digit;
    }
    return code;
  }

  void escape(std::string *out) {
    static const char kFrom[] = "\"\\/bfnrt", kTo[] = "\"\\/\b\f\n\r\t";
    if (at_ == end_) wrong("an escape without end");
    char c = *at_++;
    if (c != 'u') {
      const char *found = c ? strchr(kFrom, c) : nullptr;
      if (!found) wrong("an unknown escape");
      out->push_back(kTo[found - kFrom]);
      return;
    }
    unsigned code = hex4();
    if (code >= 0xd800 && code < 0xdc00) {
      if (end_ - at_ < 2 || at_[0] != '\\' || at_[1] != 'u') wrong("half a surrogate pair");
      at_ += 2;
      unsigned low = hex4();
      if (low < 0xdc00 || low >= 0xe000) wrong("half a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
      wrong("half a surrogate pair");
    }
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

  std::string string() {
    at_++;
    std::string out;
    for (;;) {
      const char *from = at_;
      while (at_ < end_ && *at_ != '"' && *at_ != '\\' && static_cast<unsigned char>(*at_) >= 0x20) at_++;
      if (!is_utf8({from, size_t(at_ - from)})) wrong("a string that is not UTF-8");
      out.append(from, at_);
      if (at_ == end_) wrong("a string without end");
      char c = *at_++;
      if (c == '"') return out;
      if (c != '\\') wrong("a control character in a string");
      escape(&out);
    }
  }
};

}  // namespace

const Json *Json::find(std::string_view name) const {
  for (auto &member : members)
    if (member.first == name) return &member.second;
  return nullptr;
}

bool Json::is_empty() const {
  switch (kind) {
    case Null: return true;
    case Bool: return !flag;
    case Integer: case Real: return real == 0;
    case String: return text.empty();
    case Array: return items.empty();
    case Object: return members.empty();
  }
  return false;
}

Json parse_json(std::string_view text, const char *what) { return Reader(text, what).whole(); }

}  // namespace kilat
