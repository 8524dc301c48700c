// Operators on the pairs of a pixel and a position of its footprint. None of them stores a tensor with a value for
// every pair. The definitions are in schemas.py. The loops over pairs, which take nearly all the time, are in
// simd/pairs.cpp.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "attend.h"

namespace san::cpu {
namespace {

// The median of three numbers, or 0 if that is not finite.
double middle(double a, double b, double c) {
  const double median = std::max(std::min(a, b), std::min(std::max(a, b), c));
  return std::isfinite(median) ? median : 0;
}

// A typical value of each channel of each image, [N, d]: the median of three means over eight pixels each, so that a
// huge or infinite pixel has no influence.
template <class T>
std::vector<T> typical_values(const T* map, int64_t N, int64_t P, int64_t d) {
  constexpr int64_t kPixels = 8, kMeans = 3;
  std::vector<T> typical(N * d);
  std::vector<double> means(kMeans * d);
  for (int64_t n = 0; n < N; ++n) {
    std::fill(means.begin(), means.end(), 0.0);
    for (int64_t sample = 0; sample < kMeans * kPixels; ++sample) {
      const T* pixel = map + (n * P + (2 * sample + 1) * P / (2 * kMeans * kPixels)) * d;
      for (int64_t c = 0; c < d; ++c) means[sample % kMeans * d + c] += double(pixel[c]) / kPixels;
    }
    for (int64_t c = 0; c < d; ++c)
      typical[n * d + c] = static_cast<T>(middle(means[c], means[d + c], means[2 * d + c]));
  }
  return typical;
}

// The maps of all images, and the sizes and parameters for the kernels.
template <class T>
struct Problem {
  Problem(const Tensor& center, const Tensor& around, const Tensor& norm, int64_t kernel_size, int64_t products)
      : center(as<T>(center)), around(as<T>(around)), norm(as<T>(norm)), N(center.size(0)) {
    p.footprint = check_pairs(center, around, norm, kernel_size, products);
    p.channels = d = center.size(3), p.products = products;
    p.norm = norm_of<T>(this->norm);
    P = p.footprint.pixels(), pairs = double(N) * P * p.footprint.positions();
    origins = typical_values(values<T>(this->around), N, P, d);
  }
  void take_mapping(const Tensor& weight1_, const Tensor& shift2_, const Tensor& weight2_) {
    check_pair_layers(center, weight1_, shift2_, weight2_);
    weight1 = as<T>(weight1_), shift2 = as<T>(shift2_), weight2 = as<T>(weight2_);
    p.hidden = weight1.size(0), p.weights = weight2.size(0);
    p.weight1 = values<T>(weight1), p.shift2 = values<T>(shift2), p.weight2 = values<T>(weight2);
  }
  PairMaps<T> maps(int64_t n) const {
    return {values<T>(center) + n * P * d, values<T>(around) + n * P * d, origins.data() + n * d};
  }
  std::vector<Band> bands() const { return bands_apart(N, p.footprint); }

  const PairKernels<T>& kernels = SAN_CHOOSE(pairs<T>);
  Tensor center, around, norm, weight1, shift2, weight2;
  int64_t N, P = 0, d = 0;
  double pairs = 0;
  std::vector<T> origins;
  Pairs<T> p{};
};

// The gradients of the maps, to which all bands add, and of the parameters, with separate sums for each task.
template <class T>
struct Gradients {
  Gradients(const Problem<T>& problem, size_t tasks)
      : problem(problem),
        sizes{problem.d, problem.p.hidden * problem.d, problem.p.hidden, problem.p.weights * last()},
        size(sizes[0] + sizes[1] + sizes[2] + sizes[3]),
        sums(tasks * size),
        center(zeros()),
        around(zeros()) {}
  int64_t last() const { return problem.p.hidden == 0 ? problem.d : problem.p.hidden; }
  Tensor zeros() const {
    Tensor map = torch::stable::empty_like(problem.center);
    return torch::stable::zero_(map);
  }
  PairGradients<T> of(int64_t task, int64_t image) {
    const int64_t map = image * problem.P * problem.d;
    T *shift1 = sums.data() + task * size, *weight1 = shift1 + sizes[0], *shift2 = weight1 + sizes[1];
    return {center.template mutable_data_ptr<T>() + map,
            around.template mutable_data_ptr<T>() + map,
            shift1,
            weight1,
            shift2,
            shift2 + sizes[2]};
  }

  // Multiplies the gradients of the maps by the norm's scale. Returns the gradient of the norm, [3, d], where `shift`
  // is that of its shift: with g, the gradient of norm(delta), that of scale is the sum of g * (delta - mean), which
  // follows from the sums of g for each pixel of center and of around.
  Tensor finish(const double* shift) {
    const int64_t d = problem.d, P = problem.P, products = problem.p.products;
    const T *mean = problem.p.norm.mean, *scale = problem.p.norm.scale;
    std::vector<double> of_scale(problem.N * d);
    for_each_task<T>(problem.N, 0, [&](int64_t n, T*) {
      const PairMaps<T> maps = problem.maps(n);
      const PairGradients<T> to = of(0, n);
      double* sum = of_scale.data() + n * d;
      for (int64_t i = 0; i < P; ++i)
        for (int64_t c = 0; c < d; ++c) {
          const int64_t at = i * d + c;
          const double around = to.around[at];
          if (c < products)
            sum[c] += double(maps.center[at]) * to.center[at];
          else
            sum[c] += (maps.center[at] - maps.origin[c] - mean[c]) * double(to.center[at]) +
                      (maps.around[at] - maps.origin[c]) * around;
          to.center[at] *= scale[c];
          if (c >= products) to.around[at] *= scale[c];
        }
    });
    std::vector<double> norm = sum_over_tasks(of_scale, d);
    norm.insert(norm.begin(), d, 0.0), norm.insert(norm.end(), shift, shift + d);
    for (int64_t c = 0; c < d; ++c) {
      norm[c] = -scale[c] * shift[c];
      if (c < products) norm[d + c] -= mean[c] * shift[c];
    }
    return tensor_of<T>(norm.data(), problem.center, {3, d});
  }

  // Those of center, around, norm, weight1, shift2 and weight2.
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> all() {
    const std::vector<double> total = sum_over_tasks(sums, size);
    const double *weight1 = total.data() + sizes[0], *shift2 = weight1 + sizes[1], *weight2 = shift2 + sizes[2];
    const Tensor norm = finish(total.data());
    return {center,
            around,
            norm,
            tensor_of<T>(weight1, problem.center, problem.weight1.sizes().vec()),
            tensor_of<T>(shift2, problem.center, {problem.p.hidden}),
            tensor_of<T>(weight2, problem.center, problem.weight2.sizes().vec())};
  }

  const Problem<T>& problem;
  const int64_t sizes[4], size;
  std::vector<T> sums;
  Tensor center, around;
};

template <class T>
std::tuple<Tensor, Tensor> covariance(const Problem<T>& problem) {
  const int64_t d = problem.d, size = d + d * d;
  const Norm<T>& norm = problem.p.norm;
  std::vector<T> origin(d);  // a1 near its mean, from the first image
  const std::vector<T> typical = typical_values(values<T>(problem.center), problem.N, problem.P, d);
  for (int64_t c = 0; problem.N > 0 && c < d; ++c) {
    const double i = typical[c], j = problem.origins[c], delta = c < problem.p.products ? i * j : i - j;
    const double a1 = (delta - norm.mean[c]) * norm.scale[c] + norm.shift[c];
    origin[c] = static_cast<T>(std::isfinite(a1) && a1 > 0 ? a1 : 0);
  }
  const std::vector<Band> bands = problem.bands();
  std::vector<T> sums(bands.size() * size);
  for_each_task<T>(bands.size(), problem.kernels.scratch(problem.p, most_rows(bands), false),
                   [&](int64_t task, T* scratch) {
                     T* sum = sums.data() + task * size;
                     problem.kernels.moments(problem.p, problem.maps(bands[task].image), origin.data(),
                                             bands[task].rows, scratch, sum, sum + d);
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
  check_statistics({&grad_mean, &mean}, problem.center, {d}),
      check_statistics({&grad_covariance}, problem.center, {d, d});
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
  for_each_band_apart<T>(bands, problem.kernels.scratch(problem.p, most_rows(bands), true),
                         [&](int64_t task, const Band& band, T* scratch) {
                           problem.kernels.moments_backward(problem.p, problem.maps(band.image), values<T>(middle),
                                                            slope.data(), offset.data(), band.rows, scratch,
                                                            to.of(task, band.image));
                         });
  const Tensor norm = to.finish(sum_over_tasks(to.sums, to.size).data());
  return {to.center, to.around, norm};
}

template <class T>
Values<T> values_of(const Problem<T>& problem, const Tensor& beta) {
  return {beta, problem.p.footprint, problem.p.weights, 1};
}

// y, and the softmax [N, 2, G, P] with which `attend_backward` computes the weights again.
template <class T>
std::tuple<Tensor, Tensor> attend(const Problem<T>& problem, const Tensor& beta) {
  const Pairs<T>& p = problem.p;
  Tensor softmax = torch::stable::new_empty(problem.center, {problem.N, 2, p.weights, problem.P});
  T* out = softmax.template mutable_data_ptr<T>();
  const Tensor y = attend(
      values_of(problem, beta), [&](int64_t rows) { return problem.kernels.scratch(p, rows, false); },
      [&](const Band& band, T* scratch, BandWeights<T> w) {
        problem.kernels.weights(p, problem.maps(band.image), band.rows, scratch, w,
                                out + band.image * 2 * p.weights * problem.P);
      });
  return {y, softmax};
}

using AttendGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class T>
AttendGradients attend_backward(const Problem<T>& problem, const Tensor& grad, const Tensor& softmax,
                                const Tensor& beta) {
  const Pairs<T>& p = problem.p;
  const Values<T> x = values_of(problem, beta);
  const std::vector<Band> bands = bands_of_gradients(x);
  Gradients<T> to(problem, bands.size());
  const Tensor kept = as<T>(softmax);
  const Tensor to_beta = attend_backward(
      x, grad, bands,
      [&](int64_t rows) {
        return std::max(problem.kernels.scratch(p, rows, false), problem.kernels.scratch(p, rows, true));
      },
      [&](const Band& band, T* scratch, BandWeights<T> w) {
        problem.kernels.weights_again(p, problem.maps(band.image), band.rows, scratch, w,
                                      values<T>(kept) + band.image * 2 * p.weights * problem.P);
      },
      [&](int64_t task, const Band& band, T* scratch, BandWeights<T> w, BandWeights<T> to_w, const T* dots) {
        problem.kernels.weights_backward(p, problem.maps(band.image), {w.data, w.pitch}, {to_w.data, to_w.pitch}, dots,
                                         band.rows, scratch, to.of(task, band.image));
      });
  return std::tuple_cat(to.all(), std::tuple(to_beta));
}

std::tuple<Tensor, Tensor> pair_covariance(const Tensor& center, const Tensor& around, const Tensor& norm,
                                           int64_t kernel_size, int64_t products) {
  SAN_SUM_TYPE(center, return covariance(Problem<T>(center, around, norm, kernel_size, products));)
}

std::tuple<Tensor, Tensor, Tensor> pair_covariance_backward(const Tensor& grad_mean, const Tensor& grad_covariance,
                                                            const Tensor& center, const Tensor& around,
                                                            const Tensor& norm, const Tensor& mean, int64_t kernel_size,
                                                            int64_t products) {
  SAN_SUM_TYPE(center, return covariance_backward(Problem<T>(center, around, norm, kernel_size, products), grad_mean,
                                                  grad_covariance, mean);)
}

std::tuple<Tensor, Tensor> attend_pairs(const Tensor& center, const Tensor& around, const Tensor& norm,
                                        const Tensor& weight1, const Tensor& shift2, const Tensor& weight2,
                                        const Tensor& beta, int64_t kernel_size, int64_t products, bool) {
  SAN_SUM_TYPE(center, {
    Problem<T> problem(center, around, norm, kernel_size, products);
    problem.take_mapping(weight1, shift2, weight2), check_same(weight2, center, "weights and maps");
    check_values({&beta}, center, problem.p.weights), check_same(beta, center, "beta and the other maps");
    return attend(problem, beta);
  });
}

AttendGradients attend_pairs_backward(const Tensor& grad, const Tensor& y, const Tensor& softmax, const Tensor& center,
                                      const Tensor& around, const Tensor& norm, const Tensor& weight1,
                                      const Tensor& shift2, const Tensor& weight2, const Tensor& beta,
                                      int64_t kernel_size, int64_t products, bool) {
  SAN_SUM_TYPE(center, {
    Problem<T> problem(center, around, norm, kernel_size, products);
    problem.take_mapping(weight1, shift2, weight2), check_same(weight2, center, "weights and maps");
    check_values({&beta, &grad, &y}, center, problem.p.weights), check_same(beta, center, "beta and the other maps");
    check_softmax(softmax, center, problem.p.weights);
    return attend_backward(problem, grad, softmax, beta);
  });
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("pair_covariance", TORCH_BOX(&san::cpu::pair_covariance));
  m.impl("pair_covariance_backward", TORCH_BOX(&san::cpu::pair_covariance_backward));
  m.impl("attend_pairs", TORCH_BOX(&san::cpu::attend_pairs));
  m.impl("attend_pairs_backward", TORCH_BOX(&san::cpu::attend_pairs_backward));
}
