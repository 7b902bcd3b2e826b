// step.h: what a forward pass on the device reads and writes; passed to the kernels by value.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#include "layout.h"

namespace kilat_cuda {

// Device address of a matrix, a multiple of 256, plus its format.
struct MatrixPlace {
  uint64_t bits;
  __host__ __device__ char *at() const { return reinterpret_cast<char *>(bits & ~uint64_t(255)); }
  __host__ __device__ int format() const { return int(bits & 255); }
};

// The model: all pointers are device memory that never changes after load.
struct ModelView {
  Shape shape[kLayerMatrices + 1];
  int layers, hidden, inner, q_heads, kv_heads, head_dim, rotary, vocab;
  const int *windows;          // null or [layers]: tokens that a token sees, 0: all
  float norm_eps, qk_norm_eps;
  int narrow;                  // chunks are cut for small slots
  const MatrixPlace *matrices; // [layers * 4 + 1]
  const __nv_bfloat16 *norms;  // [layers * 2 + 1, hidden]: before attention, before the MLP, ...; the last is the head's
  const __nv_bfloat16 *qk_norms;                   // [layers, 2, head_dim] or null
  const float *biases[kLayerMatrices];             // [layers, rows of the matrix] in the packed order of rows, or null
  const __nv_bfloat16 *embedding;                  // [vocab, hidden], or null: read from the head's matrix
};

// A session: buffers of one stream.
struct SessionView {
  int context, max_splits;
  __nv_bfloat16 *kv;         // [layers, kv_heads, 2, context, head_dim]
  const float *rope;         // [context, rotary]: cosines, then sines
  // Vectors of words (exchange.cuh), [2, n]: layers write the first and the second half in turn.
  uint32_t *entering;        // [.., hidden]: what enters a layer; after the last one what enters the head
  uint32_t *between;         // [.., hidden]: after attention
  uint32_t *qkv;             // [.., (q_heads + 2 kv_heads) * head_dim]
  uint32_t *attended;        // [.., q_heads * head_dim]
  uint32_t *gated;           // [.., inner]
  float *logits;             // [tiles of the head * 16] of this pass
  __nv_bfloat16 *layers;     // [layers + 1, hidden] or null: what entered each layer
  struct Partial *partial;   // [head groups, max_splits, 8, head_dim]: what attention to a span gives
  unsigned long long *tops;  // [2, blocks]: maxima of blocks, then sums of blocks
  unsigned long long *bins;  // [4, 256] of the sampler
  unsigned *barrier;         // counts arrivals of blocks, and wraps
  volatile unsigned long long *result;  // host memory, of this pass: launch number << 32 | (id + 2)
  int *drawn;                // the id that this pass draws, for the next one; a valid id at all times
  long long *trace;          // or null: clocks of block 0
};

struct DrawView {
  float temperature, min_p_log;  // min_p_log: log of min_p, -inf for none
  double top_p;
  int top_k;
  unsigned u24;                  // the uniform number times 2^24: an odd integer
  int wanted;                    // 0: no id is drawn
};

// How the stream of weights (stream.cuh) is paced.
struct Pace {
  int in_flight;    // chunks of a ring that are on their way at a time
  int ahead;        // chunks of a warp beyond its full ring, on their way to the device's cache
  unsigned clocks;  // between those
};

// A pass of one token.
struct Step {
  ModelView model;
  SessionView session;
  DrawView draw;
  int id, position;       // the token
  const int *taken;       // or null: where its id is instead, for the pass before draws it
  int first_matrix;       // 0, or layers * 4: only the head, of what lies in `entering`
  unsigned barriers;      // arrivals at `barrier` before this launch, over blocks
  unsigned first_tag;     // of this launch
  int lockstep;           // a barrier of the grid per layer
  unsigned number;        // of this launch
  int slots, slot_bytes;  // of a warp's ring
  int work_bytes;         // shared memory between the rings and the barriers
  Pace pace;
};

// Queues a pass of `step` on a stream of the current device: on `blocks` blocks with `shared_bytes` of shared memory. step.barriers is
// set by the caller; barriers_of_pass says by how much the counter grows.
cudaError_t launch_pass(const Step &step, int blocks, int shared_bytes, cudaStream_t stream);
// The same, only sampling from the logits that are there.
cudaError_t launch_sample(const Step &step, int blocks, int shared_bytes, cudaStream_t stream);
int barriers_of_pass(const Step &step);
int tags_of_pass(const Step &step);
int barriers_of_sample(const Step &step);
// Shared memory that a block may have for launch_pass, once: raises the limit of the kernels.
cudaError_t prepare_kernels(int shared_bytes);

}  // namespace kilat_cuda
