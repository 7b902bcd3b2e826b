// sample: temperature, filters and the inverse CDF, a row a unit of work. Sums are in fp64 and in one order, whatever else is running.

enum { SAMPLE_BUCKETS = 4096, SAMPLE_RUN = 256 };

struct Candidates {
  const float *x;          // [n] scaled logits
  float *w;                // [n] weights exp(x - top), 0 for what a filter has dropped
  uint16_t *bucket;        // [n] by distance from the top, the nearest first
  double mass[SAMPLE_BUCKETS];
  int32_t count[SAMPLE_BUCKETS];
  int64_t n;
  float top;
};

// x = logits / temperature and the largest of it; then weights and buckets. Everything past the end of a vector is done the same way.
static void scale_row(const float *logits, int64_t n, float temperature, float *x, float *top) {
  VF by = set1(temperature), best = set1(-INFINITY);
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    VF v = div(load(logits + i), by);
    store(x + i, v);
    best = max(best, v);
  }
  float most = max_lanes(best);
  for (; i < n; i++) {
    x[i] = logits[i] / temperature;
    most = x[i] > most ? x[i] : most;
  }
  *top = most;
}

INLINE VF weight_of(VF x, VF top) { return exp2_of(mul(sub(x, top), set1(1.4426950408889634f))); }

static void weigh_row(const float *x, int64_t n, float top, float *w) {
  VF most = set1(top);
  for (int64_t i = 0; i < n; i += W) {
    int m = n - i >= W ? W : int(n - i);
    VF v = m == W ? load(x + i) : load_n(x + i, m);
    v = weight_of(v, most);
    if (m == W) store(w + i, v);
    else store_n(w + i, v, m);
  }
}

// Weight of the run that starts at w: lanes first, then across.
INLINE double run_of(const float *w, int64_t n) {
  VF sum = zero();
  for (int64_t i = 0; i < n; i += W) sum = add(sum, n - i >= W ? load(w + i) : load_n(w + i, int(n - i)));
  return sum_lanes(sum);
}

static void fill_buckets(Candidates *c) {
  memset(c->mass, 0, sizeof c->mass);
  memset(c->count, 0, sizeof c->count);
  for (int64_t i = 0; i < c->n; i++) {
    float far = (c->top - c->x[i]) * 64.0f;
    int b = far < SAMPLE_BUCKETS - 1 ? int(far) : SAMPLE_BUCKETS - 1;
    c->bucket[i] = uint16_t(b);
    c->mass[b] += c->w[i];
    c->count[b] += c->x[i] > -INFINITY;
  }
}

// The masses again after weights were dropped; everything else stays as it is. A run without weight adds nothing.
static void weigh_buckets(Candidates *c) {
  memset(c->mass, 0, sizeof c->mass);
  for (int64_t first = 0; first < c->n; first += SAMPLE_RUN) {
    int64_t end = first + SAMPLE_RUN < c->n ? first + SAMPLE_RUN : c->n;
    if (run_of(c->w + first, end - first) == 0) continue;
    for (int64_t i = first; i < end; i++) c->mass[c->bucket[i]] += c->w[i];
  }
}

// Largest first. A heap sort of this file's own: a template of the standard library would be shared between instruction sets.
static void sort_down(float *v, int64_t n) {
  for (int64_t start = n / 2 - 1, end = n; end > 1;) {
    float moved;
    if (start >= 0) moved = v[start];
    else moved = v[--end], v[end] = v[0];
    int64_t at = start >= 0 ? start-- : 0;
    for (int64_t child; (child = 2 * at + 1) < end; at = child) {
      if (child + 1 < end && v[child + 1] < v[child]) child++;
      if (!(v[child] < moved)) break;
      v[at] = v[child];
    }
    v[at] = moved;
  }
}

// The smallest scaled logit of the likeliest tokens, none below `floor`, that together number `wanted` (by_count) or weigh it; -inf if all
// of them do not. `values` has room for n.
static float threshold_of(const Candidates *c, double wanted, bool by_count, float floor, float *values) {
  double before = 0;
  int b = 0;
  for (; b < SAMPLE_BUCKETS; b++) {
    double here = by_count ? c->count[b] : c->mass[b];
    if (before + here >= wanted) break;
    before += here;
  }
  if (b == SAMPLE_BUCKETS) return -INFINITY;
  int64_t m = 0;
  for (int64_t i = 0; i < c->n; i++)
    if (c->bucket[i] == b && c->x[i] > -INFINITY && c->x[i] >= floor) values[m++] = c->x[i];
  sort_down(values, m);
  for (int64_t i = 0; i < m; i++) {
    float lanes[W];
    store(lanes, weight_of(set1(values[i]), set1(c->top)));
    before += by_count ? 1.0 : double(lanes[0]);
    if (before >= wanted) return values[i];
  }
  return m ? values[m - 1] : -INFINITY;
}

static void drop_below(Candidates *c, float threshold) {
  const float *x = c->x;
  float *w = c->w;
  int64_t i = 0;
  for (; i + SAMPLE_RUN <= c->n; i += SAMPLE_RUN)
    for (int j = 0; j < SAMPLE_RUN; j++) w[i + j] = x[i + j] < threshold ? 0.0f : w[i + j];
  for (; i < c->n; i++) w[i] = x[i] < threshold ? 0.0f : w[i];
}

static double mass_of(const float *w, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i += SAMPLE_RUN) sum += run_of(w + i, n - i < SAMPLE_RUN ? n - i : SAMPLE_RUN);
  return sum;
}

// The run in which the running sum passes the target, then the place in it. A sum that rounding keeps below the target ends at the last
// token that weighs anything.
static int64_t inverse_cdf(const float *w, int64_t n, double u) {
  double target = mass_of(w, n) * u, sum = 0;
  int64_t first = 0;
  for (; first < n; first += SAMPLE_RUN) {
    double here = run_of(w + first, n - first < SAMPLE_RUN ? n - first : SAMPLE_RUN);
    if (sum + here > target) break;
    sum += here;
  }
  int64_t end = first + SAMPLE_RUN < n ? first + SAMPLE_RUN : n;
  for (int64_t i = first; i < end; i++) {
    sum += w[i];
    if (sum > target) return i;
  }
  int64_t last = end;
  while (last > 0 && w[last - 1] == 0) last--;
  return last > 0 ? last - 1 : 0;
}

static int64_t sample_row(Scratch *scratch, const float *logits, int64_t n, const kilat_filter *f) {
  size_t floats = sizeof(float) * size_t(n);
  char *memory = static_cast<char *>(scratch_get(scratch, 3 * floats + 2 * size_t(n) + sizeof(Candidates) + 64));
  if (!memory) return -1;
  Candidates *c = reinterpret_cast<Candidates *>(memory);
  float *x = reinterpret_cast<float *>(memory + sizeof(Candidates));
  float *values = x + 2 * n;
  c->x = x, c->w = x + n, c->n = n;
  c->bucket = reinterpret_cast<uint16_t *>(values + n);
  scale_row(logits, n, float(f->temperature), x, &c->top);
  weigh_row(x, n, c->top, c->w);
  bool nucleus = f->top_p < 1, counted = f->top_k > 0 && f->top_k < n;
  float threshold = f->min_p > 0 ? float(c->top + log(f->min_p)) : -INFINITY;
  if (nucleus || counted) fill_buckets(c);
  if (counted) {
    float kth = threshold_of(c, double(f->top_k), true, -INFINITY, values);
    threshold = kth > threshold ? kth : threshold;
  }
  if (nucleus) {
    if (threshold > -INFINITY) {
      drop_below(c, threshold);
      weigh_buckets(c);
    }
    float least = threshold_of(c, mass_of(c->w, n) * f->top_p, false, threshold, values);
    threshold = least > threshold ? least : threshold;
  }
  if (threshold > -INFINITY) drop_below(c, threshold);
  return inverse_cdf(c->w, n, f->u);
}

struct SampleJob {
  Context *c;
  const float *logits;
  int64_t stride, n;
  const kilat_filter *filters;
  int64_t *ids;
};

static void sample_unit(void *raw, int unit, int worker) {
  const SampleJob &job = *static_cast<const SampleJob *>(raw);
  job.ids[unit] = sample_row(&job.c->worker[worker], job.logits + unit * job.stride, job.n, job.filters + unit);
}

static void sample_rows(Context *c, const float *logits, int64_t stride, int64_t rows, int64_t n, const kilat_filter *filters,
                        int64_t *ids) {
  SampleJob job = {c, logits, stride, n, filters, ids};
  pool_run(c->pool, int(rows), sample_unit, &job);
}
