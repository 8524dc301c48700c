// patch_linear, forward and backward. The definition is in schemas.py; the loops over the pixels are in
// simd/patches.cpp.
#include <tuple>

#include "bands.h"

namespace san::cpu {
namespace {

template <class T>
const PatchKernels<T>& kernels() {
  return SAN_CHOOSE(patches<T>);
}

template <class T>
struct Problem {
  Problem(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight, int64_t kernel_size)
      : center(as<T>(center)), around(as<T>(around)), norm(as<T>(norm)), weight(as<T>(weight)) {
    p.footprint = check_patches(center, around, norm, weight, kernel_size);
    p.own = center.size(3), p.channels = around.size(3), p.outputs = weight.size(0);
    p.norm = norm_of<T>(this->norm), p.weight = values<T>(this->weight);
    N = center.size(0), P = p.footprint.pixels();
  }
  const T* own(int64_t n) const { return values<T>(center) + n * P * p.own; }
  const T* others(int64_t n) const { return values<T>(around) + n * P * p.channels; }

  Tensor center, around, norm, weight;
  int64_t N = 0, P = 0;
  Patches<T> p{};
};

template <class T>
Tensor map(const Problem<T>& problem) {
  const Patches<T>& p = problem.p;
  Tensor u = torch::stable::new_empty(problem.around, {problem.N, p.outputs, p.footprint.height, p.footprint.width});
  T* out = u.template mutable_data_ptr<T>();
  const std::vector<Band> bands = bands_alone(problem.N, p.footprint);
  for_each_task<T>(bands.size(), kernels<T>().scratch(p, most_rows(bands), false), [&](int64_t task, T* scratch) {
    const int64_t n = bands[task].image;
    kernels<T>().map(p, problem.own(n), problem.others(n), bands[task].rows, scratch, out + n * p.outputs * problem.P);
  });
  return u;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class T>
Gradients map_backward(const Problem<T>& problem, const Tensor& grad) {
  const Patches<T>& p = problem.p;
  const Tensor grad_u = as<T>(grad);
  Tensor to_center = torch::stable::empty_like(problem.center), to_around = torch::stable::empty_like(problem.around);
  torch::stable::zero_(to_center), torch::stable::zero_(to_around);
  T* centers = to_center.template mutable_data_ptr<T>();
  T* arounds = to_around.template mutable_data_ptr<T>();
  const std::vector<Band> bands = bands_apart(problem.N, p.footprint);
  const int64_t columns = p.columns(), lanes = kernels<T>().lanes, pitch = (p.outputs + lanes - 1) / lanes * lanes;
  const int64_t size = columns * (2 + pitch);
  std::vector<T> sums(bands.size() * size);
  for_each_band_apart<T>(
      bands, kernels<T>().scratch(p, most_rows(bands), true), [&](int64_t task, const Band& band, T* scratch) {
        const int64_t n = band.image;
        T* sum = sums.data() + task * size;
        kernels<T>().map_backward(p, problem.own(n), problem.others(n), values<T>(grad_u) + n * p.outputs * problem.P,
                                  band.rows, scratch,
                                  {centers + n * problem.P * p.own, arounds + n * problem.P * p.channels, sum,
                                   sum + columns, sum + 2 * columns});
      });
  const std::vector<double> total = sum_over_tasks(sums, size);
  const double *of_scale = total.data(), *of_shift = of_scale + columns, *of_weight = of_shift + columns;
  std::vector<double> to_norm(3 * columns), to_weight(p.outputs * columns);
  for (int64_t c = 0; c < columns; ++c) {
    to_norm[c] = -p.norm.scale[c] * of_shift[c];
    to_norm[columns + c] = of_scale[c], to_norm[2 * columns + c] = of_shift[c];
  }
  for (int64_t e = 0; e < p.outputs; ++e)
    for (int64_t c = 0; c < columns; ++c) to_weight[e * columns + c] = of_weight[c * pitch + e];
  return {to_center, to_around, tensor_of<T>(to_norm.data(), problem.around, {3, columns}),
          tensor_of<T>(to_weight.data(), problem.around, {p.outputs, columns})};
}

Tensor patch_linear(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight,
                    int64_t kernel_size, bool) {
  SAN_SUM_TYPE(around, return map(Problem<T>(center, around, norm, weight, kernel_size));)
}

Gradients patch_linear_backward(const Tensor& grad, const Tensor& center, const Tensor& around, const Tensor& norm,
                                const Tensor& weight, int64_t kernel_size, bool) {
  SAN_SUM_TYPE(around, {
    const Problem<T> problem(center, around, norm, weight, kernel_size);
    check_patch_gradient(grad, around, weight);
    auto [to_center, to_around, to_norm, to_weight] = map_backward(problem, grad);
    return {to_center, to_around, to_norm, as_type(to_weight, weight.scalar_type())};
  })
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("patch_linear", TORCH_BOX(&san::cpu::patch_linear));
  m.impl("patch_linear_backward", TORCH_BOX(&san::cpu::patch_linear_backward));
}
