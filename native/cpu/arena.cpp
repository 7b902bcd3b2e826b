#include "arena.h"

#include <sys/mman.h>

#include <atomic>
#include <new>

namespace kilat {

namespace {
const int64_t kHugePage = 2 << 20;
const int64_t kChunkBytes = 32 << 20;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
}  // namespace

struct ArenaChunk {
  std::atomic<int64_t> users{1};  // pieces, and the arena while the chunk is open
  char *map, *data;
  int64_t map_bytes, bytes, used;
};

namespace {

ArenaChunk *chunk_open(int64_t bytes) {
  ArenaChunk *c = new (std::nothrow) ArenaChunk;
  if (!c) return nullptr;
  c->bytes = bytes;
  c->used = 0;
  c->map_bytes = bytes + kHugePage;
  void *map = mmap(nullptr, size_t(c->map_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) {
    delete c;
    return nullptr;
  }
  c->map = static_cast<char *>(map);
  c->data = reinterpret_cast<char *>(round_up(int64_t(reinterpret_cast<intptr_t>(map)), kHugePage));
#ifdef MADV_HUGEPAGE
  madvise(c->data, size_t(bytes), MADV_HUGEPAGE);  // advice only: failing costs speed, not correctness
#endif
  return c;
}

void chunk_release(ArenaChunk *c) {
  if (c->users.fetch_sub(1) > 1) return;
  munmap(c->map, size_t(c->map_bytes));
  delete c;
}

}  // namespace

ArenaPiece arena_get(Arena *arena, int64_t bytes) {
  bytes = round_up(bytes, 64);
  if (!arena->open || arena->open->used + bytes > arena->open->bytes) {
    ArenaChunk *fresh = chunk_open(round_up(bytes > kChunkBytes ? bytes : kChunkBytes, kHugePage));
    if (!fresh) return {nullptr, nullptr};
    arena_close(arena);
    arena->open = fresh;
  }
  ArenaChunk *c = arena->open;
  ArenaPiece piece = {c->data + c->used, c};
  c->used += bytes;
  c->users.fetch_add(1);
  return piece;
}

void arena_put(ArenaPiece piece) { chunk_release(piece.chunk); }

void arena_close(Arena *arena) {
  if (arena->open) chunk_release(arena->open);
  arena->open = nullptr;
}

}  // namespace kilat
