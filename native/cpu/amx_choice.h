// Whether this process computes with AMX tiles.
#pragma once

#include "context.h"

namespace kilat {

// What the choice asks, in this order. Tests put other machines in its place.
struct AmxMachine {
  // By the processor, and kept by the system when it changes threads.
  bool (*present)();
  // Ask the system to let all threads of this process use tiles, those that run and those to come; without that the first use of a tile is
  // SIGILL.
  bool (*permitted)();
  // Products come out as they must. May die of a signal.
  bool (*sound)();
};

enum AmxState { AMX_USED, AMX_ABSENT, AMX_REFUSED, AMX_UNSOUND };

// Each call asks the machine anew, and lets it compute on a thread of its own.
AmxState amx_try(const AmxMachine &machine);

// That of this machine, found out by the first call.
AmxState amx_state();

extern const AmxMachine kAmxMachine;

// The kernels (isa_amx.h): those of kAvx512Bf16 with other products, and what `sound` asks; nullptr and false from a compiler that
// does not know the instructions.
const Table *amx_table();
bool amx_sound();

}  // namespace kilat
