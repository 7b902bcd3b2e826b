// What this machine says of AMX tiles: CPUID and XCR0, and the permission that Linux wants to be asked for.
#include "amx_choice.h"

#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kilat {

namespace {

// Numbers of Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapters 13 and 18, and volume 2, CPUID.
bool present() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // OSXSAVE: XCR0 can be read
  const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & wanted) != wanted) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return false;  // TILECFG and TILEDATA
  // palette 1: at least 8 tiles of 16 rows of 64 bytes, or loading their shapes is a fault
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) || (b & 0xffff) < 64 || b >> 16 < 8 || (c & 0xffff) < 16) return false;
  return __get_cpuid_count(0x1e, 0, &a, &b, &c, &d) && (b & 0xff) >= 16 && (b >> 8 & 0xffff) >= 64;
}

// Linux keeps the permission with the process: threads share it, a forked child inherits it (Documentation/arch/x86/xstate.rst). It refuses
// when a thread has an alternate signal stack that is too small for 8 KiB more, and seccomp or a sandbox may refuse as well.
bool permitted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  const long get = 0x1022, ask = 0x1023, tile_data = 18;  // ARCH_GET_XCOMP_PERM, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned long have = 0;
  return syscall(SYS_arch_prctl, ask, tile_data) == 0 && syscall(SYS_arch_prctl, get, &have) == 0 && (have >> tile_data & 1);
#else
  return false;
#endif
}

}  // namespace

extern const AmxMachine kAmxMachine = {present, permitted, amx_sound};

}  // namespace kilat
