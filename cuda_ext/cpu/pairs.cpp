// Operators on the pairs of a pixel and a position of its footprint. The attention weights are the only tensor with a
// value for every pair. The definitions are in schemas.py. The loops over pairs, which take nearly all the time, are in
// simd/pairs.cpp.
#include <cmath>
#include <tuple>

#include "bands.h"

namespace san::cpu {
namespace {

template <class T>
const PairKernels<T>& kernels() {
  if constexpr (std::is_same_v<T, double>)
    return SAN_CHOOSE(pairs_double);
  else
    return SAN_CHOOSE(pairs_float);
}

// The maps of all images, and the sizes and parameters for the kernels.
template <class T>
struct Problem {
  Problem(const Tensor& center, const Tensor& around, const Tensor& shift1, int64_t kernel_size, int64_t products)
      : center(as<T>(center)), around(as<T>(around)), shift1(as<T>(shift1)), N(center.size(0)) {
    p.footprint = check_pairs(center, around, shift1, kernel_size, products);
    p.channels = center.size(3), p.products = products, p.shift1 = values<T>(this->shift1);
    d = p.channels, P = p.footprint.pixels(), pairs = double(N) * P * p.footprint.positions();
  }
  void take_mapping(const Tensor& weight1_, const Tensor& shift2_, const Tensor& weight2_) {
    check_pair_layers(center, weight1_, shift2_, weight2_);
    weight1 = as<T>(weight1_), shift2 = as<T>(shift2_), weight2 = as<T>(weight2_);
    p.hidden = weight1.size(0), p.weights = weight2.size(0);
    p.weight1 = values<T>(weight1), p.shift2 = values<T>(shift2), p.weight2 = values<T>(weight2);
  }
  PairMaps<T> maps(int64_t n) const { return {values<T>(center) + n * P * d, values<T>(around) + n * P * d}; }
  std::vector<Band> bands() const { return bands_apart(N, p.footprint); }

  Tensor center, around, shift1, weight1, shift2, weight2;
  int64_t N, P = 0, d = 0;
  double pairs = 0;
  Pairs<T> p{};
};

// Zeros [N, H, W, d].
template <class T>
Tensor zeros_like(const Problem<T>& problem) {
  Tensor map = torch::stable::empty_like(problem.center);
  torch::stable::zero_(map);
  return map;
}

// The gradients of the maps, to which all bands add, and of the parameters, with separate sums for each task.
template <class T>
struct Gradients {
  Gradients(const Problem<T>& problem, size_t tasks)
      : p(problem.p),
        sizes{p.channels, p.hidden * p.channels, p.hidden, p.weights * last()},
        size(sizes[0] + sizes[1] + sizes[2] + sizes[3]),
        sums(tasks * size),
        center(zeros_like(problem)),
        around(zeros_like(problem)) {}
  int64_t last() const { return p.hidden == 0 ? p.channels : p.hidden; }
  PairGradients<T> of(int64_t task, int64_t image) {
    const int64_t map = image * p.footprint.pixels() * p.channels;
    T *shift1 = sums.data() + task * size, *weight1 = shift1 + sizes[0], *shift2 = weight1 + sizes[1];
    return {center.template mutable_data_ptr<T>() + map,
            around.template mutable_data_ptr<T>() + map,
            shift1,
            weight1,
            shift2,
            shift2 + sizes[2]};
  }

  const Pairs<T> p;
  const int64_t sizes[4], size;
  std::vector<T> sums;
  Tensor center, around;
};

// A value near the mean of delta + shift, so that sums of squared distances from it do not cancel: delta + shift of the
// average of up to 64 pixels, spread over the maps.
template <class T>
std::vector<T> near_mean(const Problem<T>& problem) {
  const int64_t d = problem.d, pixels = problem.N * problem.P, some = std::min<int64_t>(pixels, 64);
  std::vector<T> origin(d);
  for (int64_t c = 0; c < d; ++c) {
    double i = 0, j = 0;
    for (int64_t n = 0; n < some; ++n) {
      const int64_t at = (2 * n + 1) * pixels / (2 * some) * d + c;
      i += values<T>(problem.center)[at] / some, j += values<T>(problem.around)[at] / some;
    }
    const double relation = (c < problem.p.products ? i * j : i - j) + problem.p.shift1[c];
    origin[c] = static_cast<T>(std::isfinite(relation) ? relation : 0.0);
  }
  return origin;
}

template <class T>
std::tuple<Tensor, Tensor> statistics(const Problem<T>& problem) {
  const int64_t d = problem.d;
  const std::vector<T> origin = near_mean(problem);
  const std::vector<Band> bands = problem.bands();
  std::vector<T> sums(bands.size() * 2 * d);
  for_each_task<T>(bands.size(), kernels<T>().scratch(problem.p, most_rows(bands), false),
                   [&](int64_t task, T* scratch) {
                     T* sum = sums.data() + task * 2 * d;
                     kernels<T>().statistics(problem.p, problem.maps(bands[task].image), origin.data(),
                                             bands[task].rows, scratch, sum, sum + d);
                   });
  std::vector<double> total = sum_over_tasks(sums, 2 * d);
  for (int64_t c = 0; c < d; ++c) {
    const double mean = total[c] / problem.pairs, var = total[d + c] / problem.pairs - mean * mean;
    total[c] = mean + origin[c], total[d + c] = var < 0 ? 0 : var;  // NaN stays NaN
  }
  return {tensor_of<T>(total.data(), problem.center, {d}), tensor_of<T>(total.data() + d, problem.center, {d})};
}

template <class T>
std::tuple<Tensor, Tensor> statistics_backward(const Problem<T>& problem, const Tensor& grad_mean,
                                               const Tensor& grad_var, const Tensor& mean) {
  const int64_t d = problem.d;
  const Tensor from_mean = as<T>(grad_mean), from_var = as<T>(grad_var), middle = as<T>(mean);
  std::vector<T> slope(d), offset(d);
  for (int64_t c = 0; c < d; ++c) {
    slope[c] = static_cast<T>(2 * values<T>(from_var)[c] / problem.pairs);
    offset[c] = static_cast<T>(values<T>(from_mean)[c] / problem.pairs);
  }
  const std::vector<Band> bands = problem.bands();
  Gradients<T> to(problem, bands.size());
  for_each_band_apart<T>(
      bands, kernels<T>().scratch(problem.p, most_rows(bands), true), [&](int64_t task, const Band& band, T* scratch) {
        kernels<T>().statistics_backward(problem.p, problem.maps(band.image), values<T>(middle), slope.data(),
                                         offset.data(), band.rows, scratch, to.of(task, band.image));
      });
  return {to.center, to.around};
}

template <class T>
std::tuple<Tensor, Tensor> covariance(const Problem<T>& problem) {
  const int64_t d = problem.d, size = d + d * d;
  std::vector<T> origin = near_mean(problem);
  for (T& value : origin) value = std::max(value, T(0));
  const std::vector<Band> bands = problem.bands();
  std::vector<T> sums(bands.size() * size);
  for_each_task<T>(bands.size(), kernels<T>().scratch(problem.p, most_rows(bands), false),
                   [&](int64_t task, T* scratch) {
                     T* sum = sums.data() + task * size;
                     kernels<T>().moments(problem.p, problem.maps(bands[task].image), origin.data(), bands[task].rows,
                                          scratch, sum, sum + d);
                   });
  std::vector<double> total = sum_over_tasks(sums, size), matrix(d * d);
  for (double& x : total) x /= problem.pairs;
  for (int64_t c = 0; c < d; ++c)
    for (int64_t e = c; e < d; ++e) matrix[c * d + e] = matrix[e * d + c] = total[d + c * d + e] - total[c] * total[e];
  for (int64_t c = 0; c < d; ++c) total[c] += origin[c];
  return {tensor_of<T>(total.data(), problem.center, {d}), tensor_of<T>(matrix.data(), problem.center, {d, d})};
}

template <class T>
std::tuple<Tensor, Tensor, Tensor> covariance_backward(const Problem<T>& problem, const Tensor& grad_mean,
                                                       const Tensor& grad_covariance, const Tensor& mean) {
  const int64_t d = problem.d;
  const Tensor vector = as<T>(grad_mean), matrix = as<T>(grad_covariance), middle = as<T>(mean);
  const T *from_mean = values<T>(vector), *from_covariance = values<T>(matrix);
  std::vector<T> slope(d * d), offset(d);
  for (int64_t c = 0; c < d; ++c) {
    offset[c] = static_cast<T>(from_mean[c] / problem.pairs);
    for (int64_t e = 0; e < d; ++e)
      slope[c * d + e] = static_cast<T>((from_covariance[c * d + e] + from_covariance[e * d + c]) / problem.pairs);
  }
  const std::vector<Band> bands = problem.bands();
  Gradients<T> to(problem, bands.size());
  for_each_band_apart<T>(
      bands, kernels<T>().scratch(problem.p, most_rows(bands), true), [&](int64_t task, const Band& band, T* scratch) {
        kernels<T>().moments_backward(problem.p, problem.maps(band.image), values<T>(middle), slope.data(),
                                      offset.data(), band.rows, scratch, to.of(task, band.image));
      });
  const std::vector<double> sums = sum_over_tasks(to.sums, to.size);
  return {to.center, to.around, tensor_of<T>(sums.data(), problem.center, {d})};
}

template <class T>
Tensor weights(const Problem<T>& problem) {
  const Pairs<T>& p = problem.p;
  const int64_t K = p.footprint.positions();
  Tensor w = torch::stable::new_empty(problem.center, {problem.N, p.weights, K, problem.P}, kType<T>);
  ask_for_large_pages(w);
  T* data = w.template mutable_data_ptr<T>();
  const std::vector<Band> bands = bands_alone(problem.N, p.footprint);
  for_each_task<T>(bands.size(), kernels<T>().scratch(p, most_rows(bands), false), [&](int64_t task, T* scratch) {
    const Band& band = bands[task];
    kernels<T>().weights(p, problem.maps(band.image), band.rows, scratch,
                         data + band.image * p.weights * K * problem.P);
  });
  return w;
}

template <class T>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> weights_backward(const Problem<T>& problem,
                                                                            const Tensor& grad, const Tensor& w) {
  const Pairs<T>& p = problem.p;
  const int64_t image = p.weights * p.footprint.positions() * problem.P;
  const Tensor grads = as<T>(grad), ws = as<T>(w);
  const std::vector<Band> bands = problem.bands();
  Gradients<T> to(problem, bands.size());
  for_each_band_apart<T>(
      bands, kernels<T>().scratch(p, most_rows(bands), true), [&](int64_t task, const Band& band, T* scratch) {
        kernels<T>().weights_backward(p, problem.maps(band.image), values<T>(ws) + band.image * image,
                                      values<T>(grads) + band.image * image, band.rows, scratch,
                                      to.of(task, band.image));
      });
  const std::vector<double> sums = sum_over_tasks(to.sums, to.size);
  const double *weight1 = sums.data() + to.sizes[0], *shift2 = weight1 + to.sizes[1], *weight2 = shift2 + to.sizes[2];
  return {to.center,
          to.around,
          tensor_of<T>(sums.data(), problem.center, {p.channels}),
          tensor_of<T>(weight1, problem.center, problem.weight1.sizes().vec()),
          tensor_of<T>(shift2, problem.center, {p.hidden}),
          tensor_of<T>(weight2, problem.center, problem.weight2.sizes().vec())};
}

// A shift of zeros.
Tensor no_shift(const Tensor& center) {
  Tensor shift = torch::stable::new_empty(center, {center.dim() == 4 ? center.size(3) : 0});
  return torch::stable::zero_(shift);
}

std::tuple<Tensor, Tensor> pair_statistics(const Tensor& center, const Tensor& around, int64_t kernel_size,
                                           int64_t products) {
  SAN_SUM_TYPE(center, return statistics(Problem<T>(center, around, no_shift(center), kernel_size, products));)
}

std::tuple<Tensor, Tensor> pair_statistics_backward(const Tensor& grad_mean, const Tensor& grad_var,
                                                    const Tensor& center, const Tensor& around, const Tensor& mean,
                                                    int64_t kernel_size, int64_t products) {
  SAN_SUM_TYPE(center, return statistics_backward(Problem<T>(center, around, no_shift(center), kernel_size, products),
                                                  grad_mean, grad_var, mean);)
}

std::tuple<Tensor, Tensor> pair_covariance(const Tensor& center, const Tensor& around, const Tensor& shift,
                                           int64_t kernel_size, int64_t products, bool) {
  SAN_SUM_TYPE(center, return covariance(Problem<T>(center, around, shift, kernel_size, products));)
}

std::tuple<Tensor, Tensor, Tensor> pair_covariance_backward(const Tensor& grad_mean, const Tensor& grad_covariance,
                                                            const Tensor& center, const Tensor& around,
                                                            const Tensor& shift, const Tensor& mean,
                                                            int64_t kernel_size, int64_t products, bool) {
  SAN_SUM_TYPE(center, return covariance_backward(Problem<T>(center, around, shift, kernel_size, products), grad_mean,
                                                  grad_covariance, mean);)
}

Tensor pair_weights(const Tensor& center, const Tensor& around, const Tensor& shift1, const Tensor& weight1,
                    const Tensor& shift2, const Tensor& weight2, int64_t kernel_size, int64_t products,
                    bool){SAN_SUM_TYPE(center,
                                       {
                                         Problem<T> problem(center, around, shift1, kernel_size, products);
                                         problem.take_mapping(weight1, shift2, weight2);
                                         return as_type(weights(problem), weight2.scalar_type());
                                       })}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> pair_weights_backward(
    const Tensor& grad, const Tensor& w, const Tensor& center, const Tensor& around, const Tensor& shift1,
    const Tensor& weight1, const Tensor& shift2, const Tensor& weight2, int64_t kernel_size, int64_t products, bool) {
  SAN_SUM_TYPE(center, {
    Problem<T> problem(center, around, shift1, kernel_size, products);
    problem.take_mapping(weight1, shift2, weight2);
    check_pair_gradient(grad, w, center, weight2, problem.p.footprint);
    auto [to_center, to_around, to_shift1, to_weight1, to_shift2, to_weight2] = weights_backward(problem, grad, w);
    return {to_center, to_around,
            to_shift1, as_type(to_weight1, weight1.scalar_type()),
            to_shift2, as_type(to_weight2, weight2.scalar_type())};
  })
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("pair_statistics", TORCH_BOX(&san::cpu::pair_statistics));
  m.impl("pair_statistics_backward", TORCH_BOX(&san::cpu::pair_statistics_backward));
  m.impl("pair_covariance", TORCH_BOX(&san::cpu::pair_covariance));
  m.impl("pair_covariance_backward", TORCH_BOX(&san::cpu::pair_covariance_backward));
  m.impl("pair_weights", TORCH_BOX(&san::cpu::pair_weights));
  m.impl("pair_weights_backward", TORCH_BOX(&san::cpu::pair_weights_backward));
}
