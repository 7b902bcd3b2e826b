// rms_norm with the residual add in front of it, and silu_mul.
#pragma once

// Sum of squares of a row: four chains of vectors, then their lanes, in an order that depends on h only.
template <class T>
INLINE float sum_squares(const T *x, int64_t h) {
  VF acc[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= h; i += 4 * W) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      VF v = load(x + i + j * W);
      acc[j] = fma(v, v, acc[j]);
    }
  }
  for (; i < h; i += W) {
    VF v = h - i >= W ? load(x + i) : load_n(x + i, int(h - i));
    acc[0] = fma(v, v, acc[0]);
  }
  return sum_lanes(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

// out = round(x / rms) * weight; out may be x.
template <class T>
INLINE void norm_row(const T *x, int64_t h, const T *weight, float eps, T *out) {
  float scale = 1.0f / sqrtf(sum_squares(x, h) / float(h) + eps);
  VF s = set1(scale);
  for (int64_t i = 0; i < h; i += W) {
    int n = h - i >= W ? W : int(h - i);
    if (n == W) {
      store(out + i, mul(rounded(mul(load(x + i), s), T()), load(weight + i)));
    } else {
      store_n(out + i, mul(rounded(mul(load_n(x + i, n), s), T()), load_n(weight + i, n)), n);
    }
  }
}

template <class T>
INLINE void add_row(const T *x, T *residual, int64_t h) {
  for (int64_t i = 0; i < h; i += W) {
    int n = h - i >= W ? W : int(h - i);
    if (n == W) store(residual + i, add(load(x + i), load(residual + i)));
    else store_n(residual + i, add(load_n(x + i, n), load_n(residual + i, n)), n);
  }
}

struct NormJob {
  const NormArgs *args;
  int blocks;
};

template <class T>
static void norm_unit(void *raw, int unit, int) {
  const NormJob *job = static_cast<const NormJob *>(raw);
  const NormArgs &a = *job->args;
  for (int64_t r = a.rows * unit / job->blocks; r < a.rows * (unit + 1) / job->blocks; r++) {
    const T *x = static_cast<const T *>(a.x) + r * a.stride;
    if (a.residual) {
      T *residual = static_cast<T *>(a.residual) + r * a.h;
      add_row(x, residual, a.h);
      x = residual;
    }
    norm_row(x, a.h, static_cast<const T *>(a.weight), a.eps, static_cast<T *>(a.out) + r * a.h);
  }
}

template <class T>
static void norm(Context *c, const NormArgs *args) {
  NormJob job = {args, blocks_of(c, args->rows, args->h / 8)};
  pool_run(c->pool, job.blocks, norm_unit<T>, &job);
}

template <class T>
struct SiluJob {
  const T *x;
  int64_t stride, rows, n;
  T *out;
  int blocks;
};

template <class T>
static void silu_unit(void *raw, int unit, int) {
  const SiluJob<T> &job = *static_cast<const SiluJob<T> *>(raw);
  for (int64_t r = job.rows * unit / job.blocks; r < job.rows * (unit + 1) / job.blocks; r++) {
    const T *gate = job.x + r * job.stride, *up = gate + job.n;
    T *out = job.out + r * job.n;
    for (int64_t i = 0; i < job.n; i += W) {
      int n = job.n - i >= W ? W : int(job.n - i);
      if (n == W) store(out + i, mul(rounded(silu_of(load(gate + i)), T()), load(up + i)));
      else store_n(out + i, mul(rounded(silu_of(load_n(gate + i, n)), T()), load_n(up + i, n)), n);
    }
  }
}

template <class T>
static void silu_mul(Context *c, const void *x, int64_t stride, int64_t rows, int64_t n, void *out) {
  SiluJob<T> job = {static_cast<const T *>(x), stride, rows, n, static_cast<T *>(out), 1};
  // One row alone is worth a cut too when it is long, but rows are what a batch has; a single row costs a microsecond.
  job.blocks = blocks_of(c, rows, n / 4);
  pool_run(c->pool, job.blocks, silu_unit<T>, &job);
}
