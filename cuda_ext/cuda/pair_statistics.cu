// pair_statistics: mean and variance of delta over all pairs, forward and backward. Definition: san/ops/definitions.py.
//
// A thread computes one channel of some pixels, in a loop over their footprints. Neighboring threads have neighboring
// channels, so loads are coalesced. Neighboring pixels find most of their partners in the cache.
#include <tuple>

#include "grid.cuh"
#include "sums.cuh"
#include "window.cuh"

namespace san::cuda {
namespace {

template <class T>
struct PairMaps {
  const T *center, *around;  // [images, height, width, channels]
  Window f;
  int images, channels, products;

  SAN_HOST_DEVICE int64_t pixels() const { return int64_t(images) * f.pixels(); }
  SAN_HOST_DEVICE double pairs() const { return static_cast<double>(pixels()) * f.positions(); }

  __device__ __forceinline__ T relation(int channel, T i, T j) const { return channel < products ? i * j : i - j; }

  // A value near the mean of a channel, so that sums of squared distances from it do not cancel. It is the median of
  // delta at three pixels, each with itself as its partner, so one outlier does no harm.
  __device__ __forceinline__ T origin(int channel) const {
    if (pixels() == 0) return 0;
    return middle_of_three([&](int quarter) {
      const int64_t at = pixels() * quarter / 4 * channels + channel;
      return relation(channel, center[at], around[at]);
    });
  }

  // Calls visit(row, column, first value of the pixel's image).
  template <class Visit>
  __device__ __forceinline__ void with_place(int64_t pixel, const Visit& visit) const {
    const int image = static_cast<int>(pixel / f.pixels()), inside = static_cast<int>(pixel % f.pixels());
    visit(inside / f.width, inside % f.width, int64_t(image) * f.pixels() * channels);
  }
  // Calls visit(value of around in the channel) for all partners of a pixel.
  template <class Visit>
  __device__ __forceinline__ void for_each_partner(int64_t pixel, int channel, const Visit& visit) const {
    with_place(pixel, [&](int h, int w, int64_t first) {
      const T* values = around + first + channel;
      const int bytes = channels * static_cast<int>(sizeof(T));
      for_each_neighbour(f, h, w, [&](int, int j) { visit(*row_at(values, j, bytes)); });
    });
  }
  // Calls visit(value of center in the channel) once for each footprint position that refers to the pixel.
  template <class Visit>
  __device__ __forceinline__ void for_each_seer(int64_t pixel, int channel, const Visit& visit) const {
    with_place(pixel, [&](int h, int w, int64_t first) {
      const T* values = center + first + channel;
      const int bytes = channels * static_cast<int>(sizeof(T));
      for_each_reader(f, h, w, [&](int, int i) { visit(*row_at(values, i, bytes)); });
    });
  }
};

// Sums of delta - origin and of its square: partial [slices, channels, 2]. One thread computes both sums of a slice and
// a channel.
//
// Predicted for SAN10's stage 2 at batch 32 (18 channels, 56x56, k = 7) on an H100: reads 14 MB, 88 M pairs of sums, no
// shared memory; 0.11 ms, limited by instruction issue.
template <class T>
__global__ void __launch_bounds__(kThreads)
    moments_kernel(PairMaps<T> maps, int slices, int64_t pixels_per_slice, T* partial) {
  const int thread = blockIdx.x * kThreads + threadIdx.x, slice = thread / maps.channels;
  if (slice >= slices) return;
  const int c = thread - slice * maps.channels;
  const int64_t first = slice * pixels_per_slice;
  const int64_t last = first + pixels_per_slice < maps.pixels() ? first + pixels_per_slice : maps.pixels();
  const T origin = maps.origin(c);
  T sum = 0, square = 0;
  for (int64_t pixel = first; pixel < last; ++pixel) {
    const T own = maps.center[pixel * maps.channels + c];
    maps.for_each_partner(pixel, c, [&](T partner) {
      const T distance = maps.relation(c, own, partner) - origin;
      sum += distance, square += distance * distance;
    });
  }
  Pack<2, T>{sum, square}.store(partial + 2 * int64_t(thread));
}

// Mean and biased variance from the sums of moments_kernel.
template <class T>
struct PlaceMoments {
  PairMaps<T> maps;
  T *mean, *var;

  __device__ __forceinline__ void operator()(int64_t column, const double* sums) const {
    if (column % 2 == 1) return;
    const int c = static_cast<int>(column / 2);
    const double distance = sums[0] / maps.pairs();
    mean[c] = static_cast<T>(maps.origin(c) + distance);
    var[c] = static_cast<T>(sums[1] / maps.pairs() - distance * distance);
  }
};

// Gradients of center and around, one thread for each value. The gradient of delta is slope * (delta - mean) + offset.
//
// Predicted as above: reads 14 MB, writes 14 MB; 177 M products and sums, no shared memory; 0.23 ms, limited by
// instruction issue.
template <class T>
__global__ void gradients_kernel(PairMaps<T> maps, const T* grad_mean, const T* grad_var, const T* mean, T* to_center,
                                 T* to_around) {
  SAN_FOR_EACH(index, maps.pixels() * maps.channels) {
    const int64_t pixel = index / maps.channels;
    const int c = static_cast<int>(index - pixel * maps.channels);
    const bool is_product = c < maps.products;
    const T pairs = static_cast<T>(maps.pairs()), slope = 2 * grad_var[c] / pairs, offset = grad_mean[c] / pairs;
    const T i = maps.center[index], j = maps.around[index], middle = mean[c];
    T of_center = 0, of_around = 0;
    maps.for_each_partner(pixel, c, [&](T partner) {
      const T g = slope * (maps.relation(c, i, partner) - middle) + offset;
      of_center += is_product ? g * partner : g;
    });
    maps.for_each_seer(pixel, c, [&](T seer) {
      const T g = slope * (maps.relation(c, seer, j) - middle) + offset;
      of_around += is_product ? g * seer : -g;
    });
    to_center[index] = of_center, to_around[index] = of_around;
  }
}

template <class T>
void forward(const PairMaps<T>& maps, Tensor& mean, Tensor& var) {
  constexpr int64_t kSlices = 8192;  // enough threads to fill an H100, but few partial sums
  const int64_t per_slice = (maps.pixels() + kSlices - 1) / kSlices;
  const int64_t slices = per_slice > 0 ? (maps.pixels() + per_slice - 1) / per_slice : 0;
  const int64_t elements = slices * maps.channels;
  const Tensor partial = torch::stable::new_empty(mean, {2 * elements});
  T* sums = partial.mutable_data_ptr<T>();
  if (slices > 0) {
    SAN_LAUNCH(moments_kernel<T>, blocks_for(elements), kThreads, current_stream(mean), maps, static_cast<int>(slices),
               per_slice, sums);
  }
  const PlaceMoments<T> place{maps, mean.mutable_data_ptr<T>(), var.mutable_data_ptr<T>()};
  sum_blocks(sums, slices, 2 * maps.channels, place, current_stream(mean));
}

template <class T>
void backward(const PairMaps<T>& maps, const Tensor& grad_mean, const Tensor& grad_var, const Tensor& mean,
              Tensor& to_center, Tensor& to_around) {
  SAN_LAUNCH(gradients_kernel<T>, blocks_for(to_center.numel()), kThreads, current_stream(mean), maps,
             grad_mean.const_data_ptr<T>(), grad_var.const_data_ptr<T>(), mean.const_data_ptr<T>(),
             to_center.mutable_data_ptr<T>(), to_around.mutable_data_ptr<T>());
}

// Converts the maps for the kernels and calls run with them.
template <class Run>
void with_maps(const Tensor& center, const Tensor& around, const Footprint& f, int64_t products, const Run& run) {
  const Tensor i = torch::stable::contiguous(center), j = torch::stable::contiguous(around);
  const auto start = [&](auto zero) {
    using T = decltype(zero);
    run(PairMaps<T>{i.const_data_ptr<T>(), j.const_data_ptr<T>(), Window(f), static_cast<int>(center.size(0)),
                    static_cast<int>(center.size(3)), static_cast<int>(products)});
  };
  center.scalar_type() == ScalarType::Double ? start(double()) : start(float());
}

std::tuple<Tensor, Tensor> pair_statistics(const Tensor& center, const Tensor& around, int64_t kernel_size,
                                           int64_t products) {
  const Footprint f = check_pair_maps(center, around, kernel_size, products);
  const OperatorGuard guard("pair_statistics", center);
  Tensor mean = torch::stable::new_empty(center, {center.size(3)}), var = torch::stable::empty_like(mean);
  with_maps(center, around, f, products, [&](const auto& maps) { forward(maps, mean, var); });
  return {mean, var};
}

std::tuple<Tensor, Tensor> pair_statistics_backward(const Tensor& grad_mean, const Tensor& grad_var,
                                                    const Tensor& center, const Tensor& around, const Tensor& mean,
                                                    int64_t kernel_size, int64_t products) {
  const Footprint f = check_pair_maps(center, around, kernel_size, products);
  const OperatorGuard guard("pair_statistics_backward", center);
  const Tensor of_mean = torch::stable::contiguous(grad_mean), of_var = torch::stable::contiguous(grad_var);
  Tensor to_center = torch::stable::new_empty(center, center.sizes());
  Tensor to_around = torch::stable::new_empty(center, center.sizes());
  with_maps(center, around, f, products, [&](const auto& maps) {
    if (to_center.numel() == 0) return;
    backward(maps, of_mean, of_var, mean, to_center, to_around);
  });
  return {to_center, to_around};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("pair_statistics", TORCH_BOX(&san::cuda::pair_statistics));
  m.impl("pair_statistics_backward", TORCH_BOX(&san::cuda::pair_statistics_backward));
}
