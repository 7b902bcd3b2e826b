// From tensors and config to a kilat_model_desc: every tensor that the config asks for, with the shape that it asks for.
#include <string.h>

#include <algorithm>

#include "error.h"
#include "files.h"
#include "formats.h"

namespace kilat {

namespace {

const size_t kMaxJsonBytes = 100u << 20;

// A place in a layer: its name in GGUF and in Hugging Face checkpoints.
struct Name {
  const char *gguf, *hf;
};
const Name kNormIn = {"attn_norm", "input_layernorm"}, kQ = {"attn_q", "self_attn.q_proj"}, kK = {"attn_k", "self_attn.k_proj"},
           kV = {"attn_v", "self_attn.v_proj"}, kO = {"attn_output", "self_attn.o_proj"},
           kNormMid = {"ffn_norm", "post_attention_layernorm"}, kGate = {"ffn_gate", "mlp.gate_proj"},
           kUp = {"ffn_up", "mlp.up_proj"}, kDown = {"ffn_down", "mlp.down_proj"}, kQNorm = {"attn_q_norm", "self_attn.q_norm"},
           kKNorm = {"attn_k_norm", "self_attn.k_norm"};
const Name kEmbedding = {"token_embd", "model.embed_tokens"}, kNorm = {"output_norm", "model.norm"}, kHead = {"output", "lm_head"};

// A tensor of either kind of file.
struct Found {
  int32_t type;
  int64_t rows, cols;
  int dims;
  Bytes data;
};

uint64_t mix(uint64_t hash, const void *data, size_t n) {  // FNV-1a
  const unsigned char *p = static_cast<const unsigned char *>(data);
  for (size_t i = 0; i < n; i++) hash = (hash ^ p[i]) * 0x100000001b3u;
  return hash;
}

class Taker {
 public:
  explicit Taker(Source *source) : source_(source) {}

  std::vector<SafeTensor> safetensors;  // of all files, sorted by name
  size_t taken = 0;

  // The tensor at a place: of the model when layer < 0. It must be there unless `optional`.
  kilat_tensor take(const Name &name, int64_t layer, const char *kind, int64_t rows, int64_t cols, bool optional = false) {
    char full[128];
    const char *own = is_gguf() ? name.gguf : name.hf, *folder = is_gguf() ? "blk" : "model.layers";
    if (layer < 0) snprintf(full, sizeof full, "%s.%s", own, kind);
    else snprintf(full, sizeof full, "%s.%lld.%s.%s", folder, static_cast<long long>(layer), own, kind);
    Found found;
    if (!find(full, &found)) {
      if (optional) return {};
      fail(KILAT_BAD_FILE, "the model has no tensor %s, which its config asks for", full);
    }
    int dims = rows > 0 ? 2 : 1;
    if (found.dims != dims || found.cols != cols || (dims == 2 && found.rows != rows))
      fail(KILAT_BAD_FILE, "tensor %s has shape [%lld, %lld], the config asks for [%lld, %lld]", full,
           static_cast<long long>(found.rows), static_cast<long long>(found.cols), static_cast<long long>(dims == 2 ? rows : 1),
           static_cast<long long>(cols));
    taken++;
    source_->parameters += found.rows * found.cols;
    source_->tensor_bytes += int64_t(found.data.size);
    source_->identity = mix(source_->identity, full, strlen(full));
    source_->identity = mix(source_->identity, found.data.data, std::min<size_t>(found.data.size, 64));
    return describe(full, found, dims);
  }

  bool is_gguf() const { return !source_->gguf.tensors.empty(); }

 private:
  Source *source_;

  bool find(const char *name, Found *out) const {
    if (is_gguf()) {
      const GgufTensor *t = source_->gguf.tensor(name);
      if (t) *out = {t->type, t->rows, t->cols, t->dims, t->data};
      return t;
    }
    auto at = std::lower_bound(safetensors.begin(), safetensors.end(), name,
                               [](const SafeTensor &t, const char *n) { return t.name < n; });
    if (at == safetensors.end() || at->name != name) return false;
    *out = {at->type, at->rows, at->cols, at->dims, at->data};
    return true;
  }

  kilat_tensor describe(const char *name, const Found &found, int dims) {
    const Format *f = format_of(found.type);
    bool fp8 = found.type == KILAT_TYPE_F8_E4M3 && dims == 2 && source_->config.block_rows > 0;
    if (!f || !(fp8 || (f->readable && (dims == 2 || f->items == 1))))
      fail(KILAT_UNSUPPORTED,
           "tensor %s is stored as %s; supported: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, and F8_E4M3 with "
           "scales",
           name, f ? f->name : "a type that no model here uses");
    kilat_tensor t = {};
    t.data = found.data.data;
    t.rows = found.rows;
    t.cols = found.cols;
    t.row_bytes = found.cols / f->items * f->bytes;
    t.type = found.type;
    if (fp8) add_scales(name, &t);
    return t;
  }

  void add_scales(const char *name, kilat_tensor *t) {
    char scales[160];
    snprintf(scales, sizeof scales, "%s_scale_inv", name);
    const Config &c = source_->config;
    Found found;
    bool fits = find(scales, &found) && (found.type == KILAT_TYPE_F32 || found.type == KILAT_TYPE_BF16) && found.dims == 2 &&
                found.rows == (t->rows + c.block_rows - 1) / c.block_rows &&
                found.cols == (t->cols + c.block_cols - 1) / c.block_cols;
    if (!fits) fail(KILAT_BAD_FILE, "tensor %s of fp8 has no %s of the right shape, in F32 or BF16", name, scales);
    t->scales = found.data.data;
    t->scale_type = found.type;
    t->block_rows = int32_t(c.block_rows);
    t->block_cols = int32_t(c.block_cols);
  }
};

kilat_layer_desc describe_layer(Taker *t, const Config &c, int64_t i) {
  const int64_t q = c.q_heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  kilat_layer_desc d = {};
  d.norm_in = t->take(kNormIn, i, "weight", 0, c.hidden);
  d.q = t->take(kQ, i, "weight", q, c.hidden);
  d.k = t->take(kK, i, "weight", kv, c.hidden);
  d.v = t->take(kV, i, "weight", kv, c.hidden);
  d.o = t->take(kO, i, "weight", c.hidden, q);
  d.norm_mid = t->take(kNormMid, i, "weight", 0, c.hidden);
  d.gate = t->take(kGate, i, "weight", c.inner, c.hidden);
  d.up = t->take(kUp, i, "weight", c.inner, c.hidden);
  d.down = t->take(kDown, i, "weight", c.hidden, c.inner);
  if (c.qkv_bias) {
    d.q_bias = t->take(kQ, i, "bias", 0, q);
    d.k_bias = t->take(kK, i, "bias", 0, kv);
    d.v_bias = t->take(kV, i, "bias", 0, kv);
  }
  if (c.out_bias) d.o_bias = t->take(kO, i, "bias", 0, c.hidden);
  if (c.mlp_bias) {
    d.gate_bias = t->take(kGate, i, "bias", 0, c.inner);
    d.up_bias = t->take(kUp, i, "bias", 0, c.inner);
    d.down_bias = t->take(kDown, i, "bias", 0, c.hidden);
  }
  if (c.qk_norm) {
    d.q_norm = t->take(kQNorm, i, "weight", 0, c.head_dim);
    d.k_norm = t->take(kKNorm, i, "weight", 0, c.head_dim);
  }
  d.window = c.windows[size_t(i)];
  if (c.paired) {
    d.q.paired_heads = d.q_bias.paired_heads = int32_t(c.q_heads);
    d.k.paired_heads = d.k_bias.paired_heads = int32_t(c.kv_heads);
  }
  return d;
}

void check_shape(const Config &c) {
  if (c.head_dim > 256 || c.head_dim % 2)
    fail(KILAT_UNSUPPORTED, "heads have %lld elements; supported: an even number up to 256", static_cast<long long>(c.head_dim));
  if (c.q_heads % c.kv_heads) fail(KILAT_BAD_FILE, "the number of query heads is not a multiple of the number of key/value heads");
  if (c.q_heads * c.head_dim > 1 << 24 || c.max_context > 1 << 24) fail(KILAT_BAD_FILE, "the config asks for sizes past 2^24");
}

void describe(Source *s, Taker *t) {
  const Config &c = s->config;
  check_shape(c);
  kilat_model_desc &d = s->desc;
  d.vocab = c.vocab, d.hidden = c.hidden, d.inner = c.inner, d.n_layers = c.layers;
  d.q_heads = c.q_heads, d.kv_heads = c.kv_heads, d.head_dim = c.head_dim;
  d.rotary = c.rope.dim, d.max_context = c.max_context;
  d.norm_eps = d.qk_norm_eps = c.eps;
  s->frequencies.resize(size_t(c.rope.dim / 2));
  d.rope_factor = inverse_frequencies(c.rope, c.max_context, s->frequencies.data());
  d.inverse_frequencies = s->frequencies.data();
  d.tied = c.tied;
  const double numbers[] = {double(c.vocab),    double(c.hidden),  double(c.inner), double(c.layers),       double(c.q_heads),
                            double(c.kv_heads), double(c.head_dim), c.eps,          double(d.rope_factor), double(c.tied)};
  s->identity = mix(0xcbf29ce484222325u, numbers, sizeof numbers);
  s->identity = mix(s->identity, s->frequencies.data(), s->frequencies.size() * sizeof(float));
  s->identity = mix(s->identity, c.windows.data(), c.windows.size() * sizeof(int64_t));
  d.embedding = t->take(kEmbedding, -1, "weight", c.vocab, c.hidden);
  d.norm = t->take(kNorm, -1, "weight", 0, c.hidden);
  if (!c.tied) d.head = t->take(kHead, -1, "weight", c.vocab, c.hidden);
  for (int64_t i = 0; i < c.layers; i++) s->layers.push_back(describe_layer(t, c, i));
  d.layers = s->layers.data();
}

}  // namespace

std::unique_ptr<Source> source_of_gguf(Bytes file, const char *name) {
  std::unique_ptr<Source> s(new Source);
  s->gguf = read_gguf(file, name);
  s->config = config_of_gguf(s->gguf, name);
  Taker t(s.get());
  describe(s.get(), &t);
  // A tensor that nobody asked for would be a part of the model that is left out.
  size_t known = t.taken + (s->gguf.tensor("rope_freqs.weight") ? 1 : 0);
  if (known != s->gguf.tensors.size())
    fail(KILAT_UNSUPPORTED, "%s has %zu tensors, of which this model uses %zu: use another conversion of the model", name,
         s->gguf.tensors.size(), known);
  return s;
}

std::unique_ptr<Source> source_of_safetensors(Bytes config, const Bytes *generation, const std::vector<Bytes> &shards) {
  if (config.size > kMaxJsonBytes || (generation && generation->size > kMaxJsonBytes))
    fail(KILAT_BAD_FILE, "config.json has more than 100 MiB");
  std::unique_ptr<Source> s(new Source);
  Json generation_json;
  if (generation) generation_json = parse_json({generation->data, generation->size}, "generation_config.json");
  s->config = config_of_json(parse_json({config.data, config.size}, "config.json"), generation ? &generation_json : nullptr);
  Taker t(s.get());
  for (const Bytes &shard : shards)
    for (SafeTensor &tensor : read_safetensors(shard, "a safetensors file")) t.safetensors.push_back(std::move(tensor));
  std::sort(t.safetensors.begin(), t.safetensors.end(), [](const SafeTensor &a, const SafeTensor &b) { return a.name < b.name; });
  for (size_t i = 1; i < t.safetensors.size(); i++)
    if (t.safetensors[i].name == t.safetensors[i - 1].name)
      fail(KILAT_BAD_FILE, "two safetensors files hold the same tensor: one is left over");
  describe(s.get(), &t);
  return s;
}

}  // namespace kilat
