/* kilat_cpu.h: the CPU kernels of kilat as a plain C library.
 *
 * Conventions
 *   - Sizes and strides count elements (not bytes) unless a name says otherwise. The last dimension always has unit stride.
 *   - dtype is KILAT_F32 or KILAT_BF16. All tensors of one call have the same dtype, except where a comment says fp32 or int32.
 *   - The caller owns every buffer it passes. The library owns what kilat_linear_pack and kilat_cpu_create return, until the
 *     matching free / destroy. No pointer needs an alignment beyond that of its element.
 *   - No function exits or throws. Functions that can fail say how; the others cannot.
 *   - One kilat_cpu may be used from several threads; their calls are then served one after another.
 *
 * Promise of every op: the bits of an output row depend on that row's inputs and on the ISA only; not on the number of rows in the
 * call, on how a prompt was cut into calls, or on the number of threads. Sums have one fixed order per output element.
 */
#ifndef KILAT_CPU_H
#define KILAT_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KILAT_CPU_ABI 7

#if defined(__GNUC__)
#define KILAT_API __attribute__((visibility("default")))
#else
#define KILAT_API
#endif

enum { KILAT_F32 = 0, KILAT_BF16 = 1 };

/* Instruction sets, worst to best. */
enum {
  KILAT_ISA_PLAIN = 0,
  KILAT_ISA_AVX2 = 1,
  KILAT_ISA_AVX512 = 2,
  KILAT_ISA_AVX512_BF16 = 3,
  KILAT_ISA_AMX = 4, /* products on tiles, the rest as AVX512_BF16 */
  KILAT_ISA_COUNT = 5
};

/* Largest head dimension that the attention and rotary kernels take. */
enum { KILAT_MAX_HEAD_DIM = 256 };

typedef struct kilat_cpu kilat_cpu;
typedef struct kilat_linear kilat_linear;

/* One layer's view [pages, 2, page_tokens, kv_heads, head_dim] of the page pool: K at index 0, V at 1. */
typedef struct kilat_kv {
  void *base;
  int64_t page_stride, side_stride, token_stride, head_stride;
  int64_t page_tokens;
} kilat_kv;

/* Version of this header that the library was built from. */
KILAT_API int kilat_cpu_abi(void);

/* Best instruction set that this processor and operating system support. The first call asks Linux for AMX tiles where there are some, for
 * this process, and tries them on a thread of its own. */
KILAT_API int kilat_cpu_best_isa(void);

/* Why AMX tiles are not used though the processor has them; "" where they are used or there are none. */
KILAT_API const char *kilat_cpu_amx_note(void);

/* Name of an instruction set for people; "?" if there is none of that number. */
KILAT_API const char *kilat_cpu_isa_name(int isa);

/* A kernel set that uses `threads` threads (the caller's is one of them). NULL if the isa is not supported here, if threads < 1,
 * or if memory or threads are exhausted. */
KILAT_API kilat_cpu *kilat_cpu_create(int threads, int isa);

/* The largest calls that a caller is going to make: inputs of a linear, tokens of a call, keys that a token sees, logits of a row. */
typedef struct kilat_most {
  int64_t inputs, tokens, keys, vocab, n_q, n_kv, head_dim;
} kilat_most;

/* Take and touch all scratch memory that such calls need, so that they allocate nothing. Returns 0, or -1 when memory is exhausted. */
KILAT_API int kilat_cpu_reserve(kilat_cpu *cpu, const kilat_most *most);

/* Bind each thread but the caller's to a processor of its own where there are exactly as many threads as processors that this process
 * may use; otherwise the system places them better. Returns whether they are bound. */
KILAT_API int kilat_cpu_pin(kilat_cpu *cpu);

/* Write a zero into every page of `memory`, with all threads: fresh memory of the system is then there. `memory` is of `bytes` bytes and
 * starts at a page. */
KILAT_API void kilat_cpu_touch(kilat_cpu *cpu, void *memory, int64_t bytes);

/* Bytes of scratch memory now. */
KILAT_API int64_t kilat_cpu_scratch_bytes(const kilat_cpu *cpu);

/* Stop the threads and free everything but packed weights. In a forked child the threads do not exist and are not waited for. */
KILAT_API void kilat_cpu_destroy(kilat_cpu *cpu);

/* Pack weight [n, k] (row stride `stride`) and bias [n] (or NULL), both of `dtype`, into panels. Neither is needed afterwards.
 * NULL when memory is exhausted. A packed weight belongs to no kernel set and outlives the one that packed it. */
KILAT_API kilat_linear *kilat_linear_pack(kilat_cpu *cpu, int dtype, const void *weight, int64_t stride, int64_t n, int64_t k,
                                const void *bias);

/* Where row `row` of a weight is, k elements: anywhere, or in `room` where it has been made. Valid until this thread asks for a row of
 * another panel. Called from several threads at once. */
typedef const void *(*kilat_row_fn)(void *user, int64_t row, void *room);

/* Bytes of a packed weight [n, k], a multiple of 64. */
KILAT_API int64_t kilat_linear_size(int dtype, int64_t n, int64_t k, int has_bias);

/* As kilat_linear_pack, with rows that are asked for as they are needed and into `memory`, which is the caller's: 64-byte aligned, of
 * kilat_linear_size bytes, to be kept until kilat_linear_free. */
KILAT_API kilat_linear *kilat_linear_pack_rows(kilat_cpu *cpu, int dtype, int64_t n, int64_t k, kilat_row_fn row, void *user,
                                               const void *bias, void *memory);
KILAT_API void kilat_linear_free(kilat_linear *w);
KILAT_API int64_t kilat_linear_bytes(const kilat_linear *w);

/* Rows of a quantized weight as GGUF stores them: whole blocks of ggml type `type`, n rows, `row_bytes` from one to the next. */
typedef struct kilat_blocks {
  int type;
  const void *data;
  int64_t row_bytes, n;
} kilat_blocks;

/* Most parts of one weight. */
enum { KILAT_MAX_PARTS = 8 };

/* Values in a block of a ggml type that kilat_linear_pack_quant takes (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K), and the bytes of
 * one; 0 for every other type. */
KILAT_API int kilat_block_values(int type);
KILAT_API int kilat_block_bytes(int type);

/* Pack a quantized weight: the rows of `parts`, one part after the other, are its outputs. k is a multiple of every part's block; bias
 * [outputs] bf16 or NULL. None of them is needed afterwards. The weight stays quantized, with the same numbers. It takes and gives bf16.
 * memory: NULL, or the caller's: 64-byte aligned, of kilat_linear_quant_size bytes, to be kept until kilat_linear_free.
 * NULL when memory is exhausted, a type is not supported, a size does not fit, or there are more than KILAT_MAX_PARTS parts.
 *
 * Products with it: each run of 32 values of x is rounded to 8-bit integers times one scale, largest magnitude / 127 (a run whose
 * largest magnitude is below 1e-30 counts as zero, one with an infinity or NaN makes its whole output row NaN); the sums of integer
 * products are exact, and are multiplied by both scales and added up in fp32. The same at one row as at many. */
KILAT_API kilat_linear *kilat_linear_pack_quant(kilat_cpu *cpu, const kilat_blocks *parts, int n_parts, int64_t k, const void *bias,
                                                void *memory);

/* Bytes of such a weight, a multiple of 64; 0 where packing it would be refused. The data of `parts` is not read. */
KILAT_API int64_t kilat_linear_quant_size(const kilat_blocks *parts, int n_parts, int64_t k, int has_bias);

/* out [rows, k] contiguous = rows ids[r] of a packed weight in the dtype that products with it have; quantized values are rounded once.
 * Returns 0, or -1 if an id is outside the weight. */
KILAT_API int kilat_linear_gather(kilat_cpu *cpu, const kilat_linear *w, const int32_t *ids, int64_t rows, void *out);

/* out [rows, n] contiguous = x [rows, k] (row stride `stride`) times weight^T plus bias; fp32 sums, one rounding at the end.
 * Returns 0, or -1 when memory for packing rows is exhausted (out is then undefined). */
KILAT_API int kilat_linear_run(kilat_cpu *cpu, const kilat_linear *w, const void *x, int64_t stride, int64_t rows, void *out);

/* Whether kilat_gated_linear_run takes this weight: n a multiple of 64, no bias. */
KILAT_API int kilat_gated_linear_can(const kilat_linear *w);

/* For a weight whose first n / 2 outputs are gates and the others ups: out [rows, n / 2] contiguous = kilat_silu_mul of what
 * kilat_linear_run gives, to the bit, in one pass. Returns as kilat_linear_run. */
KILAT_API int kilat_gated_linear_run(kilat_cpu *cpu, const kilat_linear *w, const void *x, int64_t stride, int64_t rows, void *out);

/* Advice that changes no result: the weight of the product after the next one, whose first columns are fetched at the end of that; until the next call, NULL
 * when it is not known. */
KILAT_API void kilat_follow_up(kilat_cpu *cpu, const kilat_linear *w);

/* out [rows, h] contiguous = round(x / sqrt(mean(x^2) + eps)) * weight [h]; fp32 inside. */
KILAT_API void kilat_rms_norm(kilat_cpu *cpu, int dtype, const void *x, int64_t stride, int64_t rows, int64_t h, const void *weight,
                    double eps, void *out);

/* residual [rows, h] contiguous += x (rounded to dtype), in place; out = rms_norm(residual). */
KILAT_API void kilat_add_rms_norm(kilat_cpu *cpu, int dtype, const void *x, int64_t stride, void *residual, int64_t rows, int64_t h,
                        const void *weight, double eps, void *out);

/* gate_up [rows, 2 n] (row stride `stride`) -> out [rows, n] contiguous = round(silu(gate)) * up. */
KILAT_API void kilat_silu_mul(kilat_cpu *cpu, int dtype, const void *gate_up, int64_t stride, int64_t rows, int64_t n, void *out);

/* x [rows, n] (row stride `stride`, n >= 1) -> ids [rows], the lowest index of each row's largest value, and top [rows], that value; NaN
 * for a row that holds one. */
KILAT_API void kilat_greedy(kilat_cpu *cpu, int dtype, const void *x, int64_t stride, int64_t rows, int64_t n, int64_t *ids, float *top);

/* How a row is sampled: temperature above 0, top_k 0 or top_p 1 or min_p 0 for no such filter, u in (0, 1). */
typedef struct kilat_filter {
  double temperature, top_p, min_p, u;
  int64_t top_k;
} kilat_filter;

/* ids [rows], an index drawn from each row of logits [rows, n] fp32 (row stride `stride`) as its filter says: temperature, min_p, top_k,
 * top_p (ties with the last one kept are kept), then inverse CDF at u in index order. Returns 0, or -1 when memory is exhausted. */
KILAT_API int kilat_sample_rows(kilat_cpu *cpu, const float *logits, int64_t stride, int64_t rows, int64_t n,
                                const kilat_filter *filters, int64_t *ids);

/* Heads of a layer: q heads, kv heads, elements of a head (<= KILAT_MAX_HEAD_DIM), rotated elements (even, <= dim). */
typedef struct kilat_heads {
  int64_t n_q, n_kv, dim, rotary;
} kilat_heads;

/* qkv [tokens, (n_q + 2 n_kv) dim] (row stride `stride`) -> q [tokens, n_q, dim] contiguous, and K, V into kv at slots[t] =
 * page * page_tokens + offset. cos_sin [max positions, rotary] fp32 contiguous: cosines, then sines. positions, slots [tokens]
 * int32. norm_q, norm_k [dim] or both NULL. */
KILAT_API void kilat_rope_write(kilat_cpu *cpu, int dtype, const void *qkv, int64_t stride, int64_t tokens,
                                const kilat_heads *heads, const float *cos_sin, const int32_t *positions, const int32_t *slots,
                                const kilat_kv *kv, const void *norm_q, const void *norm_k, double eps, void *q);

/* The rows of a step. All int32: row_start [rows + 1], kv_len [rows], page_table [rows, table_stride]. */
typedef struct kilat_rows {
  const int32_t *row_start, *kv_len, *page_table;
  int64_t rows, table_stride;
} kilat_rows;

/* Advice that changes no result: these keys and values are what attention will read after the next products, and products of many rows
 * fetch them under way if there are rows for every thread. Until the next call; rows NULL for nothing. The caller keeps rows and what
 * it points to. */
KILAT_API void kilat_attention_ahead(kilat_cpu *cpu, int dtype, const kilat_kv *kv, const kilat_rows *rows);

/* q [tokens, n_q, dim] contiguous -> out [tokens, n_q * dim] contiguous. The last token of row b sees keys 0 .. kv_len[b] - 1, the
 * one before it one key less, and so on; with window > 0 only the last `window` of them. scale > 0. Returns 0, or -1 when memory
 * for partial results is exhausted (out is then undefined). */
KILAT_API int kilat_attention(kilat_cpu *cpu, int dtype, const void *q, const kilat_heads *heads, const kilat_kv *kv,
                    const kilat_rows *rows, double scale, int64_t window, void *out);

#ifdef __cplusplus
}
#endif
#endif
