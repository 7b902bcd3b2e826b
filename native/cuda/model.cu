// model.cu: weights of a description to device memory.
#include <algorithm>
#include <cstdio>
#include <new>
#include <vector>

#include "model.h"
#include "pack.h"

namespace kilat_cuda {

int fail_cuda(kilat_failure *f, cudaError_t error, const char *what) {
  cudaGetLastError();  // a failed allocation would otherwise be reported again by a later call
  return kilat_fail(f, error == cudaErrorMemoryAllocation ? KILAT_NO_MEMORY : KILAT_DEVICE_FAILED, "%s: %s", what, cudaGetErrorString(error));
}

namespace {

// The stored tensors that make up one matrix: at most three, concatenated, or two whose rows alternate by eight.
struct Parts {
  const kilat_tensor *tensors[3], *biases[3];
  int n;
  bool alternate;
};

Parts parts_of(const kilat_model_desc &d, int layer, int kind) {
  if (kind == kHead) return {{d.tied ? &d.embedding : &d.head}, {nullptr}, 1, false};
  const kilat_layer_desc &l = d.layers[layer];
  switch (kind) {
    case kQkv: return {{&l.q, &l.k, &l.v}, {&l.q_bias, &l.k_bias, &l.v_bias}, 3, false};
    case kOut: return {{&l.o}, {&l.o_bias}, 1, false};
    case kGateUp: return {{&l.gate, &l.up}, {&l.gate_bias, &l.up_bias}, 2, true};
    default: return {{&l.down}, {&l.down_bias}, 1, false};
  }
}

class Builder {
 public:
  Builder(const kilat_model_desc &desc, kilat_device_model &model, kilat_failure *f) : d_(desc), m_(model), v_(model.view), f_(f) {}
  ~Builder() {
    if (staging_) cudaFree(staging_);
  }

  int run(const kilat_options *options) {
    int status = check();
    if (status == KILAT_OK) status = open(options);
    if (status != KILAT_OK) return status;
    shapes();
    choose();
    if ((status = fit()) != KILAT_OK) return status;
    Carver sizes(nullptr);
    carve(sizes);
    cudaError_t error = cudaMalloc(reinterpret_cast<void **>(&m_.arena), sizes.used());
    if (error == cudaSuccess) error = cudaMemset(m_.arena, 0, sizes.used());
    if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void **>(&staging_), staging_bytes());
    if (error != cudaSuccess) return fail_cuda(f_, error, "memory for the weights on the device");
    Carver places(m_.arena);
    carve(places);
    m_.prompt = fit_prompt(v_, m_.matrices.data(), m_.blocks, shared_limit_, m_.max_splits);
    if (m_.prompt.attention_queries == 0)
      return kilat_fail(f_, KILAT_UNSUPPORTED, "the device's %d bytes of shared memory are too few for prompts of this model", shared_limit_);
    error = fill();
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    return error == cudaSuccess ? KILAT_OK : fail_cuda(f_, error, "packing the weights on the device");
  }

 private:
  int check() {
    const int64_t attended = d_.q_heads * d_.head_dim;
    if (d_.dtype != KILAT_DTYPE_BF16)
      return kilat_fail(f_, KILAT_UNSUPPORTED, "a CUDA device computes in bf16, the model's dtype is fp32: ask for bf16, or take the CPU");
    if (d_.head_dim % 8 || d_.head_dim > 256 || d_.hidden % 8 || d_.hidden > kMostHidden || d_.inner % 8 || attended % 8)
      return kilat_fail(f_, KILAT_UNSUPPORTED,
                        "the CUDA kernels take heads of at most 256 elements, a hidden size of at most %d, all sizes multiples of 8; got "
                        "head_dim %lld, hidden %lld, inner %lld",
                        kMostHidden, (long long)d_.head_dim, (long long)d_.hidden, (long long)d_.inner);
    return KILAT_OK;
  }

  int open(const kilat_options *options) {
    m_.device = options ? options->device_index : 0;
    int count = 0;
    cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) return kilat_fail(f_, KILAT_UNSUPPORTED, "no CUDA device: %s", cudaGetErrorString(error));
    if (m_.device < 0 || m_.device >= count)
      return kilat_fail(f_, KILAT_BAD_ARGUMENT, "CUDA device %d of %d; they count from 0", m_.device, count);
    if ((error = cudaSetDevice(m_.device)) != cudaSuccess || (error = cudaGetDeviceProperties(&properties, m_.device)) != cudaSuccess)
      return fail_cuda(f_, error, "opening the device");
    if (properties.major < 8)
      return kilat_fail(f_, KILAT_UNSUPPORTED, "%s has compute capability %d.%d; 8.0 is the least that has bf16 products",
                        properties.name, properties.major, properties.minor);
    m_.blocks = std::min(properties.multiProcessorCount, kThreads);
    const int64_t groups = d_.kv_heads * ((d_.q_heads / d_.kv_heads + 7) / 8);
    if (groups > m_.blocks)
      return kilat_fail(f_, KILAT_UNSUPPORTED, "the model has %lld groups of heads, the device only %d processors for them", (long long)groups,
                        m_.blocks);
    shared_limit_ = int(properties.sharedMemPerBlockOptin);
    most_slots_ = properties.major >= 9 ? 8 : 4;
    m_.max_splits = int(std::clamp<int64_t>(m_.blocks / groups, 1, 32));
    snprintf(m_.kernels, sizeof m_.kernels, "cuda-sm%d%d-%d", properties.major, properties.minor, m_.blocks);
    return KILAT_OK;
  }

  void shapes() {
    const int64_t attended = d_.q_heads * d_.head_dim;
    v_.shape[kQkv] = shape_of(attended + 2 * d_.kv_heads * d_.head_dim, d_.hidden, m_.blocks);
    v_.shape[kOut] = shape_of(d_.hidden, attended, m_.blocks);
    v_.shape[kGateUp] = shape_of(2 * d_.inner, d_.hidden, m_.blocks);
    v_.shape[kDown] = shape_of(d_.hidden, d_.inner, m_.blocks);
    v_.shape[kHead] = shape_of(d_.vocab, d_.hidden, m_.blocks);
    m_.lockstep = v_.shape[kGateUp].share == 0;
    v_.layers = int(d_.n_layers), v_.hidden = int(d_.hidden), v_.inner = int(d_.inner), v_.vocab = int(d_.vocab);
    v_.q_heads = int(d_.q_heads), v_.kv_heads = int(d_.kv_heads), v_.head_dim = int(d_.head_dim), v_.rotary = int(d_.rotary);
    m_.frequencies.assign(d_.inverse_frequencies, d_.inverse_frequencies + d_.rotary / 2);
    m_.rope_factor = d_.rope_factor;
    v_.norm_eps = float(d_.norm_eps), v_.qk_norm_eps = float(d_.qk_norm_eps);
  }

  // Formats: as stored where all parts of a matrix are stored alike in a format that the kernels read.
  void choose() {
    m_.weights = d_.weights == KILAT_WEIGHTS_WIDE ? KILAT_WEIGHTS_WIDE : KILAT_WEIGHTS_STORED;
    formats_.assign(v_.layers * kLayerMatrices + 1, kBf16);
    v_.narrow = 0;
    for (int i = 0; i < int(formats_.size()); ++i) {
      const Parts p = parts_of(d_, i / kLayerMatrices, kind(i));
      const int format = stored_format(*p.tensors[0]);
      bool alike = m_.weights == KILAT_WEIGHTS_STORED;
      for (int k = 1; k < p.n; ++k) alike = alike && stored_format(*p.tensors[k]) == format;
      if (alike) formats_[i] = format;
      v_.narrow |= formats_[i] == kQ4 || formats_[i] == kQ4Min;
    }
  }

  // Cuts the shared memory of a block into rings and work space.
  int fit() {
    int units = 0, dim = v_.head_dim;
    m_.slot_bytes = round_bytes(dim);
    for (const Shape &s : v_.shape) units = std::max(units, s.units);
    for (int format : formats_) m_.slot_bytes = std::max(m_.slot_bytes, (1 << chunk_shift(format, v_.narrow)) * unit_bytes(format));
    const int vector = units * kUnitColumns * 2 + 2048;  // and the sums of two tiles
    const int attention = (8 + 2) * dim * 2 + kWarps * (dim + 2) * 4;
    m_.work_bytes = (std::max({vector, attention, 16 * 1024}) + 127) / 128 * 128;
    const int table = kScratch * 4 + int(formats_.size() * sizeof(MatrixPlace)), left = shared_limit_ - m_.work_bytes - table;
    m_.slots = std::min(most_slots_, left / (kWarps * (m_.slot_bytes + 16)));
    if (m_.slots < 2)
      return kilat_fail(f_, KILAT_UNSUPPORTED, "the device's %d bytes of shared memory are too few for an inner size of %d", shared_limit_, v_.inner);
    m_.shared_bytes = m_.work_bytes + table + m_.slots * kWarps * (m_.slot_bytes + 16);
    // on an H200 the rings of a model of 8 B hold 17 MB, and as much again may be on its way to the cache, a chunk of every warp in about
    // the time in which memory brings them
    m_.pace = {1, std::max(1, 16 * 1024 / m_.slot_bytes), unsigned(m_.slot_bytes * 3500ll / 8192)};
    cudaError_t error = prepare_kernels(m_.shared_bytes);
    if (error == cudaSuccess) error = prepare_prompt(shared_limit_);
    return error == cudaSuccess ? KILAT_OK : fail_cuda(f_, error, "kernels for this device");
  }

  int kind(int index) const { return index == v_.layers * kLayerMatrices ? kHead : index % kLayerMatrices; }

  void carve(Carver &c) {
    const int head = v_.layers * kLayerMatrices;
    m_.matrices.resize(head + 1);
    for (int i = 0; i <= head; ++i)
      m_.matrices[i] = {reinterpret_cast<uint64_t>(c.take<char>(matrix_bytes(v_.shape[kind(i)], formats_[i]))) | uint64_t(formats_[i])};
    m_.weight_bytes = c.used();
    // a tied bf16 head is read by rows too
    v_.embedding = d_.tied && formats_[head] == kBf16 ? nullptr : c.take<__nv_bfloat16>(d_.vocab * d_.hidden);
    m_.embedding_bytes = c.used() - m_.weight_bytes;
    matrices_ = c.take<MatrixPlace>(head + 1);
    norms_ = c.take<__nv_bfloat16>((2 * v_.layers + 1) * d_.hidden);
    qk_norms_ = v_.layers && d_.layers[0].q_norm.data ? c.take<__nv_bfloat16>(2 * v_.layers * d_.head_dim) : nullptr;
    for (int k = 0; k < kLayerMatrices; ++k)
      biases_[k] = has_bias(k) ? c.take<float>(int64_t(v_.layers) * v_.shape[k].tiles * kTileRows) : nullptr;
    bool windows = false;
    for (int l = 0; l < v_.layers; ++l) windows |= d_.layers[l].window > 0;
    windows_ = windows ? c.take<int>(v_.layers) : nullptr;
    m_.table_bytes = c.used() - m_.weight_bytes - m_.embedding_bytes;
    v_.matrices = matrices_, v_.norms = norms_, v_.qk_norms = qk_norms_, v_.windows = windows_;
    for (int k = 0; k < kLayerMatrices; ++k) v_.biases[k] = biases_[k];
  }

  bool has_bias(int k) const {
    for (int l = 0; l < v_.layers; ++l) {
      const Parts p = parts_of(d_, l, k);
      for (int i = 0; i < p.n; ++i)
        if (p.biases[i]->data) return true;
    }
    return false;
  }

  static int64_t scale_bytes_of(const kilat_tensor &t) {
    if (!t.scales) return 0;
    const int64_t n = (t.rows + t.block_rows - 1) / t.block_rows * ((t.cols + t.block_cols - 1) / t.block_cols);
    return n * (t.scale_type == KILAT_TYPE_F32 ? 4 : 2);
  }

  template <class Visit>
  void each_tensor(Visit visit) const {
    visit(d_.embedding), visit(d_.norm), visit(d_.head);
    for (int l = 0; l < v_.layers; ++l) {
      const kilat_layer_desc &y = d_.layers[l];
      for (const kilat_tensor *t : {&y.norm_in, &y.q, &y.k, &y.v, &y.o, &y.norm_mid, &y.gate, &y.up, &y.down, &y.q_bias, &y.k_bias,
                                    &y.v_bias, &y.o_bias, &y.gate_bias, &y.up_bias, &y.down_bias, &y.q_norm, &y.k_norm})
        visit(*t);
    }
  }

  int64_t staging_bytes() const {
    int64_t most = 1;
    each_tensor([&](const kilat_tensor &t) {
      if (t.data) most = std::max(most, ((t.rows * t.row_bytes + 255) & ~int64_t(255)) + scale_bytes_of(t));
    });
    return most;
  }

  cudaError_t upload(const kilat_tensor &t, Source &s) {
    const int64_t bytes = t.rows * t.row_bytes, after = (bytes + 255) & ~int64_t(255);
    s = {staging_, t.rows, t.cols, t.row_bytes, t.type, t.paired_heads, int(t.paired_heads ? t.rows / t.paired_heads : 0), staging_ + after,
         t.scale_type, t.block_rows, t.block_cols};
    cudaError_t error = cudaMemcpyAsync(staging_, t.data, bytes, cudaMemcpyHostToDevice);
    if (error == cudaSuccess && t.scales) error = cudaMemcpyAsync(staging_ + after, t.scales, scale_bytes_of(t), cudaMemcpyHostToDevice);
    return error;
  }

  template <class T>
  cudaError_t vector(const kilat_tensor &t, T *out) {
    if (!t.data) return cudaSuccess;
    Source s;
    const cudaError_t error = upload(t, s);
    return error == cudaSuccess ? widen(s, out, nullptr) : error;
  }

  cudaError_t matrix(int index) {
    const Parts p = parts_of(d_, index / kLayerMatrices, kind(index));
    int half = 0;
    for (int i = 0; i < p.n; ++i) {
      Source s;
      cudaError_t error = upload(*p.tensors[i], s);
      if (error != cudaSuccess) return error;
      const Target t{m_.matrices[index].at(), formats_[index], v_.shape[kind(index)].units, v_.narrow != 0, p.alternate ? i : half, p.alternate ? 2 : 1};
      if ((error = pack(s, t, nullptr)) != cudaSuccess) return error;
      half += int(p.tensors[i]->rows / 8);
    }
    return cudaSuccess;
  }

  // Biases in the packed order of rows. Parts that alternate are brought into it here, on the host.
  cudaError_t bias(int layer, int k) {
    const Parts p = parts_of(d_, layer, k);
    float *to = biases_[k] + int64_t(layer) * v_.shape[k].tiles * kTileRows;
    for (int i = 0; i < p.n; ++i) {
      const int64_t rows = p.tensors[i]->rows;
      if (p.biases[i]->data) {
        Source s;
        cudaError_t error = upload(*p.biases[i], s);
        if (error != cudaSuccess) return error;
        // a column, so that pairs are rows
        s.rows = s.columns, s.columns = 1, s.row_bytes /= s.rows;
        if (s.paired_heads) s.head_dim = int(s.rows / s.paired_heads);
        float *flat = p.alternate ? reinterpret_cast<float *>(staging_ + ((p.biases[i]->row_bytes + 255) & ~int64_t(255))) : to;
        if ((error = widen(s, flat, nullptr)) != cudaSuccess) return error;
        if (p.alternate) error = cudaMemcpy2DAsync(to + i * 8, 64, flat, 32, 32, rows / 8, cudaMemcpyDeviceToDevice);
        if (error != cudaSuccess) return error;
      }
      if (!p.alternate) to += rows;
    }
    return cudaSuccess;
  }

  cudaError_t fill() {
    cudaError_t error = cudaMemcpy(matrices_, m_.matrices.data(), m_.matrices.size() * sizeof(MatrixPlace), cudaMemcpyHostToDevice);
    const auto then = [&](cudaError_t next) {
      if (error == cudaSuccess) error = next;
    };
    for (int i = 0; i < int(m_.matrices.size()) && error == cudaSuccess; ++i) then(matrix(i));
    if (v_.embedding) then(vector(d_.embedding, const_cast<__nv_bfloat16 *>(v_.embedding)));
    then(vector(d_.norm, norms_ + 2 * v_.layers * d_.hidden));
    std::vector<int> windows;
    for (int l = 0; l < v_.layers && error == cudaSuccess; ++l) {
      const kilat_layer_desc &y = d_.layers[l];
      windows.push_back(int(y.window));
      then(vector(y.norm_in, norms_ + 2 * l * d_.hidden));
      then(vector(y.norm_mid, norms_ + (2 * l + 1) * d_.hidden));
      if (qk_norms_) {
        then(vector(y.q_norm, qk_norms_ + 2 * l * d_.head_dim));
        then(vector(y.k_norm, qk_norms_ + (2 * l + 1) * d_.head_dim));
      }
      for (int k = 0; k < kLayerMatrices; ++k)
        if (biases_[k]) then(bias(l, k));
    }
    if (windows_) then(cudaMemcpy(windows_, windows.data(), windows.size() * sizeof(int), cudaMemcpyHostToDevice));
    return error;
  }

  const kilat_model_desc &d_;
  kilat_device_model &m_;
  ModelView &v_;
  kilat_failure *f_;
  std::vector<int> formats_;
  MatrixPlace *matrices_ = nullptr;
  __nv_bfloat16 *norms_ = nullptr, *qk_norms_ = nullptr;
  float *biases_[kLayerMatrices] = {};
  int *windows_ = nullptr;
  uint8_t *staging_ = nullptr;
  int shared_limit_ = 0, most_slots_ = 0;
};

}  // namespace

int build_model(const kilat_model_desc &desc, const kilat_options *options, kilat_device_model &m, kilat_failure *f) {
  return Builder(desc, m, f).run(options);
}

}  // namespace kilat_cuda
