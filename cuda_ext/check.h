// What a kernel's host function checks before it touches memory. Users meet the friendlier checks of
// san/ops/functional.py first; these protect direct callers of torch.ops.san.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>

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
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), names, " must have the same dtype");
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
  STD_TORCH_CHECK(phi.sizes().vec() == psi.sizes().vec(), "phi and psi must have the same shape");
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

// Inputs of patch_linear (schemas.py); the gradients of its backward operator have the shape of its result.
inline Footprint check_patches(const Tensor& center, const Tensor& around, const Tensor& scale, const Tensor& shift,
                               const Tensor& weight, int64_t kernel_size) {
  STD_TORCH_CHECK(center.dim() == 4 && around.dim() == 4, "center and around must have 4 dimensions [N, H, W, C], not ",
                  center.dim(), " and ", around.dim());
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(center.size(axis) == around.size(axis), "center and around must be maps of one size");
  }
  const Footprint footprint = footprint_of(around.size(1), around.size(2), kernel_size);
  const int64_t C = center.size(3), R = around.size(3), columns = C + R * footprint.positions();
  STD_TORCH_CHECK(R > 0 && (C == 0 || C == R), "center has ", C, " channels; expected around's ", R, " or none");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) == columns, "weight must be [E, ", columns,
                  "] for the ", columns, " channels of a patch");
  STD_TORCH_CHECK(scale.dim() == 1 && scale.size(0) == columns && shift.dim() == 1 && shift.size(0) == columns,
                  "scale and shift must have the ", columns, " channels of a patch");
  const ScalarType type = around.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, "around must be float32 or float64");
  check_same(center, around, "center and around");
  check_same(scale, around, "scale and around"), check_same(shift, around, "shift and around");
  STD_TORCH_CHECK(weight.scalar_type() == type || weight.scalar_type() == ScalarType::Half ||
                      weight.scalar_type() == ScalarType::BFloat16,
                  "weight must have around's dtype, float16 or bfloat16");
  STD_TORCH_CHECK(weight.device() == around.device(), "weight and around must be on one device");
  return footprint;
}

// Inputs of pairwise attention (schemas.py); norm1 and norm2 are gain, bias, mean and var.
inline void check_pairwise(const Tensor& center, const Tensor& around, const Tensor& beta,
                           std::initializer_list<const Tensor*> norm1, const Tensor& weight1,
                           std::initializer_list<const Tensor*> norm2, const Tensor& weight2) {
  check_map(center, "center"), check_map(around, "around"), check_map(beta, "beta");
  STD_TORCH_CHECK(center.sizes().vec() == around.sizes().vec(), "center and around must have the same shape");
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(beta.size(axis) == center.size(axis), "beta and center must be maps of one size");
  }
  STD_TORCH_CHECK(weight1.dim() == 2 && weight2.dim() == 2, "weight1 and weight2 must be matrices");
  const int64_t d = center.size(3), E = weight1.size(0), G = weight2.size(0), M = beta.size(3);
  STD_TORCH_CHECK(d > 0 && E > 0 && G > 0 && M > 0 && M % G == 0, "beta's channels must be a positive multiple of the ",
                  G, " weight channels");
  STD_TORCH_CHECK(weight1.size(1) == d && weight2.size(1) == E, "weight1 must be [E, d] and weight2 [G, E]");
  for (const Tensor* x : norm1) {
    STD_TORCH_CHECK(x->dim() == 1 && x->size(0) == d, "the first BatchNorm must have ", d, " channels");
  }
  for (const Tensor* x : norm2) {
    STD_TORCH_CHECK(x->dim() == 1 && x->size(0) == E, "the second BatchNorm must have ", E, " channels");
  }
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
