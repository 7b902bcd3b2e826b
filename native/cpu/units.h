// How the product of rows and a packed weight is cut into units of work.
#pragma once

enum { ROW_BLOCK = 64 };

// Into how many ranges the panels are cut: the number at which the busiest thread has least to do if all are equally fast; of
// several such, the largest, so that a thread that is held up leaves the rest to the others.
static inline int column_blocks_of(const Context *c, const Linear *w, int64_t panels, int row_blocks, int64_t rows,
                                   int64_t products_per_ns = 100) {
  if (c->threads == 1) return 1;
  // Nanoseconds of one panel: its bytes at about 25 GB/s, or its products. No unit below 2 us.
  int64_t read_ns = w->panel_bytes / 25, compute_ns = rows * w->k * PANEL / products_per_ns;
  int64_t most = panels * (read_ns > compute_ns ? read_ns : compute_ns) / 2000 + 1;
  if (most > c->threads * 8) most = c->threads * 8;
  if (most > panels) most = panels;
  int64_t best = 1, best_span = panels * ((row_blocks + c->threads - 1) / c->threads);
  for (int64_t n = 2; n <= most; n++) {
    int64_t span = (row_blocks * n + c->threads - 1) / c->threads * ((panels + n - 1) / n);
    if (span <= best_span) best = n, best_span = span;
  }
  return int(best);
}
