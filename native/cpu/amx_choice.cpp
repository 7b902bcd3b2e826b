// A machine that says it has tiles is believed only after products on a thread that has done nothing else, as the pool's have not: what the
// thread leaves in its registers ends with it. A signal there, SIGILL or SIGSEGV, means no.
#include "amx_choice.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

namespace kilat {

namespace {

const int kSignals[] = {SIGILL, SIGSEGV};

// Handlers belong to the process, so there is one guard, and the lock is for those that wait for it.
struct Guard {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_t thread;
  sigjmp_buf back;
  struct sigaction before[2];
} guard;

void on_signal(int) {
  if (pthread_equal(pthread_self(), guard.thread)) siglongjmp(guard.back, 1);
  // Another thread's own fault: it happens again after this, and meets the handlers that were there before.
  for (int i = 0; i < 2; i++) sigaction(kSignals[i], &guard.before[i], nullptr);
}

struct Check {
  bool (*sound)();
  bool passed;
};

void *check_main(void *raw) {
  Check *check = static_cast<Check *>(raw);
  guard.thread = pthread_self();
  struct sigaction own = {};
  own.sa_handler = on_signal;
  sigset_t signals;
  sigemptyset(&signals);
  for (int i = 0; i < 2; i++) {
    sigaddset(&signals, kSignals[i]);
    sigaction(kSignals[i], &own, &guard.before[i]);
  }
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  if (sigsetjmp(guard.back, 1) == 0) check->passed = check->sound();
  for (int i = 0; i < 2; i++) sigaction(kSignals[i], &guard.before[i], nullptr);
  return nullptr;
}

bool passes(const AmxMachine &machine) {
  Check check = {machine.sound, false};
  pthread_mutex_lock(&guard.lock);
  sigset_t all, before;  // the thread takes no signal that is meant for others
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const bool started = pthread_create(&thread, nullptr, check_main, &check) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (started) pthread_join(thread, nullptr);
  pthread_mutex_unlock(&guard.lock);
  return check.passed;
}

}  // namespace

AmxState amx_try(const AmxMachine &machine) {
  if (!machine.present()) return AMX_ABSENT;
  if (!machine.permitted()) return AMX_REFUSED;
  return passes(machine) ? AMX_USED : AMX_UNSOUND;
}

AmxState amx_state() {
  static const AmxState state = amx_table() ? amx_try(kAmxMachine) : AMX_ABSENT;
  return state;
}

}  // namespace kilat
