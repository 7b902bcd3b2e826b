// prompt.h: a forward pass of many tokens: a few kernels per layer, each over all tokens.
#pragma once

#include "step.h"

namespace kilat_cuda {

constexpr int kPromptRows = 512;  // tokens of one pass at most

// Token ids of a pass; they travel with the launch.
struct PromptIds {
  int at[kPromptRows];
};

// What a pass of `rows` tokens from position `first` on reads and writes. All vectors are bf16, one row after another.
struct Prompt {
  ModelView model;
  SessionView session;
  int rows, first;
  __nv_bfloat16 *residual;  // [rows, hidden]
  __nv_bfloat16 *normed;    // [rows, hidden]
  __nv_bfloat16 *qkv;       // [rows, (q_heads + 2 kv_heads) * head_dim]
  __nv_bfloat16 *attended;  // [rows, q_heads * head_dim]
  __nv_bfloat16 *gated;     // [rows, inner]; lies where qkv and attended do
  float *sums;              // of products whose columns several blocks share: PromptFit.sums
  unsigned *arrived;        // blocks of each group of those, counted and counted back to 0: [PromptFit.groups]
  unsigned tag;             // of the words of the last token that the head will read
};

// How the kernels fit a device.
struct PromptFit {
  int blocks;             // processors
  int shared_limit;       // bytes of shared memory that a block can have
  int attention_queries;  // that a block attends with; 0: shared memory does not do
  int groups;             // of blocks that may share a product's columns
  int64_t sums;           // floats that those groups leave for each other
};

// `matrices` [layers * 4] is host memory here and below; contexts are cut into at most `max_splits` spans.
PromptFit fit_prompt(const ModelView &model, const MatrixPlace *matrices, int blocks, int shared_limit, int max_splits);
// Raises the kernels' limits of shared memory, once.
cudaError_t prepare_prompt(int shared_limit);
// Queues the layers: K and V go to the session's pages, what the head reads of the last token to session.entering.
cudaError_t launch_prompt(const Prompt &prompt, const PromptIds &ids, const MatrixPlace *matrices, const PromptFit &fit, cudaStream_t stream);

}  // namespace kilat_cuda
