// no_cpu.cpp: in place of the CPU backend, whose kernels take minutes to compile. Only models on the emulated device can be opened.
#include "../../runtime/backend.h"

extern "C" const kilat_backend *kilat_cpu_backend(void) { return kilat_cuda_backend(); }
