// Weights of plain numbers: what a packed one takes, what packs it, and reading single rows of it. See Linear in context.h.
#pragma once

#include "context.h"

namespace kilat {

// Set everything of w but its memory.
void plain_plan(Linear *w, int dtype, int64_t n, int64_t k, bool bias);

// Take `memory` of w->bytes and write the bias there; the panels are left to plain_fill.
void plain_place(Linear *w, char *memory, const void *bias);

// The panels; false when there is no memory for rows that are made.
bool plain_fill(Context *c, const Linear *w, kilat_row_fn row, void *user);

// out [rows, k] of the weight's dtype = rows ids[r]; they are there.
void plain_gather(Pool *pool, const Linear *w, const int32_t *ids, int64_t rows, void *out);

// Element i of a bias.
float bias_at(const void *bias, int dtype, int64_t i);

}  // namespace kilat
