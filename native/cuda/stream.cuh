// stream.cuh: the weights of a whole pass, and the keys and values of older tokens, as one stream into shared memory.
//
// Every computing warp has a ring of slots. The chunks of a block's tiles, counted through, go to the warps in turn; the rounds of the
// block's span follow those of the qkv matrix. One more warp brings them: its lane w fills the ring of warp w. Nothing of it depends on
// what a pass computes, so the stream runs ahead over the end of a matrix and over every wait as far as the rings reach, and beyond them
// into the device's cache. Of each ring only a few chunks
// (Pace) are on their way at a time: enough for the full bandwidth, while all of them together would make everything else that crosses
// the device late. What goes to the cache is paced for the same reason.
#pragma once

#include "span.cuh"

namespace kilat_cuda {

// The tiles of a matrix that the block of this rank works on.
__device__ inline void tiles_of_rank(const Shape &s, int rank, int &begin, int &end) {
  begin = s.share * rank + min(rank, s.extra);
  end = begin + s.share + (rank < s.extra);
}

// Ranks of a block. The tiles more of a matrix go to the blocks behind those that had the last one's, as cards are dealt: at no point of
// the pass has a block more than one tile more than another. The head's ranks are the blocks' numbers: its outputs are in their order.
class Turn {
 public:
  __device__ void next(const Shape &last) {
    rank_ -= last.extra;
    if (rank_ < 0) rank_ += gridDim.x;
  }
  __device__ int rank(int kind) const { return kind == kHead ? int(blockIdx.x) : rank_; }

 private:
  int rank_ = blockIdx.x;
};

// Slots too small for a round's keys and values have its keys, the next ones its values.
__device__ inline bool past_is_cut(const Step &step) { return step.slot_bytes < 2 * round_bytes(step.model.head_dim); }

// A place in a warp's sequence of chunks.
class Cursor {
 public:
  // At the first chunk of warp `warp` of the matrices `index` ... `last`; `matrices` is the table in shared memory.
  __device__ Cursor(const Step &step, const MatrixPlace *matrices, int warp, int index, int last)
      : matrices_(matrices), item_(item_of(step, blockIdx.x)), warp_(warp), index_(index), last_(last) {
    set_span(step, 0, item_);
    enter(step);
  }

  __device__ bool at_end() const { return index_ > last_; }

  __device__ int bytes(const Step &step) const {
    int n = 0;
    each_piece(step, [&](int, const char *, int piece) { n += piece; });
    return n;
  }

  // Calls each(byte of the slot, where it comes from, bytes).
  template <class Each>
  __device__ void each_piece(const Step &step, const Each &each) const {
    if (!in_past_) {
      each(0, base_ + (int64_t(tile_) * units_ + first_unit()) * unit_bytes_, min(1 << chunk_shift_, units_ - first_unit()) * unit_bytes_);
      return;
    }
    const int row = step.model.head_dim * 2, cut = past_is_cut(step);
    const int64_t values = int64_t(step.session.context) * row;
    const char *from = base_ + int64_t(position_) * row;
#pragma unroll 1
    for (int at = 0, left = stored_ - position_; left > 0 && at < round_bytes(step.model.head_dim); at += 8 * row, left -= kGroupKeys) {
      if (!cut || !values_) each(at, from, min(left, 8) * row);
      if (!cut || values_) each(at + (cut ? 0 : round_bytes(step.model.head_dim)), from + values, min(left, 8) * row);
      from += kGroupKeys * row;
    }
  }

  __device__ void advance(const Step &step) {
    if (in_past_) {
      values_ = past_is_cut(step) && !values_;
      if (values_) return;
      position_ += held_groups(step.model.head_dim) * kGroupKeys;
      in_past_ = position_ < stored_;
      if (in_past_) return;
    } else {
      chunk_ += kWarps;
      if (to_tile() || to_past(step)) return;
    }
    leave(step.model);
    enter(step);
  }

 private:
  __device__ int first_unit() const { return chunk_ << chunk_shift_; }

  __device__ void leave(const ModelView &m) { turn_.next(m.shape[kind_of(m, index_++)]); }

  // At the first chunk of matrix index_ and what follows it, or of the next one of which the warp has any.
  __device__ void enter(const Step &step) {
    const ModelView &m = step.model;
    for (; index_ <= last_; leave(m)) {
      const int kind = kind_of(m, index_), format = matrices_[index_].format();
      tiles_of_rank(m.shape[kind], turn_.rank(kind), tile_, end_);
      units_ = m.shape[kind].units;
      unit_bytes_ = unit_bytes(format);
      chunk_shift_ = chunk_shift(format, m.narrow);
      chunks_ = (units_ + (1 << chunk_shift_) - 1) >> chunk_shift_;
      base_ = matrices_[index_].at();
      chunk_ = warp_;
      if (to_tile() || to_past(step)) return;
    }
  }

  // Chunks beyond the end of a tile are the next one's; false beyond the last tile.
  __device__ bool to_tile() {
    for (; chunk_ >= chunks_; chunk_ -= chunks_) ++tile_;
    return tile_ < end_;
  }

  // At the first round of the layer's span; false if the matrix is not qkv, or there is none.
  __device__ bool to_past(const Step &step) {
    if (kind_of(step.model, index_) != kQkv) return false;
    const int layer = index_ / kLayerMatrices;
    if (step.model.windows) set_span(step, layer, item_);
    position_ = item_.span.begin + warp_ * 8;
    stored_ = item_.exists() ? stored_end(step, item_.span) : 0;
    base_ = reinterpret_cast<const char *>(page_of(step.model, step.session, layer, item_.kv_head));
    return in_past_ = position_ < stored_;
  }

  Turn turn_;
  const MatrixPlace *matrices_;
  const char *base_;  // of the matrix, or of the K/V head's keys
  AttentionItem item_;
  int warp_, index_, last_, tile_, end_, chunk_, chunks_, units_, unit_bytes_, chunk_shift_;
  int position_, stored_;  // of a round the first; where the older ones end
  bool in_past_ = false, values_ = false;
};

// Slots in turn, and the parity of the current round through them.
struct Slot {
  int index = 0, parity = 0;
  __device__ void next(int slots) {
    if (++index == slots) index = 0, parity ^= 1;
  }
};

// Shared memory of the rings: slots, then for each slot a barrier that it is full and one that it is free.
struct Rings {
  uint32_t slots, barriers;
  __device__ uint32_t slot(const Step &step, int warp, int i) const { return slots + (warp * step.slots + i) * step.slot_bytes; }
  __device__ uint32_t full(const Step &step, int warp, int i) const { return barriers + (warp * step.slots + i) * 16; }
  __device__ uint32_t free(const Step &step, int warp, int i) const { return full(step, warp, i) + 8; }
};

#if KILAT_BULK
__device__ inline void init_rings(const Step &step, const Rings &rings) {
  for (int i = threadIdx.x; i < kWarps * step.slots; i += kBlockThreads) {
    barrier_init(rings.full(step, 0, i), 1);
    barrier_init(rings.free(step, 0, i), 1);
  }
  barrier_init_visible();
}

// Lanes of the warp that brings: everything from `cursor` on.
__device__ inline void fill_rings(const Step &step, const Rings &rings, Cursor cursor) {
  const int warp = threadIdx.x % 32;
  const uint64_t policy = policy_read_once();
  Cursor ahead = cursor;  // what goes to the cache next: n_ahead chunks from `cursor` on are on their way there
  Slot to, landed;        // where the next chunk goes; the oldest chunk that is not known to be there
  int in_flight = 0, n_ahead = 0;
  unsigned busy_until = 0;
  while (!cursor.at_end()) {
    if (in_flight > 0 && barrier_test(rings.full(step, warp, landed.index), landed.parity)) landed.next(step.slots), --in_flight;
    // a slot is free for its round when the one before was read; for the first round it always is
    if (in_flight < step.pace.in_flight && barrier_test(rings.free(step, warp, to.index), to.parity ^ 1)) {
      const uint32_t slot = rings.slot(step, warp, to.index), full = rings.full(step, warp, to.index);
      barrier_expect(full, cursor.bytes(step));
      cursor.each_piece(step, [&](int at, const char *from, int bytes) { copy_bulk(slot + at, from, bytes, full, policy); });
      to.next(step.slots), ++in_flight;
      cursor.advance(step);
      busy_until = unsigned(clock()) + step.pace.clocks;
      if (n_ahead > 0)
        --n_ahead;
      else
        ahead = cursor;
    } else if (in_flight == 0 && n_ahead < step.pace.ahead && !ahead.at_end() && int(unsigned(clock()) - busy_until) >= 0) {
      ahead.each_piece(step, [](int, const char *from, int bytes) { prefetch_bulk(from, bytes); });
      ahead.advance(step), ++n_ahead;
      busy_until = unsigned(clock()) + step.pace.clocks;
    }
  }
}
#endif

// A computing warp's end of its ring.
class Stream {
 public:
  __device__ Stream(const Step &step, const Rings &rings, const Cursor &from) : rings_(rings), cursor_(from) {
#if !KILAT_BULK
#pragma unroll 1
    for (int i = 0; i < step.slots; ++i) issue(step, i);
#endif
  }

  // The next chunk of this warp is in shared memory at the address returned.
  __device__ uint32_t wait(const Step &step) {
    const int warp = threadIdx.x / 32;
#if KILAT_BULK
    barrier_wait(rings_.full(step, warp, slot_.index), slot_.parity);
#else
    switch (step.slots) {  // all copies but the last slots - 1 groups are there
      case 1: copy_wait<0>(); break;
      case 2: copy_wait<1>(); break;
      case 3: copy_wait<2>(); break;
      default: copy_wait<3>(); break;
    }
    __syncwarp();
#endif
    return rings_.slot(step, warp, slot_.index);
  }

  // This warp has read its chunk.
  __device__ void release(const Step &step) {
    __syncwarp();
#if KILAT_BULK
    if (threadIdx.x % 32 == 0) barrier_arrive(rings_.free(step, threadIdx.x / 32, slot_.index));
#else
    issue(step, slot_.index);
#endif
    slot_.next(step.slots);
  }

 private:
#if !KILAT_BULK
  __device__ void issue(const Step &step, int slot) {
    if (!cursor_.at_end()) {
      const uint32_t to = rings_.slot(step, threadIdx.x / 32, slot);
      cursor_.each_piece(step, [&](int at, const char *from, int bytes) {
        for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512) copy_16(to + at + i, from + i);
      });
      cursor_.advance(step);
    }
    copy_commit();  // without copies too: it keeps the count of groups
  }
#endif

  Rings rings_;
  Cursor cursor_;  // without bulk copies a warp brings its own chunks
  Slot slot_;
};

}  // namespace kilat_cuda
