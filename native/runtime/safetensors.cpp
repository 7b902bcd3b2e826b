#include "safetensors.h"

#include <algorithm>

#include "error.h"
#include "json.h"

namespace kilat {

namespace {

const uint64_t kMaxHeaderBytes = 64u << 20;
const size_t kMaxDims = 8;

struct Type {
  const char *name;
  int bits;
  int32_t type;
};

const Type kTypes[] = {
    {"F32", 32, KILAT_TYPE_F32}, {"F16", 16, KILAT_TYPE_F16},    {"BF16", 16, KILAT_TYPE_BF16}, {"F8_E4M3", 8, KILAT_TYPE_F8_E4M3},
    {"F8_E5M2", 8, -1},          {"F8_E8M0", 8, -1},             {"F8_E4M3FNUZ", 8, -1},        {"F8_E5M2FNUZ", 8, -1},
    {"F4", 4, -1},               {"F6_E2M3", 6, -1},             {"F6_E3M2", 6, -1},            {"BOOL", 8, -1},
    {"U8", 8, -1},               {"I8", 8, -1},                  {"U16", 16, -1},               {"I16", 16, -1},
    {"U32", 32, -1},             {"I32", 32, -1},                {"U64", 64, -1},               {"I64", 64, -1},
    {"F64", 64, -1},             {"C64", 64, -1},
};

bool naturals(const Json *list) {
  if (!list || list->kind != Json::Array) return false;
  for (const Json &item : list->items)
    if (item.kind != Json::Integer || item.integer < 0) return false;
  return true;
}

struct Entry {
  SafeTensor tensor;
  uint64_t begin, end;
};

Entry entry_of(const std::string &name, const Json &value, const char *file) {
  auto damaged = [&](const char *what) {
    fail(KILAT_BAD_FILE, "%s: tensor %.200s %s: the file is damaged", file, name.c_str(), what);
  };
  const Json *dtype = value.find("dtype"), *shape = value.find("shape"), *offsets = value.find("data_offsets");
  const Type *type = nullptr;
  for (const Type &t : kTypes)
    if (dtype && dtype->kind == Json::String && dtype->text == t.name) type = &t;
  if (!type) damaged("has an unknown type");
  if (!naturals(shape) || shape->items.size() > kMaxDims) damaged("has no valid shape of at most 8 dimensions");
  if (!naturals(offsets) || offsets->items.size() != 2) damaged("has no valid data_offsets");
  Entry e;
  e.begin = uint64_t(offsets->items[0].integer);
  e.end = uint64_t(offsets->items[1].integer);
  const std::vector<Json> &dims = shape->items;
  uint64_t rows = 1, cols = dims.empty() ? 1 : uint64_t(dims.back().integer), bits;
  bool wrong = false;
  for (size_t i = 0; i + 1 < dims.size(); i++) wrong = wrong || __builtin_mul_overflow(rows, uint64_t(dims[i].integer), &rows);
  wrong = wrong || __builtin_mul_overflow(rows, cols, &bits) || __builtin_mul_overflow(bits, uint64_t(type->bits), &bits);
  if (wrong || e.end < e.begin || bits % 8 || e.end - e.begin != bits / 8) damaged("has data_offsets that do not span its shape");
  e.tensor = {name, type->type, int64_t(rows), int64_t(cols), int(dims.size()), {}};
  return e;
}

}  // namespace

std::vector<SafeTensor> read_safetensors(Bytes file, const char *name) {
  uint64_t header = file.size >= 8 ? number_at<uint64_t>(file.data) : 0;
  if (file.size < 8 || header > file.size - 8)
    fail(KILAT_BAD_FILE, "%s has %zu bytes, its header alone needs %llu: the file is cut short or not a safetensors file", name,
         file.size, static_cast<unsigned long long>(header));
  if (header > kMaxHeaderBytes)
    fail(KILAT_BAD_FILE, "%s: header of %llu bytes, limit 67108864", name, static_cast<unsigned long long>(header));
  Json json = parse_json({file.data + 8, size_t(header)}, name);
  if (json.kind != Json::Object) fail(KILAT_BAD_FILE, "%s: the header is not a JSON object: the file is damaged", name);
  std::vector<Entry> entries;
  entries.reserve(json.members.size());
  for (auto &member : json.members)
    if (member.first != "__metadata__") entries.push_back(entry_of(member.first, member.second, name));
  std::sort(entries.begin(), entries.end(),
            [](const Entry &a, const Entry &b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  const char *data = file.data + 8 + header;
  uint64_t at = 0, room = file.size - 8 - header;
  for (Entry &e : entries) {
    if (e.begin != at || e.end > room)
      fail(KILAT_BAD_FILE, "%s: tensor %.200s %s: the file is cut short or damaged", name, e.tensor.name.c_str(),
           e.begin < at ? "lies over another" : e.begin > at ? "leaves a hole before it" : "ends past the file");
    e.tensor.data = {data + e.begin, size_t(e.end - e.begin)};
    at = e.end;
  }
  if (at != room)
    fail(KILAT_BAD_FILE, "%s has %llu bytes that belong to no tensor: it is damaged", name,
         static_cast<unsigned long long>(room - at));
  std::vector<SafeTensor> found;
  found.reserve(entries.size());
  for (Entry &e : entries) found.push_back(std::move(e.tensor));
  std::sort(found.begin(), found.end(), [](const SafeTensor &a, const SafeTensor &b) { return a.name < b.name; });
  return found;
}

}  // namespace kilat
