#include "pack.h"

#include <string.h>

#include <atomic>

namespace kilat {

namespace {

int64_t element_bytes(const Linear &w) { return w.dtype == KILAT_F32 ? 4 : 2; }

// Four rows of four elements.
typedef uint32_t Four __attribute__((vector_size(16)));

void transpose(const char *const *rows, int64_t step, uint32_t *out) {
  Four in[4];
  for (int i = 0; i < 4; i++) memcpy(&in[i], rows[i] + step * 4, 16);
  const Four low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, left = {0, 1, 4, 5}, right = {2, 3, 6, 7};
  Four a = __builtin_shuffle(in[0], in[1], low), b = __builtin_shuffle(in[2], in[3], low);
  Four c = __builtin_shuffle(in[0], in[1], high), d = __builtin_shuffle(in[2], in[3], high);
  Four turned[4] = {__builtin_shuffle(a, b, left), __builtin_shuffle(a, b, right), __builtin_shuffle(c, d, left),
                    __builtin_shuffle(c, d, right)};
  for (int i = 0; i < 4; i++) memcpy(out + i * PANEL, &turned[i], 16);
}

// One panel from its rows, of which those from `count` on do not exist. A pair of bf16 is moved as 4 bytes.
void fill_panel(const Linear &w, const char *const *rows, int count, uint32_t *out) {
  const int64_t whole = w.k * element_bytes(w) / 4;
  if (count < PANEL) memset(out, 0, size_t(w.panel_bytes));
  int64_t s = 0;
  for (; count == PANEL && s + 16 <= whole; s += 16)  // a line of each row
    for (int c = 0; c < PANEL; c += 4)
      for (int i = 0; i < 16; i += 4) transpose(rows + c, s + i, out + (s + i) * PANEL + c);
  for (; s < whole; s++)
    for (int c = 0; c < count; c++) memcpy(&out[s * PANEL + c], rows[c] + s * 4, 4);
  for (int c = 0; whole < w.steps && c < count; c++) {
    uint16_t last;
    memcpy(&last, rows[c] + whole * 4, 2);
    out[whole * PANEL + c] = last;
  }
}

struct FillJob {
  Context *c;
  const Linear *w;
  kilat_row_fn row;
  void *user;
  std::atomic<bool> failed;
};

void fill_unit(void *raw, int unit, int worker) {
  FillJob &job = *static_cast<FillJob *>(raw);
  const Linear &w = *job.w;
  const int64_t row_bytes = w.k * element_bytes(w), first = int64_t(unit) * PANEL;
  const int count = w.n - first < PANEL ? int(w.n - first) : int(PANEL);
  char *room = static_cast<char *>(scratch_get(&job.c->worker[worker], size_t(PANEL * row_bytes)));
  if (!room) {
    job.failed = true;
    return;
  }
  const char *rows[PANEL];
  for (int c = 0; c < count; c++) rows[c] = static_cast<const char *>(job.row(job.user, first + c, room + c * row_bytes));
  // One row after the other into the near caches: from memory, 32 rows side by side would come much slower.
  for (int c = 0; c < count; c++)
    for (int64_t i = 0; i < row_bytes; i += 64) static_cast<void>(static_cast<const volatile char *>(rows[c])[i]);
  fill_panel(w, rows, count, reinterpret_cast<uint32_t *>(w.data + unit * w.panel_bytes));
}

struct GatherJob {
  const Linear *w;
  const int32_t *ids;
  int64_t rows;
  char *out;
};

const int kRowsAUnit = 8;

void gather_unit(void *raw, int unit, int) {
  const GatherJob &job = *static_cast<GatherJob *>(raw);
  const Linear &w = *job.w;
  int64_t row_bytes = w.k * element_bytes(w), whole = row_bytes / 4;
  for (int64_t r = int64_t(unit) * kRowsAUnit; r < (unit + 1) * int64_t(kRowsAUnit) && r < job.rows; r++) {
    const char *from = w.data + job.ids[r] / PANEL * w.panel_bytes + job.ids[r] % PANEL * 4;
    char *to = job.out + r * row_bytes;
    for (int64_t s = 0; s < whole; s++) memcpy(to + s * 4, from + s * PANEL * 4, 4);
    if (whole < w.steps) memcpy(to + whole * 4, from + whole * PANEL * 4, 2);
  }
}

}  // namespace

float bias_at(const void *bias, int dtype, int64_t i) {
  float x;
  if (dtype == KILAT_F32) {
    memcpy(&x, static_cast<const char *>(bias) + i * 4, 4);
  } else {
    uint16_t half;
    memcpy(&half, static_cast<const char *>(bias) + i * 2, 2);
    uint32_t whole = uint32_t(half) << 16;
    memcpy(&x, &whole, 4);
  }
  return x;
}

void plain_plan(Linear *w, int dtype, int64_t n, int64_t k, bool bias) {
  w->dtype = dtype;
  w->n_parts = 0;
  w->n = n;
  w->k = k;
  w->steps = dtype == KILAT_F32 ? k : (k + 1) / 2;
  w->panels = (n + PANEL - 1) / PANEL;
  w->panel_bytes = w->steps * PANEL * 4;
  w->bytes = w->panels * w->panel_bytes + (bias ? w->panels * PANEL * 4 : 0);
}

void plain_place(Linear *w, char *memory, const void *bias) {
  w->data = memory;
  w->bias = bias ? reinterpret_cast<float *>(memory + w->panels * w->panel_bytes) : nullptr;
  for (int64_t i = 0; bias && i < w->panels * PANEL; i++) w->bias[i] = i < w->n ? bias_at(bias, w->dtype, i) : 0.0f;
}

bool plain_fill(Context *c, const Linear *w, kilat_row_fn row, void *user) {
  FillJob job = {c, w, row, user, {false}};
  pool_run(c->pool, int(w->panels), fill_unit, &job);
  return !job.failed;
}

void plain_gather(Pool *pool, const Linear *w, const int32_t *ids, int64_t rows, void *out) {
  GatherJob job = {w, ids, rows, static_cast<char *>(out)};
  pool_run(pool, int((rows + kRowsAUnit - 1) / kRowsAUnit), gather_unit, &job);
}

}  // namespace kilat
