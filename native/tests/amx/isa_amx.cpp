// cpu/isa_amx.cpp with the model in the place of the instructions.
#include "amx_model.h"
// (that comes first)
#include "../../cpu/isa_amx.h"
