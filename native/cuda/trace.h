// trace.h: clocks of one processor at each barrier of a step; for measurements.
#pragma once

#include "../runtime/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Switches the notes of the session's steps on or off.
void kilat_cuda_trace(kilat_device_session *s, int on);
// Clocks of the last step of one token into out [capacity]: the start; for each matrix when its input was in shared memory and when its
// output was written, and after those of qkv the end of attention; the end of the draw. Returns how many.
int kilat_cuda_trace_read(kilat_device_session *s, long long *out, int capacity);

#ifdef __cplusplus
}
#endif
