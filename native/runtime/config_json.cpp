// config.json of Llama, Mistral, Qwen2 and Qwen3 checkpoints; the rules are those of the package's models/.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "config.h"
#include "error.h"

namespace kilat {

namespace {

const int64_t kMaxDim = 1 << 24, kMaxLayers = 4096;

// Fields that say how a model was trained, stored or prompted; none of them changes a forward pass.
const char *const kHarmless[] = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "initializer_range", "attention_dropout", "hidden_dropout", "is_llama_config",
    "transformers.js_config", "name_or_path", "id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states",
    "return_dict", "torchscript", "keys_to_ignore_at_inference", "tokenizer_class", "task_specific_params", "max_window_layers",
    "chunk_size_feed_forward", "is_encoder_decoder", "license",
};

// Reads each field once, checks its type, and refuses at the end what nobody asked for.
class Fields {
 public:
  Fields(const Json &json, const char *name) : json_(json), name_(name) {}

  const Json *get(const char *key) {
    seen_.push_back(key);
    const Json *found = json_.find(key);
    return found && found->kind != Json::Null ? found : nullptr;
  }

  int64_t whole(const char *key, int64_t otherwise, int64_t limit = kMaxDim) {
    const Json *found = get(key);
    int64_t value = found && found->kind == Json::Integer ? found->integer : found ? -1 : otherwise;
    if (value < 1 || value > limit)
      fail(KILAT_BAD_FILE, "%s: %s is %s, expected a whole number from 1 to %lld", name_, key, found ? "out of range" : "missing",
           static_cast<long long>(limit));
    return value;
  }

  double number(const char *key, double otherwise) {
    const Json *found = get(key);
    double value = found ? found->is_number() ? found->real : NAN : otherwise;
    if (!(value > 0 && value < 1e30))
      fail(KILAT_BAD_FILE, "%s: %s is %s, expected a number above 0", name_, key, found ? "wrong" : "missing");
    return value;
  }

  bool flag(const char *key, bool otherwise) {
    const Json *found = get(key);
    if (found && found->kind != Json::Bool) fail(KILAT_BAD_FILE, "%s: %s is not true or false", name_, key);
    return found ? found->flag : otherwise;
  }

  void must_be_text(const char *key, const char *wanted) {
    const Json *found = get(key);
    if (found && found->text != wanted)
      fail(KILAT_UNSUPPORTED, "%s: %s is '%.60s', supported is %s", name_, key, found->text.c_str(), wanted);
  }

  void finish() const {
    for (auto &member : json_.members) {
      const std::string &key = member.first;
      auto is = [&](const char *known) { return key == known; };
      if (key[0] == '_' || member.second.is_empty() || std::any_of(seen_.begin(), seen_.end(), is) ||
          std::any_of(std::begin(kHarmless), std::end(kHarmless), is))
        continue;
      fail(KILAT_UNSUPPORTED, "%s has '%.100s', which this version does not know and which may change the model's math", name_,
           key.c_str());
    }
  }

 private:
  const Json &json_;
  const char *name_;
  std::vector<const char *> seen_;
};

void read_rope(Fields *f, Config *c, double default_theta) {
  const Json *modern = f->get("rope_parameters"), *old = f->get("rope_scaling");
  const Json empty;
  Fields parameters(modern ? *modern : empty, "rope_parameters");
  double theta = f->number("rope_theta", default_theta), partial = f->number("partial_rotary_factor", 1.0);
  theta = parameters.number("rope_theta", theta);
  partial = parameters.number("partial_rotary_factor", partial);
  if (theta <= 1 || partial > 1) fail(KILAT_BAD_FILE, "config.json: rope_theta or partial_rotary_factor is out of range");
  c->rope.theta = theta;
  c->rope.dim = int64_t(double(c->head_dim) * partial);
  if (c->rope.dim < 2 || c->rope.dim % 2) fail(KILAT_BAD_FILE, "config.json: the rotary dimension is not an even number above 0");

  Fields s(old ? *old : modern ? *modern : empty, "rope_scaling");
  const Json *kind = s.get("rope_type"), *older = s.get("type");
  std::string name = kind ? kind->text : older ? older->text : "default";
  s.get("rope_theta"), s.get("partial_rotary_factor");
  if (name == "linear") {
    c->rope.scaling = RopeScaling::Linear;
    c->rope.factor = s.number("factor", NAN);
  } else if (name == "llama3") {
    c->rope.scaling = RopeScaling::Llama3;
    c->rope.factor = s.number("factor", NAN);
    c->rope.low_freq = s.number("low_freq_factor", NAN);
    c->rope.high_freq = s.number("high_freq_factor", NAN);
    c->rope.original_context = s.number("original_max_position_embeddings", NAN);
    if (c->rope.high_freq <= c->rope.low_freq) fail(KILAT_BAD_FILE, "rope_scaling: high_freq_factor is not above low_freq_factor");
  } else if (name == "yarn") {
    c->rope.scaling = RopeScaling::Yarn;
    c->rope.factor = s.number("factor", NAN);
    c->rope.original_context = s.number("original_max_position_embeddings", double(c->max_context));
    c->rope.beta_fast = s.number("beta_fast", 32.0);
    c->rope.beta_slow = s.number("beta_slow", 1.0);
    if (s.get("attention_factor")) c->rope.attention_factor = s.number("attention_factor", 1.0);
  } else if (name != "default") {
    fail(KILAT_UNSUPPORTED, "rope_scaling: type '%.60s' is not supported; supported: default, linear, llama3, yarn", name.c_str());
  }
  s.finish();
}

void read_windows(Fields *f, Config *c) {
  bool used = f->flag("use_sliding_window", false);
  const Json *types = f->get("layer_types");
  c->windows.assign(size_t(c->layers), 0);
  auto is_kind = [&](const Json &t, const char *kind) { return t.text == kind; };
  if (!used) {
    f->get("sliding_window");
    for (size_t i = 0; types && i < types->items.size(); i++)
      if (!is_kind(types->items[i], "full_attention")) fail(KILAT_BAD_FILE, "config.json: layer_types without use_sliding_window");
    return;
  }
  int64_t window = f->whole("sliding_window", 0);
  if (!types) {
    const Json *first = f->get("max_window_layers");
    int64_t from = first && first->kind == Json::Integer ? first->integer : c->layers;
    for (int64_t i = std::max<int64_t>(from, 0); i < c->layers; i++) c->windows[size_t(i)] = window;
    return;
  }
  if (types->items.size() != c->windows.size()) fail(KILAT_BAD_FILE, "config.json: layer_types does not fit the number of layers");
  for (size_t i = 0; i < c->windows.size(); i++) {
    if (is_kind(types->items[i], "sliding_attention")) c->windows[i] = window;
    else if (!is_kind(types->items[i], "full_attention")) fail(KILAT_UNSUPPORTED, "config.json: layer_types has an unknown type");
  }
}

void read_quantization(const Json &q, Config *c) {
  const Json *method = q.find("quant_method"), *blocks = q.find("weight_block_size");
  bool fits = method && method->text == "fp8" && blocks && blocks->items.size() == 2;
  for (size_t i = 0; fits && i < 2; i++)
    fits = blocks->items[i].kind == Json::Integer && blocks->items[i].integer >= 1 && blocks->items[i].integer <= 4096;
  if (!fits)
    fail(KILAT_UNSUPPORTED,
         "config.json: this quantization_config is not supported, only fp8 with weight_block_size; or use a GGUF file");
  c->block_rows = blocks->items[0].integer;
  c->block_cols = blocks->items[1].integer;
}

void read_ids(const Json *json, const char *key, std::vector<int32_t> *out) {
  const Json *value = json ? json->find(key) : nullptr;
  if (!value || value->kind == Json::Null || !out->empty()) return;
  const Json *first = value->kind == Json::Array ? value->items.data() : value;
  size_t n = value->kind == Json::Array ? value->items.size() : 1;
  for (size_t i = 0; i < n; i++) {
    if (first[i].kind != Json::Integer || first[i].integer < 0 || first[i].integer > INT32_MAX)
      fail(KILAT_BAD_FILE, "%s is not a token id", key);
    int32_t id = int32_t(first[i].integer);
    if (std::find(out->begin(), out->end(), id) == out->end()) out->push_back(id);
  }
}

void read_family(Fields *f, Config *c) {
  const std::string &a = c->architecture;
  if (a == "llama") {
    c->qkv_bias = c->out_bias = f->flag("attention_bias", false);
    c->mlp_bias = f->flag("mlp_bias", false);
    f->get("pretraining_tp"), f->get("rope_interleaved");
    const Json *tp = f->get("pretraining_tp"), *pairs = f->get("rope_interleaved");
    if ((tp && tp->real != 1) || (pairs && pairs->flag))
      fail(KILAT_UNSUPPORTED, "config.json: pretraining_tp or rope_interleaved is not supported");
    c->windows.assign(size_t(c->layers), 0);
  } else if (a == "mistral") {
    if (f->flag("attention_bias", false)) fail(KILAT_UNSUPPORTED, "config.json: mistral with attention_bias is not supported");
    const Json *window = f->get("sliding_window");
    bool fits = !window || (window->kind == Json::Integer && window->integer >= 0 && window->integer <= kMaxDim);
    if (!fits) fail(KILAT_BAD_FILE, "config.json: sliding_window is out of range");
    c->windows.assign(size_t(c->layers), window ? window->integer : 0);
  } else if (a == "qwen2") {
    c->qkv_bias = true;
    read_windows(f, c);
  } else if (a == "qwen3") {
    c->qkv_bias = c->out_bias = f->flag("attention_bias", false);
    c->qk_norm = true;
    read_windows(f, c);
  } else {
    fail(KILAT_UNSUPPORTED, "config.json: model_type '%.60s' is not supported; supported: llama, mistral, qwen2, qwen3", a.c_str());
  }
}

}  // namespace

Config config_of_json(const Json &json, const Json *generation) {
  if (json.kind != Json::Object) fail(KILAT_BAD_FILE, "config.json is not an object");
  Config c;
  Fields f(json, "config.json");
  const Json *kind = f.get("model_type");
  c.architecture = kind ? kind->text : "";
  bool mistral = c.architecture == "mistral", qwen3 = c.architecture == "qwen3", llama = c.architecture == "llama";
  c.hidden = f.whole("hidden_size", 0);
  c.inner = f.whole("intermediate_size", 0);
  c.vocab = f.whole("vocab_size", 0);
  c.layers = f.whole("num_hidden_layers", 0, kMaxLayers);
  c.q_heads = f.whole("num_attention_heads", 0);
  c.kv_heads = f.whole("num_key_value_heads", mistral ? 8 : c.q_heads);
  c.head_dim = f.whole("head_dim", qwen3 ? 128 : c.hidden / c.q_heads);
  c.max_context = f.whole("max_position_embeddings", llama ? 2048 : mistral ? 131072 : 32768);
  c.eps = f.number("rms_norm_eps", 1e-6);
  c.tied = f.flag("tie_word_embeddings", false);
  f.must_be_text("hidden_act", "silu");
  read_family(&f, &c);
  read_rope(&f, &c, 10000.0);
  if (const Json *q = f.get("quantization_config")) read_quantization(*q, &c);
  const Json *dtype = json.find("dtype"), *older = json.find("torch_dtype");
  const Json *stored = dtype && !dtype->text.empty() ? dtype : older;
  c.stored_f32 = stored && stored->text == "float32";
  read_ids(generation, "eos_token_id", &c.end_ids);
  read_ids(&json, "eos_token_id", &c.end_ids);
  std::vector<int32_t> bos;
  read_ids(generation, "bos_token_id", &bos);
  read_ids(&json, "bos_token_id", &bos);
  if (!bos.empty()) c.bos_id = bos[0];
  f.finish();
  return c;
}

}  // namespace kilat
