#include "gguf.h"

#include <algorithm>

#include "error.h"
#include "formats.h"

namespace kilat {

namespace {

// The largest real headers (400k-token vocabularies with merges) stay far below these.
const size_t kMaxHeaderBytes = 256u << 20;
const uint64_t kMaxItems = 1 << 22, kMaxKeys = 1 << 16, kMaxTensors = 1 << 17, kMaxName = 1024, kMaxAlignment = 1 << 20;
const int kMaxDims = 4;
// Bytes of a number by type; 0: not a number.
const int kNumberBytes[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

class Cursor {
 public:
  Cursor(Bytes file, const char *name) : name(name), file_(file), end_(std::min(file.size, kMaxHeaderBytes)) {}

  const char *const name;
  uint64_t items_left = kMaxItems;

  size_t position() const { return at_; }
  size_t file_bytes() const { return file_.size; }
  const char *file_data() const { return file_.data; }

  const char *claim(uint64_t bytes, const char *what) {
    if (bytes > end_ - at_)
      fail(KILAT_BAD_FILE,
           "%s: %s needs %llu bytes at offset %zu, but the file or the limit of its header ends at %zu: it is cut short or damaged",
           name, what, static_cast<unsigned long long>(bytes), at_, end_);
    const char *p = file_.data + at_;
    at_ += size_t(bytes);
    return p;
  }

  template <class T>
  T number(const char *what) {
    return number_at<T>(claim(sizeof(T), what));
  }

  uint64_t count(const char *what, uint64_t limit) {
    uint64_t n = number<uint64_t>(what);
    if (n > limit)
      fail(KILAT_BAD_FILE, "%s: %s is %llu, limit %llu: the file is damaged", name, what, static_cast<unsigned long long>(n),
           static_cast<unsigned long long>(limit));
    return n;
  }

  std::string_view text(const char *what, uint64_t limit) {
    uint64_t n = count(what, limit);
    std::string_view found(claim(n, what), size_t(n));
    if (!is_utf8(found))
      fail(KILAT_BAD_FILE, "%s: %s at offset %zu is not UTF-8: the file is damaged", name, what, at_ - size_t(n));
    return found;
  }

 private:
  Bytes file_;
  size_t at_ = 0, end_;
};

void read_number(const char *p, GgufValue *v, const Cursor &c) {
  switch (v->type) {
    case 0: v->integer = number_at<uint8_t>(p); break;
    case 1: v->integer = number_at<int8_t>(p); break;
    case 2: v->integer = number_at<uint16_t>(p); break;
    case 3: v->integer = number_at<int16_t>(p); break;
    case 4: v->integer = number_at<uint32_t>(p); break;
    case 5: v->integer = number_at<int32_t>(p); break;
    case 6: v->real = double(number_at<float>(p)); return;
    case GGUF_BOOL:
      v->integer = number_at<uint8_t>(p);
      if (v->integer > 1)
        fail(KILAT_BAD_FILE, "%s: %.*s is a boolean that is neither 0 nor 1: the file is damaged", c.name, int(v->key.size()),
             v->key.data());
      break;
    case 10: {
      uint64_t wide = number_at<uint64_t>(p);  // no field that is read needs more than 63 bits
      v->integer = wide > INT64_MAX ? INT64_MAX : int64_t(wide);
      break;
    }
    case 11: v->integer = number_at<int64_t>(p); break;
    default: v->real = number_at<double>(p); return;
  }
  v->real = double(v->integer);
}

void read_array(Cursor *c, GgufValue *v) {
  v->item_type = int(c->number<uint32_t>("the item type of an array"));
  uint64_t n = c->count("the item count of an array", c->items_left);
  c->items_left -= n;
  v->count = size_t(n);
  size_t begin = c->position();
  if (v->item_type == GGUF_STRING) {
    for (uint64_t i = 0; i < n; i++) c->text("a string of an array", kMaxHeaderBytes);
  } else if (v->item_type >= 0 && v->item_type < 13 && kNumberBytes[v->item_type]) {
    c->claim(n * uint64_t(kNumberBytes[v->item_type]), "an array");
    for (uint64_t i = 0; v->item_type == GGUF_BOOL && i < n; i++)
      if (static_cast<unsigned char>(c->file_data()[begin + i]) > 1)
        fail(KILAT_BAD_FILE, "%s: a boolean that is neither 0 nor 1", c->name);
  } else {
    fail(KILAT_BAD_FILE, "%s: array %.*s has items of type %d: only numbers, booleans and strings are supported", c->name,
         int(v->key.size()), v->key.data(), v->item_type);
  }
  v->raw = {c->file_data() + begin, c->position() - begin};
}

GgufValue read_value(Cursor *c) {
  GgufValue v;
  v.key = c->text("a metadata key", kMaxName);
  uint32_t type = c->number<uint32_t>("the type of a value");
  if (type > 12)
    fail(KILAT_BAD_FILE, "%s: %.*s has unknown type %u: the file is damaged or newer than this reader", c->name, int(v.key.size()),
         v.key.data(), type);
  v.type = int(type);
  if (v.type == GGUF_STRING) v.text = c->text("a text", kMaxHeaderBytes);
  else if (v.type == GGUF_ARRAY) read_array(c, &v);
  else read_number(c->claim(uint64_t(kNumberBytes[type]), "a number"), &v, *c);
  return v;
}

// The table entry, with the offset from the start of the data in data.data's place until the data's place is known.
GgufTensor read_tensor(Cursor *c, uint64_t alignment, uint64_t *offset) {
  GgufTensor t;
  t.name = c->text("a tensor name", kMaxName);
  uint32_t dims = c->number<uint32_t>("the number of dimensions");
  int shown = int(t.name.size());
  if (dims < 1 || dims > kMaxDims)
    fail(KILAT_BAD_FILE, "%s: tensor %.*s has %u dimensions, allowed 1 to 4: the file is damaged", c->name, shown, t.name.data(),
         dims);
  t.dims = int(dims);
  uint64_t sizes[kMaxDims];
  for (uint32_t i = 0; i < dims; i++) sizes[i] = c->number<uint64_t>("a shape");
  uint32_t type = c->number<uint32_t>("the type of a tensor");
  *offset = c->number<uint64_t>("the offset of a tensor");
  const Format *f = type < 1000 ? format_of(type) : nullptr;
  if (!f)
    fail(KILAT_BAD_FILE, "%s: tensor %.*s has unknown type %u: the file is damaged or newer", c->name, shown, t.name.data(), type);
  t.type = int32_t(type);
  uint64_t rows = 1, bytes = 0;
  bool wrong = sizes[0] == 0 || sizes[0] % uint64_t(f->items) != 0;
  for (uint32_t i = 1; i < dims; i++) wrong = wrong || __builtin_mul_overflow(rows, sizes[i], &rows) || rows == 0;
  wrong = wrong || __builtin_mul_overflow(sizes[0] / uint64_t(f->items), uint64_t(f->bytes), &bytes) ||
          __builtin_mul_overflow(bytes, rows, &bytes) || bytes > c->file_bytes();
  if (wrong)
    fail(KILAT_BAD_FILE, "%s: tensor %.*s has a shape that %s cannot have in this file: it is cut short or damaged", c->name, shown,
         t.name.data(), f->name);
  if (*offset % alignment)
    fail(KILAT_BAD_FILE, "%s: tensor %.*s is not at a multiple of %llu: the file is damaged", c->name, shown, t.name.data(),
         static_cast<unsigned long long>(alignment));
  t.rows = int64_t(rows);
  t.cols = int64_t(sizes[0]);
  t.data.size = size_t(bytes);
  return t;
}

// Every tensor inside the file, none over another.
void place_tensors(const Cursor &c, std::vector<GgufTensor> *tensors, const std::vector<uint64_t> &offsets, uint64_t data_offset) {
  uint64_t room = c.file_bytes() > data_offset ? c.file_bytes() - data_offset : 0;
  std::vector<std::pair<uint64_t, uint64_t>> spans;
  for (size_t i = 0; i < tensors->size(); i++) {
    GgufTensor &t = (*tensors)[i];
    if (offsets[i] > room || t.data.size > room - offsets[i])
      fail(KILAT_BAD_FILE, "%s: tensor %.*s needs %zu bytes at %llu of the data, which has %llu: the file is cut short or damaged",
           c.name, int(t.name.size()), t.name.data(), t.data.size, static_cast<unsigned long long>(offsets[i]),
           static_cast<unsigned long long>(room));
    t.data.data = c.file_data() + data_offset + offsets[i];
    spans.emplace_back(offsets[i], offsets[i] + t.data.size);
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); i++)
    if (spans[i].first < spans[i - 1].second) fail(KILAT_BAD_FILE, "%s: two tensors overlap: the file is damaged", c.name);
}

void read_preamble(Cursor *c, uint64_t *n_tensors, uint64_t *n_keys) {
  if (memcmp(c->claim(4, "the magic number"), "GGUF", 4) != 0)
    fail(KILAT_BAD_FILE, "%s does not start with GGUF: it is not a GGUF file", c->name);
  uint32_t version = c->number<uint32_t>("the version");
  if (version != 2 && version != 3)
    fail(KILAT_UNSUPPORTED, "%s has GGUF version %u, supported are 2 and 3, little-endian: convert the model again", c->name,
         version);
  *n_tensors = c->count("the tensor count", kMaxTensors);
  *n_keys = c->count("the metadata count", kMaxKeys);
  uint64_t least = *n_tensors * 32 + *n_keys * 13;
  if (least > c->file_bytes() - c->position())
    fail(KILAT_BAD_FILE, "%s: %llu tensors and %llu metadata keys do not fit the file: it is cut short or damaged", c->name,
         static_cast<unsigned long long>(*n_tensors), static_cast<unsigned long long>(*n_keys));
}

}  // namespace

const GgufValue *Gguf::find(std::string_view key) const {
  auto at = std::lower_bound(values.begin(), values.end(), key, [](const GgufValue &v, std::string_view k) { return v.key < k; });
  return at != values.end() && at->key == key ? &*at : nullptr;
}

const GgufTensor *Gguf::tensor(std::string_view name) const {
  auto at =
      std::lower_bound(tensors.begin(), tensors.end(), name, [](const GgufTensor &t, std::string_view n) { return t.name < n; });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

Gguf read_gguf(Bytes file, const char *name) {
  Cursor c(file, name);
  uint64_t n_tensors, n_keys;
  read_preamble(&c, &n_tensors, &n_keys);
  Gguf g;
  g.values.reserve(size_t(n_keys));
  for (uint64_t i = 0; i < n_keys; i++) g.values.push_back(read_value(&c));
  std::sort(g.values.begin(), g.values.end(), [](const GgufValue &a, const GgufValue &b) { return a.key < b.key; });
  for (size_t i = 1; i < g.values.size(); i++)
    if (g.values[i].key == g.values[i - 1].key) fail(KILAT_BAD_FILE, "%s: a metadata key appears twice: the file is damaged", name);
  uint64_t alignment = 32;
  if (const GgufValue *v = g.find("general.alignment")) {
    alignment = v->is_integer() ? uint64_t(v->integer) : 0;
    if (alignment < 8 || alignment > kMaxAlignment || (alignment & (alignment - 1)))
      fail(KILAT_BAD_FILE, "%s: general.alignment must be a power of two from 8 to 1048576: the file is damaged", name);
  }
  std::vector<uint64_t> offsets(static_cast<size_t>(n_tensors));
  g.tensors.reserve(size_t(n_tensors));
  for (uint64_t i = 0; i < n_tensors; i++) g.tensors.push_back(read_tensor(&c, alignment, &offsets[size_t(i)]));
  place_tensors(c, &g.tensors, offsets, (c.position() + alignment - 1) / alignment * alignment);
  std::sort(g.tensors.begin(), g.tensors.end(), [](const GgufTensor &a, const GgufTensor &b) { return a.name < b.name; });
  for (size_t i = 1; i < g.tensors.size(); i++)
    if (g.tensors[i].name == g.tensors[i - 1].name)
      fail(KILAT_BAD_FILE, "%s: a tensor name appears twice: the file is damaged", name);
  return g;
}

std::vector<std::string_view> strings_of(const GgufValue &array) {
  std::vector<std::string_view> found;
  if (array.type != GGUF_ARRAY || array.item_type != GGUF_STRING) return found;
  found.reserve(array.count);
  const char *p = array.raw.data;
  for (size_t i = 0; i < array.count; i++) {
    size_t n = size_t(number_at<uint64_t>(p));
    found.emplace_back(p + 8, n);
    p += 8 + n;
  }
  return found;
}

}  // namespace kilat
