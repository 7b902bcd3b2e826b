/* kilat_layers.h: all layers of a decoder as one call, on the ops of kilat_cpu.h and with their conventions. Between two ops of a step
 * nothing but C runs, so helper threads find the next one while they still spin. */
#ifndef KILAT_LAYERS_H
#define KILAT_LAYERS_H

#include "kilat_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A pre-norm layer: x += o(attention(qkv(norm_in x))), x += down(silu(gate) * up of norm_mid x). norm_in, norm_mid [hidden]; q_norm,
 * k_norm [dim] or both NULL; window as for kilat_attention. */
typedef struct kilat_layer {
  const kilat_linear *qkv, *o, *gate_up, *down;
  const void *norm_in, *norm_mid, *q_norm, *k_norm;
  int64_t window;
} kilat_layer;

/* Layers of one shape, and the dtype of all of their tensors. */
typedef struct kilat_decoder {
  const kilat_layer *layers;
  int64_t n, hidden, inner;
  kilat_heads heads;
  double eps, qk_eps;
  int dtype;
} kilat_decoder;

/* What goes on past the keys and values of the last layer. */
enum { KILAT_EVERY_TOKEN = 0, KILAT_LAST_OF_ROWS = 1, KILAT_NO_TOKEN = 2 };

/* A step. `kv` is layer 0's view; layer i's begins i * layer_stride elements later. `seen`, if there is one, is called with what enters
 * each layer, [tokens, hidden]. */
typedef struct kilat_pass {
  const float *cos_sin;
  const int32_t *positions, *slots;
  kilat_rows rows;
  kilat_kv kv;
  int64_t layer_stride, tokens;
  int wanted;
  void (*seen)(void *user, int64_t layer, const void *entering);
  void *user;
} kilat_pass;

/* Bytes of `room` for a pass over so many tokens and rows. */
KILAT_API int64_t kilat_layers_room(const kilat_decoder *decoder, int64_t tokens, int64_t rows);

/* x [tokens, hidden] goes in; afterwards x plus residual [tokens, hidden] is what leaves the last layer, with KILAT_LAST_OF_ROWS of the
 * last token of each row only, in the first rows of both; with KILAT_NO_TOKEN both are undefined. The bits are those of the ops
 * one after the other. room: 64-byte aligned. Returns 0, or -1 when memory is exhausted (all outputs are then undefined). */
KILAT_API int kilat_layers_run(kilat_cpu *cpu, const kilat_decoder *decoder, const kilat_pass *pass, void *x, void *residual, void *room);

#ifdef __cplusplus
}
#endif
#endif
