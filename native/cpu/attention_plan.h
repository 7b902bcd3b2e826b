// How the work of one attention call is cut into units. None of it changes a bit of the result.
#pragma once

template <class T>
struct AttentionJob {
  Context *c;
  const AttentionArgs *a;
  const QueryBlock *blocks;
  int n_blocks, blocks_per_unit;
  int head_groups, heads_per_group;
  int64_t max_splits;  // > 0: a unit is one split and leaves its state in partial
  float *partial;
  int64_t state_floats;  // floats of the state of one (block, head group) at most
  float score_scale;
  bool failed;
  int units = 0;

  int last_head(int first) const { return first + heads_per_group < a->heads.n_kv ? first + heads_per_group : int(a->heads.n_kv); }
  // Later blocks of a prompt see more keys: they go first, so that the short ones fill up the end.
  const QueryBlock &block(int i) const { return blocks[n_blocks - 1 - i]; }
};

template <class T>
static void gather_queries(const AttentionArgs &a, const Shape<T> &s, const QueryBlock &b, int h0, int h1, const Workspace &w) {
  for (int h = h0; h < h1; h++) gather_query<T>(a, s, b, h, w.query + int64_t(h - h0) * b.tokens * s.group * s.elements);
}

// A unit of whole blocks: blocks_per_unit of them for one group of heads.
template <class T>
static void blocks_unit(void *raw, int, int worker) {
  AttentionJob<T> *job = static_cast<AttentionJob<T> *>(raw);
  const int unit = own_unit(job->c, job->units, worker);
  const AttentionArgs &a = *job->a;
  Shape<T> s(a.heads);
  int h0 = unit % job->head_groups * job->heads_per_group, h1 = job->last_head(h0);
  int first = unit / job->head_groups * job->blocks_per_unit, end = first + job->blocks_per_unit;
  if (end > job->n_blocks) end = job->n_blocks;
  for (int i = first; i < end; i++) {
    const QueryBlock &b = job->block(i), *after = i + 1 < end ? &job->block(i + 1) : nullptr;
    int rows = b.tokens * s.group * (h1 - h0);
    Workspace w;
    if (!workspace<T>(&job->c->worker[worker], s, rows, &w)) {
      job->failed = true;
      return;
    }
    gather_queries<T>(a, s, b, h0, h1, w);
    state_reset(w.total, rows, s.dim_v);
    for (int64_t split = b.split_begin; split < b.split_end; split++) {
      split_update<T>(a, s, b, h0, h1, split, job->score_scale, w, true, after);
      state_merge(w.total, w.state, rows, s.dim_v);
    }
    write_out<T>(a, s, b, h0, h1, w.total);
  }
}

// A unit of one split of one block for one group of heads.
template <class T>
static void split_unit(void *raw, int unit, int worker) {
  AttentionJob<T> *job = static_cast<AttentionJob<T> *>(raw);
  const AttentionArgs &a = *job->a;
  Shape<T> s(a.heads);
  int64_t i = unit / job->max_splits;
  int h0 = int(i % job->head_groups) * job->heads_per_group, h1 = job->last_head(h0);
  const QueryBlock &b = job->block(int(i / job->head_groups));
  int64_t split = b.split_begin + unit % job->max_splits;
  if (split >= b.split_end) return;
  int rows = b.tokens * s.group * (h1 - h0);
  Workspace w;
  if (!workspace<T>(&job->c->worker[worker], s, rows, &w)) {
    job->failed = true;
    return;
  }
  gather_queries<T>(a, s, b, h0, h1, w);
  w.state = state_at(job->partial + unit * job->state_floats, rows);
  split_update<T>(a, s, b, h0, h1, split, job->score_scale, w, false, nullptr);
}

// After a job of split units: merge the splits of one block and head group in order.
template <class T>
static void merge_unit(void *raw, int unit, int worker) {
  AttentionJob<T> *job = static_cast<AttentionJob<T> *>(raw);
  const AttentionArgs &a = *job->a;
  Shape<T> s(a.heads);
  int h0 = unit % job->head_groups * job->heads_per_group, h1 = job->last_head(h0);
  const QueryBlock &b = job->block(unit / job->head_groups);
  int rows = b.tokens * s.group * (h1 - h0);
  Workspace w;
  if (!workspace<T>(&job->c->worker[worker], s, rows, &w)) {
    job->failed = true;
    return;
  }
  state_reset(w.total, rows, s.dim_v);
  for (int64_t i = 0; i < b.split_end - b.split_begin; i++)
    state_merge(w.total, state_at(job->partial + (unit * job->max_splits + i) * job->state_floats, rows), rows, s.dim_v);
  write_out<T>(a, s, b, h0, h1, w.total);
}

// Cut the rows of the step into blocks of at most block_tokens queries; counts only when out is nullptr.
static int cut_blocks(const AttentionArgs &a, int block_tokens, QueryBlock *out) {
  int n = 0;
  for (int row = 0; row < a.rows.rows; row++) {
    int64_t first = a.rows.row_start[row], last = a.rows.row_start[row + 1], position = a.rows.kv_len[row] - (last - first);
    for (int64_t t = first; t < last; t += block_tokens, n++) {
      if (!out) continue;
      QueryBlock &b = out[n];
      b.row = row;
      b.tokens = last - t < block_tokens ? int(last - t) : block_tokens;
      b.first_token = t;
      b.first_position = position + (t - first);
      b.split_begin = first_key_of(b, a.window) / SPLIT_KEYS;
      b.split_end = (end_key_of(b) - 1) / SPLIT_KEYS + 1;
    }
  }
  return n;
}

// Queries of a block: many, so that packing a tile pays, but not so many that threads go without work.
template <class T>
static int block_tokens_of(const Context *c, const AttentionArgs &a, const Shape<T> &s) {
  int64_t tokens = a.rows.row_start[a.rows.rows];
  int rows = BLOCK_ROWS;
  while (rows > BLOCK_ROWS / 4 && tokens * s.group / rows * a.heads.n_kv < c->threads * 4) rows /= 2;
  return s.group >= rows ? 1 : rows / s.group;
}

template <class T>
static int attention(Context *c, const AttentionArgs *args) {
  const AttentionArgs &a = *args;
  Shape<T> s(a.heads);
  int block_tokens = block_tokens_of(c, a, s), n_blocks = cut_blocks(a, block_tokens, nullptr);
  if (n_blocks == 0) return 0;
  size_t block_bytes = size_t(round_up(n_blocks * int64_t(sizeof(QueryBlock)), 64));
  QueryBlock *blocks = static_cast<QueryBlock *>(scratch_get(&c->shared, block_bytes));
  if (!blocks) return -1;
  cut_blocks(a, block_tokens, blocks);
  int most_tokens = 0;
  int64_t most_splits = 0;
  for (int i = 0; i < n_blocks; i++) {
    const QueryBlock &b = blocks[i];
    if (b.tokens > most_tokens) most_tokens = b.tokens;
    if (b.split_end - b.split_begin > most_splits) most_splits = b.split_end - b.split_begin;
  }

  AttentionJob<T> job = {c, args, blocks, n_blocks, 1, 1, 1, 0, nullptr, 0, 0, false};
  job.score_scale = a.scale * 1.4426950408889634f;  // the softmax works in powers of two
  // Heads of one page lie side by side in memory, so decode rows take as many per unit as a block has room for.
  int heads = BLOCK_ROWS / (most_tokens * s.group);
  job.heads_per_group = heads < 1 ? 1 : heads > a.heads.n_kv ? int(a.heads.n_kv) : heads;
  job.head_groups = int((a.heads.n_kv + job.heads_per_group - 1) / job.heads_per_group);
  job.state_floats = round_up(state_floats_of(most_tokens * s.group * job.heads_per_group, s.dim_v), 16);
  int wanted = c->threads == 1 ? 1 : c->threads * 4;
  int64_t units = int64_t(n_blocks) * job.head_groups, partial_limit = 4 << 20;  // floats
  if (units < wanted && most_splits > 1 && units * most_splits * job.state_floats <= partial_limit) {
    job.max_splits = most_splits;
    char *both = static_cast<char *>(scratch_get(&c->shared, block_bytes + size_t(units * most_splits * job.state_floats) * 4));
    if (!both) return -1;
    blocks = reinterpret_cast<QueryBlock *>(both);  // the memory may have moved
    cut_blocks(a, block_tokens, blocks);
    job.blocks = blocks;
    job.partial = reinterpret_cast<float *>(both + block_bytes);
    pool_run(c->pool, int(units * most_splits), split_unit<T>, &job);
    pool_run(c->pool, int(units), merge_unit<T>, &job);
  } else {
    // Decode rows are short: several make a unit, so that the first tile of one is fetched under the last tile of another.
    if (most_tokens * s.group <= DIRECT_ROWS) job.blocks_per_unit = int(units / (wanted * 2)) + 1;
    job.units = (n_blocks + job.blocks_per_unit - 1) / job.blocks_per_unit * job.head_groups;
    for (int i = 0; i < c->threads; i++) c->worker[i].taken.store(0, std::memory_order_relaxed);
    pool_run(c->pool, job.units, blocks_unit<T>, &job);
  }
  return job.failed ? -1 : 0;
}
