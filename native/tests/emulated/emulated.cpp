// emulated.cpp: see cuda_runtime.h beside it.
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <vector>

#include "cuda_runtime.h"

namespace kilat_emulated {

Place *here;

namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr int kBlocks = 5;  // processors of the device

struct Fibre;

// Threads that wait for each other.
struct Meeting {
  std::vector<Fibre *> waiting;
};

struct Block {
  std::vector<char> memory;
  Meeting meetings[2];
  int threads;
};

struct Warp {
  Meeting meeting;
  uint64_t words[32 * 8];
};

struct Fibre {
  Place place;
  Block *block;
  Warp *warp;
  ucontext_t start;
  jmp_buf at;
  bool started = false;
};

// The launch that runs; fibres are changed in one thread of the host.
struct Launch {
  std::vector<Fibre> fibres;
  std::vector<Block> blocks;
  std::vector<Warp> warps;
  std::vector<Fibre *> ready, polling;  // polling: looked at memory in vain, perhaps; they seldom run before the others
  Fibre *current = nullptr;
  size_t finished = 0;
  jmp_buf end;
  void (*body)(void *);
  void *argument;
};
Launch *launch;
uint64_t seed = 0x9e3779b97f4a7c15u;
int together = 0;  // launches so far of kernels whose blocks wait for each other

[[noreturn]] void go_on() {
  if (launch->finished == launch->fibres.size()) _longjmp(launch->end, 1);
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  std::vector<Fibre *> &from = launch->ready.empty() || (seed % 16 == 0 && !launch->polling.empty()) ? launch->polling : launch->ready;
  if (from.empty()) trap("all threads wait for each other");
  std::swap(from[(seed >> 8) % from.size()], from.back());
  Fibre *f = launch->current = from.back();
  from.pop_back();
  here = &f->place;
  if (f->started) _longjmp(f->at, 1);
  f->started = true;
  setcontext(&f->start);
  abort();
}

void begin() {
  launch->body(launch->argument);
  ++launch->finished;
  go_on();
}

void wait(Meeting &m, size_t n) {
  if (m.waiting.size() + 1 == n) {
    launch->ready.insert(launch->ready.end(), m.waiting.begin(), m.waiting.end());
    m.waiting.clear();
    return;
  }
  m.waiting.push_back(launch->current);
  if (_setjmp(launch->current->at) == 0) go_on();
}

char *stacks(size_t n) {
  static char *memory = nullptr;
  static size_t size = 0;
  if (n * kStackBytes > size) {
    if (memory) munmap(memory, size);
    size = n * kStackBytes;
    memory = static_cast<char *>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED) trap("no memory for stacks");
  }
  return memory;
}

}  // namespace

void trap(const char *what) {
  fprintf(stderr, "emulated device: %s (block %u, thread %u)\n", what, here ? here->block.x : 0, here ? here->thread.x : 0);
  abort();
}

void yield() {
  launch->polling.push_back(launch->current);
  if (_setjmp(launch->current->at) == 0) go_on();
}
void meet_warp() { wait(launch->current->warp->meeting, 32); }
void meet(int id, int n) {
  Block *b = launch->current->block;
  wait(b->meetings[id], size_t(n ? n : b->threads));
}
uint64_t *lane_words() { return launch->current->warp->words; }
char *shared() { return launch->current->block->memory.data(); }

namespace {

// Blocks first ... first + n - 1 of `blocks`.
void run_some(unsigned first, unsigned n, dim3 blocks, dim3 threads, size_t shared_bytes, void (*body)(void *), void *argument) {
  if (threads.x % 32) trap("a block of whole warps is wanted");
  Launch l;
  launch = &l;
  l.body = body, l.argument = argument;
  const size_t fibres = size_t(n) * threads.x;
  l.fibres.resize(fibres), l.blocks.resize(n), l.warps.resize(fibres / 32);
  char *stack = stacks(fibres);
  for (size_t i = 0; i < fibres; ++i) {
    Fibre &f = l.fibres[i];
    f.place.thread.x = unsigned(i % threads.x), f.place.block.x = first + unsigned(i / threads.x), f.place.blocks = blocks;
    f.block = &l.blocks[i / threads.x], f.warp = &l.warps[i / 32];
    if (i % threads.x == 0) f.block->memory.assign(shared_bytes, char(0xcc)), f.block->threads = int(threads.x);
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = stack + i * kStackBytes, f.start.uc_stack.ss_size = kStackBytes, f.start.uc_link = nullptr;
    makecontext(&f.start, begin, 0);
    l.ready.push_back(&f);
  }
  if (_setjmp(l.end) == 0) go_on();
  launch = nullptr, here = nullptr;
}

}  // namespace

void run_together(dim3 blocks, dim3 threads, size_t shared_bytes, void (*body)(void *), void *argument) {
  ++together;
  run_some(0, blocks.x, blocks, threads, shared_bytes, body, argument);
}

void run_blocks(dim3 blocks, dim3 threads, size_t shared_bytes, void (*body)(void *), void *argument) {
  for (unsigned i = 0; i < blocks.x; ++i) run_some(i, 1, blocks, threads, shared_bytes, body, argument);
}

void run_apart(dim3 blocks, dim3 threads, void (*body)(void *), void *argument) {
  Place place;
  here = &place;
  place.blocks = blocks;
  for (place.block.x = 0; place.block.x < blocks.x; ++place.block.x)
    for (place.thread.x = 0; place.thread.x < threads.x; ++place.thread.x) body(argument);
  here = nullptr;
}

}  // namespace kilat_emulated

extern "C" int kilat_emulated_launches() { return kilat_emulated::together; }

cudaError_t cudaMalloc(void **p, size_t bytes) {
  *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *p) { return free(p), cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
  *p = {"emulated", 9, 0, kilat_emulated::kBlocks, 232448};
  return cudaSuccess;
}
