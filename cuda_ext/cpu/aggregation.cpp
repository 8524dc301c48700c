// aggregation, forward and backward. The definition is in san/ops/reference.py, the loops over pixels are in
// simd/aggregation.cpp.
#include <tuple>

#include "attend.h"

namespace san::cpu {
namespace {

template <class T>
struct Problem {
  Problem(const Tensor& beta, const Tensor& weight, int64_t kernel_size)
      : p{check_aggregation(beta, weight, kernel_size), beta.size(1), weight.size(1)},
        N(beta.size(0)),
        map_size(p.values * p.footprint.pixels()),
        w_size(p.weights * p.footprint.positions() * p.footprint.pixels()),
        w(as<T>(weight)),
        like(beta),
        beta(by_pixels<T>(beta)),
        kernels(aggregation_kernels<T>(p.footprint)) {}
  // A map like beta, but [N, H, W, C], as one like beta itself.
  Tensor by_channels(const Tensor& x) const {
    const Tensor map = torch::stable::transpose(torch::stable::transpose(x, 2, 3), 1, 2);
    return as_type(is_channels_last(like) ? map : torch::stable::contiguous(map), like.scalar_type());
  }
  AggregationMaps<T> maps(const Band& band) const {
    const T* weights = values<T>(w);
    return {values<T>(beta) + band.image * map_size,
            {weights + first_weight(band), p.footprint.pixels()},
            weights + N * w_size};
  }
  int64_t first_weight(const Band& band) const { return band.image * w_size + band.rows.first * p.footprint.width; }

  const Aggregation<T> p;
  const int64_t N, map_size, w_size;
  const Tensor w, like, beta;
  const AggregationKernels<T>& kernels;
};

template <class T>
Tensor forward(const Problem<T>& problem) {
  Tensor y = torch::stable::empty_like(problem.beta);
  T* out = y.template mutable_data_ptr<T>();
  const Footprint& f = problem.p.footprint;
  const std::vector<Band> bands = bands_alone(problem.N, f, band_rows(problem.p, 1));
  for_each_task<T>(bands.size(), problem.kernels.scratch(problem.p, most_rows(bands), false),
                   [&](int64_t task, T* scratch) {
                     const int64_t n = bands[task].image;
                     problem.kernels.forward(problem.p, problem.maps(bands[task]), bands[task].rows, scratch,
                                             out + n * problem.map_size);
                   });
  return problem.by_channels(y);
}

template <class T>
std::tuple<Tensor, Tensor> backward(const Problem<T>& problem, const Tensor& grad) {
  const Tensor grad_y = by_pixels<T>(grad);
  Tensor grad_beta = torch::stable::empty_like(problem.beta), grad_w = torch::stable::empty_like(problem.w);
  torch::stable::zero_(grad_beta);
  ask_for_large_pages(grad_w);
  T *to_beta = grad_beta.template mutable_data_ptr<T>(), *to_w = grad_w.template mutable_data_ptr<T>();
  const Footprint& f = problem.p.footprint;
  const std::vector<Band> bands = bands_of(problem.N, f, band_rows(problem.p, f.kernel_size));
  for_each_band_apart<T>(
      bands, problem.kernels.scratch(problem.p, most_rows(bands), true), [&](int64_t, const Band& band, T* scratch) {
        const int64_t n = band.image;
        problem.kernels.backward(problem.p, problem.maps(band), values<T>(grad_y) + n * problem.map_size, band.rows,
                                 scratch, to_beta + n * problem.map_size,
                                 {to_w + problem.first_weight(band), f.pixels()}, nullptr);
      });
  return {problem.by_channels(grad_beta), as_type(grad_w, problem.like.scalar_type())};
}

Tensor aggregation(const Tensor& beta, const Tensor& weight, int64_t kernel_size) {
  SAN_SUM_TYPE(beta, return forward(Problem<T>(beta, weight, kernel_size));)
}

std::tuple<Tensor, Tensor> aggregation_backward(const Tensor& grad, const Tensor& beta, const Tensor& weight,
                                                int64_t kernel_size) {
  check_alike(grad, beta, "grad and beta");
  SAN_SUM_TYPE(beta, return backward(Problem<T>(beta, weight, kernel_size), grad);)
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("aggregation", TORCH_BOX(&san::cpu::aggregation));
  m.impl("aggregation_backward", TORCH_BOX(&san::cpu::aggregation_backward));
}
