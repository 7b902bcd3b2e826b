// fail.cpp: what a backend needs of the runtime besides its rotary table, for libraries that hold a backend alone.
#include <stdarg.h>
#include <stdio.h>

#include "../runtime/backend.h"

extern "C" int kilat_fail(kilat_failure *failure, int status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure->text, sizeof failure->text, format, arguments);
  va_end(arguments);
  return status;
}
