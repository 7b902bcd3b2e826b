#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "error.h"
#include "json.h"

namespace kilat {

namespace {

const size_t kMaxJsonBytes = 100u << 20, kMaxShards = 4096;

std::string base_name(const std::string &path) {
  size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

bool is_file(const std::string &path) {
  struct stat s;
  return stat(path.c_str(), &s) == 0 && S_ISREG(s.st_mode);
}

// A shard is a file of the directory, never a path.
bool is_shard_name(const std::string &name) {
  const std::string end = ".safetensors";
  if (name.size() <= end.size() || name.size() > 255 || name[0] == '.' || name[0] == '-') return false;
  for (char c : name)
    if (!((c | 32) >= 'a' && (c | 32) <= 'z') && !(c >= '0' && c <= '9') && c != '.' && c != '_' && c != '-') return false;
  return name.compare(name.size() - end.size(), end.size(), end) == 0;
}

std::vector<std::string> shard_names(const std::string &folder) {
  const std::string single = "model.safetensors", index = "model.safetensors.index.json";
  if (is_file(folder + "/" + single)) return {single};
  if (!is_file(folder + "/" + index))
    fail(KILAT_BAD_FILE, "the model directory has neither %s nor %s: convert the weights to safetensors", single.c_str(),
         index.c_str());
  Mapping map(folder + "/" + index);
  if (map.bytes.size > kMaxJsonBytes) fail(KILAT_BAD_FILE, "%s has more than 100 MiB", index.c_str());
  Json json = parse_json({map.bytes.data, map.bytes.size}, index.c_str());
  const Json *weights = json.find("weight_map");
  if (!weights || weights->members.empty()) fail(KILAT_BAD_FILE, "%s has no weight_map: the file is damaged", index.c_str());
  std::vector<std::string> names;
  for (auto &member : weights->members) {
    if (!is_shard_name(member.second.text))
      fail(KILAT_BAD_FILE, "%s names '%.100s', which is not the name of a safetensors file", index.c_str(),
           member.second.text.c_str());
    names.push_back(member.second.text);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  if (names.size() > kMaxShards) fail(KILAT_BAD_FILE, "%s names %zu files, limit 4096", index.c_str(), names.size());
  return names;
}

}  // namespace

Mapping::Mapping(const std::string &path) {
  std::string name = base_name(path);
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(KILAT_BAD_FILE, "cannot open %s: %s", name.c_str(), strerror(errno));
  struct stat s;
  if (fstat(file, &s) != 0 || !S_ISREG(s.st_mode) || s.st_size == 0) {
    close(file);
    fail(KILAT_BAD_FILE, "%s is empty or not a file", name.c_str());
  }
  void *map = mmap(nullptr, size_t(s.st_size), PROT_READ, MAP_PRIVATE, file, 0);
  int why = errno;
  close(file);
  if (map == MAP_FAILED) fail(KILAT_BAD_FILE, "cannot map %s: %s", name.c_str(), strerror(why));
  madvise(map, size_t(s.st_size), MADV_WILLNEED);  // advice only
  bytes = {static_cast<const char *>(map), size_t(s.st_size)};
}

Mapping::~Mapping() {
  if (bytes.data) munmap(const_cast<char *>(bytes.data), bytes.size);
}

std::unique_ptr<Source> open_source(const std::string &path) {
  struct stat s;
  if (stat(path.c_str(), &s) != 0) fail(KILAT_BAD_FILE, "cannot open %s: %s", base_name(path).c_str(), strerror(errno));
  std::vector<Mapping> maps;
  if (!S_ISDIR(s.st_mode)) {
    maps.emplace_back(path);
    std::unique_ptr<Source> source = source_of_gguf(maps[0].bytes, base_name(path).c_str());
    source->maps = std::move(maps);
    return source;
  }
  Mapping config(path + "/config.json");
  std::vector<Mapping> generation;
  if (is_file(path + "/generation_config.json")) generation.emplace_back(path + "/generation_config.json");
  std::vector<Bytes> shards;
  for (const std::string &name : shard_names(path)) {
    maps.emplace_back(path + "/" + name);
    shards.push_back(maps.back().bytes);
  }
  std::unique_ptr<Source> source = source_of_safetensors(config.bytes, generation.empty() ? nullptr : &generation[0].bytes, shards);
  source->maps = std::move(maps);
  return source;
}

}  // namespace kilat
