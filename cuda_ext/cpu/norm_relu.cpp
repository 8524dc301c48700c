// BatchNorm and ReLU of channels-last float32 maps in one operator, with or without a residual map between them; the
// definitions are in schemas.py. Forward and backward each read their maps twice. Memory limits their speed, so the
// compiler vectorizes the loops.
#include <cmath>
#include <optional>
#include <tuple>

#include "bands.h"
#include "vectorize.h"

namespace san::cpu {
namespace {

// A map as rows of `width` values: one pixel, or several if there are few channels. The last row may be shorter.
struct Layout {
  explicit Layout(const Tensor& x) : values(x.numel()), C(x.size(3)) {}

  // Calls work(task, first value, number of values) in threads.
  template <class Work>
  void for_each(const Work& work) const {
    for_each_task<char>(tasks, 0, [&](int64_t task, char*) {
      work(task, task * task_values, std::min(task_values, values - task * task_values));
    });
  }

  // Two sums for each channel, [2, C], of what add(first value, number of values, sums [2, width]) adds.
  template <class Add>
  std::vector<double> sums(const Add& add) const {
    std::vector<double> of_tasks(tasks * 2 * width), of_channels(2 * C);
    for_each([&](int64_t task, int64_t first, int64_t count) { add(first, count, &of_tasks[task * 2 * width]); });
    const std::vector<double> total = sum_over_tasks(of_tasks, 2 * width);
    for (int64_t i = 0; i < 2 * width; ++i) of_channels[i / width * C + i % C] += total[i];
    return of_channels;
  }

  // value(channel) for each value of a row.
  template <class Value>
  std::vector<float> row(const Value& value) const {
    std::vector<float> row(width);
    for (int64_t i = 0; i < width; ++i) row[i] = i < C ? static_cast<float>(value(i)) : row[i - C];
    return row;
  }

  static constexpr int64_t kLeastWidth = 64, kTaskValues = 1 << 16;
  const int64_t values, C, P = values / C, width = (kLeastWidth + C - 1) / C * C;
  const int64_t task_values = std::max<int64_t>(1, kTaskValues / width) * width;
  const int64_t tasks = (values + task_values - 1) / task_values;
};

// Adds x - origin and its square to their sums. The sums are double, so means may be far from `origin`.
SAN_VECTOR void add_distances(const float* x, int64_t count, int64_t width, const float* origin,
                              double* SAN_RESTRICT sum, double* SAN_RESTRICT square) {
  for (; count >= 4 * width; x += 4 * width, count -= 4 * width)
    for (int64_t i = 0; i < width; ++i) {
      const double a = x[i] - origin[i], b = x[width + i] - origin[i];
      const double c = x[2 * width + i] - origin[i], d = x[3 * width + i] - origin[i];
      sum[i] += (a + b) + (c + d), square[i] += (a * a + b * b) + (c * c + d * d);
    }
  for (; count > 0; x += width, count -= width)
    for (int64_t i = 0; i < std::min(count, width); ++i) {
      const double a = x[i] - origin[i];
      sum[i] += a, square[i] += a * a;
    }
}

// The norm (x - mean) * scale + bias, as values of a row, and each channel's standard deviation.
struct Affine {
  Affine(const Layout& layout, const Tensor& weight, const Tensor& bias, const std::vector<double>& mean,
         const std::vector<double>& var, double eps)
      : mean(layout.row([&](int64_t c) { return mean[c]; })), deviation(var) {
    for (double& x : deviation) x = std::sqrt(x + eps);
    const std::vector<double> w = doubles(weight), b = doubles(bias);
    scale = layout.row([&](int64_t c) { return w[c] / deviation[c]; });
    // The bias contains the part of the mean that float32 cannot represent.
    this->bias = layout.row([&](int64_t c) { return b[c] + (this->mean[c] - mean[c]) * scale[c]; });
  }

  float operator()(float x, int64_t i) const { return (x - mean[i]) * scale[i] + bias[i]; }
  // The gradient of the norm's result. Like torch's, it is 0 where the result is not positive, but not where it is NaN.
  template <bool is_masked>
  float gradient(float grad, float x, int64_t i) const {
    return !is_masked && (*this)(x, i) <= 0 ? 0 : grad;
  }

  std::vector<float> mean, scale, bias;
  std::vector<double> deviation;
};

template <bool adds>
SAN_VECTOR void apply(const Affine& norm, const float* x, const float* residual, int64_t count, int64_t width,
                      float* SAN_RESTRICT y) {
  for (; count > 0; x += width, y += width, count -= width) {
    for (int64_t i = 0; i < std::min(count, width); ++i) {
      const float v = adds ? norm(x[i], i) + residual[i] : norm(x[i], i);
      y[i] = v < 0 ? 0 : v;  // NaN stays
    }
    if (adds) residual += width;
  }
}

// The gradient before a ReLU with the result y.
SAN_VECTOR void mask(const float* grad, const float* y, int64_t count, float* SAN_RESTRICT masked) {
  for (int64_t i = 0; i < count; ++i) masked[i] = y[i] <= 0 ? 0 : grad[i];
}

SAN_VECTOR void add(const float* more, int64_t count, float* SAN_RESTRICT sum) {
  for (int64_t i = 0; i < count; ++i) sum[i] += more[i];
}

// Adds the gradient of the norm's result, and its product with x - mean, to their sums. It follows from that of the
// ReLU's result, or is `grad` itself if that `is_masked`.
template <bool is_masked>
SAN_VECTOR void add_gradients(const Affine& norm, const float* grad, const float* x, int64_t count, int64_t width,
                              double* SAN_RESTRICT sum, double* SAN_RESTRICT product) {
  for (; count >= 2 * width; x += 2 * width, grad += 2 * width, count -= 2 * width)
    for (int64_t i = 0; i < width; ++i) {
      const float g = norm.gradient<is_masked>(grad[i], x[i], i);
      const float h = norm.gradient<is_masked>(grad[width + i], x[width + i], i);
      sum[i] += g + h, product[i] += g * (x[i] - norm.mean[i]) + h * (x[width + i] - norm.mean[i]);
    }
  for (; count > 0; x += width, grad += width, count -= width)
    for (int64_t i = 0; i < std::min(count, width); ++i) {
      const float g = norm.gradient<is_masked>(grad[i], x[i], i);
      sum[i] += g, product[i] += g * (x[i] - norm.mean[i]);
    }
}

// grad_x = scale * gradient + slope * (x - mean) + offset; the last two come from the batch's statistics.
template <bool is_masked, bool of_batch>
SAN_VECTOR void apply_gradients(const Affine& norm, const float* slope, const float* offset, const float* grad,
                                const float* x, int64_t count, int64_t width, float* SAN_RESTRICT grad_x) {
  for (; count > 0; x += width, grad += width, grad_x += width, count -= width)
    for (int64_t i = 0; i < std::min(count, width); ++i) {
      const float g = norm.scale[i] * norm.gradient<is_masked>(grad[i], x[i], i);
      grad_x[i] = of_batch ? g + ((x[i] - norm.mean[i]) * slope[i] + offset[i]) : g;
    }
}

void check_norm(const Tensor& x, std::initializer_list<const Tensor*> vectors) {
  bool fits = x.dim() == 4 && x.size(3) > 0 && x.scalar_type() == ScalarType::Float;
  for (const Tensor* vector : vectors) fits = fits && vector->dim() == 1 && vector->size(0) == x.size(3);
  STD_TORCH_CHECK(fits, "x must be a float32 map [N, H, W, C], and weight, bias, mean and var must be [C]");
}

// The mean and the biased variance of each channel.
std::pair<std::vector<double>, std::vector<double>> statistics(const Layout& layout, const float* x) {
  const std::vector<float> origin =  // the first pixel
      layout.row([&](int64_t c) { return layout.values > 0 && std::isfinite(x[c]) ? x[c] : 0; });
  std::vector<double> mean = layout.sums([&](int64_t first, int64_t count, double* sums) {
    add_distances(x + first, count, layout.width, origin.data(), sums, sums + layout.width);
  });
  std::vector<double> var(mean.begin() + layout.C, mean.end());
  for (int64_t c = 0; c < layout.C; ++c) {
    const double distance = mean[c] / layout.P;
    mean[c] = origin[c] + distance;
    var[c] = std::max(var[c] / layout.P - distance * distance, 0.0);  // NaN stays
  }
  return {mean, var};
}

using Statistic = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor* residual, const Tensor& weight,
                                           const Tensor& bias, const Statistic& mean, const Statistic& var,
                                           double eps) {
  check_norm(x, {&weight, &bias});
  STD_TORCH_CHECK(mean.has_value() == var.has_value(), "give both mean and var, or neither");
  if (mean && var) check_norm(x, {&*mean, &*var});
  const Tensor map = as<float>(x), identity = residual ? as<float>(*residual) : map;
  const Layout layout(map);
  const float *in = values<float>(map), *kept = values<float>(identity);
  const auto [m, v] = mean && var ? std::pair(doubles(*mean), doubles(*var)) : statistics(layout, in);
  const Affine norm(layout, weight, bias, m, v, eps);
  Tensor y = torch::stable::empty_like(map);
  ask_for_large_pages(y);
  float* out = y.mutable_data_ptr<float>();
  const auto run = residual ? apply<true> : apply<false>;
  layout.for_each([&](int64_t, int64_t first, int64_t count) {
    run(norm, in + first, kept + first, count, layout.width, out + first);
  });
  return {y, tensor_of<double>(m.data(), map, {layout.C}), tensor_of<double>(v.data(), map, {layout.C})};
}

// Gradients of x, weight and bias. With `is_masked`, y is the result of a residual and a ReLU after the norm, and their
// gradient becomes `masked`. `added`, unless null, is added to the gradient of x.
template <bool is_masked>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const Tensor& bias, const Tensor& mean, const Tensor& var, double eps,
                                            bool of_batch, const float* y, float* masked, const float* added) {
  const Tensor map = as<float>(x), grad_y = as<float>(grad);
  const float *in = values<float>(map), *of_y = values<float>(grad_y), *g = is_masked ? masked : of_y;
  const Layout layout(map);
  const std::vector<double> m = doubles(mean);
  const Affine norm(layout, weight, bias, m, doubles(var), eps);
  std::vector<double> to_bias = layout.sums([&](int64_t first, int64_t count, double* sums) {
    if (is_masked) mask(of_y + first, y + first, count, masked + first);
    add_gradients<is_masked>(norm, g + first, in + first, count, layout.width, sums, sums + layout.width);
  });
  std::vector<double> to_weight(to_bias.begin() + layout.C, to_bias.end());
  for (int64_t c = 0; c < layout.C; ++c)
    to_weight[c] = (to_weight[c] + (norm.mean[c] - m[c]) * to_bias[c]) / norm.deviation[c];
  const auto slope =
      layout.row([&](int64_t c) { return -norm.scale[c] * to_weight[c] / norm.deviation[c] / layout.P; });
  const auto offset = layout.row([&](int64_t c) { return -norm.scale[c] * to_bias[c] / layout.P; });
  Tensor grad_x = torch::stable::empty_like(map);
  ask_for_large_pages(grad_x);
  float* out = grad_x.mutable_data_ptr<float>();
  const auto finish = of_batch ? apply_gradients<is_masked, true> : apply_gradients<is_masked, false>;
  layout.for_each([&](int64_t, int64_t first, int64_t count) {
    finish(norm, slope.data(), offset.data(), g + first, in + first, count, layout.width, out + first);
    if (added != nullptr) add(added + first, count, out + first);
  });
  return {grad_x, as_type(tensor_of<double>(to_weight.data(), map, {layout.C}), weight.scalar_type()),
          as_type(tensor_of<double>(to_bias.data(), map, {layout.C}), bias.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor> norm_relu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                             const Statistic& mean, const Statistic& var, double eps) {
  return forward(x, nullptr, weight, bias, mean, var, eps);
}

std::tuple<Tensor, Tensor, Tensor> norm_relu_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                      const Tensor& bias, const Tensor& mean, const Tensor& var,
                                                      double eps, bool of_batch, const std::optional<Tensor>& added) {
  check_norm(x, {&weight, &bias, &mean, &var});
  check_alike(grad, x, "grad and x");
  if (added) check_alike(*added, x, "added and x");
  const Tensor more = added ? as<float>(*added) : x;
  return backward<false>(grad, x, weight, bias, mean, var, eps, of_batch, nullptr, nullptr,
                         added ? values<float>(more) : nullptr);
}

std::tuple<Tensor, Tensor, Tensor> norm_add_relu(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                 const Tensor& bias, const Statistic& mean, const Statistic& var,
                                                 double eps) {
  check_alike(residual, x, "residual and x");
  return forward(x, &residual, weight, bias, mean, var, eps);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_add_relu_backward(const Tensor& grad, const Tensor& x, const Tensor& y,
                                                                  const Tensor& weight, const Tensor& bias,
                                                                  const Tensor& mean, const Tensor& var, double eps,
                                                                  bool of_batch) {
  check_norm(x, {&weight, &bias, &mean, &var});
  check_alike(grad, x, "grad and x"), check_alike(y, x, "y and x");
  const Tensor result = as<float>(y);
  Tensor of_residual = torch::stable::empty_like(result);
  ask_for_large_pages(of_residual);
  const auto [of_x, of_weight, of_bias] =
      backward<true>(grad, x, weight, bias, mean, var, eps, of_batch, values<float>(result),
                     of_residual.mutable_data_ptr<float>(), nullptr);
  return {of_x, of_residual, of_weight, of_bias};
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("norm_relu", TORCH_BOX(&san::cpu::norm_relu));
  m.impl("norm_relu_backward", TORCH_BOX(&san::cpu::norm_relu_backward));
  m.impl("norm_add_relu", TORCH_BOX(&san::cpu::norm_add_relu));
  m.impl("norm_add_relu_backward", TORCH_BOX(&san::cpu::norm_add_relu_backward));
}
