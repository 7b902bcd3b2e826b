// model.h: a model and a session on a CUDA device. Each has one allocation on the device for everything.
#pragma once

#include <vector>

#include "../runtime/backend.h"
#include "prompt.h"

struct kilat_device_model {
  int device = 0, blocks = 0;    // processors of the device, and blocks of every launch
  int weights = 0;               // KILAT_WEIGHTS_...
  kilat_cuda::ModelView view{};
  char *arena = nullptr;
  int64_t weight_bytes = 0, embedding_bytes = 0, table_bytes = 0;
  int lockstep = 0;                // a block may have no tile of a layer's largest matrix
  int slots = 0, slot_bytes = 0, work_bytes = 0, shared_bytes = 0;
  kilat_cuda::Pace pace{};
  int max_splits = 0;              // spans that attention cuts a context into at most
  kilat_cuda::PromptFit prompt{};
  std::vector<kilat_cuda::MatrixPlace> matrices;  // [layers * 4 + 1], as view.matrices on the device
  char kernels[48] = "";
  std::vector<float> frequencies;  // of the rotation, [rotary / 2]
  float rope_factor = 1;
};

namespace kilat_cuda {

// Where passes leave logits and ids: in the first two in turn, so that one that was begun too early spoils nothing; a draw alone leaves its
// id in the last.
constexpr int kPassPlaces = 2, kDrawPlace = 2, kPlaces = 3;

// A pass of one token that was begun before the host had its id.
struct Ahead {
  bool begun = false;
  unsigned number = 0;   // of the launch
  int32_t id = -1;       // which it takes, once the host has it
  int64_t position = 0;
  kilat_draw draw{};

  bool is_for(int32_t wanted_id, int64_t at, const kilat_draw &d) const {
    return begun && wanted_id == id && at == position && d.temperature == draw.temperature && d.top_p == draw.top_p && d.min_p == draw.min_p &&
           d.u == draw.u && d.top_k == draw.top_k;
  }
};

}  // namespace kilat_cuda

struct kilat_device_session {
  kilat_device_model *model = nullptr;
  cudaStream_t stream = nullptr;
  kilat_cuda::SessionView view{};
  kilat_cuda::Prompt prompt{};           // its buffers
  int prompt_rows = 0;                   // tokens of a pass that they hold
  char *arena = nullptr;
  unsigned long long *result = nullptr;  // [kPlaces], pinned, the kernels write it
  long long *trace = nullptr;            // device, as SessionView's
  int64_t kv_bytes = 0, table_bytes = 0, activation_bytes = 0, scratch_bytes = 0;
  unsigned barriers = 0, launches = 0, tags = 1;
  int64_t logits_stride = 0;
  int place = 0;                         // of the last pass that was asked for
  kilat_cuda::Ahead ahead;               // its place is the other one
};

namespace kilat_cuda {

constexpr int kTraceClocks(int layers) { return layers * 12 + 32; }

// Hands out pieces of one allocation. Run twice: without memory it adds up the size.
class Carver {
 public:
  explicit Carver(char *base) : base_(base) {}
  template <class T>
  T *take(int64_t n) {
    char *at = base_ ? base_ + used_ : nullptr;
    used_ += (n * int64_t(sizeof(T)) + 255) & ~int64_t(255);
    return reinterpret_cast<T *>(at);
  }
  int64_t used() const { return used_; }

 private:
  char *base_;
  int64_t used_ = 0;
};

int build_model(const kilat_model_desc &desc, const kilat_options *options, kilat_device_model &m, kilat_failure *f);
int create_session(kilat_device_model *m, int64_t context, int64_t flags, kilat_device_session &s, kilat_failure *f);

// What a failed call of the CUDA runtime comes to.
int fail_cuda(kilat_failure *f, cudaError_t error, const char *what);

}  // namespace kilat_cuda
