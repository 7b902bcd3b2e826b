// The kernels for one instruction set; the build gives this file the flags of isa_avx512bf16.cpp, and its functions name their own set, so
// that a compiler that knows no AMX makes a library without it.
#if __has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>)

#include "amx_instructions.h"
#include "isa_amx.h"

#else

#include "amx_choice.h"

namespace kilat {

const Table *amx_table() { return nullptr; }
bool amx_sound() { return false; }

}  // namespace kilat

#endif
