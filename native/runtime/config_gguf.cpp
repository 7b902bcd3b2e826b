// GGUF metadata of Llama, Qwen2 and Qwen3 models; the rules are those of the package's load/gguf_config.py.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "config.h"
#include "error.h"

namespace kilat {

namespace {

const int64_t kMaxDim = 1 << 24, kMaxLayers = 4096;

// Tokens that end a turn or a text, by the names that model families give them.
const char *const kEndTokens[] = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",
                                  "<|end|>",    "<|eot|>",       "<end_of_turn>", "</s>"};

// The metadata of one architecture: checks types and ranges, remembers what was read.
class Fields {
 public:
  Fields(const Gguf &file, const char *name, const std::string &architecture)
      : file_(file), name_(name), prefix_(architecture + ".") {}

  const GgufValue *get(const char *key) {
    seen_.push_back(prefix_ + key);
    return file_.find(seen_.back());
  }

  int64_t whole(const char *key, int64_t otherwise, int64_t limit = kMaxDim) {
    const GgufValue *found = get(key);
    int64_t value = found ? found->is_integer() ? found->integer : -1 : otherwise;
    if (value < 1 || value > limit)
      fail(KILAT_BAD_FILE, "%s: %s%s is %s, expected a whole number from 1 to %lld", name_, prefix_.c_str(), key,
           found ? "out of range" : "missing", static_cast<long long>(limit));
    return value;
  }

  double number(const char *key, double otherwise) {
    const GgufValue *found = get(key);
    double value = found ? found->is_number() ? found->real : NAN : otherwise;
    if (!(value > 0 && value < 1e30))
      fail(KILAT_BAD_FILE, "%s: %s%s is %s, expected a number above 0", name_, prefix_.c_str(), key, found ? "wrong" : "missing");
    return value;
  }

  void must_be(const char *key, int64_t wanted) {
    const GgufValue *found = get(key);
    if (found && found->integer != wanted)
      fail(KILAT_UNSUPPORTED, "%s: %s%s is not %lld, which is all that is supported", name_, prefix_.c_str(), key,
           static_cast<long long>(wanted));
  }

  void finish() const {
    for (const GgufValue &v : file_.values) {
      bool off = v.type == GGUF_STRING ? v.text.empty() : v.type == GGUF_ARRAY ? v.count == 0 : v.real == 0;
      if (v.key.substr(0, prefix_.size()) != prefix_ || off) continue;
      if (std::find(seen_.begin(), seen_.end(), v.key) == seen_.end())
        fail(KILAT_UNSUPPORTED, "%s has %.*s, which this version does not know and which may change the model's math", name_,
             int(v.key.size()), v.key.data());
    }
  }

 private:
  const Gguf &file_;
  const char *name_;
  std::string prefix_;
  std::vector<std::string> seen_;
};

void check_container(const Gguf &file, const char *name) {
  const GgufValue *kind = file.find("general.type"), *parts = file.find("split.count");
  if (kind && kind->text != "model") fail(KILAT_UNSUPPORTED, "%s holds something else than a model", name);
  if (parts && parts->integer > 1)
    fail(KILAT_UNSUPPORTED, "%s is one part of a split model: join the parts with llama-gguf-split --merge", name);
}

void read_scaling(Fields *f, Config *c, const char *name) {
  const GgufValue *kind = f->get("rope.scaling.type");
  f->get("rope.scaling.finetuned");
  double factor = f->number("rope.scaling.factor", f->number("rope.scale_linear", 1.0));
  double original = double(f->whole("rope.scaling.original_context_length", c->max_context));
  std::string_view type = kind ? kind->text : factor != 1.0 ? "linear" : "none";
  if (type == "none" || factor == 1.0) return;
  c->rope.factor = factor;
  if (type == "linear") {
    c->rope.scaling = RopeScaling::Linear;
  } else if (type == "yarn") {
    c->rope.scaling = RopeScaling::Yarn;
    c->rope.original_context = original;
    c->rope.beta_fast = f->number("rope.scaling.yarn_beta_fast", 32.0);
    c->rope.beta_slow = f->number("rope.scaling.yarn_beta_slow", 1.0);
  } else {
    fail(KILAT_UNSUPPORTED, "%s: rope.scaling.type is not none, linear or yarn", name);
  }
}

// Llama 3.x files carry the divisor of each frequency instead of the parameters it was computed from. These are found again by
// computing the divisors of every published Llama 3.x model and comparing.
void read_divisors(const Gguf &file, Config *c, const char *name) {
  const GgufTensor *t = file.tensor("rope_freqs.weight");
  if (!t || c->rope.scaling != RopeScaling::None) return;
  int64_t n = c->head_dim / 2;
  if (t->type != KILAT_TYPE_F32 || t->cols != n || t->rows != 1)
    fail(KILAT_BAD_FILE, "%s: rope_freqs.weight has a wrong type or shape", name);
  std::vector<float> found(static_cast<size_t>(n));
  memcpy(found.data(), t->data.data, size_t(n) * 4);
  double factor = 0;
  for (float d : found) {
    if (!(d >= 0.999f && d < 1e30f))
      fail(KILAT_BAD_FILE, "%s: rope_freqs.weight holds values below 1 or not finite: the file is damaged", name);
    factor = std::max(factor, double(d));
  }
  if (factor < 1.001) return;
  const double low = 1, high = 4, context = 8192;
  for (int64_t i = 0; i < n; i++) {
    double turns = context * pow(c->rope.theta, -2.0 * double(i) / double(c->head_dim)) / (2 * M_PI);
    double kept = std::min(std::max((turns - low) / (high - low), 0.0), 1.0), wanted = 1 / ((1 - kept) / factor + kept);
    if (fabs(double(found[size_t(i)]) - wanted) > 1e-3 * wanted)
      fail(KILAT_UNSUPPORTED, "%s: rope_freqs.weight is not Llama 3 scaling, which is all that is supported: use the safetensors",
           name);
  }
  c->rope.scaling = RopeScaling::Llama3;
  c->rope.factor = factor;
  c->rope.low_freq = low;
  c->rope.high_freq = high;
  c->rope.original_context = context;
}

// An id ends a text when the metadata says so, when the chat template writes its token and the token is known to end turns, or when
// it is the padding token and is known to end texts.
void read_special_ids(const Gguf &file, Config *c, const char *name) {
  const GgufValue *array = file.find("tokenizer.ggml.tokens"), *chat = file.find("tokenizer.chat_template");
  std::vector<std::string_view> tokens;
  if (array) tokens = strings_of(*array);
  auto id_of = [&](const char *key) -> int32_t {
    const GgufValue *v = file.find(key);
    if (!v) return -1;
    if (!v->is_integer() || v->integer < 0 || v->integer >= int64_t(tokens.size()))
      fail(KILAT_BAD_FILE, "%s: %s is not an id of the vocabulary", name, key);
    return int32_t(v->integer);
  };
  auto add = [&](int32_t id) {
    if (id >= 0 && std::find(c->end_ids.begin(), c->end_ids.end(), id) == c->end_ids.end()) c->end_ids.push_back(id);
  };
  for (const char *key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"})
    add(id_of(key));
  int32_t padding = id_of("tokenizer.ggml.padding_token_id");
  std::vector<std::string_view> used;
  for (const char *token : kEndTokens) {
    if (padding >= 0 && tokens[size_t(padding)] == token) add(padding);
    if (chat && chat->text.find(token) != std::string_view::npos) used.push_back(token);
  }
  for (size_t i = 0; !used.empty() && i < tokens.size(); i++)
    if (std::find(used.begin(), used.end(), tokens[i]) != used.end()) add(int32_t(i));
  c->bos_id = id_of("tokenizer.ggml.bos_token_id");
}

}  // namespace

Config config_of_gguf(const Gguf &file, const char *name) {
  check_container(file, name);
  const GgufValue *kind = file.find("general.architecture");
  Config c;
  c.architecture = kind ? std::string(kind->text) : "";
  if (c.architecture != "llama" && c.architecture != "qwen2" && c.architecture != "qwen3")
    fail(KILAT_UNSUPPORTED, "%s: general.architecture is '%.60s'; supported: llama, qwen2, qwen3", name, c.architecture.c_str());
  Fields f(file, name, c.architecture);
  c.hidden = f.whole("embedding_length", 0);
  c.q_heads = f.whole("attention.head_count", 0);
  c.head_dim = f.whole("attention.key_length", c.hidden % c.q_heads ? 0 : c.hidden / c.q_heads);
  c.max_context = f.whole("context_length", 0);
  c.inner = f.whole("feed_forward_length", 0);
  c.layers = f.whole("block_count", 0, kMaxLayers);
  c.kv_heads = f.whole("attention.head_count_kv", c.q_heads);
  c.eps = f.number("attention.layer_norm_rms_epsilon", NAN);
  c.rope.theta = f.number("rope.freq_base", 10000.0);
  c.rope.dim = c.head_dim;
  if (c.rope.theta <= 1) fail(KILAT_BAD_FILE, "%s: rope.freq_base is not above 1", name);
  c.tied = !file.tensor("output.weight");
  c.paired = c.architecture == "llama";
  c.qkv_bias = c.architecture == "qwen2" || file.tensor("blk.0.attn_q.bias");
  c.out_bias = c.architecture != "qwen2" && c.qkv_bias;
  c.mlp_bias = c.architecture == "llama" && file.tensor("blk.0.ffn_gate.bias");
  c.qk_norm = c.architecture == "qwen3";
  f.must_be("attention.value_length", c.head_dim);
  f.must_be("rope.dimension_count", c.head_dim);
  f.must_be("expert_count", 0);
  f.must_be("expert_used_count", 0);
  f.must_be("attention.causal", 1);
  const GgufValue *window = f.get("attention.sliding_window");
  if (window && window->integer > 0 && window->integer < c.max_context)
    fail(KILAT_UNSUPPORTED, "%s: attention.sliding_window is not supported in GGUF files, use the model's safetensors", name);
  c.windows.assign(size_t(c.layers), 0);
  read_scaling(&f, &c, name);
  read_divisors(file, &c, name);
  const GgufTensor *embedding = file.tensor("token_embd.weight");
  if (!embedding || embedding->dims != 2 || embedding->cols != c.hidden || embedding->rows > kMaxDim)
    fail(KILAT_BAD_FILE, "%s: token_embd.weight is missing or does not fit the config", name);
  c.vocab = embedding->rows;
  const GgufValue *tokens = file.find("tokenizer.ggml.tokens");
  if (tokens && tokens->count > size_t(c.vocab))
    fail(KILAT_BAD_FILE, "%s: the vocabulary has more tokens than token_embd.weight has rows", name);
  f.get("vocab_size"), f.get("tensor_data_layout");
  f.finish();
  read_special_ids(file, &c, name);
  return c;
}

}  // namespace kilat
