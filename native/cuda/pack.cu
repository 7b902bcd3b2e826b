// pack.cu: see pack.h and layout.h. Runs once per tensor at load.
#include "values.cuh"

namespace kilat_cuda {

namespace {

// Bytes of unit `unit` of a tile: its numbers, and its scales.
struct UnitPlace {
  char *numbers, *scales;
};

__device__ inline UnitPlace place_of(const Target &t, int64_t tile, int unit) {
  const int per = 1 << chunk_shift(t.format, t.narrow), first = unit / per * per, n = min(per, t.units - first);
  char *chunk = t.matrix + (tile * t.units + first) * unit_bytes(t.format);
  return {chunk + (unit - first) * number_bytes(t.format), chunk + n * number_bytes(t.format) + (unit - first) * scale_bytes(t.format)};
}

// One lane's share of a unit of half a tile: row g of the half, columns 8 t ... 8 t + 7 of each of the unit's two groups of 32.
__global__ void pack_kernel(const Source s, const Target t, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int lane = int(i % 32), g = lane / 4, quad = lane % 4;
  const int unit = int(i / 32 % t.units);
  const int64_t source_half = i / 32 / t.units, row = source_half * 8 + g, half = t.first_half + source_half * t.half_step;
  const int upper = int(half % 2);
  if (row >= s.rows) return;
  const UnitPlace place = place_of(t, half / 2, unit);
  const uint8_t *bytes = s.data + stored_row(s, row) * s.row_bytes;
  for (int group = 0; group < 2; ++group) {
    const int64_t base = unit * kUnitColumns + group * 32;
    if (base >= s.columns) break;
    Group q{};
    if (t.format == kQ4 || t.format == kQ4Min) {
      q = group_of(s.type, bytes, base / 32);
      if (quad == 0) {
        __half *to = reinterpret_cast<__half *>(place.scales + g * (scale_bytes(t.format) / 8) + group * 4 + upper * 2);
        to[0] = __float2half_rn(q.scale);
        if (t.format == kQ4Min) to[4] = __float2half_rn(q.minimum);
      }
    }
    for (int e = 0; e < 8; ++e) {
      const int64_t k = base + quad * 8 + e;
      if (k >= s.columns) break;
      const int step = group * 2 + e / 4, pair = e % 4 / 2, second = e % 2;
      if (t.format == kBf16) {
        __nv_bfloat16 *to = reinterpret_cast<__nv_bfloat16 *>(place.numbers + step * 512 + lane * 16 + (pair * 2 + upper) * 4);
        to[second] = __float2bfloat16_rn(value_of(s, row, k));
      } else if (t.format == kFp8) {
        place.numbers[group * 512 + lane * 16 + (e / 4 * 2 + pair) * 4 + second * 2 + !upper] = bytes[k];
      } else {
        const int nibble = pair * 2 + upper + second * 4;
        atomicOr(reinterpret_cast<unsigned *>(place.numbers + lane * 16 + step * 4), unsigned(q.nibble(quad * 8 + e)) << (nibble * 4));
      }
    }
  }
  if (t.format == kFp8 && lane == 0)
    reinterpret_cast<float *>(place.scales)[upper] = block_scale(s, stored_row(s, row), unit * kUnitColumns);
}

template <class T>
__global__ void widen_kernel(const Source s, T *out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= s.rows * s.columns) return;
  const __nv_bfloat16 v = __float2bfloat16_rn(value_of(s, i / s.columns, i % s.columns));
  if constexpr (sizeof(T) == 2)
    out[i] = v;
  else
    out[i] = __bfloat162float(v);
}

template <class T>
cudaError_t widen_to(const Source &s, T *out, cudaStream_t stream) {
  const int64_t n = s.rows * s.columns;
  void *arguments[] = {const_cast<Source *>(&s), &out};
  return cudaLaunchKernel(widen_kernel<T>, dim3(unsigned((n + 255) / 256)), dim3(256), arguments, 0, stream);
}

}  // namespace

int stored_format(const kilat_tensor &t) {
  switch (t.type) {
    case KILAT_TYPE_Q4_0: return kQ4;
    case KILAT_TYPE_Q4_1:
    case KILAT_TYPE_Q4_K: return kQ4Min;
    // a half-tile's unit has one scale
    case KILAT_TYPE_F8_E4M3: return t.block_rows % 8 == 0 && t.block_cols % kUnitColumns == 0 && !t.paired_heads ? kFp8 : kBf16;
    default: return kBf16;
  }
}

cudaError_t pack(const Source &source, const Target &target, cudaStream_t stream) {
  int64_t n = (source.rows + 7) / 8 * target.units * 32;
  void *arguments[] = {const_cast<Source *>(&source), const_cast<Target *>(&target), &n};
  return cudaLaunchKernel(pack_kernel, dim3(unsigned((n + 255) / 256)), dim3(256), arguments, 0, stream);
}

cudaError_t widen(const Source &source, __nv_bfloat16 *out, cudaStream_t stream) { return widen_to(source, out, stream); }
cudaError_t widen(const Source &source, float *out, cudaStream_t stream) { return widen_to(source, out, stream); }

}  // namespace kilat_cuda
