// The thread pool: one caller hands out numbered units of work; helper threads and the caller take them one by one.
#pragma once

#include <stdint.h>

namespace kilat {

typedef void (*UnitFn)(void *arg, int unit, int worker);

struct Pool;

Pool *pool_create(int threads);
void pool_destroy(Pool *pool);
int pool_threads(const Pool *pool);

// See kilat_cpu_pin.
bool pool_pin(Pool *pool);

// Run units 0 .. n - 1, each exactly once, in any order on any thread; returns when all are done. worker is 0 for the caller and
// 1 .. threads - 1 for helpers: an index into per-thread scratch memory. n < 2^20.
void pool_run(Pool *pool, int n, UnitFn fn, void *arg);

// Serialises callers: every public op holds it, so scratch memory has one owner at a time.
void pool_lock(Pool *pool);
void pool_unlock(Pool *pool);

}  // namespace kilat
