// What is behind the handles of kilat.h, and how an error inside becomes a status and a text.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "error.h"
#include "files.h"
#include "tokenizer.h"

struct kilat_model {
  const kilat_backend *backend = nullptr;
  kilat_device_model *device = nullptr;  // nullptr: it could not be loaded
  std::unique_ptr<kilat::Tokenizer> tokenizer;
  std::string tokenizer_error, architecture;
  std::vector<int32_t> end_ids;
  int64_t vocab = 0, hidden = 0, layers = 0;
  uint64_t identity = 0;  // of the weights and of what computes with them
  kilat_info info = {};
  kilat_failure error = {};

  kilat_model() = default;
  kilat_model(const kilat_model &) = delete;
  ~kilat_model();
  void read_tokenizer(const kilat::Gguf &file);
  void take_facts(const kilat::Source &source);
};

struct kilat_session {
  kilat_model *model = nullptr;
  kilat_device_session *device = nullptr;
  std::vector<int32_t> ids;  // the tokens, room for `context` of them
  int64_t context = 0;
  bool has_logits = false, keeps_layers = false, runs_ahead = false;
  kilat_failure error = {};

  kilat_session() = default;
  kilat_session(const kilat_session &) = delete;
  ~kilat_session();
  int64_t n_tokens() const { return int64_t(ids.size()); }
};

namespace kilat {

inline bool is_ready(const kilat_model *m) { return m->device; }
inline bool is_ready(const kilat_session *s) { return s->device; }

// Runs `work` for a handle and returns its status; the handle keeps the text.
template <class Handle, class Work>
int guard_any(Handle *handle, Work work) {
  try {
    work();
    return KILAT_OK;
  } catch (const Error &e) {
    handle->error = e.failure;
    return e.status;
  } catch (const std::bad_alloc &) {
    return kilat_fail(&handle->error, KILAT_NO_MEMORY, "memory is exhausted");
  }
}

// The same for a handle that must be there and be usable.
template <class Handle, class Work>
int guard(Handle *handle, Work work) {
  if (!handle) return KILAT_BAD_ARGUMENT;
  if (!is_ready(handle)) return kilat_fail(&handle->error, KILAT_BAD_ARGUMENT, "the handle is one that could not be opened");
  return guard_any(handle, work);
}

}  // namespace kilat
