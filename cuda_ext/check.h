// What a kernel's host function checks before it touches memory. Users meet the friendlier checks of
// san/ops/functional.py first; these protect direct callers of torch.ops.san.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "footprint.h"

namespace san {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Footprint footprint_of(int64_t height, int64_t width, int64_t kernel_size) {
  const Footprint footprint{kernel_size, height, width};
  STD_TORCH_CHECK(footprint.fits(), "a ", kernel_size, "x", kernel_size, " footprint does not fit a ", height, "x",
                  width, " map: it must be odd and its half smaller than each side");
  return footprint;
}

inline void check_map(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 4, name, " must have 4 dimensions [N, C, H, W], not ", x.dim());
}

inline void check_same(const Tensor& a, const Tensor& b, const char* names) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), names, " must have one dtype");
  STD_TORCH_CHECK(a.device() == b.device(), names, " must be on one device");
}

// [N, C, K, P] over the footprint, as unfold, subtraction and the attention weights are.
inline void check_unfolded(const Tensor& x, const Footprint& footprint, const char* name) {
  STD_TORCH_CHECK(x.dim() == 4 && x.size(2) == footprint.positions() && x.size(3) == footprint.pixels(), name,
                  " must be [N, C, ", footprint.positions(), ", ", footprint.pixels(), "]");
}

// phi and psi of dot, [N, R, H, W], whose channels fall into `groups` groups of equal size.
inline void check_dot(const Tensor& phi, const Tensor& psi, int64_t groups) {
  check_map(phi, "phi");
  check_same(phi, psi, "phi and psi");
  STD_TORCH_CHECK(phi.sizes().vec() == psi.sizes().vec(), "phi and psi must have one shape");
  STD_TORCH_CHECK(groups > 0 && phi.size(1) > 0 && phi.size(1) % groups == 0, "phi's ", phi.size(1),
                  " channels must be a positive multiple of the ", groups, " groups");
}

inline void check_aggregation(const Tensor& beta, const Tensor& weight, const Footprint& footprint) {
  check_same(beta, weight, "beta and weight");
  check_unfolded(weight, footprint, "weight");
  STD_TORCH_CHECK(weight.size(0) == beta.size(0), "beta and weight must have one batch size");
  STD_TORCH_CHECK(weight.size(1) > 0 && beta.size(1) > 0 && beta.size(1) % weight.size(1) == 0, "beta's ", beta.size(1),
                  " channels must be a positive multiple of weight's ", weight.size(1));
}

}  // namespace san

// Runs the body with `scalar_t` bound to the tensor's C++ type.
#define SAN_DISPATCH(TYPE, NAME, ...)                                                             \
  THO_DISPATCH_SWITCH(TYPE, NAME,                                                                 \
                      THO_DISPATCH_CASE(torch::headeronly::ScalarType::Float, __VA_ARGS__)        \
                          THO_DISPATCH_CASE(torch::headeronly::ScalarType::Double, __VA_ARGS__)   \
                              THO_DISPATCH_CASE(torch::headeronly::ScalarType::Half, __VA_ARGS__) \
                                  THO_DISPATCH_CASE(torch::headeronly::ScalarType::BFloat16, __VA_ARGS__))

namespace san {

// Half types are summed in float.
template <class scalar_t>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <class scalar_t>
using accumulate_t = typename Accumulate<scalar_t>::type;

}  // namespace san
