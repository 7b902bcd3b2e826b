#include "cpu_weights.h"

#include <string.h>

#include <initializer_list>

#include "error.h"
#include "formats.h"

namespace kilat {

namespace {

int64_t element_bytes(int dtype) { return dtype == KILAT_F32 ? 4 : 2; }

// Tensors whose rows are stacked into one weight, or whose values into one bias.
struct Stack {
  const kilat_tensor *parts[3];
  int n;
  int dtype;
  Stack(std::initializer_list<const kilat_tensor *> list, int dtype) : n(0), dtype(dtype) {
    for (const kilat_tensor *t : list) parts[n++] = t;
  }
  int64_t rows() const {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) sum += parts[i]->rows;
    return sum;
  }
  int64_t cols() const { return parts[0]->cols; }
};

// Where row r is stored. `count` is the number of rows (of values, for a bias).
int64_t stored_row(const kilat_tensor &t, int64_t count, int64_t r) {
  if (t.paired_heads == 0) return r;
  int64_t dim = count / t.paired_heads, half = dim / 2, head = r / dim, within = r % dim;
  return head * dim + within % half * 2 + within / half;
}

const void *row_of_stack(void *user, int64_t r, void *room) {
  const Stack &s = *static_cast<const Stack *>(user);
  int part = 0;
  while (r >= s.parts[part]->rows) r -= s.parts[part++]->rows;
  const kilat_tensor &t = *s.parts[part];
  const char *row = static_cast<const char *>(t.data) + stored_row(t, t.rows, r) * t.row_bytes;
  if (t.type == (s.dtype == KILAT_F32 ? KILAT_TYPE_F32 : KILAT_TYPE_BF16)) return row;
  convert_row(t.type, row, t.cols, s.dtype, room);
  return room;
}

// A bias or a norm, in the order of the package's checkpoints.
void convert_vector(const kilat_tensor &t, int dtype, void *out) {
  int64_t item = format_of(t.type)->bytes, element = element_bytes(dtype);
  for (int64_t i = 0; i < t.cols; i++) {
    const char *from = static_cast<const char *>(t.data) + stored_row(t, t.cols, i) * item;
    convert_row(t.type, from, 1, dtype, static_cast<char *>(out) + i * element);
  }
}

// The parts of a stack as kilat_linear_pack_quant takes them, with rows that must change places copied.
struct Blocks {
  kilat_blocks parts[3];
  std::vector<char> moved[3];

  explicit Blocks(const Stack &s) {
    for (int i = 0; i < s.n; i++) parts[i] = {s.parts[i]->type, s.parts[i]->data, s.parts[i]->row_bytes, s.parts[i]->rows};
  }

  void put_in_order(const Stack &s) {
    for (int i = 0; i < s.n; i++) {
      const kilat_tensor &t = *s.parts[i];
      if (t.paired_heads == 0) continue;
      moved[i].resize(size_t(t.rows * t.row_bytes));
      for (int64_t r = 0; r < t.rows; r++)
        memcpy(moved[i].data() + r * t.row_bytes, static_cast<const char *>(t.data) + stored_row(t, t.rows, r) * t.row_bytes,
               size_t(t.row_bytes));
      parts[i].data = moved[i].data();
    }
  }
};

class Loader {
 public:
  Loader(const kilat_model_desc &desc, kilat_cpu *cpu, int dtype, CpuWeights *out) : d_(desc), cpu_(cpu), dtype_(dtype), w_(*out) {
    w_.stored = desc.weights != KILAT_WEIGHTS_WIDE && dtype == KILAT_BF16;
  }

  // Twice the same walk: the first counts, the second takes and fills.
  void run() {
    w_.layers.resize(size_t(d_.n_layers));
    walk();
    int64_t total = w_.linear_bytes + w_.embedding_bytes + w_.small_bytes;
    if (!w_.region.open(total))
      fail(KILAT_NO_MEMORY, "the weights need %lld bytes of memory, which the system does not give", static_cast<long long>(total));
    w_.linear_bytes = w_.embedding_bytes = w_.small_bytes = 0;
    filling_ = true;
    walk();
  }

 private:
  const kilat_model_desc &d_;
  kilat_cpu *cpu_;
  int dtype_;
  CpuWeights &w_;
  bool filling_ = false;

  // A weight stays in its blocks when all of it is in blocks that the kernels know.
  bool stays(const Stack &s) const {
    for (int i = 0; i < s.n; i++)
      if (!kilat_block_values(s.parts[i]->type)) return false;
    return w_.stored;
  }

  void walk() {
    w_.gather_head = d_.tied;
    if (!w_.gather_head) embedding();
    for (int64_t i = 0; i < d_.n_layers; i++) {
      const kilat_layer_desc &l = d_.layers[i];
      kilat_layer &out = w_.layers[size_t(i)];
      out.window = l.window;
      out.norm_in = vector(l.norm_in);
      out.norm_mid = vector(l.norm_mid);
      out.q_norm = vector(l.q_norm);
      out.k_norm = vector(l.k_norm);
      out.qkv = linear(Stack({&l.q, &l.k, &l.v}, dtype_), Stack({&l.q_bias, &l.k_bias, &l.v_bias}, dtype_));
      out.o = linear(Stack({&l.o}, dtype_), Stack({&l.o_bias}, dtype_));
      out.gate_up = linear(Stack({&l.gate, &l.up}, dtype_), Stack({&l.gate_bias, &l.up_bias}, dtype_));
      out.down = linear(Stack({&l.down}, dtype_), Stack({&l.down_bias}, dtype_));
    }
    w_.norm = vector(d_.norm);
    const kilat_tensor none = {};
    w_.head = linear(Stack({d_.tied ? &d_.embedding : &d_.head}, dtype_), Stack({&none}, dtype_));
  }

  // Block formats stay as they are, for a step reads one row; plain numbers become the dtype.
  void embedding() {
    const kilat_tensor &t = d_.embedding;
    bool plain = format_of(t.type)->items == 1;
    w_.embedding_row_bytes = plain ? t.cols * element_bytes(dtype_) : t.row_bytes;
    w_.embedding_type = !plain ? t.type : dtype_ == KILAT_F32 ? KILAT_TYPE_F32 : KILAT_TYPE_BF16;
    int64_t bytes = t.rows * w_.embedding_row_bytes;
    w_.embedding_bytes = Region::room(bytes);
    if (!filling_) return;
    char *to = static_cast<char *>(w_.region.take(bytes));
    w_.embedding = to;
    if (!plain || t.type == w_.embedding_type) {
      memcpy(to, t.data, size_t(bytes));
      return;
    }
    for (int64_t r = 0; r < t.rows; r++)
      convert_row(t.type, static_cast<const char *>(t.data) + r * t.row_bytes, t.cols, dtype_, to + r * w_.embedding_row_bytes);
  }

  void *vector(const kilat_tensor &t) {
    if (!t.data) return nullptr;
    int64_t bytes = t.cols * element_bytes(dtype_);
    w_.small_bytes += Region::room(bytes);
    if (!filling_) return nullptr;
    void *out = w_.region.take(bytes);
    convert_vector(t, dtype_, out);
    return out;
  }

  kilat_linear *linear(const Stack &weight, const Stack &bias) {
    const bool with_bias = bias.parts[0]->data, blocks = stays(weight);
    Blocks parts(weight);
    int64_t bytes = blocks ? kilat_linear_quant_size(parts.parts, weight.n, weight.cols(), with_bias)
                           : kilat_linear_size(dtype_, weight.rows(), weight.cols(), with_bias);
    w_.linear_bytes += Region::room(bytes);
    if (!filling_) return nullptr;
    std::vector<char> values;
    if (with_bias) values.resize(size_t(weight.rows() * element_bytes(dtype_)));
    char *to = values.data();
    for (int i = 0; with_bias && i < bias.n; i++) {
      convert_vector(*bias.parts[i], dtype_, to);
      to += bias.parts[i]->cols * element_bytes(dtype_);
    }
    const void *b = with_bias ? values.data() : nullptr;
    void *memory = w_.region.take(bytes);
    if (blocks) parts.put_in_order(weight);
    kilat_linear *out = blocks ? kilat_linear_pack_quant(cpu_, parts.parts, weight.n, weight.cols(), b, memory)
                               : kilat_linear_pack_rows(cpu_, dtype_, weight.rows(), weight.cols(), row_of_stack,
                                                        const_cast<Stack *>(&weight), b, memory);
    if (!out) fail(KILAT_NO_MEMORY, "no memory to pack the weights");
    return out;
  }
};

}  // namespace

CpuWeights::~CpuWeights() {
  for (kilat_layer &l : layers)
    for (const kilat_linear *w : {l.qkv, l.o, l.gate_up, l.down}) kilat_linear_free(const_cast<kilat_linear *>(w));
  kilat_linear_free(head);
}

void load_weights(const kilat_model_desc &desc, kilat_cpu *cpu, int dtype, CpuWeights *out) { Loader(desc, cpu, dtype, out).run(); }

void convert_row(int32_t type, const void *data, int64_t n, int dtype, void *out) {
  if (dtype == KILAT_F32) return widen_row(type, data, n, static_cast<float *>(out));
  if (type == KILAT_TYPE_BF16) {
    memcpy(out, data, size_t(n) * 2);
    return;
  }
  const Format *f = format_of(type);
  const char *from = static_cast<const char *>(data);
  uint16_t *to = static_cast<uint16_t *>(out);
  float wide[256];
  for (int64_t done = 0; done < n; done += 256) {
    int64_t count = n - done < 256 ? n - done : 256;
    widen_row(type, from + done / f->items * f->bytes, count, wide);
    for (int64_t i = 0; i < count; i++) to[done + i] = bf16_of(wide[i]);
  }
}

}  // namespace kilat
