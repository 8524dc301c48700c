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

// Inputs of the operators on pairs (schemas.py).
inline void check_pairs(const Tensor& center, const Tensor& around, const Tensor& shift, int64_t products) {
  check_map(center, "center"), check_map(around, "around");
  check_same(center, around, "center and around"), check_same(center, shift, "center and shift");
  STD_TORCH_CHECK(center.scalar_type() == ScalarType::Float || center.scalar_type() == ScalarType::Double,
                  "maps must be float32 or float64");
  STD_TORCH_CHECK(center.sizes().vec() == around.sizes().vec(), "center and around must have the same shape");
  const int64_t d = center.size(3);
  STD_TORCH_CHECK(d > 0 && shift.dim() == 1 && shift.size(0) == d, "shift must have center's ", d, " channels");
  STD_TORCH_CHECK(products >= 0 && products <= d, "products must be from 0 to ", d, ", not ", products);
}

// The two layers of a mapping from d channels; weight1 may be empty.
inline void check_mapping(int64_t d, const Tensor& weight1, const Tensor& shift2, const Tensor& weight2) {
  STD_TORCH_CHECK(weight1.dim() == 2 && weight2.dim() == 2 && shift2.dim() == 1, "weights must be matrices");
  const int64_t E = weight1.size(0);
  STD_TORCH_CHECK(E == 0 || weight1.size(1) == d, "weight1 must be [E, ", d, "]");
  STD_TORCH_CHECK(shift2.size(0) == E, "shift2 must have weight1's ", E, " channels");
  STD_TORCH_CHECK(weight2.size(0) > 0 && weight2.size(1) == (E == 0 ? d : E), "weight2 must be [G, ", E == 0 ? d : E,
                  "]");
}

// Inputs of patch_linear (schemas.py).
inline void check_patches(const Tensor& center, const Tensor& around, const Tensor& scale, const Tensor& shift,
                          const Tensor& weight, const Footprint& footprint) {
  check_map(center, "center"), check_map(around, "around");
  check_same(center, around, "center and around"), check_same(around, scale, "around and scale");
  check_same(scale, shift, "scale and shift");
  STD_TORCH_CHECK(around.scalar_type() == ScalarType::Float || around.scalar_type() == ScalarType::Double,
                  "maps must be float32 or float64");
  for (int axis = 0; axis < 3; ++axis)
    STD_TORCH_CHECK(center.size(axis) == around.size(axis), "center and around must be maps of one size");
  const int64_t columns = center.size(3) + around.size(3) * footprint.positions();
  STD_TORCH_CHECK(around.size(3) > 0 && scale.dim() == 1 && scale.size(0) == columns && shift.dim() == 1 &&
                      shift.size(0) == columns,
                  "scale and shift must have ", columns, " values");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) == columns, "weight must be [E, ", columns,
                  "]");
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
