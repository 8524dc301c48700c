// BatchNorm and ReLU of channels-last maps in one operator, with or without a residual map between them, forward and
// backward. Definitions: san/ops/fused_reference.py.
//
// Both read their maps twice, first for sums over all pixels. A thread's sums are float, of distances from a typical
// value.
#include <optional>
#include <tuple>

#include "channels.cuh"

namespace san::cuda {
namespace {

// A value near most values of a channel: sums of squares of distances from an outlier would cancel.
template <class T>
struct Origin {
  const T* x;
  int64_t pixels;
  int channels;

  __device__ __forceinline__ float operator()(int c) const {
    return middle_of_three([&](int i) { return static_cast<float>(x[(pixels - 1) / 2 * i * channels + c]); });
  }
};

// The parameters and statistics of a norm, and for a thread's channels, the norm as (x - mean) * scale + bias.
struct Norm {
  Floats weight, bias, mean, var;
  double eps;

  __device__ __forceinline__ double deviation(int c) const { return std::sqrt(var.get(c) + eps); }
};

template <int kWidth>
struct Affine {
  float mean[kWidth], scale[kWidth], bias[kWidth];

  __device__ __forceinline__ Affine(const Norm& norm, int channel) {
    SAN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const double exact = norm.mean.get(channel + i);
      // Not in double, whose square root takes many registers.
      const float inverse = rsqrtf(static_cast<float>(norm.var.get(channel + i) + norm.eps));
      mean[i] = static_cast<float>(exact), scale[i] = static_cast<float>(norm.weight.get(channel + i)) * inverse;
      // The bias contains the part of the mean that float32 cannot represent.
      bias[i] = static_cast<float>(norm.bias.get(channel + i) + (mean[i] - exact) * scale[i]);
    }
  }

  __device__ __forceinline__ float operator()(float x, int i) const { return (x - mean[i]) * scale[i] + bias[i]; }
  // The gradient of the norm's result. Like torch's, it is 0 where the result is not positive, but not where it is NaN.
  __device__ __forceinline__ float gradient(float grad, float x, int i) const { return (*this)(x, i) <= 0 ? 0 : grad; }
};

// Sums of x - origin and of its square.
//
// Predicted for the first norm of SAN10's stage 1 at batch 32 (64 channels, 112x112, float32) on an H100: reads 103 MB;
// 0.035 ms, of memory bandwidth. The forward kernel after it reads and writes 103 MB: 0.07 ms. Backward, the sums read
// 206 MB and the gradients as much and write 103 MB: 0.07 and 0.1 ms.
template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    distance_sums_kernel(Layout layout, const T* x, Origin<T> origin, double* partial) {
  const Own<kWidth> own(layout);
  float center[kWidth] = {};
  SAN_UNROLL
  for (int i = 0; own.exists && i < kWidth; ++i) center[i] = origin(own.channel + i);
  sum_channels<2>(layout, own, partial, [&](int64_t pixel, float* sums) {
    const int64_t at = own.index(layout, pixel);
    const Pack<kWidth, T> values = Pack<kWidth, T>::load(x + at);
    SAN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const float distance = static_cast<float>(values.data[i]) - center[i];
      sums[2 * i] += distance, sums[2 * i + 1] += distance * distance;
    }
  });
}

template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    norm_relu_kernel(Layout layout, const T* x, const T* residual, Norm norm, T* y) {
  const Own<kWidth> own(layout);
  if (!own.exists) return;
  const Affine<kWidth> affine(norm, own.channel);
  own.for_each_pixel(layout, [&](int64_t pixel) {
    const int64_t at = own.index(layout, pixel);
    Pack<kWidth, T> values = Pack<kWidth, T>::load(x + at), more{};
    if (residual != nullptr) more = Pack<kWidth, T>::load(residual + at);
    SAN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const float result = affine(static_cast<float>(values.data[i]), i) + static_cast<float>(more.data[i]);
      values.data[i] = static_cast<T>(result < 0 ? 0 : result);  // NaN stays
    }
    values.store(y + at);
  });
}

// Sums of the gradient of the norm's result, and of its product with x - mean. Where a residual and a ReLU with the
// result y follow, that gradient becomes `masked`.
template <int kWidth, class T, bool kMasks>
__global__ void __launch_bounds__(kThreads)
    gradient_sums_kernel(Layout layout, const T* grad, const T* x, Norm norm, const T* y, T* masked, double* partial) {
  const Own<kWidth> own(layout);
  const Affine<kWidth> affine(norm, own.exists ? own.channel : 0);
  sum_channels<2>(layout, own, partial, [&](int64_t pixel, float* sums) {
    const int64_t at = own.index(layout, pixel);
    const Pack<kWidth, T> values = Pack<kWidth, T>::load(x + at);
    Pack<kWidth, T> grads = Pack<kWidth, T>::load(grad + at), results{};
    if (kMasks) results = Pack<kWidth, T>::load(y + at);
    SAN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const float value = static_cast<float>(values.data[i]);
      float g = static_cast<float>(grads.data[i]);
      g = kMasks ? (static_cast<float>(results.data[i]) <= 0 ? 0 : g) : affine.gradient(g, value, i);
      grads.data[i] = static_cast<T>(g);
      sums[2 * i] += g, sums[2 * i + 1] += g * (value - affine.mean[i]);
    }
    if (kMasks) grads.store(masked + at);
  });
}

// Gradients of weight and bias, and the slope and offset [channels, 2] by which the batch's statistics change grad_x.
struct PlaceGradients {
  Norm norm;
  double pixels;
  Floats to_weight, to_bias;
  float* rest;

  __device__ __forceinline__ void operator()(int64_t column, const double* sums) const {
    if (column % 2 == 1) return;
    const int c = static_cast<int>(column / 2);
    const double exact = norm.mean.get(c), deviation = norm.deviation(c), scale = norm.weight.get(c) / deviation;
    const double rounding = static_cast<float>(exact) - exact;  // of the mean in `Affine`
    const double of_weight = (sums[1] + rounding * sums[0]) / deviation;
    to_weight.set(c, of_weight), to_bias.set(c, sums[0]);
    const double slope = -scale * of_weight / deviation / pixels;
    rest[column] = static_cast<float>(slope);
    rest[column + 1] = static_cast<float>(slope * rounding - scale * sums[0] / pixels);
  }
};

// The gradient of x, plus `added` unless that is null. With kMasked, `grad` is the gradient of the norm's result.
template <int kWidth, class T, bool kMasked>
__global__ void __launch_bounds__(kThreads) norm_gradient_kernel(Layout layout, const T* grad, const T* x, Norm norm,
                                                                 const float* rest, const T* added, T* grad_x) {
  const Own<kWidth> own(layout);
  if (!own.exists) return;
  const Affine<kWidth> affine(norm, own.channel);
  const bool of_batch = rest != nullptr;
  float slope[kWidth] = {}, offset[kWidth] = {};
  SAN_UNROLL
  for (int i = 0; of_batch && i < kWidth; ++i) {
    slope[i] = rest[2 * (own.channel + i)], offset[i] = rest[2 * (own.channel + i) + 1];
  }
  own.for_each_pixel(layout, [&](int64_t pixel) {
    const int64_t at = own.index(layout, pixel);
    const Pack<kWidth, T> values = Pack<kWidth, T>::load(x + at);
    Pack<kWidth, T> grads = Pack<kWidth, T>::load(grad + at), others{};
    if (added != nullptr) others = Pack<kWidth, T>::load(added + at);
    SAN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const float value = static_cast<float>(values.data[i]), of_y = static_cast<float>(grads.data[i]);
      const float g = affine.scale[i] * (kMasked ? of_y : affine.gradient(of_y, value, i));
      const float more = (value - affine.mean[i]) * slope[i] + offset[i];  // NaN if the value is infinite
      grads.data[i] = static_cast<T>((of_batch ? g + more : g) + static_cast<float>(others.data[i]));
    }
    grads.store(grad_x + at);
  });
}

// The mean and the biased variance of each channel.
template <class T>
struct PlaceStatistics {
  Origin<T> origin;
  double *mean, *var;

  __device__ __forceinline__ void operator()(int64_t column, const double* sums) const {
    if (column % 2 == 1) return;
    const int c = static_cast<int>(column / 2);
    const double count = static_cast<double>(origin.pixels), distance = sums[0] / count;
    const double variance = sums[1] / count - distance * distance;
    mean[c] = origin(c) + distance, var[c] = variance < 0 ? 0 : variance;  // NaN stays
  }
};

void check_norm_relu(const Tensor& x, std::initializer_list<const Tensor*> vectors) {
  bool fits = x.dim() == 4 && x.size(3) > 0;
  for (const Tensor* vector : vectors) {
    fits = fits && vector->dim() == 1 && vector->size(0) == x.size(3);
    STD_TORCH_CHECK(vector->device() == x.device(), "x, weight, bias, mean and var must be on one device");
  }
  fits = fits && (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16);
  STD_TORCH_CHECK(fits, "x must be a float32 or bfloat16 map [N, H, W, C], and weight, bias, mean and var must be [C]");
}

template <class T>
const T* values_or_null(const std::optional<Tensor>& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& x) {
  return x ? std::optional<Tensor>(torch::stable::contiguous(*x)) : std::nullopt;
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight,
                                           const Tensor& bias, const std::optional<Tensor>& mean,
                                           const std::optional<Tensor>& var, double eps) {
  check_norm_relu(x, {&weight, &bias});
  STD_TORCH_CHECK(mean.has_value() == var.has_value(), "give both mean and var, or neither");
  if (mean && var) check_norm_relu(x, {&*mean, &*var});
  const OperatorGuard guard(residual ? "norm_add_relu" : "norm_relu", x);
  const Tensor map = torch::stable::contiguous(x);
  const std::optional<Tensor> identity = contiguous(residual);
  const int64_t C = map.size(3), pixels = map.numel() / C;
  Tensor y = torch::stable::empty_like(map), m = doubles_like(map, C), v = doubles_like(map, C);
  if (mean && var) torch::stable::copy_(m, *mean), torch::stable::copy_(v, *var);
  if (map.numel() == 0) return {y, m, v};
  const Tensor kept[] = {torch::stable::contiguous(weight), torch::stable::contiguous(bias)};
  const Norm norm{Floats(kept[0]), Floats(kept[1]), Floats(m), Floats(v), eps};
  const auto stream = current_stream(map);
  for_type_and_width(map, {&y, identity ? &*identity : &map}, [&]<class T, int kWidth>(T, Int<kWidth>) {
    const Layout layout(pixels, C, kWidth);
    const T* in = map.const_data_ptr<T>();
    if (!mean) {
      const Origin<T> origin{in, pixels, layout.channels};
      Tensor partial = doubles_like(map, layout.slices * 2 * C);
      SAN_LAUNCH_SHARED((distance_sums_kernel<kWidth, T>), layout.blocks(), kThreads, bytes_of_sums(2 * kWidth), stream,
                        layout, in, origin, partial.mutable_data_ptr<double>());
      sum_rows(PartialSums<double>{partial.const_data_ptr<double>(), 2 * C}, layout.slices, 2 * C,
               PlaceStatistics<T>{origin, m.mutable_data_ptr<double>(), v.mutable_data_ptr<double>()}, stream);
    }
    SAN_LAUNCH((norm_relu_kernel<kWidth, T>), layout.blocks(), kThreads, stream, layout, in,
               values_or_null<T>(identity), norm, y.mutable_data_ptr<T>());
  });
  return {y, m, v};
}

// Gradients of x, weight and bias. With kMasks, y is the result of a residual and a ReLU after the norm, and their
// gradient becomes `masked`. `added` is added to the gradient of x.
template <bool kMasks>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const Tensor& bias, const Tensor& mean, const Tensor& var, double eps,
                                            bool of_batch, const std::optional<Tensor>& y,
                                            const std::optional<Tensor>& masked, const std::optional<Tensor>& added) {
  const OperatorGuard guard(kMasks ? "norm_add_relu_backward" : "norm_relu_backward", x);
  const Tensor map = torch::stable::contiguous(x), grad_y = torch::stable::contiguous(grad);
  const std::optional<Tensor> results = contiguous(y), others = contiguous(added);
  const int64_t C = map.size(3), pixels = map.numel() / C;
  const Tensor kept[] = {torch::stable::contiguous(weight), torch::stable::contiguous(bias),
                         torch::stable::contiguous(mean), torch::stable::contiguous(var)};
  Tensor grad_x = torch::stable::empty_like(map), to_weight = torch::stable::empty_like(kept[0]),
         to_bias = torch::stable::empty_like(kept[1]);
  if (map.numel() == 0) {
    torch::stable::zero_(to_weight), torch::stable::zero_(to_bias);
    return {grad_x, to_weight, to_bias};
  }
  const Norm norm{Floats(kept[0]), Floats(kept[1]), Floats(kept[2]), Floats(kept[3]), eps};
  const auto stream = current_stream(map);
  // Memory that this function allocates is aligned.
  const Tensor &first = results ? *results : map, &second = others ? *others : map;
  for_type_and_width(map, {&grad_y, &first, &second}, [&]<class T, int kWidth>(T, Int<kWidth>) {
    const Layout layout(pixels, C, kWidth);
    const T *in = map.const_data_ptr<T>(), *of_y = grad_y.const_data_ptr<T>();
    Tensor partial = doubles_like(map, layout.slices * 2 * C);
    Tensor rest = torch::stable::new_empty(map, {2 * C}, std::optional<ScalarType>(ScalarType::Float));
    SAN_LAUNCH_SHARED((gradient_sums_kernel<kWidth, T, kMasks>), layout.blocks(), kThreads, bytes_of_sums(2 * kWidth),
                      stream, layout, of_y, in, norm, values_or_null<T>(results),
                      masked ? masked->mutable_data_ptr<T>() : nullptr, partial.mutable_data_ptr<double>());
    sum_rows(PartialSums<double>{partial.const_data_ptr<double>(), 2 * C}, layout.slices, 2 * C,
             PlaceGradients{norm, static_cast<double>(pixels), Floats(to_weight), Floats(to_bias),
                            rest.mutable_data_ptr<float>()},
             stream);
    SAN_LAUNCH((norm_gradient_kernel<kWidth, T, kMasks>), layout.blocks(), kThreads, stream, layout,
               kMasks ? masked->const_data_ptr<T>() : of_y, in, norm, of_batch ? rest.const_data_ptr<float>() : nullptr,
               values_or_null<T>(others), grad_x.mutable_data_ptr<T>());
  });
  return {grad_x, to_weight, to_bias};
}

std::tuple<Tensor, Tensor, Tensor> norm_relu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                             const std::optional<Tensor>& mean, const std::optional<Tensor>& var,
                                             double eps) {
  return forward(x, std::nullopt, weight, bias, mean, var, eps);
}

std::tuple<Tensor, Tensor, Tensor> norm_relu_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                      const Tensor& bias, const Tensor& mean, const Tensor& var,
                                                      double eps, bool of_batch, const std::optional<Tensor>& added) {
  check_norm_relu(x, {&weight, &bias, &mean, &var});
  check_alike(grad, x, "grad and x");
  if (added) check_alike(*added, x, "added and x");
  return backward<false>(grad, x, weight, bias, mean, var, eps, of_batch, std::nullopt, std::nullopt, added);
}

std::tuple<Tensor, Tensor, Tensor> norm_add_relu(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                 const Tensor& bias, const std::optional<Tensor>& mean,
                                                 const std::optional<Tensor>& var, double eps) {
  check_alike(residual, x, "residual and x");
  return forward(x, residual, weight, bias, mean, var, eps);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_add_relu_backward(const Tensor& grad, const Tensor& x, const Tensor& y,
                                                                  const Tensor& weight, const Tensor& bias,
                                                                  const Tensor& mean, const Tensor& var, double eps,
                                                                  bool of_batch) {
  check_norm_relu(x, {&weight, &bias, &mean, &var});
  check_alike(grad, x, "grad and x"), check_alike(y, x, "y and x");
  const Tensor of_residual = torch::stable::new_empty(x, x.sizes());
  const auto [of_x, of_weight, of_bias] =
      backward<true>(grad, x, weight, bias, mean, var, eps, of_batch, y, of_residual, std::nullopt);
  return {of_x, of_residual, of_weight, of_bias};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("norm_relu", TORCH_BOX(&san::cuda::norm_relu));
  m.impl("norm_relu_backward", TORCH_BOX(&san::cuda::norm_relu_backward));
  m.impl("norm_add_relu", TORCH_BOX(&san::cuda::norm_add_relu));
  m.impl("norm_add_relu_backward", TORCH_BOX(&san::cuda::norm_add_relu_backward));
}
