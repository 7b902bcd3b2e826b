// How the runtime says inside that something went wrong: an exception that ends at the C API, where it becomes a status and a text.
#pragma once

#include <stdarg.h>
#include <stdio.h>

#include "backend.h"

namespace kilat {

struct Error {
  int status;
  kilat_failure failure;
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(int status, const char *format, ...) {
  Error error;
  error.status = status;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error.failure.text, sizeof error.failure.text, format, arguments);
  va_end(arguments);
  throw error;
}

}  // namespace kilat
