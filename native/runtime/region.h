// One piece of private memory for everything that an owner will ever need: sized first, then mapped, then cut up.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kilat {

class Region {
 public:
  Region() = default;
  Region(const Region &) = delete;
  ~Region();

  // Map `bytes`, in huge pages where the system gives them; false when memory is exhausted. They are there once they are touched.
  bool open(int64_t bytes);
  char *data() { return data_; }
  // The next `bytes`, 64-byte aligned. The sum of all sizes, each rounded up by room(), may not exceed what was opened.
  void *take(int64_t bytes);
  int64_t bytes() const { return bytes_; }
  int64_t used() const { return used_; }

  static int64_t room(int64_t bytes) { return (bytes + 63) & ~int64_t(63); }

 private:
  char *map_ = nullptr, *data_ = nullptr;
  size_t map_bytes_ = 0;
  int64_t bytes_ = 0, used_ = 0;
};

}  // namespace kilat
