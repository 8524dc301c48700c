// Tensors of fused attention as kernels take them: contiguous, of one type for all maps and one for all sums.
#pragma once
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "sums.cuh"

namespace san::cuda {
namespace {

inline Tensor contiguous_of(const Tensor& x, ScalarType type) {
  return torch::stable::contiguous(x.scalar_type() == type ? x : torch::stable::to(x, type));
}

// The type that kernels read maps in: theirs, or float where they differ.
inline ScalarType map_type(const Tensor& center, const Tensor& around, const Tensor& beta) {
  const ScalarType type = beta.scalar_type();
  const bool same = center.scalar_type() == type && around.scalar_type() == type;
  return same || type == ScalarType::Double ? type : ScalarType::Float;
}

// The type of parameters, statistics and sums.
inline ScalarType sum_type(ScalarType maps) { return maps == ScalarType::Double ? maps : ScalarType::Float; }

// Calls run with std::true_type where products are to be accurate: of float32 unless the user allows TF32, to which
// half types are equal or worse.
template <class scalar_t, class Run>
auto with_precision(bool tf32, const Run& run) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    if (!tf32) return run(std::true_type());
  }
  return run(std::false_type());
}

inline void check_devices(const Tensor& like, std::initializer_list<const Tensor*> others) {
  for (const Tensor* x : others) {
    STD_TORCH_CHECK(x->device() == like.device(), "all tensors must be on one device");
  }
}

// Inputs and workspace of one call, which live until all its kernels are launched.
template <class scalar_t>
class Workspace {
 public:
  using T = accumulate_t<scalar_t>;

  Workspace(const Tensor& like, ScalarType maps) : like_(like), maps_(maps) {}

  auto stream() const { return current_stream(like_); }
  Tensor new_maps(const std::vector<int64_t>& shape) const { return torch::stable::new_empty(like_, shape, maps_); }
  Tensor new_sums(const std::vector<int64_t>& shape) const {
    return torch::stable::new_empty(like_, shape, sum_type(maps_));
  }
  // So many elements, until the call ends.
  T* take(int64_t elements) {
    kept_.push_back(new_sums({elements}));
    return kept_.back().template mutable_data_ptr<T>();
  }
  Moments* take_moments(int64_t blocks, int64_t channels) {
    const std::vector<int64_t> shape{blocks, channels, int64_t(sizeof(Moments) / sizeof(double))};
    kept_.push_back(torch::stable::new_empty(like_, shape, ScalarType::Double));
    return reinterpret_cast<Moments*>(kept_.back().template mutable_data_ptr<double>());
  }
  const T* keep(const Tensor& parameter) {
    kept_.push_back(contiguous_of(parameter, sum_type(maps_)));
    return kept_.back().template const_data_ptr<T>();
  }
  // A map whose pixels can be read some channels at once: a view may begin anywhere.
  const scalar_t* keep_map(const Tensor& map) {
    constexpr uintptr_t kAlignment = 32;  // of four doubles
    kept_.push_back(contiguous_of(map, maps_));
    const auto begin = reinterpret_cast<uintptr_t>(kept_.back().template const_data_ptr<scalar_t>());
    if (begin % kAlignment != 0) kept_.back() = torch::stable::clone(kept_.back());
    return kept_.back().template const_data_ptr<scalar_t>();
  }

 private:
  const Tensor& like_;
  ScalarType maps_;
  std::vector<Tensor> kept_;
};

}  // namespace
}  // namespace san::cuda
