// greedy: the largest logit of every row and where it is.

// Floats as integers in the same order; both zeros are 0, so that they tie.
INLINE int16_t order_of(bf16 x) {
  int16_t i = int16_t(x.bits);
  int16_t key = int16_t(i ^ ((i >> 15) & 0x7fff));
  return key == -1 ? int16_t(0) : key;
}
INLINE int32_t order_of(float x) {
  int32_t i;
  memcpy(&i, &x, 4);
  int32_t key = i ^ ((i >> 31) & 0x7fffffff);
  return key == -1 ? 0 : key;
}
INLINE int16_t order_of_infinity(bf16) { return 0x7f80; }
INLINE int32_t order_of_infinity(float) { return 0x7f800000; }
INLINE float value_of(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE float value_of(float x) { return x; }

// Trip counts are constant so that the compiler makes vectors of these loops.
enum { GREEDY_BLOCK = 256 };

template <class T>
struct GreedyJob {
  const T *x;
  int64_t stride, rows, n;
  int64_t *ids;
  float *top;
  int blocks;
};

template <class T>
static void greedy_row(const T *x, int64_t n, int64_t *id, float *top) {
  typedef decltype(order_of(T())) Key;
  const Key infinity = order_of_infinity(T());
  Key best = order_of(x[0]), least = best;
  int64_t at = 0, i = 0;
  for (; i + GREEDY_BLOCK <= n; i += GREEDY_BLOCK) {
    Key high = order_of(x[i]), low = high;
    for (int j = 0; j < GREEDY_BLOCK; j++) {
      Key key = order_of(x[i + j]);
      high = key > high ? key : high;
      low = key < low ? key : low;
    }
    least = low < least ? low : least;
    if (high > best) best = high, at = i;
  }
  for (; i < n; i++) {
    Key key = order_of(x[i]);
    least = key < least ? key : least;
    if (key > best) best = key, at = i;
  }
  while (order_of(x[at]) != best) at++;
  *id = at;
  // NaNs lie beyond the infinities, on either side
  bool broken = best > infinity || least < Key(~infinity);
  *top = broken ? NAN : value_of(x[at]);
}

template <class T>
static void greedy_unit(void *raw, int unit, int) {
  const GreedyJob<T> &job = *static_cast<const GreedyJob<T> *>(raw);
  for (int64_t r = job.rows * unit / job.blocks; r < job.rows * (unit + 1) / job.blocks; r++)
    greedy_row(job.x + r * job.stride, job.n, job.ids + r, job.top + r);
}

template <class T>
static void greedy(Context *c, const void *x, int64_t stride, int64_t rows, int64_t n, int64_t *ids, float *top) {
  GreedyJob<T> job = {static_cast<const T *>(x), stride, rows, n, ids, top, 1};
  job.blocks = blocks_of(c, rows, n / 8);
  pool_run(c->pool, job.blocks, greedy_unit<T>, &job);
}
