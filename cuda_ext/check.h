// Checks of the arguments before a kernel accesses memory. Before unfused operators, the functions of
// san/ops/functional.py check first, with more helpful messages; before fused ones, only the footprint is checked.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <type_traits>
#include <vector>

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

// Whether the memory format of [N, C, H, W] is channels-last. The map may be a slice of one with more channels.
inline bool is_channels_last(const Tensor& x) {
  const int64_t C = x.size(1), H = x.size(2), W = x.size(3), pixel = x.stride(3);
  return x.stride(1) == 1 && pixel >= C && x.stride(2) == pixel * W && C > 1 &&
         (x.size(0) == 1 || x.stride(0) == pixel * W * H);
}

inline void check_same(const Tensor& a, const Tensor& b, const char* names) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), names, " must have the same dtype");
  STD_TORCH_CHECK(a.device() == b.device(), names, " must be on one device");
}

// The same with one shape.
inline void check_alike(const Tensor& a, const Tensor& b, const char* names) {
  check_same(a, b, names);
  STD_TORCH_CHECK(a.sizes().vec() == b.sizes().vec(), names, " must have the same shape");
}

// x must be [N, C, K, P], like the results of unfold and subtraction and like attention weights.
inline void check_unfolded(const Tensor& x, const Footprint& footprint, const char* name) {
  STD_TORCH_CHECK(x.dim() == 4 && x.size(2) == footprint.positions() && x.size(3) == footprint.pixels(), name,
                  " must be [N, C, ", footprint.positions(), ", ", footprint.pixels(), "]");
}

// phi and psi of dot are [N, R, H, W], and R must be a multiple of `groups`.
inline Footprint check_dot(const Tensor& phi, const Tensor& psi, int64_t kernel_size, int64_t groups) {
  check_map(phi, "phi"), check_alike(phi, psi, "phi and psi");
  STD_TORCH_CHECK(groups > 0 && phi.size(1) > 0 && phi.size(1) % groups == 0, "phi's ", phi.size(1),
                  " channels must be a positive multiple of the ", groups, " groups");
  return footprint_of(phi.size(2), phi.size(3), kernel_size);
}

inline Footprint check_aggregation(const Tensor& beta, const Tensor& weight, int64_t kernel_size) {
  check_map(beta, "beta"), check_same(beta, weight, "beta and weight");
  const Footprint footprint = footprint_of(beta.size(2), beta.size(3), kernel_size);
  check_unfolded(weight, footprint, "weight");
  STD_TORCH_CHECK(weight.size(0) == beta.size(0), "beta and weight must have one batch size");
  STD_TORCH_CHECK(weight.size(1) > 0 && beta.size(1) > 0 && beta.size(1) % weight.size(1) == 0, "beta's ", beta.size(1),
                  " channels must be a positive multiple of weight's ", weight.size(1));
  return footprint;
}

// Weights of fused operators have the type of the maps or a half type.
inline void check_weight(const Tensor& weight, const Tensor& map) {
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK(type == map.scalar_type() || type == ScalarType::Half || type == ScalarType::BFloat16,
                  "weights must have the dtype of the maps or a half type");
  STD_TORCH_CHECK(weight.device() == map.device(), "weights and maps must be on one device");
}

// The affine form of a norm must be [3, channels], with the type and device of the maps.
inline void check_norm(const Tensor& norm, const Tensor& map, int64_t channels) {
  STD_TORCH_CHECK(norm.dim() == 2 && norm.size(0) == 3 && norm.size(1) == channels, "norm must be [3, ", channels, "]");
  check_same(norm, map, "norm and the maps");
}

// Saved statistics and gradients of statistics must have this shape, and the type and device of the maps.
inline void check_statistics(std::initializer_list<const Tensor*> tensors, const Tensor& map,
                             const std::vector<int64_t>& shape) {
  for (const Tensor* x : tensors) {
    STD_TORCH_CHECK(x->sizes().vec() == shape, "statistics and their gradients must have the ", shape[0],
                    " channels of the maps");
    check_same(*x, map, "statistics and the maps");
  }
}

// The maps of the pair operators; see schemas.py.
inline Footprint check_pair_maps(const Tensor& center, const Tensor& around, int64_t kernel_size, int64_t products) {
  STD_TORCH_CHECK(center.dim() == 4, "center must have 4 dimensions [N, H, W, d], not ", center.dim());
  STD_TORCH_CHECK(center.scalar_type() == ScalarType::Float || center.scalar_type() == ScalarType::Double,
                  "center must be float32 or float64");
  check_alike(around, center, "center and around");
  STD_TORCH_CHECK(center.size(3) > 0, "center must have channels");
  STD_TORCH_CHECK(products >= 0 && products <= center.size(3), "products must be between 0 and the ", center.size(3),
                  " channels, not ", products);
  return footprint_of(center.size(1), center.size(2), kernel_size);
}

// The maps and the norm of the pair operators.
inline Footprint check_pairs(const Tensor& center, const Tensor& around, const Tensor& norm, int64_t kernel_size,
                             int64_t products) {
  const Footprint footprint = check_pair_maps(center, around, kernel_size, products);
  check_norm(norm, center, center.size(3));
  return footprint;
}

// The layers that follow the relation. Without a hidden layer, weight1 is empty.
inline void check_pair_layers(const Tensor& center, const Tensor& weight1, const Tensor& shift2,
                              const Tensor& weight2) {
  STD_TORCH_CHECK(weight1.dim() == 2 && weight2.dim() == 2, "weight1 and weight2 must be matrices");
  const int64_t d = center.size(3), E = weight1.size(0), G = weight2.size(0), depth = E > 0 ? E : d;
  STD_TORCH_CHECK(E == 0 || weight1.size(1) == d, "weight1 must be [E, ", d, "], not [", E, ", ", weight1.size(1), "]");
  STD_TORCH_CHECK(G > 0 && weight2.size(1) == depth, "weight2 must be [G, ", depth, "], not [", G, ", ",
                  weight2.size(1), "]");
  STD_TORCH_CHECK(shift2.dim() == 1 && shift2.size(0) == E, "shift2 must have ", E,
                  " values, one for each row of weight1");
  check_same(shift2, center, "shift2 and center"), check_same(weight1, weight2, "weight1 and weight2");
  check_weight(weight2, center);
}

// The second result of attend_pairs and attend_dot.
inline void check_softmax(const Tensor& softmax, const Tensor& map, int64_t G) {
  const int64_t N = map.size(0), P = map.size(1) * map.size(2);
  STD_TORCH_CHECK(softmax.sizes().vec() == std::vector({N, int64_t(2), G, P}),
                  "softmax must be the second result of the forward operator");
  check_same(softmax, map, "softmax and the maps");
}

// beta [N, H, W, M] and, if there are any, y and its gradient; `map` is [N, H, W, channels], and G is the number of
// weight channels.
inline void check_values(std::initializer_list<const Tensor*> tensors, const Tensor& map, int64_t G) {
  const Tensor& beta = **tensors.begin();
  for (const Tensor* x : tensors) {
    STD_TORCH_CHECK(
        x->dim() == 4 && x->size(0) == map.size(0) && x->size(1) == map.size(1) && x->size(2) == map.size(2),
        "beta, y and its gradient must be maps [", map.size(0), ", ", map.size(1), ", ", map.size(2), ", M]");
    check_alike(*x, beta, "beta, y and its gradient");
  }
  STD_TORCH_CHECK(beta.size(3) > 0 && beta.size(3) % G == 0, "beta's ", beta.size(3),
                  " channels must be a positive multiple of the ", G, " weight channels");
  STD_TORCH_CHECK(beta.device() == map.device(), "beta and the other maps must be on one device");
}

// The inputs of attend_dot: maps [N, H, W, R] and scores [N, G, 2 kernel_size, P].
inline Footprint check_attend_dot(const Tensor& phi, const Tensor& psi, const Tensor& scores, int64_t kernel_size) {
  STD_TORCH_CHECK(phi.dim() == 4, "phi must have 4 dimensions [N, H, W, R], not ", phi.dim());
  STD_TORCH_CHECK(phi.scalar_type() == ScalarType::Float || phi.scalar_type() == ScalarType::Double,
                  "phi must be float32 or float64");
  check_alike(phi, psi, "phi and psi"), check_same(scores, phi, "scores and the maps");
  const Footprint footprint = footprint_of(phi.size(1), phi.size(2), kernel_size);
  STD_TORCH_CHECK(scores.dim() == 4 && scores.size(0) == phi.size(0) && scores.size(1) > 0 &&
                      scores.size(2) == 2 * kernel_size && scores.size(3) == footprint.pixels(),
                  "scores must be [", phi.size(0), ", G, ", 2 * kernel_size, ", ", footprint.pixels(), "]");
  STD_TORCH_CHECK(phi.size(3) > 0 && phi.size(3) % scores.size(1) == 0, "phi's ", phi.size(3),
                  " channels must be a positive multiple of the ", scores.size(1), " weight channels");
  return footprint;
}

// The maps of the patch operators; see schemas.py.
inline Footprint check_patch_maps(const Tensor& center, const Tensor& around, int64_t kernel_size) {
  STD_TORCH_CHECK(center.dim() == 4 && around.dim() == 4, "center and around must have 4 dimensions [N, H, W, C], not ",
                  center.dim(), " and ", around.dim());
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(center.size(axis) == around.size(axis), "center and around must be maps of one size");
  }
  const int64_t C = center.size(3), R = around.size(3);
  STD_TORCH_CHECK(R > 0 && (C == 0 || C == R), "center has ", C, " channels; expected around's ", R, " or none");
  STD_TORCH_CHECK(around.scalar_type() == ScalarType::Float || around.scalar_type() == ScalarType::Double,
                  "around must be float32 or float64");
  check_same(center, around, "center and around");
  return footprint_of(around.size(1), around.size(2), kernel_size);
}

// The inputs of patch_linear.
inline Footprint check_patches(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight,
                               int64_t kernel_size) {
  const Footprint footprint = check_patch_maps(center, around, kernel_size);
  const int64_t columns = center.size(3) + around.size(3) * footprint.positions();
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) == columns, "weight must be [E, ", columns,
                  "] for the ", columns, " channels of a patch");
  check_norm(norm, around, columns);
  check_weight(weight, around);
  return footprint;
}

// The gradient of patch_linear's result.
inline void check_patch_gradient(const Tensor& grad, const Tensor& around, const Tensor& weight) {
  const int64_t N = around.size(0), E = weight.size(0), H = around.size(1), W = around.size(2);
  STD_TORCH_CHECK(grad.sizes().vec() == std::vector({N, E, H, W}), "grad must be [", N, ", ", E, ", ", H, ", ", W, "]");
  check_same(grad, around, "grad and around");
}

// The last layer of a patchwise mapping for maps `hidden` [N, H, W, E]: weight [G * K, E] and bias [G * K].
inline Footprint check_last_layer(const Tensor& hidden, const Tensor& weight, const Tensor& bias, int64_t kernel_size) {
  STD_TORCH_CHECK(hidden.dim() == 4 && hidden.size(3) > 0, "hidden must be [N, H, W, E]");
  STD_TORCH_CHECK(hidden.scalar_type() == ScalarType::Float || hidden.scalar_type() == ScalarType::Double,
                  "hidden must be float32 or float64");
  const Footprint footprint = footprint_of(hidden.size(1), hidden.size(2), kernel_size);
  const int64_t K = footprint.positions();
  STD_TORCH_CHECK(
      weight.dim() == 2 && weight.size(0) > 0 && weight.size(0) % K == 0 && weight.size(1) == hidden.size(3),
      "weight must be [G * ", K, ", ", hidden.size(3), "]");
  STD_TORCH_CHECK(bias.dim() == 1 && bias.size(0) == weight.size(0), "bias must have ", weight.size(0), " values");
  check_same(weight, hidden, "weight and hidden"), check_same(bias, hidden, "bias and hidden");
  return footprint;
}

inline void check_poolable(int64_t height, int64_t width) {
  STD_TORCH_CHECK(height > 1 && width > 1, "a map of ", height, "x", width, " pixels is too small for 2x2 pooling");
}

// The images of the stem with, at most, four channels and their mean.
constexpr int kMostInputs = 5;
inline void check_images(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4 && x.scalar_type() == ScalarType::Float && x.size(3) > 0 && x.size(3) <= kMostInputs,
                  "x must be float32 images [N, H, W, channels] with 1 to ", kMostInputs, " channels");
}
inline void check_stem(const Tensor& weight, const Tensor& bias, const Tensor& x) {
  check_images(x), check_poolable(x.size(1), x.size(2));
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) == x.size(3) && bias.dim() == 1 &&
                      bias.size(0) == weight.size(0),
                  "weight must be [C, ", x.size(3), "] and bias [C]");
  check_same(weight, x, "weight and x"), check_same(bias, x, "bias and x");
}

constexpr int kCellPixels = 4;  // pooling makes one pixel of a cell

// Keeps the larger value and its index, and a value that is NaN, as torch does.
SAN_HOST_DEVICE void keep_larger(float x, int index, float& best, int& at) {
  const bool takes = x > best || x != x;
  best = takes ? x : best, at = takes ? index : at;
}

// The gradient of a pooled map, and the indices of its maxima.
inline void check_pooled_gradient(const Tensor& grad, const Tensor& index, int64_t height, int64_t width) {
  check_poolable(height, width);
  STD_TORCH_CHECK(grad.dim() == 4 && grad.size(1) == height / 2 && grad.size(2) == width / 2, "grad must be [N, ",
                  height / 2, ", ", width / 2, ", C]");
  STD_TORCH_CHECK(index.sizes().vec() == grad.sizes().vec() && index.scalar_type() == ScalarType::Byte,
                  "index must be uint8 and have the shape of grad");
  STD_TORCH_CHECK(index.device() == grad.device(), "grad and index must be on one device");
}

inline void check_stem_gradient(const Tensor& grad, const Tensor& index, const Tensor& x) {
  check_images(x), check_pooled_gradient(grad, index, x.size(1), x.size(2));
  STD_TORCH_CHECK(grad.size(0) == x.size(0) && grad.device() == x.device(),
                  "grad and x must have one batch size and be on one device");
}

inline void check_norm_affine(const Tensor& mean, const Tensor& var) {
  check_alike(mean, var, "mean and var");
  STD_TORCH_CHECK(var.dim() == 1, "mean and var must be vectors");
  STD_TORCH_CHECK(var.scalar_type() == ScalarType::Float || var.scalar_type() == ScalarType::Double,
                  "mean and var must be float32 or float64");
}

inline void check_track_statistics(const Tensor& running_mean, const Tensor& running_var, const Tensor& batches,
                                   const Tensor& mean, const Tensor& var, int64_t values) {
  check_norm_affine(running_mean, running_var), check_norm_affine(mean, var);
  const int64_t C = mean.size(0);
  STD_TORCH_CHECK(running_mean.size(0) == C && running_var.size(0) == C && var.size(0) == C,
                  "running and new statistics must have the same channels");
  STD_TORCH_CHECK(running_mean.is_contiguous() && running_var.is_contiguous(), "running statistics must be contiguous");
  STD_TORCH_CHECK(batches.numel() == 1 && batches.scalar_type() == ScalarType::Long, "batches must be one int64");
  STD_TORCH_CHECK(running_mean.device() == mean.device() && batches.device() == mean.device(),
                  "running and new statistics must be on one device");
  STD_TORCH_CHECK(values > 1, "a variance needs more than 1 value per channel");
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

// The type of sums: float for half types, otherwise the type itself.
template <class scalar_t>
using accumulate_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// A number that the compiler knows.
template <int number>
using Int = std::integral_constant<int, number>;

// Calls run with the first of the constants that is not smaller than the number, or with the last one.
template <int first, int... others, class Run>
void with_constant(int64_t number, const Run& run) {
  if constexpr (sizeof...(others) > 0) {
    if (number > first) return with_constant<others...>(number, run);
  }
  run(Int<first>());
}

// Calls run with the number of channels of the stem's images.
template <class Run>
void with_inputs(int64_t channels, const Run& run) {
  static_assert(kMostInputs == 5);
  with_constant<1, 2, 3, 4, 5>(channels, run);
}

}  // namespace san
