/* backend.h: what a device provides to the runtime. Internal; C structs so that any compiler can build a backend.
 *
 * The runtime reads files and checks everything that comes from outside: shapes, types, ids, positions, the context. A backend may
 * trust its arguments. It keeps the numbers; the runtime keeps the tokens.
 */
#ifndef KILAT_BACKEND_H
#define KILAT_BACKEND_H

#include <stdint.h>

#include "../include/kilat.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Storage formats; the numbers below 1000 are those of GGUF files. */
enum {
  KILAT_TYPE_F32 = 0,
  KILAT_TYPE_F16 = 1,
  KILAT_TYPE_Q4_0 = 2,
  KILAT_TYPE_Q4_1 = 3,
  KILAT_TYPE_Q5_0 = 6,
  KILAT_TYPE_Q5_1 = 7,
  KILAT_TYPE_Q8_0 = 8,
  KILAT_TYPE_Q4_K = 12,
  KILAT_TYPE_Q5_K = 13,
  KILAT_TYPE_Q6_K = 14,
  KILAT_TYPE_BF16 = 30,
  KILAT_TYPE_F8_E4M3 = 1000 /* with `scales` */
};

/* A tensor [rows, cols] in a mapped file, valid while model_build runs; a vector has one row. data is null when the model has no
 * such tensor. Not aligned beyond a byte. Rows are whole blocks and lie one after another, `row_bytes` apart. */
typedef struct kilat_tensor {
  const void *data;
  int64_t rows, cols, row_bytes;
  int32_t type;
  /* > 0: that many heads whose rows are stored as rotating pairs: row i * 2 + j of a head belongs at j * head_dim / 2 + i. */
  int32_t paired_heads;
  /* fp8 only: value = stored * scale of its block. scales [ceil(rows / block_rows), ceil(cols / block_cols)], contiguous, of
   * scale_type (F32 or BF16). */
  const void *scales;
  int32_t scale_type, block_rows, block_cols;
} kilat_tensor;

/* Weights [outputs, inputs]; biases and norms are vectors. A layer computes
 *   x += o(attention(rope(norm(q)), rope(norm(k)), v)) of norm_in(x);  x += down(silu(gate) * up) of norm_mid(x). */
typedef struct kilat_layer_desc {
  kilat_tensor norm_in, q, k, v, o, norm_mid, gate, up, down;
  kilat_tensor q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias; /* each may be absent; q, k, v come together */
  kilat_tensor q_norm, k_norm;                                               /* both or neither; [head_dim] */
  int64_t window; /* > 0: a token sees only the last `window` tokens, itself included */
} kilat_layer_desc;

typedef struct kilat_model_desc {
  int64_t vocab, hidden, inner, n_layers, q_heads, kv_heads, head_dim;
  int64_t rotary;              /* elements of a head that rotate, as pairs (i, i + rotary / 2); the rest pass through */
  int64_t max_context;
  double norm_eps, qk_norm_eps;
  const float *inverse_frequencies; /* [rotary / 2]; angle = fp32(position) * this, rounded to fp32 */
  float rope_factor;                /* on cosines and sines */
  int32_t dtype;                    /* KILAT_DTYPE_F32 or _BF16: activations, KV and logits; every op rounds to it once */
  int32_t weights;                  /* KILAT_WEIGHTS_STORED or _WIDE; AUTO: the backend chooses */
  int32_t tied;                     /* head is the embedding */
  kilat_tensor embedding, norm, head; /* head.data is null when tied */
  const kilat_layer_desc *layers;     /* [n_layers] */
} kilat_model_desc;

/* Where a failed call says why; text is set together with the status that is returned. */
typedef struct kilat_failure {
  char text[512];
} kilat_failure;

/* Sets the text like printf and returns `status`: `return kilat_fail(f, KILAT_NO_MEMORY, "..., got %d", n)`. */
int kilat_fail(kilat_failure *failure, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* What sampling at a position comes to: a kilat_sampling that was checked, and its uniform number in (0, 1). temperature 0: greedy.
 */
typedef struct kilat_draw {
  double temperature, top_p, min_p, u;
  int64_t top_k;
} kilat_draw;

/* [positions, rotary] fp32 contiguous: rotary / 2 cosines, then as many sines; the same bits as the engine's table. */
void kilat_rope_table(const kilat_model_desc *desc, int64_t positions, float *out);

typedef struct kilat_device_model kilat_device_model;
typedef struct kilat_device_session kilat_device_session;

typedef struct kilat_backend {
  /* Copy and pack the weights of `desc`, which dies afterwards; start threads, open the device. */
  int (*model_build)(const kilat_model_desc *desc, const kilat_options *options, kilat_device_model **out, kilat_failure *f);
  void (*model_free)(kilat_device_model *m);
  /* Name of the kernel set; part of what a snapshot must agree with. Lives as long as the model. */
  const char *(*model_kernels)(const kilat_device_model *m);
  /* KILAT_WEIGHTS_STORED or _WIDE, what was chosen. */
  int (*model_weights)(const kilat_device_model *m);
  /* Owners of memory into out [capacity]; returns how many there are. */
  int (*model_memory)(const kilat_device_model *m, kilat_memory *out, int capacity);

  /* Reserve and touch all memory that a session of `context` tokens can ever need. */
  int (*session_create)(kilat_device_model *m, int64_t context, int64_t flags, kilat_device_session **out, kilat_failure *f);
  void (*session_free)(kilat_device_session *s);
  int (*session_memory)(const kilat_device_session *s, kilat_memory *out, int capacity);

  /* Write K and V of ids [n] at positions first ... first + n - 1, all before being there, and leave the logits of the last one;
   * with `draw` also sample from them into *next (KILAT_NOT_FINITE when their maximum is not finite). n is 1 for a step; the
   * backend cuts a long prompt as it likes.
   * `after`, only with `draw`: the caller likely goes on with *next, to be followed by this draw, and position first + n is free. A
   * backend may begin that before it returns, as long as nobody can tell who then does something else. Never with layers kept. */
  int (*forward)(kilat_device_session *s, const int32_t *ids, int64_t n, int64_t first, const kilat_draw *draw,
                 const kilat_draw *after, int32_t *next, kilat_failure *f);
  /* Sample from the logits that are there. */
  int (*sample)(kilat_device_session *s, const kilat_draw *draw, int32_t *next, kilat_failure *f);
  /* out [vocab] fp32. */
  int (*logits_read)(kilat_device_session *s, float *out, kilat_failure *f);
  /* out [n_layers + 1, hidden] fp32 of the last token: what entered each layer and what left the last one. */
  int (*layers_read)(kilat_device_session *s, float *out, kilat_failure *f);

  /* A snapshot's part of the device: KV of positions 0 ... n - 1 and the logits, as bytes in the backend's own layout. */
  int64_t (*state_bytes)(const kilat_device_session *s, int64_t n);
  int (*state_read)(kilat_device_session *s, int64_t n, void *out, kilat_failure *f);
  int (*state_write)(kilat_device_session *s, int64_t n, const void *data, kilat_failure *f);
} kilat_backend;

/* The backend of the CPU, and that of CUDA devices, which is only there in builds that have it. */
const kilat_backend *kilat_cpu_backend(void);
const kilat_backend *kilat_cuda_backend(void) __attribute__((weak));

#ifdef __cplusplus
}
#endif
#endif
