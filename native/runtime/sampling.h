// Randomness as a function: the package's draw (ops/sample.py), Philox4x32-10 (Salmon et al., SC'11) at (seed, position, purpose).
#pragma once

#include <stdint.h>

namespace kilat {

// A number in (0, 1), an odd multiple of 2^-24.
inline double uniform(uint64_t seed, int64_t position) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32), c0 = uint32_t(position), c1 = 0, c2 = 0, c3 = 0;  // purpose 0: a token
  for (int i = 0; i < 10; i++) {
    uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b);
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (double(c0 >> 9) + 0.5) * 0x1p-23;
}

}  // namespace kilat
