#include "region.h"

#include <sys/mman.h>

namespace kilat {

namespace {
const int64_t kPage = 4096, kHugePage = 2 << 20;
}

Region::~Region() {
  if (map_) munmap(map_, map_bytes_);
}

bool Region::open(int64_t bytes) {
  bytes_ = (bytes + kPage - 1) / kPage * kPage;
  map_bytes_ = size_t(bytes_ + kHugePage);
  void *map = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return false;
  map_ = static_cast<char *>(map);
  data_ = map_ + (kHugePage - reinterpret_cast<intptr_t>(map_) % kHugePage) % kHugePage;
#ifdef MADV_HUGEPAGE
  madvise(data_, size_t(bytes_), MADV_HUGEPAGE);  // advice only: failing costs speed, not correctness
#endif
  return true;
}

void *Region::take(int64_t bytes) {
  char *p = data_ + used_;
  used_ += room(bytes);
  return p;
}

}  // namespace kilat
