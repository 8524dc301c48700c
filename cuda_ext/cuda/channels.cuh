// Loops over the channels of channels-last maps. A thread keeps its channels and visits every few pixels. Its sums are
// float; they are added in double, always in the same order.
#pragma once
#include "sums.cuh"

namespace san::cuda {
namespace {

using torch::headeronly::BFloat16;

constexpr int kMostLanes = 64;

// How threads divide a map of `pixels` rows of `channels` values. `lanes` neighbors of a block have groups of kWidth
// channels of the same pixel; a block has one `tile` of groups and one slice of the pixels.
struct Layout {
  int64_t pixels;
  int channels, groups, lanes, rows, tiles, slices;

  Layout(int64_t pixels, int64_t channels, int width)
      : pixels(pixels),
        channels(static_cast<int>(channels)),
        groups(static_cast<int>(channels) / width),
        lanes(std::min(groups, kMostLanes)),
        rows(kThreads / lanes),
        tiles((groups + lanes - 1) / lanes),
        slices(static_cast<int>(
            std::max<int64_t>(1, std::min(2 * wanted_sum_blocks() / tiles, (pixels + rows - 1) / rows)))) {}

  int blocks() const { return tiles * slices; }
};

// A thread's first channel, and its pixels.
template <int kWidth>
struct Own {
  int lane, row, channel, slice;
  bool exists;

  __device__ __forceinline__ explicit Own(const Layout& layout)
      : lane(threadIdx.x % layout.lanes), row(threadIdx.x / layout.lanes) {
    const int group = static_cast<int>(blockIdx.x) % layout.tiles * layout.lanes + lane;
    slice = blockIdx.x / layout.tiles, channel = group * kWidth;
    exists = group < layout.groups && row < layout.rows;
  }

  // The index of the thread's first value of a pixel.
  __device__ __forceinline__ int64_t index(const Layout& layout, int64_t pixel) const {
    return pixel * layout.channels + channel;
  }
  // Calls visit(pixel).
  template <class Visit>
  __device__ __forceinline__ void for_each_pixel(const Layout& layout, const Visit& visit) const {
    if (!exists) return;
    const int64_t step = int64_t(layout.slices) * layout.rows;
    for (int64_t pixel = int64_t(slice) * layout.rows + row; pixel < layout.pixels; pixel += step) {
      visit(pixel);
    }
  }
};

// kSums sums of each channel over the block's pixels, to partial [slices, channels, kSums]. add(pixel, sums) adds to
// the sums of the thread's channels, [kWidth, kSums].
template <int kSums, int kWidth, class Add>
__device__ __forceinline__ void sum_channels(const Layout& layout, const Own<kWidth>& own, double* partial,
                                             const Add& add) {
  constexpr int kOwn = kSums * kWidth;
  float sums[kOwn] = {};
  own.for_each_pixel(layout, [&](int64_t pixel) { add(pixel, sums); });
  float* shared = reinterpret_cast<float*>(shared_memory_base());  // [rows, lanes, kWidth, kSums]
  SAN_UNROLL
  for (int k = 0; k < kOwn; ++k) shared[threadIdx.x * kOwn + k] = sums[k];
  __syncthreads();
  const int columns = layout.lanes * kOwn, first = (own.channel - own.lane * kWidth) * kSums;
  const int all = kSums * layout.channels;
  for (int column = threadIdx.x; column < columns && first + column < all; column += kThreads) {
    double sum = 0;
    for (int row = 0; row < layout.rows; ++row) sum += shared[row * columns + column];
    partial[int64_t(own.slice) * all + first + column] = sum;
  }
}

constexpr size_t bytes_of_sums(int of_thread) { return size_t(kThreads) * of_thread * sizeof(float); }

// Calls run with the map's type and the number of channels of a thread: 4 if they can be loaded at once from all maps.
template <class Run>
void for_type_and_width(const Tensor& x, std::initializer_list<const Tensor*> others, const Run& run) {
  bool wide = x.size(3) % 4 == 0 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (const Tensor* other : others) wide = wide && reinterpret_cast<uintptr_t>(other->const_data_ptr()) % 16 == 0;
  const auto with_width = [&](auto type) { wide ? run(type, Int<4>()) : run(type, Int<1>()); };
  x.scalar_type() == ScalarType::Float ? with_width(float()) : with_width(BFloat16());
}

Tensor doubles_like(const Tensor& x, int64_t size) {
  return torch::stable::new_empty(x, {size}, std::optional<ScalarType>(ScalarType::Double));
}

}  // namespace
}  // namespace san::cuda
