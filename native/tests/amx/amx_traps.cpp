// A machine whose tile instructions are real and illegal: the very machine code of cpu/isa_amx.cpp runs on a processor without tiles, and
// what it dies of, SIGILL, is where amx_model.h does what the instruction says. In the place of cpu/amx_machine.cpp.
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#include "../../cpu/amx_choice.h"
#include "amx_model.h"

namespace kilat {

namespace amx {

ModelMachine model;

}  // namespace amx

namespace {

// A memory operand: for tiles, rows `stride` bytes apart.
struct Operand {
  char *start;
  int64_t stride;
  int length;  // of the instruction
};

Operand operand_of(const uint8_t *at, const greg_t *registers, bool x, bool b) {
  static const int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  const int mod = at[4] >> 6, rm = at[4] & 7, sib = rm == 4 ? at[5] : 0;
  const int base = rm == 4 ? (sib & 7) | b << 3 : rm | b << 3, index = (sib >> 3 & 7) | x << 3;
  int length = rm == 4 ? 6 : 5;
  const bool no_base = mod == 0 && (base & 7) == 5;
  int64_t shift = 0;
  if (mod == 1) {
    shift = int8_t(at[length++]);
  } else if (mod == 2 || no_base) {
    int32_t wide;
    memcpy(&wide, at + length, 4);
    shift = wide;
    length += 4;
  }
  int64_t start = shift;
  if (!no_base) start += registers[kOrder[base]];
  else if (rm == 5) start += int64_t(at) + length;
  const int64_t stride = rm == 4 && index != 4 ? registers[kOrder[index]] * (int64_t(1) << (sib >> 6)) : 0;
  return {reinterpret_cast<char *>(start), stride, length};
}

// Length of the instruction that has been done, or 0: it is no tile instruction. Encodings: Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2.
int done(const uint8_t *at, const greg_t *registers) {
  if (at[0] != 0xc4 || (at[1] & 0x1f) != 2) return 0;                 // three bytes of VEX, opcodes 0F38
  if (!(at[1] & 0x80) || (at[2] & 0x84)) return 0;  // tiles 0 to 7, W0, 128
  const int prefix = at[2] & 3, third = ~(at[2] >> 3) & 15, opcode = at[3], reg = at[4] >> 3 & 7, rm = at[4] & 7;
  enum { NONE = 0, F3 = 2, F2 = 3 };
  if (at[4] >> 6 == 3) {
    if (opcode == 0x49 && prefix == NONE && at[4] == 0xc0) amx::tiles_end();
    else if (opcode == 0x49 && prefix == F2 && rm == 0) amx::model_zero(reg);
    else if (opcode == 0x5c && prefix == F3 && third < 8) amx::model_dot(reg, rm, third);
    else if (opcode == 0x5e && prefix == F3 && third < 8) amx::model_dot_bytes(reg, rm, third);
    else return 0;
    return 5;
  }
  const Operand o = operand_of(at, registers, !(at[1] & 0x40), !(at[1] & 0x20));
  if (opcode == 0x49 && prefix == NONE && reg == 0) {
    amx::TileShapes shapes;
    memcpy(&shapes, o.start, sizeof shapes);
    amx::tiles_begin(shapes);
  } else if (opcode == 0x4b && prefix == F2 && rm == 4) {
    amx::model_load(reg, o.start, o.stride);
  } else if (opcode == 0x4b && prefix == F3 && rm == 4) {
    amx::model_store(reg, o.start, o.stride);
  } else {
    return 0;
  }
  return o.length;
}

void on_illegal(int, siginfo_t *, void *raw) {
  greg_t *registers = static_cast<ucontext_t *>(raw)->uc_mcontext.gregs;
  const int length = done(reinterpret_cast<const uint8_t *>(registers[REG_RIP]), registers);
  if (length) registers[REG_RIP] += length;
  else signal(SIGILL, SIG_DFL);  // it happens again, and that is the end
}

void catch_illegal() {
  struct sigaction own = {};
  own.sa_sigaction = on_illegal;
  own.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &own, nullptr);
}

bool present() { return true; }

bool permitted() { return amx::model.permitted = true; }

// Whoever asks has handlers of its own and puts back what was there before.
bool sound() {
  catch_illegal();
  return amx_sound();
}

}  // namespace

extern const AmxMachine kAmxMachine = {present, permitted, sound};

}  // namespace kilat

extern "C" {

// For the rest of this process.
KILAT_API void kilat_traps_begin(void) { kilat::catch_illegal(); }
KILAT_API int64_t kilat_model_products(void) { return kilat::amx::model.products; }
KILAT_API int kilat_model_begun(void) { return kilat::amx::model.begun; }

}  // extern "C"
