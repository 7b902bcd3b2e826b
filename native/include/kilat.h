/* kilat.h: one model, one stream at a time, no Python: the single-stream runtime of kilat.
 *
 *   kilat_model *m;  kilat_session *s;  int32_t id;
 *   if (kilat_open("model.gguf", NULL, &m)) return fail(kilat_model_error(m));
 *   if (kilat_session_create(m, NULL, &s)) return fail(kilat_session_error(s));
 *   for (int e = kilat_prefill(s, prompt, n, &sampling, &id); !e && !done(id); e = kilat_step(s, id, &sampling, &id)) print(id);
 *   kilat_session_close(s);  kilat_close(m);
 *
 * Conventions
 *   - No global state; nothing exits, throws or prints. A call that can fail returns a KILAT_... status, 0 for success, and leaves a
 *     sentence in the handle that it worked on (kilat_model_error, kilat_session_error).
 *   - No call after kilat_session_create allocates memory; all of it is reserved, touched and accounted for (kilat_memory_report).
 *   - The caller owns the buffers it passes and nothing keeps pointers to them. Text is UTF-8; sizes named bytes are bytes, else counts.
 *   - A session is used by one thread at a time. Sessions of one model may run in several threads; close them before the model.
 *   - Token ids depend on weights, tokens, sampling and seed only: not on threads, or on how tokens were cut into calls.
 */
#ifndef KILAT_H
#define KILAT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KILAT_VERSION 1

#if defined(__GNUC__)
#define KILAT_API __attribute__((visibility("default")))
#else
#define KILAT_API
#endif

typedef struct kilat_model kilat_model;
typedef struct kilat_session kilat_session;

enum {
  KILAT_OK = 0,
  KILAT_BAD_ARGUMENT = 1, /* a null pointer, an id outside the vocabulary, a number out of its range */
  KILAT_BAD_FILE = 2,     /* cannot be read, or is damaged */
  KILAT_UNSUPPORTED = 3,  /* an architecture, weight type, tokenizer or device that this build does not know */
  KILAT_NO_MEMORY = 4,    /* host or device */
  KILAT_CONTEXT_FULL = 5, /* more tokens than the session was created for; the session is as it was before */
  KILAT_NO_LOGITS = 6,    /* nothing was computed since creation or kilat_rewind */
  KILAT_NOT_FINITE = 7,   /* the model's output holds NaN or infinity */
  KILAT_BAD_SNAPSHOT = 8, /* damaged, or of another model or kernel set; the session is empty */
  KILAT_TOO_SMALL = 9,    /* the caller's buffer; the needed size was stored */
  KILAT_DEVICE_FAILED = 10
};

enum { KILAT_DEVICE_CPU = 0, KILAT_DEVICE_CUDA = 1 };
enum { KILAT_DTYPE_AUTO = 0, KILAT_DTYPE_F32 = 1, KILAT_DTYPE_BF16 = 2 };
enum { KILAT_WEIGHTS_AUTO = 0, KILAT_WEIGHTS_STORED = 1, KILAT_WEIGHTS_WIDE = 2 };

/* How a model is loaded. All zeros is a good choice; a null pointer means that. */
typedef struct kilat_options {
  int32_t device;       /* KILAT_DEVICE_... */
  int32_t device_index; /* which one, from 0 */
  int32_t threads;      /* of the CPU, the caller's is one of them; 0: one per processor that this process may use */
  int32_t dtype;        /* KILAT_DTYPE_... of activations and KV; AUTO: fp32 for an fp32 checkpoint, else bf16 */
  int32_t weights;      /* KILAT_WEIGHTS_...: STORED keeps block formats as they are, WIDE widens them to dtype at load,
                           AUTO takes STORED where the device has kernels for it */
} kilat_options;

/* Version of this header that the library was built from. */
KILAT_API int kilat_version(void);

/* A status as a word for people; never null. */
KILAT_API const char *kilat_status_name(int status);

/* Load the model at `path`: a .gguf file, or a directory with config.json and safetensors files. They are mapped, checked and read
 * before this returns and not needed afterwards; they must not change meanwhile. *out is null only when memory is exhausted; after
 * any other error it is a handle that has nothing but an error text and must be closed. */
KILAT_API int kilat_open(const char *path, const kilat_options *options, kilat_model **out);

/* Free a model, or nothing for null. */
KILAT_API void kilat_close(kilat_model *model);

/* What the last failed call on this handle says is wrong; "" if none failed. Valid until the next call on it. */
KILAT_API const char *kilat_model_error(const kilat_model *model);
KILAT_API const char *kilat_session_error(const kilat_session *session);

/* Facts of a model. Pointers are valid until kilat_close. */
typedef struct kilat_info {
  const char *architecture; /* llama, mistral, qwen2, qwen3 */
  const char *kernels;      /* what computes: "cpu-avx512-bf16" ... */
  int64_t vocab, hidden, inner, layers, q_heads, kv_heads, head_dim;
  int64_t max_context;      /* tokens that the model was trained for */
  int64_t parameters;
  int64_t file_bytes;       /* of all tensors as stored */
  int32_t dtype, weights;   /* what AUTO became */
  int32_t bos_id;           /* begins a text, or -1 */
  int32_t n_end_ids;        /* ids that end one */
  const int32_t *end_ids;
} kilat_info;

KILAT_API int kilat_model_info(const kilat_model *model, kilat_info *out);

/* One owner of memory. `host_bytes` is private memory of this process, `device_bytes` memory of the device. */
typedef struct kilat_memory {
  const char *owner; /* weights, embedding, kv, activations, tables, scratch, graphs, tokenizer ... */
  int64_t host_bytes, device_bytes;
} kilat_memory;

/* All memory of `model` (if not null) and of `session` (if not null) by owner, into out [capacity]; *n is the number of owners. */
KILAT_API int kilat_memory_report(const kilat_model *model, const kilat_session *session, kilat_memory *out, int capacity, int *n);

enum { KILAT_KEEP_LAYERS = 1, KILAT_RUN_AHEAD = 2 };

/* How a session is made; null: context 0, no flags. */
typedef struct kilat_session_options {
  int64_t context; /* tokens that it can hold; 0: the model's max_context, at most 4096 */
  int64_t flags;   /* KILAT_KEEP_LAYERS: kilat_layers works, at a cost to every step.
                      KILAT_RUN_AHEAD: for streams. A call that draws an id also starts the step that takes it, where a device can do
                      so before the caller has the id (CUDA, without KILAT_KEEP_LAYERS). kilat_step with this id and the same
                      sampling goes on with that; any other call finds the session as if it had not been, after one step's time. */
} kilat_session_options;

/* An empty session. *out as for kilat_open. */
KILAT_API int kilat_session_create(kilat_model *model, const kilat_session_options *options, kilat_session **out);

/* Free a session, or nothing for null. */
KILAT_API void kilat_session_close(kilat_session *session);

/* Tokens in the session, and how many it can hold. */
KILAT_API int64_t kilat_tokens(const kilat_session *session);
KILAT_API int64_t kilat_context(const kilat_session *session);

/* How an id is drawn. Order: temperature, min_p, top_k, top_p (over what is left), then one uniform number that is a function of seed
 * and position. All zeros but `temperature` and `top_p` = 1 is plain sampling; temperature 0 is greedy (lowest id wins a tie). */
typedef struct kilat_sampling {
  double temperature; /* >= 0 */
  double top_p;       /* in (0, 1]; 1: off */
  double min_p;       /* in [0, 1]; 0: off */
  int64_t top_k;      /* 0: off */
  uint64_t seed;
} kilat_sampling;

/* Append ids [n], n >= 1, and compute the logits of the last one. With `sampling` also draw the id that follows into *next (which may
 * be null without). The drawn id is not part of the session until it is given to kilat_step. */
KILAT_API int kilat_prefill(kilat_session *session, const int32_t *ids, int64_t n, const kilat_sampling *sampling, int32_t *next);

/* The same for one id: one forward pass, in one call. */
KILAT_API int kilat_step(kilat_session *session, int32_t id, const kilat_sampling *sampling, int32_t *next);

/* Draw from the logits of the last token; may be called again with other parameters. */
KILAT_API int kilat_sample(kilat_session *session, const kilat_sampling *sampling, int32_t *next);

/* Copy the logits of the last token into out [vocab], fp32. */
KILAT_API int kilat_logits(kilat_session *session, float *out);

/* Copy what entered each layer, and what left the last one, for the last token, into out [layers + 1, hidden], fp32. */
KILAT_API int kilat_layers(kilat_session *session, float *out);

/* Forget all tokens but the first n, 0 <= n <= kilat_tokens. */
KILAT_API int kilat_rewind(kilat_session *session, int64_t n);

/* Bytes that kilat_snapshot would write now. */
KILAT_API int64_t kilat_snapshot_bytes(const kilat_session *session);

/* Write the session (tokens, KV, logits, checksum) to out [capacity bytes]; *written is what it takes, also when that is too much. */
KILAT_API int kilat_snapshot(kilat_session *session, void *out, int64_t capacity, int64_t *written);

/* Make the session what it was at the snapshot; its own context must hold the tokens. Only for the same model, dtype and kernels. */
KILAT_API int kilat_restore(kilat_session *session, const void *data, int64_t n_bytes);

/* Text to ids with the tokenizer of a GGUF file (byte-level BPE), into out [capacity]; *n is the number of ids, also when that is too
 * many. With `special` control tokens written in the text are recognised and BOS is added where the model wants it. */
KILAT_API int kilat_encode(kilat_model *model, const char *text, int64_t n_bytes, int special, int32_t *out, int64_t capacity,
                           int64_t *n);

/* Bytes of one id, maybe a part of a character, not terminated; *bytes is owned by the model. Control tokens are their names. */
KILAT_API int kilat_token_bytes(kilat_model *model, int32_t id, const char **bytes, int64_t *n_bytes);

#ifdef __cplusplus
}
#endif
#endif
