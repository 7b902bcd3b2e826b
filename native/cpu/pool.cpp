// A caller never waits for a helper that has not taken a unit yet: a helper that sleeps or is descheduled costs speed only. All state
// of "which unit is next" is one 64-bit word, so that a late helper cannot take a unit of a job that it has not seen: job number (24
// bits), units (20 bits), next unit (20 bits).
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kilat {

namespace {

const int kUnitBits = 20;
const uint64_t kUnitMask = (1u << kUnitBits) - 1;
// Helpers spin this long after the last job before they sleep: longer than the gap between two ops of a step, short enough to
// leave the core to others when the step is over.
const int64_t kSpinNs = 60 * 1000;
const int kPausesPerClock = 32;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

}  // namespace

struct Pool {
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<int> done{0};
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  UnitFn fn = nullptr;
  void *arg = nullptr;
  uint64_t job = 0;
  int threads = 1;
  pid_t owner = 0;
  pthread_mutex_t callers = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
  std::vector<pthread_t> helpers;
};

namespace {

struct Start {
  Pool *pool;
  int worker;
};

bool has_unit(uint64_t ticket) { return (ticket & kUnitMask) < ((ticket >> kUnitBits) & kUnitMask); }

// Take units of the current job until none is left.
void take_units(Pool *p, int worker) {
  uint64_t t = p->ticket.load(std::memory_order_acquire);
  while (has_unit(t)) {
    if (!p->ticket.compare_exchange_weak(t, t + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    // The job cannot end before this unit is counted, so fn and arg are those of the ticket.
    p->fn(p->arg, int(t & kUnitMask), worker);
    p->done.fetch_add(1, std::memory_order_release);
    t = p->ticket.load(std::memory_order_acquire);
  }
}

void sleep_until_work(Pool *p) {
  pthread_mutex_lock(&p->sleep_lock);
  p->sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (!p->stop.load() && !has_unit(p->ticket.load(std::memory_order_seq_cst))) pthread_cond_wait(&p->wake, &p->sleep_lock);
  p->sleepers.fetch_sub(1);
  pthread_mutex_unlock(&p->sleep_lock);
}

void *helper_main(void *raw) {
  Start start = *static_cast<Start *>(raw);
  delete static_cast<Start *>(raw);
  Pool *p = start.pool;
  while (!p->stop.load(std::memory_order_relaxed)) {
    int64_t until = now_ns() + kSpinNs;
    bool found = false;
    while (!found && now_ns() < until) {
      for (int i = 0; i < kPausesPerClock && !found; i++) {
        pause();
        found = has_unit(p->ticket.load(std::memory_order_relaxed)) || p->stop.load(std::memory_order_relaxed);
      }
    }
    if (!found) sleep_until_work(p);
    take_units(p, start.worker);
  }
  return nullptr;
}

}  // namespace

Pool *pool_create(int threads) {
  Pool *p = new (std::nothrow) Pool;
  if (!p) return nullptr;
  p->owner = getpid();
  for (int i = 1; i < threads; i++) {
    pthread_t id;
    Start *start = new (std::nothrow) Start{p, i};
    if (!start || pthread_create(&id, nullptr, helper_main, start) != 0) {
      delete start;
      pool_destroy(p);
      return nullptr;
    }
    p->helpers.push_back(id);
    p->threads = i + 1;
  }
  return p;
}

void pool_destroy(Pool *p) {
  if (!p) return;
  if (p->owner != getpid()) return;  // a forked child: the helpers are not there, the memory is a copy that dies with it
  pthread_mutex_lock(&p->sleep_lock);
  p->stop.store(true);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->sleep_lock);
  for (pthread_t id : p->helpers) pthread_join(id, nullptr);
  delete p;
}

int pool_threads(const Pool *p) { return p->threads; }

bool pool_pin(Pool *p) {
#if defined(__linux__)
  cpu_set_t all;
  if (p->threads == 1 || sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) != p->threads) return false;
  // The caller may go where it likes: with the helpers on the others, the processor it is on now is the one that is free.
  int own = sched_getcpu(), cpu = 0;
  for (pthread_t id : p->helpers) {
    while (!CPU_ISSET(cpu, &all) || cpu == own) cpu++;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu++, &one);
    if (pthread_setaffinity_np(id, sizeof one, &one) != 0) return false;
  }
  return true;
#else
  static_cast<void>(p);
  return false;
#endif
}

void pool_run(Pool *p, int n, UnitFn fn, void *arg) {
  // In a forked child the helpers do not exist, and a condition variable that they slept on may not be touched.
  if (p->threads == 1 || n <= 1 || getpid() != p->owner) {
    for (int i = 0; i < n; i++) fn(arg, i, 0);
    return;
  }
  p->fn = fn;
  p->arg = arg;
  p->done.store(0, std::memory_order_relaxed);
  p->job++;
  p->ticket.store(p->job << (2 * kUnitBits) | uint64_t(n) << kUnitBits, std::memory_order_seq_cst);
  if (p->sleepers.load(std::memory_order_seq_cst) > 0) {
    pthread_mutex_lock(&p->sleep_lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->sleep_lock);
  }
  take_units(p, 0);
  for (int spins = 0; p->done.load(std::memory_order_acquire) < n; spins++) {
    pause();
    if (spins > 2000) sched_yield();  // the helper may need this very core
  }
}

void pool_lock(Pool *p) { pthread_mutex_lock(&p->callers); }
void pool_unlock(Pool *p) { pthread_mutex_unlock(&p->callers); }

}  // namespace kilat
