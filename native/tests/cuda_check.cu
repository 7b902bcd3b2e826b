// cuda_check.cu: what the tests and measurements of the CUDA backend call beside its table of functions.
#include <time.h>

#include "../cuda/model.h"
#include "../cuda/pack.h"
#include "../cuda/trace.h"
#include "../runtime/formats.h"

namespace {

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// 16 bytes per thread and round, eight rounds in flight.
__global__ void read_kernel(const uint4 *from, int64_t n, unsigned *out) {
  unsigned sum = 0;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * stride < n; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x12345678u) *out = sum;
}

}  // namespace

// n steps at positions first, first + stride, ... with the drawn id fed back; times[i] is when step i's id was there, in seconds.
// `ahead`, with stride 1: each step is begun while the one before runs.
extern "C" int kilat_time_steps(kilat_device_session *s, int32_t id, int64_t first, int64_t stride, int64_t n, int ahead,
                                const kilat_draw *draw, double *times, kilat_failure *f) {
  const kilat_backend *b = kilat_cuda_backend();
  for (int64_t i = 0; i < n; ++i) {
    const int status = b->forward(s, &id, 1, first + i * stride, draw, ahead ? draw : nullptr, &id, f);
    if (status != KILAT_OK) return status;
    times[i] = now_s();
  }
  return KILAT_OK;
}

// Bytes per second that a plain kernel reads from `bytes` of device memory; 0 if that failed.
extern "C" double kilat_read_bandwidth(int64_t bytes) {
  char *data = nullptr;
  if (cudaMalloc(&data, bytes + 256) != cudaSuccess) return 0;
  cudaMemset(data, 1, bytes + 256);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin), cudaEventCreate(&end);
  float best = 1e30f;
  for (int i = 0; i < 6; ++i) {
    float ms = 0;
    cudaEventRecord(begin);
    read_kernel<<<132 * 8, 256>>>(reinterpret_cast<uint4 *>(data), bytes / 16, reinterpret_cast<unsigned *>(data + bytes));
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
    if (i && ms < best) best = ms;
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  const bool good = cudaGetLastError() == cudaSuccess;
  cudaFree(data);
  return good ? double(bytes) / (best * 1e-3) : 0;
}

// The device's reading of n values of one row against the runtime's: how many differ after rounding to bf16, or -1 if the device failed.
extern "C" int64_t kilat_compare_format(int type, const void *row, int64_t n, int64_t row_bytes) {
  uint8_t *data = nullptr;
  __nv_bfloat16 *out = nullptr;
  uint16_t *device = new uint16_t[n];
  float *host = new float[n];
  int64_t differ = -1;
  if (cudaMalloc(&data, row_bytes) == cudaSuccess && cudaMalloc(&out, n * 2) == cudaSuccess &&
      cudaMemcpy(data, row, row_bytes, cudaMemcpyHostToDevice) == cudaSuccess) {
    const kilat_cuda::Source source{data, 1, n, row_bytes, type, 0, 0, nullptr, 0, 1, 1};
    if (kilat_cuda::widen(source, out, nullptr) == cudaSuccess && cudaMemcpy(device, out, n * 2, cudaMemcpyDeviceToHost) == cudaSuccess) {
      kilat::widen_row(type, row, n, host);
      differ = 0;
      for (int64_t i = 0; i < n; ++i) {
        const uint16_t expected = kilat::bf16_of(host[i]);
        differ += expected != device[i] && ((expected | device[i]) & 0x7fff) != 0;  // both zeros are one value
      }
    }
  }
  cudaFree(data), cudaFree(out);
  delete[] device;
  delete[] host;
  return differ;
}
