// Memory for packed weights: many of them side by side in huge pages, which a walk over all layers of a model needs to be fast.
#pragma once

#include <stdint.h>

namespace kilat {

struct ArenaChunk;

// A piece of memory, 64-byte aligned, and the chunk that it keeps alive. data is nullptr when memory is exhausted.
struct ArenaPiece {
  char *data;
  ArenaChunk *chunk;
};

struct Arena {
  ArenaChunk *open = nullptr;  // where the next piece goes if it fits
};

// Not thread-safe for one arena; arena_put may be called from any thread and after arena_close.
ArenaPiece arena_get(Arena *arena, int64_t bytes);
void arena_put(ArenaPiece piece);
void arena_close(Arena *arena);

}  // namespace kilat
