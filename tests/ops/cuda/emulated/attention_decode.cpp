// attention_decode.cu on the emulated device of native/tests/emulated: ptx.cuh in plain C++. Copies are there at once.
#include "cuda_fp8.h"
#include "cuda_runtime.h"

#define __forceinline__ inline

typedef unsigned int u32;
typedef unsigned short u16;

using kilat_emulated::exchange;
using kilat_emulated::here;
using kilat_emulated::lane_words;
using kilat_emulated::meet_warp;

inline int lane_here() { return int(threadIdx.x) & 31; }
inline int thread_here() { return int(threadIdx.x); }
inline int block_here() { return int(blockIdx.x); }
inline char *shared_memory() { return kilat_emulated::shared(); }
inline u32 shared_address(const void *p) { return u32(static_cast<const char *>(p) - shared_memory()); }
inline void sync_threads() { kilat_emulated::meet(0, 0); }
inline void sync_warp() { meet_warp(); }
inline void fence() {}
inline void let_next_start() {}
inline void wait_for_previous() {}

inline void copy_16(u32 to, const void *from, bool on) {
  if (to % 16 || (on && reinterpret_cast<uintptr_t>(from) % 16)) kilat_emulated::trap("a copy of 16 bytes is not aligned");
  if (on)
    memcpy(shared_memory() + to, from, 16);
  else
    memset(shared_memory() + to, 0, 16);
}
inline void copy_commit() {}
template <int PENDING>
inline void copy_wait() {}
inline uint4 load_shared(u32 at) {
  if (at % 16) kilat_emulated::trap("a load of shared memory is not aligned");
  return *reinterpret_cast<uint4 *>(shared_memory() + at);
}
inline int load_read_only(const int *p) { return *p; }
inline float load_read_only(const float *p) { return *p; }
inline uint4 load_16(const void *p) { return *static_cast<const uint4 *>(p); }
inline void store_16(void *p, u32 a, u32 b, u32 c, u32 d) { *static_cast<uint4 *>(p) = make_uint4(a, b, c, d); }
inline void store_8(void *p, u32 a, u32 b) { *static_cast<uint2 *>(p) = make_uint2(a, b); }
inline void store_4(float *p, float a, float b, float c, float d) { p[0] = a, p[1] = b, p[2] = c, p[3] = d; }
inline void load_4(const float *p, float &a, float &b, float &c, float &d) { a = p[0], b = p[1], c = p[2], d = p[3]; }
inline u32 add_one(u32 *p) { return (*p)++; }

inline float from_lane(float v, int mask) { return exchange(v, lane_here() ^ mask); }
inline int from_lane_below(int v, int d) { return exchange(v, lane_here() < d ? lane_here() : lane_here() - d); }
inline u32 from_first_lane(u32 v) { return exchange(v, 0); }
inline bool any_lane(bool v) {
  lane_words()[lane_here() * 8] = v;
  meet_warp();
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) any |= lane_words()[lane * 8] != 0;
  meet_warp();
  return any;
}
inline float max_of(float a, float b) { return fmaxf(a, b); }
inline int min_of(int a, int b) { return a < b ? a : b; }
inline float abs_of(float a) { return fabsf(a); }
inline float exp2_of(float x) { return exp2f(x); }
inline u32 bytes_of(u32 a, u32 b, u32 select) { return __byte_perm(a, b, select); }

inline u32 half_bits(float v) {
  const _Float16 h = _Float16(v);
  u16 bits;
  memcpy(&bits, &h, 2);
  return bits;
}
inline float half_value(u32 bits) {
  const u16 low = u16(bits);
  _Float16 h;
  memcpy(&h, &low, 2);
  return float(h);
}
inline u32 two_half(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
inline u32 half_from_fp8(u32 bits) {
  return two_half(float(__nv_fp8_e4m3{uint8_t(bits)}), float(__nv_fp8_e4m3{uint8_t(bits >> 8)}));
}
inline u32 bf16_bits(float v) {
  const u32 u = __float_as_uint(v);
  return v != v ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline u32 two_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline float rounded(float v) { return __uint_as_float(bf16_bits(v) << 16); }
inline u32 half_from_bf16(u32 both) { return two_half(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)); }
inline u32 e4m3(float v) {  // the nearest, even where two are as near; at most 448
  u32 best = 0;
  for (u32 i = 1; i < 127; ++i) {
    const float old = fabsf(fabsf(v) - float(__nv_fp8_e4m3{uint8_t(best)})), now = fabsf(fabsf(v) - float(__nv_fp8_e4m3{uint8_t(i)}));
    if (now < old || (now == old && i % 2 == 0)) best = i;
  }
  return best | (v < 0 ? 128 : 0);
}
inline u32 four_e4m3(float a, float b, float c, float d) { return e4m3(a) | e4m3(b) << 8 | e4m3(c) << 16 | e4m3(d) << 24; }

#if FP8
inline u32 pair_of(float low, float high) { return two_half(low, high); }
inline float value_of(u32 bits) { return half_value(bits); }
#else
inline u32 pair_of(float low, float high) { return two_bf16(low, high); }
inline float value_of(u32 bits) { return __uint_as_float(bits << 16); }
#endif

// Operand words of lanes: element (row, k) of the left one, (k, column) of the right one, as the instruction defines them.
inline float left_of(int row, int k) {
  return value_of(u32(lane_words()[(row % 8 * 4 + k % 8 / 2) * 8 + row / 8 + k / 8 * 2] >> k % 2 * 16 & 0xffff));
}
inline float right_of(int k, int column) { return value_of(u32(lane_words()[(column * 4 + k % 8 / 2) * 8 + 4 + k / 8] >> k % 2 * 16 & 0xffff)); }
inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int lane = lane_here();
  const u32 words[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; ++i) lane_words()[lane * 8 + i] = words[i];
  meet_warp();
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) c[i] += left_of(lane / 4 + i / 2 * 8, k) * right_of(k, lane % 4 * 2 + i % 2);
  meet_warp();
}
inline u32 transposed(u32 v) {
  const int lane = lane_here(), row = lane / 4;
  lane_words()[lane * 8] = v;
  meet_warp();
  u32 out = 0;
  for (int i = 0; i < 2; ++i) out |= u32(lane_words()[((lane % 4 * 2 + i) * 4 + row / 2) * 8] >> row % 2 * 16 & 0xffff) << 16 * i;
  meet_warp();
  return out;
}

#include "../../../../src/kilat/ops/cuda/attention_decode.cu"

extern "C" void run(const Args *args, int blocks, int shared_bytes) {
  kilat_emulated::run_blocks(unsigned(blocks), 256, size_t(shared_bytes), [](void *a) { decode(*static_cast<const Args *>(a)); }, const_cast<Args *>(args));
}
