// BatchNorm and ReLU in one, for channels-last maps [N, H, W, C]. Definition: torch's batch_norm followed by relu.
//
// Memory decides. In training forward reads a map twice (moments, then y) and writes it once; backward reads map and
// gradient twice (sums, then the map's gradient). A thread owns some neighbouring channels, 16 bytes where rows allow,
// and walks over rows, so that what it knows of its channels stays in registers.
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "product.cuh"
#include "sums.cuh"

namespace san::cuda {
namespace {

constexpr int kResidentBlocks = 2;  // that registers must leave room for on a multiprocessor
constexpr int64_t kVectorBytes = 16;
constexpr int kMostColumns = 64;          // of a block
constexpr int64_t kLeastRows = 8;         // of a thread, so that blocks are worth their start
constexpr int64_t kMostSummedRows = 128;  // of a thread: sums of so many are taken in the type of sums
constexpr int64_t kWantedBlocks = 1024;   // of a pass that sums: enough for a GPU, and few sums to merge

// A map as `rows` (pixels) of `columns` (vectors of channels), cut into blocks of some rows and `width` columns. The
// `parts` threads that share a column take rows in turn.
struct Layout {
  int64_t rows, rows_of_block;
  int channels, columns, width, parts;

  Layout(int64_t rows, int channels, int lanes) : rows(rows), channels(channels), columns(channels / lanes) {
    const int strips = (columns + kMostColumns - 1) / kMostColumns;
    width = (columns + strips - 1) / strips;
    parts = parts_for(kThreads, width);
    cut(kMaxBlocks, rows);
  }
  // The same in about `wanted` blocks, unless threads had more than `most` rows then.
  Layout for_sums() const {
    Layout layout = *this;
    layout.cut(kWantedBlocks, kMostSummedRows);
    return layout;
  }

  SAN_HOST_DEVICE int strips() const { return (columns + width - 1) / width; }
  SAN_HOST_DEVICE int64_t row_blocks() const { return (rows + rows_of_block - 1) / rows_of_block; }
  int blocks() const { return static_cast<int>(row_blocks() * strips()); }

 private:
  void cut(int64_t blocks, int64_t most) {
    const int64_t share = (rows * strips() + blocks * parts - 1) / (blocks * parts);
    rows_of_block = std::min(std::max(share, kLeastRows), most) * parts;
  }
};

// The part of a map that a thread works on: channels [channel, channel + N) of rows first, first + parts, ..
template <int N>
struct Share {
  int column, part, parts, channel, channels;
  int64_t block, top, first, last;
  bool is_empty;

  __device__ __forceinline__ explicit Share(const Layout& layout) : parts(layout.parts), channels(layout.channels) {
    const int strip = static_cast<int>(blockIdx.x % layout.strips()), thread = threadIdx.x;
    block = blockIdx.x / layout.strips(), part = divide(thread, layout.width), column = thread - part * layout.width;
    top = block * layout.rows_of_block, first = top + part, channel = (strip * layout.width + column) * N;
    last = top + layout.rows_of_block < layout.rows ? top + layout.rows_of_block : layout.rows;
    is_empty = part >= parts || channel >= channels;
  }

  // Calls use(index, load(index)) with the index of each of its vectors; several loads are under way at once.
  template <class Load, class Use>
  __device__ __forceinline__ void for_each(const Load& load, const Use& use) const {
    using Loaded = decltype(load(first));
    constexpr int kBatch = sizeof(Loaded) > kVectorBytes ? 2 : 4;
    for (int64_t row = first; row < last; row += kBatch * parts) {
      Loaded loaded[kBatch];
      SAN_UNROLL
      for (int n = 0; n < kBatch; ++n) {
        if (row + n * parts < last) loaded[n] = load((row + n * parts) * channels + channel);
      }
      SAN_UNROLL
      for (int n = 0; n < kBatch; ++n) {
        if (row + n * parts < last) use((row + n * parts) * channels + channel, loaded[n]);
      }
    }
  }
  // Puts the thread's two sums of each channel into shared memory [parts, 2, width * N].
  template <class T>
  __device__ __forceinline__ void store(const Layout& layout, const T (&one)[N], const T (&other)[N], T* sums) const {
    const int width = layout.width * N;
    for (int n = 0; n < N; ++n) {
      sums[part * 2 * width + column * N + n] = one[n], sums[(part * 2 + 1) * width + column * N + n] = other[n];
    }
  }
};

// The parameters of a thread's channels; y = relu((x - mean) * scale + bias).
template <class T>
struct Parameters {
  const T *gain, *bias, *mean, *var;
  T eps;
};
template <int N, class T>
struct Affine {
  T mean[N], scale[N], bias[N], deviation[N];  // deviation = 1 / sqrt(var + eps)

  __device__ __forceinline__ Affine(const Parameters<T>& p, int channel) {
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      deviation[n] = 1 / std::sqrt(p.var[channel + n] + p.eps);
      mean[n] = p.mean[channel + n], bias[n] = p.bias[channel + n], scale[n] = p.gain[channel + n] * deviation[n];
    }
  }
  __device__ __forceinline__ T operator()(int n, T x) const { return (x - mean[n]) * scale[n] + bias[n]; }
};

// Moments of each channel over the rows of a block: [row blocks, C].
template <int N, class scalar_t, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    moments_kernel(Layout layout, const scalar_t* x, Moments* moments) {
  T* sums = reinterpret_cast<T*>(shared_memory_base());
  const Share<N> share(layout);
  T shift[N], sum[N] = {}, square[N] = {};
  if (!share.is_empty) {
    for (int n = 0; n < N; ++n) {
      shift[n] = typical(share.top, share.last,
                         [&](int64_t row) { return static_cast<T>(x[row * share.channels + share.channel + n]); });
    }
    share.for_each([&](int64_t index) { return Pack<N, scalar_t>::load(x + index); },
                   [&](int64_t, const Pack<N, scalar_t>& values) {
                     SAN_UNROLL
                     for (int n = 0; n < N; ++n) {
                       const T distance = static_cast<T>(values.data[n]) - shift[n];
                       sum[n] += distance, square[n] += distance * distance;
                     }
                   });
    share.store(layout, sum, square, sums);
  }
  __syncthreads();
  if (share.part > 0 || share.is_empty) return;
  const double count = double(share.last - share.top);
  for (int n = 0; n < N; ++n) {
    moments[share.block * share.channels + share.channel + n] =
        moments_of(sums, layout.parts, layout.width * N, share.column * N + n, count, shift[n]);
  }
}

// y may be x.
template <int N, class scalar_t, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    rectify_kernel(Layout layout, const scalar_t* x, Parameters<T> parameters, scalar_t* y) {
  const Share<N> share(layout);
  if (share.is_empty) return;
  const Affine<N, T> norm(parameters, share.channel);
  share.for_each([&](int64_t index) { return Pack<N, scalar_t>::load(x + index); },
                 [&](int64_t index, Pack<N, scalar_t>& values) {
                   SAN_UNROLL
                   for (int n = 0; n < N; ++n) {
                     values.data[n] = static_cast<scalar_t>(relu(norm(n, static_cast<T>(values.data[n]))));
                   }
                   values.store(y + index);
                 });
}

// A vector of x and of the gradient of y.
template <int N, class scalar_t>
struct Both {
  Pack<N, scalar_t> x, grad;
};
template <int N, class scalar_t>
struct LoadBoth {
  const scalar_t *x, *grad;
  __device__ __forceinline__ Both<N, scalar_t> operator()(int64_t index) const {
    return {Pack<N, scalar_t>::load(x + index), Pack<N, scalar_t>::load(grad + index)};
  }
};

// Sums over the rows of a block: [row blocks, 2, C] of the gradient where y is positive, and of it times the normalised
// x.
template <int N, class scalar_t, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    gradient_sums_kernel(Layout layout, LoadBoth<N, scalar_t> load, Parameters<T> parameters, T* partial) {
  T* sums = reinterpret_cast<T*>(shared_memory_base());
  const Share<N> share(layout);
  if (!share.is_empty) {
    const Affine<N, T> norm(parameters, share.channel);
    T sum[N] = {}, product[N] = {};
    share.for_each(load, [&](int64_t, const Both<N, scalar_t>& values) {
      SAN_UNROLL
      for (int n = 0; n < N; ++n) {
        const T value = static_cast<T>(values.x.data[n]);
        const T gradient = norm(n, value) > 0 ? static_cast<T>(values.grad.data[n]) : T(0);
        sum[n] += gradient, product[n] += gradient * (value - norm.mean[n]);
      }
    });
    for (int n = 0; n < N; ++n) product[n] *= norm.deviation[n];
    share.store(layout, sum, product, sums);
  }
  __syncthreads();
  if (share.part > 0 || share.is_empty) return;
  for (int n = 0; n < 2 * N; ++n) {
    const int kind = n / N, width = layout.width * N, c = n % N;
    double sum = 0;
    for (int part = 0; part < layout.parts; ++part) sum += sums[(part * 2 + kind) * width + share.column * N + c];
    partial[(share.block * 2 + kind) * share.channels + share.channel + c] = static_cast<T>(sum);
  }
}

// grad_x = scale * (gradient - its mean - normalised x * the mean of their products); in evaluation the statistics do
// not depend on x, both sums are null and their terms fall away.
template <int N, class scalar_t, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    gradient_kernel(Layout layout, LoadBoth<N, scalar_t> load, Parameters<T> parameters, const T* grad_bias,
                    const T* grad_gain, scalar_t* grad_x) {
  const Share<N> share(layout);
  if (share.is_empty) return;
  const Affine<N, T> norm(parameters, share.channel);
  T offset[N] = {}, tilt[N] = {};
  for (int n = 0; grad_bias != nullptr && n < N; ++n) {
    offset[n] = grad_bias[share.channel + n] / static_cast<T>(layout.rows);
    tilt[n] = grad_gain[share.channel + n] / static_cast<T>(layout.rows) * norm.deviation[n];
  }
  share.for_each(load, [&](int64_t index, const Both<N, scalar_t>& values) {
    Pack<N, scalar_t> out;
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      const T value = static_cast<T>(values.x.data[n]);
      const T gradient = norm(n, value) > 0 ? static_cast<T>(values.grad.data[n]) : T(0);
      out.data[n] = static_cast<scalar_t>(norm.scale[n] * (gradient - offset[n] - (value - norm.mean[n]) * tilt[n]));
    }
    out.store(grad_x + index);
  });
}

// Checked parameters, which lie in a row.
class Norm {
 public:
  Norm(const Tensor& x, const Tensor& gain, const Tensor& bias, const Tensor& mean, const Tensor& var, double eps)
      : eps_(eps) {
    check_map(x, "x");
    const bool is_double = x.scalar_type() == ScalarType::Double;
    for (const Tensor* tensor : {&gain, &bias, &mean, &var}) {
      STD_TORCH_CHECK(tensor->scalar_type() == (is_double ? ScalarType::Double : ScalarType::Float),
                      "gain, bias, mean and var must be float64 for float64 maps and float32 for others");
      STD_TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) == x.size(3) && x.size(3) > 0,
                      "gain, bias, mean and var must be [", x.size(3), "], as x has channels");
      STD_TORCH_CHECK(tensor->device() == x.device(), "all tensors must be on one device");
      tensors_.push_back(torch::stable::contiguous(*tensor));
    }
  }
  const Tensor& gain() const { return tensors_[0]; }
  const Tensor& bias() const { return tensors_[1]; }
  const Tensor& mean() const { return tensors_[2]; }
  const Tensor& var() const { return tensors_[3]; }

  template <class T>
  Parameters<T> parameters(const Tensor& mean, const Tensor& var) const {
    return {gain().const_data_ptr<T>(), bias().const_data_ptr<T>(), mean.const_data_ptr<T>(), var.const_data_ptr<T>(),
            static_cast<T>(eps_)};
  }

 private:
  double eps_;
  std::vector<Tensor> tensors_;
};

// Calls run(std::integral_constant<int, N>) with as many channels as maps can be read at once: they must begin at a
// multiple of 16 bytes, and so must each of their rows.
template <class scalar_t, class Run>
void with_vectors(int64_t channels, std::initializer_list<const Tensor*> maps, const Run& run) {
  constexpr int kLanes = kVectorBytes / sizeof(scalar_t);
  bool fits = channels % kLanes == 0;
  for (const Tensor* map : maps) {
    fits = fits && reinterpret_cast<uintptr_t>(map->const_data_ptr<scalar_t>()) % kVectorBytes == 0;
  }
  fits ? run(std::integral_constant<int, kLanes>()) : run(std::integral_constant<int, 1>());
}

template <int N, class T>
size_t bytes_of_sums(const Layout& layout) {
  return layout.parts * 2 * layout.width * N * sizeof(T);
}

template <class scalar_t>
void rectify(const Tensor& x, const Parameters<accumulate_t<scalar_t>>& parameters, Tensor& y) {
  if (x.numel() == 0) return;
  with_vectors<scalar_t>(x.size(3), {&x, &y}, [&](auto lanes) {
    const Layout layout(x.numel() / x.size(3), static_cast<int>(x.size(3)), lanes);
    SAN_LAUNCH((rectify_kernel<lanes, scalar_t, accumulate_t<scalar_t>>), layout.blocks(), kThreads, current_stream(x),
               layout, x.const_data_ptr<scalar_t>(), parameters, y.mutable_data_ptr<scalar_t>());
  });
}

template <class scalar_t>
void batch_statistics(const Tensor& x, Tensor& mean, Tensor& var) {
  using T = accumulate_t<scalar_t>;
  with_vectors<scalar_t>(x.size(3), {&x}, [&](auto lanes) {
    const Layout layout = Layout(x.numel() / x.size(3), static_cast<int>(x.size(3)), lanes).for_sums();
    const std::vector<int64_t> shape{layout.row_blocks(), layout.channels, int64_t(sizeof(Moments) / sizeof(double))};
    Tensor moments = torch::stable::new_empty(x, shape, ScalarType::Double);
    Moments* data = reinterpret_cast<Moments*>(moments.mutable_data_ptr<double>());
    const size_t bytes = bytes_of_sums<lanes, T>(layout);
    SAN_LAUNCH_SHARED((moments_kernel<lanes, scalar_t, T>), layout.blocks(), kThreads, bytes, current_stream(x), layout,
                      x.const_data_ptr<scalar_t>(), data);
    merge_moments(data, layout.row_blocks(), layout.channels, mean.mutable_data_ptr<T>(), var.mutable_data_ptr<T>(),
                  current_stream(x));
  });
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

Three norm_relu(const Tensor& x, const Tensor& gain, const Tensor& bias, const Tensor& mean, const Tensor& var,
                bool training, double eps) {
  const Norm norm(x, gain, bias, mean, var, eps);
  const OperatorGuard guard("norm_relu", x);
  const Tensor map = torch::stable::contiguous(x);
  Tensor y = torch::stable::empty_like(map);
  Tensor new_mean = torch::stable::clone(norm.mean()), new_var = torch::stable::clone(norm.var());
  SAN_DISPATCH(x.scalar_type(), "norm_relu", [&] {
    if (training && x.numel() > 0) batch_statistics<scalar_t>(map, new_mean, new_var);
    rectify<scalar_t>(map, norm.parameters<accumulate_t<scalar_t>>(new_mean, new_var), y);
  });
  return {y, new_mean, new_var};
}

void norm_relu_(Tensor x, const Tensor& gain, const Tensor& bias, const Tensor& mean, const Tensor& var, double eps) {
  const Norm norm(x, gain, bias, mean, var, eps);
  STD_TORCH_CHECK(x.is_contiguous(), "x must be contiguous [N, H, W, C]");
  const OperatorGuard guard("norm_relu_", x);
  SAN_DISPATCH(x.scalar_type(), "norm_relu_",
               [&] { rectify<scalar_t>(x, norm.parameters<accumulate_t<scalar_t>>(norm.mean(), norm.var()), x); });
}

template <class scalar_t>
void gradients(const Tensor& grad, const Tensor& x, const Parameters<accumulate_t<scalar_t>>& parameters, bool training,
               Tensor& grad_x, Tensor& grad_gain, Tensor& grad_bias) {
  using T = accumulate_t<scalar_t>;
  with_vectors<scalar_t>(x.size(3), {&x, &grad, &grad_x}, [&](auto lanes) {
    const Layout layout(x.numel() / x.size(3), static_cast<int>(x.size(3)), lanes), summed = layout.for_sums();
    const int64_t channels = layout.channels;
    const LoadBoth<lanes, scalar_t> load{x.const_data_ptr<scalar_t>(), grad.const_data_ptr<scalar_t>()};
    Tensor partial = torch::stable::new_empty(grad_gain, {summed.row_blocks(), 2, channels});
    T *to_bias = grad_bias.mutable_data_ptr<T>(), *to_gain = grad_gain.mutable_data_ptr<T>();
    const size_t bytes = bytes_of_sums<lanes, T>(summed);
    SAN_LAUNCH_SHARED((gradient_sums_kernel<lanes, scalar_t, T>), summed.blocks(), kThreads, bytes, current_stream(x),
                      summed, load, parameters, partial.mutable_data_ptr<T>());
    sum_blocks(partial.const_data_ptr<T>(), summed.row_blocks(), 2 * channels,
               Totals<T>{{to_bias, to_gain}, {channels, channels}}, current_stream(x));
    SAN_LAUNCH((gradient_kernel<lanes, scalar_t, T>), layout.blocks(), kThreads, current_stream(x), layout, load,
               parameters, training ? to_bias : nullptr, training ? to_gain : nullptr,
               grad_x.mutable_data_ptr<scalar_t>());
  });
}

Three norm_relu_backward(const Tensor& grad, const Tensor& x, const Tensor& gain, const Tensor& bias,
                         const Tensor& mean, const Tensor& var, bool training, double eps) {
  const Norm norm(x, gain, bias, mean, var, eps);
  check_same(grad, x, "grad and x");
  STD_TORCH_CHECK(grad.sizes().vec() == x.sizes().vec(), "grad and x must have the same shape");
  const OperatorGuard guard("norm_relu_backward", x);
  const Tensor map = torch::stable::contiguous(x), grads = torch::stable::contiguous(grad);
  Tensor grad_x = torch::stable::empty_like(map);
  Tensor grad_gain = torch::stable::empty_like(norm.gain()), grad_bias = torch::stable::empty_like(norm.bias());
  if (x.numel() == 0) {
    torch::stable::zero_(grad_gain), torch::stable::zero_(grad_bias);
  } else {
    SAN_DISPATCH(x.scalar_type(), "norm_relu_backward", [&] {
      gradients<scalar_t>(grads, map, norm.parameters<accumulate_t<scalar_t>>(norm.mean(), norm.var()), training,
                          grad_x, grad_gain, grad_bias);
    });
  }
  return {grad_x, grad_gain, grad_bias};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("norm_relu", TORCH_BOX(&san::cuda::norm_relu));
  m.impl("norm_relu_", TORCH_BOX(&san::cuda::norm_relu_));
  m.impl("norm_relu_backward", TORCH_BOX(&san::cuda::norm_relu_backward));
}
