// All layers of a decoder, op after op. The order of operations is that of the package's decoder (nn/decoder.py).
#include "kilat_layers.h"

#include <math.h>
#include <string.h>

namespace {

int64_t element_bytes(const kilat_decoder &d) { return d.dtype == KILAT_F32 ? 4 : 2; }

// The buffers of a pass, cut from the caller's room; with `room` NULL they are only counted.
struct Buffers {
  char *normed, *qkv, *q, *attended, *gate_up, *inner;
  int32_t *row_start;
  int64_t bytes = 0;

  Buffers(const kilat_decoder &d, int64_t tokens, int64_t rows, char *room) {
    const int64_t row = tokens * element_bytes(d), q_width = d.heads.n_q * d.heads.dim, kv_width = d.heads.n_kv * d.heads.dim;
    bool wide = false;
    for (int64_t i = 0; i < d.n; i++) wide = wide || !kilat_gated_linear_can(d.layers[i].gate_up);
    normed = take(room, row * d.hidden);
    qkv = take(room, row * (q_width + 2 * kv_width));
    q = take(room, row * q_width);
    attended = take(room, row * q_width);
    gate_up = take(room, wide ? row * 2 * d.inner : 0);
    inner = take(room, row * d.inner);
    row_start = reinterpret_cast<int32_t *>(take(room, (rows + 1) * 4));
  }

 private:
  char *take(char *room, int64_t n) {
    char *at = room ? room + bytes : nullptr;
    bytes += (n + 63) / 64 * 64;
    return at;
  }
};

class Pass {
 public:
  Pass(kilat_cpu *cpu, const kilat_decoder &d, const kilat_pass &p, void *x, void *residual, void *room)
      : cpu_(cpu), d_(d), p_(p), b_(d, p.tokens, p.rows.rows, static_cast<char *>(room)), rows_(p.rows), n_(p.tokens),
        x_(static_cast<char *>(x)), residual_(static_cast<char *>(residual)) {}

  bool run() {
    kilat_attention_ahead(cpu_, d_.dtype, &p_.kv, &p_.rows);
    const bool done = layers();
    kilat_attention_ahead(cpu_, d_.dtype, &p_.kv, nullptr);
    kilat_follow_up(cpu_, nullptr);
    return done;
  }

 private:
  kilat_cpu *cpu_;
  const kilat_decoder &d_;
  const kilat_pass &p_;
  Buffers b_;
  kilat_rows rows_;
  int64_t n_;  // tokens that are still on their way
  char *x_, *residual_;

  bool layers() {
    for (int64_t i = 0; i < d_.n; i++) {
      const kilat_layer &l = d_.layers[i];
      const bool last = i + 1 == d_.n;
      enter(l, i);
      if (!keys_and_values(l, i)) return false;
      if (last && p_.wanted == KILAT_NO_TOKEN) return true;
      if (last && p_.wanted == KILAT_LAST_OF_ROWS) narrow();
      if (!attend(l, i) || !mlp(l)) return false;
    }
    return true;
  }

  void enter(const kilat_layer &l, int64_t layer) {
    if (layer == 0) {
      memcpy(residual_, x_, size_t(n_ * d_.hidden * element_bytes(d_)));
      kilat_rms_norm(cpu_, d_.dtype, x_, d_.hidden, n_, d_.hidden, l.norm_in, d_.eps, b_.normed);
    } else {
      kilat_add_rms_norm(cpu_, d_.dtype, x_, d_.hidden, residual_, n_, d_.hidden, l.norm_in, d_.eps, b_.normed);
    }
    if (p_.seen) p_.seen(p_.user, layer, residual_);
  }

  kilat_kv pages(int64_t layer) const {
    kilat_kv kv = p_.kv;
    kv.base = static_cast<char *>(kv.base) + layer * p_.layer_stride * element_bytes(d_);
    return kv;
  }

  bool keys_and_values(const kilat_layer &l, int64_t layer) {
    const int64_t width = (d_.heads.n_q + 2 * d_.heads.n_kv) * d_.heads.dim;
    kilat_follow_up(cpu_, l.o);
    if (kilat_linear_run(cpu_, l.qkv, b_.normed, d_.hidden, n_, b_.qkv)) return false;
    kilat_kv kv = pages(layer);
    kilat_rope_write(cpu_, d_.dtype, b_.qkv, width, n_, &d_.heads, p_.cos_sin, p_.positions, p_.slots, &kv, l.q_norm, l.k_norm, d_.qk_eps,
                     b_.q);
    return true;
  }

  // From now on only the last token of each row: to the front, in their order, so none is overwritten before it has moved.
  void narrow() {
    const int64_t q_bytes = d_.heads.n_q * d_.heads.dim * element_bytes(d_), bytes = d_.hidden * element_bytes(d_);
    n_ = rows_.rows;
    for (int64_t r = 0; r < n_; r++) {
      const int64_t from = rows_.row_start[r + 1] - 1;
      memmove(b_.q + r * q_bytes, b_.q + from * q_bytes, size_t(q_bytes));
      memmove(residual_ + r * bytes, residual_ + from * bytes, size_t(bytes));
    }
    for (int64_t r = 0; r <= n_; r++) b_.row_start[r] = int32_t(r);
    rows_.row_start = b_.row_start;
  }

  bool attend(const kilat_layer &l, int64_t layer) {
    kilat_kv kv = pages(layer);
    const double scale = pow(double(d_.heads.dim), -0.5);
    if (kilat_attention(cpu_, d_.dtype, b_.q, &d_.heads, &kv, &rows_, scale, l.window, b_.attended)) return false;
    const kilat_kv next = pages(layer + 1);
    kilat_attention_ahead(cpu_, d_.dtype, &next, layer + 1 < d_.n ? &p_.rows : nullptr);
    kilat_follow_up(cpu_, l.gate_up);
    if (kilat_linear_run(cpu_, l.o, b_.attended, d_.heads.n_q * d_.heads.dim, n_, x_)) return false;
    kilat_add_rms_norm(cpu_, d_.dtype, x_, d_.hidden, residual_, n_, d_.hidden, l.norm_mid, d_.eps, b_.normed);
    return true;
  }

  bool mlp(const kilat_layer &l) {
    kilat_follow_up(cpu_, l.down);
    if (kilat_gated_linear_can(l.gate_up)) {
      if (kilat_gated_linear_run(cpu_, l.gate_up, b_.normed, d_.hidden, n_, b_.inner)) return false;
    } else {
      if (kilat_linear_run(cpu_, l.gate_up, b_.normed, d_.hidden, n_, b_.gate_up)) return false;
      kilat_silu_mul(cpu_, d_.dtype, b_.gate_up, 2 * d_.inner, n_, d_.inner, b_.inner);
    }
    kilat_follow_up(cpu_, &l + 1 < d_.layers + d_.n ? (&l)[1].qkv : nullptr);
    return kilat_linear_run(cpu_, l.down, b_.inner, d_.inner, n_, x_) == 0;
  }
};

}  // namespace

extern "C" {

int64_t kilat_layers_room(const kilat_decoder *decoder, int64_t tokens, int64_t rows) {
  return Buffers(*decoder, tokens, rows, nullptr).bytes;
}

int kilat_layers_run(kilat_cpu *cpu, const kilat_decoder *decoder, const kilat_pass *pass, void *x, void *residual, void *room) {
  return Pass(cpu, *decoder, *pass, x, residual, room).run() ? 0 : -1;
}

}  // extern "C"
