#include "tokenizer.h"

#include <string.h>

#include <algorithm>
#include <queue>

#include "cut.h"
#include "error.h"
#include "unicode.h"

namespace kilat {

namespace {

enum { kUnknown = 2, kControl = 3, kUserDefined = 4 };  // tokenizer.ggml.token_type

uint64_t hash_of(std::string_view s) {
  uint64_t h = 0x9E3779B97F4A7C15u ^ s.size();
  const char *p = s.data();
  size_t n = s.size();
  for (; n >= 8; p += 8, n -= 8) h = (h ^ number_at<uint64_t>(p)) * 0xff51afd7ed558ccdu, h ^= h >> 29;
  uint64_t rest = 0;
  memcpy(&rest, p, n);
  h = (h ^ rest) * 0xff51afd7ed558ccdu;
  return h ^ h >> 32;
}

size_t table_size(size_t n) {
  size_t size = 16;
  while (size < 2 * n) size *= 2;
  return size;
}

// Text -> id, with the texts kept elsewhere.
class Vocabulary {
 public:
  std::vector<std::string> texts;

  void index() {
    slots_.assign(table_size(texts.size()), -1);
    for (size_t i = 0; i < texts.size(); i++) {
      size_t at = slot(texts[i]);
      if (slots_[at] >= 0)
        fail(KILAT_BAD_FILE, "tokenizer.ggml.tokens lists '%.100s' twice: the file is damaged", texts[i].c_str());
      slots_[at] = int32_t(i);
    }
  }

  int32_t id(std::string_view text) const { return slots_[slot(text)]; }
  size_t bytes() const { return slots_.size() * sizeof(int32_t); }

 private:
  std::vector<int32_t> slots_;

  size_t slot(std::string_view text) const {
    size_t mask = slots_.size() - 1, at = hash_of(text) & mask;
    while (slots_[at] >= 0 && texts[size_t(slots_[at])] != text) at = (at + 1) & mask;
    return at;
  }
};

struct Merge {
  uint64_t pair = UINT64_MAX;  // left id << 32 | right id
  int32_t rank = 0, id = 0;
};

class Merges {
 public:
  void reserve(size_t n) { slots_.resize(table_size(n)); }

  // The first of two equal pairs counts.
  void add(int32_t left, int32_t right, int32_t rank, int32_t id) {
    Merge *m = const_cast<Merge *>(find(left, right));
    if (m->pair == UINT64_MAX) *m = {key(left, right), rank, id};
  }

  // The merge of two ids, or an empty slot.
  const Merge *find(int32_t left, int32_t right) const {
    uint64_t k = key(left, right);
    size_t mask = slots_.size() - 1, at = (k * 0x9E3779B97F4A7C15u >> 20) & mask;
    while (slots_[at].pair != k && slots_[at].pair != UINT64_MAX) at = (at + 1) & mask;
    return &slots_[at];
  }
  size_t bytes() const { return slots_.size() * sizeof(Merge); }

 private:
  std::vector<Merge> slots_;
  static uint64_t key(int32_t left, int32_t right) { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }
};

class ByteBpe : public Tokenizer {
 public:
  explicit ByteBpe(const Gguf &file) {
    read_cut(file);
    read_tokens(file);
    read_merges(file);
    read_flags(file);
  }

  std::vector<int32_t> encode(std::string_view text, bool special) const override {
    if (!is_utf8(text)) fail(KILAT_BAD_ARGUMENT, "the text is not UTF-8");
    std::vector<int32_t> out;
    if (special && bos_ >= 0) out.push_back(bos_);
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
      int32_t found = added_at(text, i, special);
      if (found < 0) {
        i++;
        continue;
      }
      plain(text.substr(begin, i - begin), &out);
      out.push_back(found);
      begin = i += vocab_.texts[size_t(found)].size();
    }
    plain(text.substr(begin), &out);
    if (special && eos_ >= 0) out.push_back(eos_);
    return out;
  }

  std::string_view bytes(int32_t id) const override {
    return size_t(id) < bytes_.size() ? std::string_view(bytes_[size_t(id)]) : std::string_view();
  }

  int64_t memory_bytes() const override {
    size_t sum = vocab_.bytes() + merges_.bytes();
    for (const std::string &s : vocab_.texts) sum += sizeof s + (s.size() > 15 ? s.capacity() + 1 : 0);
    for (const std::string &s : bytes_) sum += sizeof s + (s.size() > 15 ? s.capacity() + 1 : 0);
    return int64_t(sum);
  }

 private:
  Vocabulary vocab_;
  Merges merges_;
  const Cut *cut_ = nullptr;
  std::vector<std::string> bytes_;
  std::vector<uint8_t> control_;
  int32_t byte_ids_[256];
  std::vector<int32_t> added_[256];  // tokens matched whole in a text, by first byte, the longest first
  int32_t bos_ = -1, eos_ = -1;

  void read_cut(const Gguf &file) {
    const GgufValue *pre = file.find("tokenizer.ggml.pre");
    for (const Cut &c : kCuts)
      if (pre && pre->text == c.name) cut_ = &c;
    if (!cut_)
      fail(KILAT_UNSUPPORTED,
           "tokenizer.ggml.pre is '%.*s'; known are gpt-2, smollm, qwen2, llama-bpe: give token ids instead of text",
           pre ? int(std::min<size_t>(pre->text.size(), 60)) : 0, pre ? pre->text.data() : "");
  }

  // The alphabet of byte-level vocabularies: printable bytes are themselves, the others U+0100 and up.
  static void alphabet(uint32_t (&code_of)[256]) {
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; b++) {
      bool itself = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      code_of[b] = itself ? b : next++;
    }
  }

  void read_tokens(const Gguf &file) {
    const GgufValue *tokens = file.find("tokenizer.ggml.tokens"), *types = file.find("tokenizer.ggml.token_type");
    if (!tokens || tokens->type != GGUF_ARRAY || tokens->item_type != GGUF_STRING || tokens->count == 0)
      fail(KILAT_BAD_FILE, "tokenizer.ggml.tokens is missing or no list of texts: the file holds no tokenizer");
    if (types && (types->item_type != 5 || types->count != tokens->count))
      fail(KILAT_BAD_FILE, "tokenizer.ggml.token_type does not fit the tokens");
    std::vector<std::string_view> views = strings_of(*tokens);
    vocab_.texts.assign(views.begin(), views.end());
    vocab_.index();
    uint32_t code_of[256];
    alphabet(code_of);
    int16_t byte_of[0x200];
    std::fill(std::begin(byte_of), std::end(byte_of), int16_t(-1));
    for (int b = 0; b < 256; b++) {
      byte_of[code_of[b]] = int16_t(b);
      std::string one;
      append_code(code_of[b], &one);
      byte_ids_[b] = vocab_.id(one);
    }
    bytes_.resize(views.size());
    control_.resize(views.size());
    for (size_t i = 0; i < views.size(); i++) {
      int32_t type = types ? number_at<int32_t>(types->raw.data + 4 * i) : 1;
      bool whole = type == kControl || type == kUnknown || type == kUserDefined;
      control_[i] = type == kControl || type == kUnknown;
      if (whole && !views[i].empty()) added_[static_cast<unsigned char>(views[i][0])].push_back(int32_t(i));
      bytes_[i] = whole ? std::string(views[i]) : decoded(views[i], byte_of);
    }
    for (auto &list : added_)
      std::sort(list.begin(), list.end(), [&](int32_t a, int32_t b) { return views[size_t(a)].size() > views[size_t(b)].size(); });
  }

  static std::string decoded(std::string_view text, const int16_t (&byte_of)[0x200]) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
      uint32_t code = next_code(text, &i);
      if (code >= 0x200 || byte_of[code] < 0) return std::string(text);  // not in the alphabet: the token is its own text
      out.push_back(char(byte_of[code]));
    }
    return out;
  }

  void read_merges(const Gguf &file) {
    const GgufValue *list = file.find("tokenizer.ggml.merges");
    std::vector<std::string_view> merges;
    if (list) merges = strings_of(*list);
    merges_.reserve(merges.size());
    std::string joined;
    for (size_t i = 0; i < merges.size(); i++) {
      size_t space = merges[i].find(' ');
      std::string_view left = merges[i].substr(0, space),
                       right = space == std::string_view::npos ? "" : merges[i].substr(space + 1);
      joined.assign(left).append(right);
      int32_t a = vocab_.id(left), b = vocab_.id(right), both = vocab_.id(joined);
      if (a < 0 || b < 0 || both < 0)
        fail(KILAT_BAD_FILE, "tokenizer.ggml.merges has '%.*s', which does not join two tokens: the file is damaged",
             int(std::min<size_t>(merges[i].size(), 100)), merges[i].data());
      merges_.add(a, b, int32_t(i), both);
    }
  }

  void read_flags(const Gguf &file) {
    auto id = [&](const char *key, bool wanted) -> int32_t {
      const GgufValue *v = file.find(key);
      if (!v || !wanted) return -1;
      if (!v->is_integer() || v->integer < 0 || v->integer >= int64_t(vocab_.texts.size()))
        fail(KILAT_BAD_FILE, "%s is not an id of the vocabulary", key);
      return int32_t(v->integer);
    };
    const GgufValue *bos = file.find("tokenizer.ggml.add_bos_token"), *eos = file.find("tokenizer.ggml.add_eos_token");
    bos_ = id("tokenizer.ggml.bos_token_id", bos ? bos->integer != 0 : cut_->bos);
    eos_ = id("tokenizer.ggml.eos_token_id", eos && eos->integer != 0);
  }

  // The longest added token that stands at text[at], or -1.
  int32_t added_at(std::string_view text, size_t at, bool special) const {
    for (int32_t id : added_[static_cast<unsigned char>(text[at])]) {
      const std::string &token = vocab_.texts[size_t(id)];
      if ((special || !control_[size_t(id)]) && text.compare(at, token.size(), token) == 0) return id;
    }
    return -1;
  }

  void plain(std::string_view given, std::vector<int32_t> *out) const {
    std::string normal;
    if (cut_->nfc) normal = nfc(given);
    std::string_view text = cut_->nfc ? std::string_view(normal) : given;
    std::vector<Char> chars;
    chars.reserve(text.size());
    for (size_t i = 0; i < text.size();) {
      uint32_t begin = uint32_t(i), code = next_code(text, &i);
      chars.push_back({code, begin, kind_of(code)});
    }
    auto byte_at = [&](size_t i) { return i < chars.size() ? size_t(chars[i].begin) : text.size(); };
    for (size_t begin = 0; begin < chars.size();) {
      size_t end = chars.size();
      if (cut_->first_digits) {
        end = begin;
        while (end < chars.size() && chars[end].kind != CharKind::Number) end++;
        if (end == begin) end++;
      }
      Cutter cutter(chars, end, *cut_);
      while (begin < end) {
        size_t next = cutter.next(begin);
        word(text.substr(byte_at(begin), byte_at(next) - byte_at(begin)), out);
        begin = next;
      }
    }
  }

  // One piece: the pair of lowest rank is joined first, the leftmost of several.
  void word(std::string_view piece, std::vector<int32_t> *out) const {
    struct Symbol {
      int32_t id, before, after;
    };
    struct Join {
      int32_t rank, at, left, right, id;
      bool operator<(const Join &o) const { return rank != o.rank ? rank > o.rank : at > o.at; }
    };
    std::vector<Symbol> s;
    for (char c : piece) {
      int32_t id = byte_ids_[static_cast<unsigned char>(c)];
      if (id < 0) continue;  // a vocabulary without this byte cannot say it
      int32_t n = int32_t(s.size());
      s.push_back({id, n - 1, n + 1});
    }
    if (s.empty()) return;
    s.back().after = -1;
    if (cut_->whole_words) {
      std::string spelled;
      uint32_t code_of[256];
      alphabet(code_of);
      for (char c : piece) append_code(code_of[static_cast<unsigned char>(c)], &spelled);
      int32_t whole = vocab_.id(spelled);
      if (whole >= 0) {
        out->push_back(whole);
        return;
      }
    }
    std::priority_queue<Join> joins;
    auto consider = [&](int32_t at) {
      if (at < 0 || s[size_t(at)].after < 0) return;
      int32_t left = s[size_t(at)].id, right = s[size_t(s[size_t(at)].after)].id;
      const Merge *m = merges_.find(left, right);
      if (m->pair != UINT64_MAX) joins.push({m->rank, at, left, right, m->id});
    };
    for (int32_t i = 0; i + 1 < int32_t(s.size()); i++) consider(i);
    while (!joins.empty()) {
      Join j = joins.top();
      joins.pop();
      Symbol &left = s[size_t(j.at)];
      // The neighbours may have been joined to others since.
      if (left.id != j.left || left.after < 0 || s[size_t(left.after)].id != j.right) continue;
      Symbol &right = s[size_t(left.after)];
      left.id = j.id;
      left.after = right.after;
      right.id = -1;
      if (left.after >= 0) s[size_t(left.after)].before = j.at;
      consider(left.before);
      consider(j.at);
    }
    for (int32_t i = 0; i >= 0; i = s[size_t(i)].after) out->push_back(s[size_t(i)].id);
  }
};

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const Gguf &file) {
  const GgufValue *model = file.find("tokenizer.ggml.model");
  if (!model || model->text != "gpt2")
    fail(KILAT_UNSUPPORTED,
         "tokenizer.ggml.model is '%.*s', only gpt2 (byte-level BPE) is read here: give token ids instead of text",
         model ? int(std::min<size_t>(model->text.size(), 60)) : 0, model ? model->text.data() : "");
  return std::unique_ptr<Tokenizer>(new ByteBpe(file));
}

}  // namespace kilat
