// trace.h: clocks of one processor at each barrier of a step; for measurements.
#pragma once

#include "../runtime/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Switches the notes of the session's steps on or off.
void kilat_cuda_trace(kilat_device_session *s, int on);
// Clocks of the last step into out [capacity]: the start, after each barrier, the end of the head, the end. Returns how many.
int kilat_cuda_trace_read(kilat_device_session *s, long long *out, int capacity);

#ifdef __cplusplus
}
#endif
