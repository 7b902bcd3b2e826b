// What bench_native.py --peer runs: greedy tokens of llama.cpp in one process, each timed.
//   llama_gaps MODEL.gguf THREADS CONTEXT TOKENS ID...   -> milliseconds: one line for the prompt, then one for each token after it
// Build: g++ -O2 -I llama.cpp/include -I llama.cpp/ggml/include llama_gaps.cpp -L llama.cpp/build/bin -lllama -lggml -lggml-base -o llama_gaps
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

static double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static llama_token likeliest(const float *logits, int n) {
  int best = 0;
  for (int i = 1; i < n; i++)
    if (logits[i] > logits[best]) best = i;
  return best;
}

int main(int argc, char **argv) {
  if (argc < 6) return 2;
  std::vector<llama_token> ids;
  for (int i = 5; i < argc; i++) ids.push_back(atoi(argv[i]));
  llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
  llama_backend_init();
  llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_threads = params.n_threads_batch = atoi(argv[2]);
  params.n_ctx = params.n_batch = uint32_t(atoi(argv[3]));
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  llama_context *context = llama_init_from_model(model, params);
  if (!context) return 1;
  const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::vector<double> times;
  llama_token next = 0;
  for (int i = 0, n = atoi(argv[4]); i <= n; i++) {
    double begin = now_ms();
    llama_batch batch = i == 0 ? llama_batch_get_one(ids.data(), int(ids.size())) : llama_batch_get_one(&next, 1);
    if (llama_decode(context, batch) != 0) return 1;
    next = likeliest(llama_get_logits_ith(context, -1), vocab);
    times.push_back(now_ms() - begin);
  }
  for (double t : times) printf("%.4f\n", t);
  return 0;
}
