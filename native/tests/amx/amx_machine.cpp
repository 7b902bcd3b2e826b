// A machine with the tiles of amx_model.h, in the place of cpu/amx_machine.cpp, and what the tests ask of it.
#include <signal.h>

#include "../../cpu/amx_choice.h"
#include "amx_model.h"

namespace kilat {

namespace amx {

ModelMachine model;

}  // namespace amx

namespace {

bool present() { return amx::model.fault != amx::FAULT_ABSENT; }

bool permitted() {
  if (amx::model.fault == amx::FAULT_REFUSED) return false;
  amx::model.permitted = amx::model.fault != amx::FAULT_UNASKED;  // UNASKED: the system says yes and does not mean it
  return true;
}

}  // namespace

extern const AmxMachine kAmxMachine = {present, permitted, amx_sound};

}  // namespace kilat

using namespace kilat;

extern "C" {

// From now on, so before the first question about instruction sets.
KILAT_API void kilat_model_fault(int fault) { amx::model.fault = fault; }

// The state that is found on a machine with a fault, or -1 when that leaves other signal handlers behind; then the machine is whole again.
KILAT_API int kilat_model_try(int fault) {
  struct sigaction before[2], after[2];
  const int signals[] = {SIGILL, SIGSEGV};
  for (int i = 0; i < 2; i++) sigaction(signals[i], nullptr, &before[i]);
  amx::model.fault = fault;
  const AmxState state = amx_try(kAmxMachine);
  amx::model.fault = amx::FAULT_NONE;
  amx::model.permitted = true;
  amx::model.begun = 0;  // a thread that died in the middle took its tiles along
  for (int i = 0; i < 2; i++) {
    sigaction(signals[i], nullptr, &after[i]);
    if (before[i].sa_sigaction != after[i].sa_sigaction || before[i].sa_flags != after[i].sa_flags) return -1;
  }
  return state;
}

KILAT_API int64_t kilat_model_products(void) { return amx::model.products; }
KILAT_API int kilat_model_begun(void) { return amx::model.begun; }

}  // extern "C"
