// How the work of one attention call is cut into units. None of it changes a bit of the result.
#pragma once

template <class T>
static void attention_unit(void *raw, int unit, int worker) {
  AttentionJob<T> *job = static_cast<AttentionJob<T> *>(raw);
  const AttentionArgs &a = *job->a;
  Shape<T> s(a.heads);
  int64_t splits = job->max_splits ? job->max_splits : 1;
  int split_index = int(unit % splits), group = int(unit / splits % job->head_groups);
  // Later blocks of a prompt see more keys: they go first, so that the short ones fill up the end.
  const QueryBlock &b = job->blocks[job->n_blocks - 1 - unit / splits / job->head_groups];
  int h0 = group * job->heads_per_group, h1 = h0 + job->heads_per_group;
  if (h1 > a.heads.n_kv) h1 = int(a.heads.n_kv);
  int rows = b.tokens * s.group, all_rows = rows * (h1 - h0);
  int64_t split = b.split_begin + split_index;
  if (split >= b.split_end) return;
  Workspace w;
  if (!workspace<T>(&job->c->worker[worker], s, all_rows, &w)) {
    job->failed = true;
    return;
  }
  for (int h = h0; h < h1; h++) gather_query<T>(a, s, b, h, w.query + int64_t(h - h0) * rows * s.elements);
  if (job->max_splits) {
    w.state = state_at(job->partial + unit * job->state_floats, all_rows);
    split_update<T>(a, s, b, h0, h1, split, job->score_scale, w);
    return;
  }
  state_reset(w.total, all_rows, s.dim_v);
  for (; split < b.split_end; split++) {
    split_update<T>(a, s, b, h0, h1, split, job->score_scale, w);
    state_merge(w.total, w.state, all_rows, s.dim_v);
  }
  write_out<T>(a, s, b, h0, h1, w.total);
}

// After a job with a unit per split: merge the splits of one block and head group in order.
template <class T>
static void merge_unit(void *raw, int unit, int worker) {
  AttentionJob<T> *job = static_cast<AttentionJob<T> *>(raw);
  const AttentionArgs &a = *job->a;
  Shape<T> s(a.heads);
  int group = unit % job->head_groups;
  const QueryBlock &b = job->blocks[job->n_blocks - 1 - unit / job->head_groups];
  int h0 = group * job->heads_per_group, h1 = h0 + job->heads_per_group;
  if (h1 > a.heads.n_kv) h1 = int(a.heads.n_kv);
  int all_rows = b.tokens * s.group * (h1 - h0);
  Workspace w;
  if (!workspace<T>(&job->c->worker[worker], s, all_rows, &w)) {
    job->failed = true;
    return;
  }
  state_reset(w.total, all_rows, s.dim_v);
  for (int64_t i = 0; i < b.split_end - b.split_begin; i++) {
    float *at = job->partial + (unit * job->max_splits + i) * job->state_floats;
    state_merge(w.total, state_at(at, all_rows), all_rows, s.dim_v);
  }
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
      b.split_end = (b.first_position + b.tokens - 1) / SPLIT_KEYS + 1;
      int64_t from = a.window > 0 ? b.first_position + 1 - a.window : 0;
      b.split_begin = from > 0 ? from / SPLIT_KEYS : 0;
    }
  }
  return n;
}

template <class T>
static int attention(Context *c, const AttentionArgs *args) {
  const AttentionArgs &a = *args;
  Shape<T> s(a.heads);
  int block_tokens = s.group >= BLOCK_ROWS ? 1 : BLOCK_ROWS / s.group;
  int n_blocks = cut_blocks(a, block_tokens, nullptr);
  if (n_blocks == 0) return 0;
  size_t block_bytes = size_t(round_up(n_blocks * int64_t(sizeof(QueryBlock)), 64));
  if (!scratch_get(&c->shared, block_bytes)) return -1;
  cut_blocks(a, block_tokens, static_cast<QueryBlock *>(c->shared.data));

  AttentionJob<T> job = {c, args, static_cast<QueryBlock *>(c->shared.data), n_blocks, 0, 0, 0, nullptr, 0, 0, false};
  job.score_scale = a.scale * 1.4426950408889634f;  // the softmax works in powers of two
  int most_tokens = 0;
  int64_t most_splits = 0;
  for (int i = 0; i < n_blocks; i++) {
    const QueryBlock &b = job.blocks[i];
    if (b.tokens > most_tokens) most_tokens = b.tokens;
    if (b.split_end - b.split_begin > most_splits) most_splits = b.split_end - b.split_begin;
  }
  // Heads of one page lie side by side in memory, so decode rows take as many per unit as a block has room for.
  int heads = BLOCK_ROWS / (most_tokens * s.group);
  if (heads < 1) heads = 1;
  if (heads > a.heads.n_kv) heads = int(a.heads.n_kv);
  int wanted = c->threads == 1 ? 1 : c->threads * 4;
  int64_t partial_limit = 4 << 20;  // floats
  job.heads_per_group = heads;
  job.head_groups = int((a.heads.n_kv + heads - 1) / heads);
  job.state_floats = round_up(state_floats_of(most_tokens * s.group * heads, s.dim_v), 16);
  int64_t units = int64_t(n_blocks) * job.head_groups;
  if (units < wanted && most_splits > 1 && units * most_splits * job.state_floats <= partial_limit) {
    job.max_splits = most_splits;
    size_t bytes = size_t(units * most_splits * job.state_floats) * 4;
    if (!scratch_get(&c->shared, block_bytes + bytes)) return -1;
    cut_blocks(a, block_tokens, static_cast<QueryBlock *>(c->shared.data));
    job.blocks = static_cast<QueryBlock *>(c->shared.data);
    job.partial = reinterpret_cast<float *>(static_cast<char *>(c->shared.data) + block_bytes);
    pool_run(c->pool, int(units * most_splits), attention_unit<T>, &job);
    pool_run(c->pool, int(units), merge_unit<T>, &job);
  } else {
    pool_run(c->pool, int(units), attention_unit<T>, &job);
  }
  return job.failed ? -1 : 0;
}
