// rope_write: norm and rotation of q and k heads in fp32, and the write of K and V into their pages.
#pragma once

// pairs (i, i + half): (a cos - b sin, b cos + a sin)
INLINE void rotate(float *x, const float *cos, const float *sin, int half) {
  for (int i = 0; i < half; i += W) {
    int n = half - i >= W ? W : half - i;
    if (n == W) {
      VF a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
      store(x + i, fnma(b, s, mul(a, c)));
      store(x + half + i, fma(a, s, mul(b, c)));
    } else {
      VF a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
      store_n(x + i, fnma(b, s, mul(a, c)), n);
      store_n(x + half + i, fma(a, s, mul(b, c)), n);
    }
  }
}

template <class T>
INLINE void rope_head(const T *x, const RopeArgs &a, const float *table, const T *weight, T *out) {
  T normed[KILAT_MAX_HEAD_DIM];
  float wide[KILAT_MAX_HEAD_DIM];
  int dim = int(a.heads.dim), rotary = int(a.heads.rotary);
  if (weight) {
    norm_row(x, dim, weight, a.eps, normed);
    x = normed;
  }
  for (int i = 0; i < rotary; i += W) {
    if (rotary - i >= W) store(wide + i, load(x + i));
    else store_n(wide + i, load_n(x + i, rotary - i), rotary - i);
  }
  rotate(wide, table, table + rotary / 2, rotary / 2);
  for (int i = 0; i < rotary; i += W) {
    if (rotary - i >= W) store(out + i, load(wide + i));
    else store_n(out + i, load_n(wide + i, rotary - i), rotary - i);
  }
  if (rotary < dim) memcpy(out + rotary, x + rotary, sizeof(T) * (dim - rotary));
}

struct RopeJob {
  const RopeArgs *args;
  int blocks;
};

template <class T>
static void rope_unit(void *raw, int unit, int) {
  const RopeJob *job = static_cast<const RopeJob *>(raw);
  const RopeArgs &a = *job->args;
  int64_t dim = a.heads.dim, n_q = a.heads.n_q, n_kv = a.heads.n_kv;
  const T *norm_q = static_cast<const T *>(a.norm_q), *norm_k = static_cast<const T *>(a.norm_k);
  for (int64_t t = a.tokens * unit / job->blocks; t < a.tokens * (unit + 1) / job->blocks; t++) {
    const T *x = static_cast<const T *>(a.qkv) + t * a.stride;
    const float *table = a.cos_sin + a.positions[t] * a.heads.rotary;
    T *q = static_cast<T *>(a.q) + t * n_q * dim;
    for (int64_t h = 0; h < n_q; h++, x += dim) rope_head(x, a, table, norm_q, q + h * dim);
    T *k = static_cast<T *>(a.kv.base) + a.slots[t] / a.kv.page_tokens * a.kv.page_stride +
           a.slots[t] % a.kv.page_tokens * a.kv.token_stride;
    for (int64_t h = 0; h < n_kv; h++, x += dim) rope_head(x, a, table, norm_k, k + h * a.kv.head_stride);
    T *v = k + a.kv.side_stride;
    for (int64_t h = 0; h < n_kv; h++, x += dim) memcpy(v + h * a.kv.head_stride, x, sizeof(T) * dim);
  }
}

template <class T>
static void rope_write(Context *c, const RopeArgs *args) {
  RopeJob job = {args, blocks_of(c, args->tokens, (args->heads.n_q + 2 * args->heads.n_kv) * args->heads.dim / 8)};
  pool_run(c->pool, job.blocks, rope_unit<T>, &job);
}
