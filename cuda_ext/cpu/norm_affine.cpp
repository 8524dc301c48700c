// norm_affine, forward and backward: the affine form of a norm, computed in float64; and track_statistics, the update
// of its running statistics. The definitions are in schemas.py.
#include <cmath>
#include <tuple>

#include "bands.h"

namespace san::cpu {
namespace {

std::vector<double> wide_values(const Tensor& x, int64_t count) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == count, "weight and bias must have the ", count, " channels of mean");
  return doubles(x);
}

Tensor norm_affine(const Tensor& mean, const Tensor& var, const Tensor& weight, const Tensor& bias, double eps) {
  check_norm_affine(mean, var);
  const int64_t C = mean.size(0);
  const std::vector<double> means = wide_values(mean, C), vars = wide_values(var, C);
  const std::vector<double> weights = wide_values(weight, C), biases = wide_values(bias, C);
  std::vector<double> norm(3 * C);
  for (int64_t c = 0; c < C; ++c) {
    norm[c] = means[c], norm[2 * C + c] = biases[c];
    norm[C + c] = weights[c] / std::sqrt((vars[c] < 0 ? 0 : vars[c]) + eps);
  }
  SAN_SUM_TYPE(mean, return tensor_of<T>(norm.data(), mean, {3, C});)
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_affine_backward(const Tensor& grad, const Tensor& var,
                                                                const Tensor& weight, double eps) {
  const int64_t C = var.size(0);
  check_norm_affine(var, var), check_norm(grad, var, C);
  const std::vector<double> grads = doubles(grad);
  const double* g = grads.data();
  const std::vector<double> vars = wide_values(var, C), weights = wide_values(weight, C);
  std::vector<double> to_var(C), to_weight(C);
  for (int64_t c = 0; c < C; ++c) {
    const double inverse = 1 / std::sqrt((vars[c] < 0 ? 0 : vars[c]) + eps);
    to_weight[c] = g[C + c] * inverse;
    to_var[c] = vars[c] < 0 ? 0 : -0.5 * to_weight[c] * weights[c] * inverse * inverse;
  }
  SAN_SUM_TYPE(var, return {tensor_of<T>(g, var, {C}), tensor_of<T>(to_var.data(), var, {C}),
                            tensor_of<T>(to_weight.data(), var, {C}), tensor_of<T>(g + 2 * C, var, {C})};)
}

void track_statistics(Tensor running_mean, Tensor running_var, Tensor batches, const Tensor& mean, const Tensor& var,
                      int64_t values, double momentum) {
  check_track_statistics(running_mean, running_var, batches, mean, var, values);
  const std::vector<double> means = doubles(mean), vars = doubles(var);
  SAN_SUM_TYPE(running_mean, {
    T *to_mean = running_mean.mutable_data_ptr<T>(), *to_var = running_var.mutable_data_ptr<T>();
    for (size_t c = 0; c < means.size(); ++c) {
      to_mean[c] = static_cast<T>(to_mean[c] + momentum * (means[c] - to_mean[c]));
      to_var[c] = static_cast<T>(to_var[c] + momentum * (vars[c] * values / (values - 1) - to_var[c]));
    }
  })
  ++*batches.mutable_data_ptr<int64_t>();
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("norm_affine", TORCH_BOX(&san::cpu::norm_affine));
  m.impl("norm_affine_backward", TORCH_BOX(&san::cpu::norm_affine_backward));
  m.impl("track_statistics", TORCH_BOX(&san::cpu::track_statistics));
}
