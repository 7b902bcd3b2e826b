// sample.cuh: the id that follows, drawn by the whole grid from logits that are already spread over its blocks.
//
// The rule is ops/sample.py's: every filter is a threshold on the logit, then inverse CDF in order of ids. Probabilities are 64-bit
// integers (exp(x - top) * 2^40), so sums have no order and the draw has one answer. Logits are bf16: thresholds are found in two
// passes over bins of 8 bits of the number's rank.
#pragma once

#include "grid.cuh"

namespace kilat_cuda {

// Order-preserving rank of a bf16 number given as fp32; 0xffff for a NaN; both zeros are one number.
__device__ inline unsigned rank_of(float x) {
  if (isnan(x)) return 0xffff;
  if (x == 0) return 0x8000;
  const unsigned bits = __float_as_uint(x) >> 16;
  return bits & 0x8000 ? 0xffff - bits : bits | 0x8000;
}

// Grid barriers that a draw passes.
__host__ __device__ inline int barriers_of(const DrawView &d, int vocab) {
  if (d.temperature <= 0) return 1;
  return 2 + (d.top_k > 0 && d.top_k < vocab ? 2 : 0) + (d.top_p < 1 ? 2 : 0);
}

// The logits of this block.
struct Share {
  const float *logits;
  int first_id, n;
};

class Sampler {
 public:
  __device__ Sampler(const Step &step, Grid &grid, const Share &share, char *work)
      : step_(step), grid_(grid), share_(share), scratch_(reinterpret_cast<unsigned long long *>(work)), bins_(scratch_ + kThreads) {}

  __device__ void run() {
    unsigned long long best = 0;
    for (int i = threadIdx.x; i < share_.n; i += kThreads)
      best = max(best, (static_cast<unsigned long long>(rank_of(logit(i))) << 32) | (0xffffffffu - unsigned(share_.first_id + i)));
    best = block_max(best, scratch_);
    unsigned long long *tops = step_.session.tops;
    if (threadIdx.x == 0) __stcg(tops + blockIdx.x, best);
    if (blockIdx.x == 0)
      for (int i = threadIdx.x; i < 4 * 256; i += kThreads) __stcg(step_.session.bins + i, 0ull);
    grid_.sync();
    best = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) best = max(best, __ldcg(tops + i));
    best = block_max(best, scratch_);
    const unsigned rank = unsigned(best >> 32), id = 0xffffffffu - unsigned(best);
    if (rank >= 0xff80 || rank < 0x0080) {  // infinite or NaN
      if (blockIdx.x == 0) answer(-2);
      for (int i = barriers_of(step_.draw, step_.model.vocab); i > 1; --i) grid_.sync();  // the host has counted them
    } else if (step_.draw.temperature <= 0) {
      if (blockIdx.x == 0) answer(int(id));
    } else {
      const unsigned bits = rank & 0x8000 ? rank & 0x7fff : 0xffff - rank;
      top_ = __uint_as_float(bits << 16) / step_.draw.temperature;
      draw();
    }
  }

 private:
  __device__ float logit(int i) const { return __ldcg(share_.logits + i); }

  __device__ bool kept(float x, unsigned rank) const { return rank >= floor_ && x >= top_ + step_.draw.min_p_log; }

  // Probability of the block's logit i over that of the likeliest, times 2^40; 0 if it is filtered.
  __device__ unsigned long long weight(int i) const {
    const float l = logit(i), x = l / step_.draw.temperature;
    return kept(x, rank_of(l)) ? __float2ull_rn(expf(x - top_) * 1099511627776.0f) : 0;
  }

  __device__ void draw() {
    const DrawView &d = step_.draw;
    if (d.top_k > 0 && d.top_k < step_.model.vocab) {
      const auto one = [](int) { return 1ull; };
      floor_ = threshold(0, one, [&](unsigned long long) { return static_cast<unsigned long long>(d.top_k); });
    }
    if (d.top_p < 1) {
      const unsigned old = floor_;
      const unsigned least = threshold(
          2, [&](int i) { return weight(i); },
          [&](unsigned long long total) { return static_cast<unsigned long long>(ceil(double(total) * d.top_p)); });
      floor_ = max(old, least);
    }
    unsigned long long sum = 0;
    for (int i = threadIdx.x; i < share_.n; i += kThreads) sum += weight(i);
    sum = block_sum(sum, scratch_);
    unsigned long long *sums = step_.session.tops + gridDim.x;
    if (threadIdx.x == 0) __stcg(sums + blockIdx.x, sum);
    grid_.sync();
    // ids are in the order of blocks; a launch has fewer blocks than a block has threads
    const unsigned long long mine = threadIdx.x < gridDim.x ? __ldcg(sums + threadIdx.x) : 0, upto = block_scan(mine, scratch_);
    scratch_[threadIdx.x] = upto;
    sync_threads();
    const unsigned long long total = scratch_[kThreads - 1], before = blockIdx.x ? scratch_[blockIdx.x - 1] : 0;
    const unsigned long long end = scratch_[blockIdx.x];
    sync_threads();
    // the first id whose running sum is above total * u
    const unsigned long long target = (__umul64hi(total, d.u24) << 40) | ((total * d.u24) >> 24);
    if (before <= target && target < end) find(before, target);
  }

  // This block holds the id: threads take runs of ids.
  __device__ void find(unsigned long long before, unsigned long long target) {
    const int per = (share_.n + kThreads - 1) / kThreads, first = threadIdx.x * per, last = min(first + per, share_.n);
    unsigned long long sum = 0;
    for (int i = first; i < last; ++i) sum += weight(i);
    const unsigned long long upto = before + block_scan(sum, scratch_);
    if (upto <= target || upto - sum > target) return;
    sum = upto - sum;
    for (int i = first; i < last; ++i) {
      sum += weight(i);
      if (sum > target) {
        answer_from_one(share_.first_id + i);
        return;
      }
    }
  }

  // The largest rank r such that the values of the kept logits of rank >= r sum up to at least need(sum of all). Bins `set`, `set` + 1.
  template <class Value, class Need>
  __device__ unsigned threshold(int set, Value value, Need need) {
    unsigned long long *bins = step_.session.bins + set * 256;
    count(bins, value, 0, 0);
    unsigned long long above, want;
    const unsigned high = find_bin(bins, 0, [&](unsigned long long total) { return need(total); }, above, want);
    count(bins + 256, value, high, 8);
    const unsigned low = find_bin(bins + 256, above, [&](unsigned long long) { return want; }, above, want);
    return high << 8 | low;
  }

  // Adds the block's values to bins of the upper (`known_bits` 0) or lower byte of the rank, and waits for the grid.
  template <class Value>
  __device__ void count(unsigned long long *bins, Value value, unsigned high, int known_bits) {
    static_assert(kThreads >= 256, "a thread per bin");
    if (threadIdx.x < 256) bins_[threadIdx.x] = 0;
    sync_threads();
    for (int i = threadIdx.x; i < share_.n; i += kThreads) {
      const unsigned rank = rank_of(logit(i));
      if (known_bits == 0)
        atomicAdd(bins_ + (rank >> 8), value(i));
      else if (rank >> 8 == high)
        atomicAdd(bins_ + (rank & 255), value(i));
    }
    sync_threads();
    if (threadIdx.x < 256 && bins_[threadIdx.x]) atomicAdd(bins + threadIdx.x, bins_[threadIdx.x]);
    grid_.sync();
  }

  // The bin at which the running sum from the top, begun at `above`, reaches need(sum of all bins); `above` becomes the sum before it.
  template <class Need>
  __device__ unsigned find_bin(const unsigned long long *bins, unsigned long long start, Need need, unsigned long long &above,
                               unsigned long long &want) {
    const unsigned bin = 255 - threadIdx.x % 256;
    const unsigned long long mine = threadIdx.x < 256 ? __ldcg(bins + bin) : 0, upto = block_scan(mine, scratch_);
    scratch_[threadIdx.x] = upto;
    sync_threads();
    want = need(scratch_[kThreads - 1]);
    sync_threads();
    if (threadIdx.x == 0) found_bin() = 0, scratch_[1] = start;
    sync_threads();
    if (threadIdx.x < 256 && mine && start + upto >= want && start + upto - mine < want) found_bin() = bin, scratch_[1] = start + upto - mine;
    sync_threads();
    const unsigned bin_found = unsigned(found_bin());
    above = scratch_[1];
    sync_threads();
    return bin_found;
  }
  __device__ unsigned long long &found_bin() { return scratch_[0]; }

  __device__ void answer(int id) {
    if (threadIdx.x == 0) answer_from_one(id);
  }
  __device__ void answer_from_one(int id) {
    if (id >= 0) *step_.session.drawn = id;
    *step_.session.result = (static_cast<unsigned long long>(step_.number) << 32) | unsigned(id + 2);
    __threadfence_system();
  }

  const Step &step_;
  Grid &grid_;
  Share share_;
  unsigned long long *scratch_, *bins_;
  unsigned floor_ = 0;
  float top_ = 0;
};

}  // namespace kilat_cuda
