// pair_statistics and patch_statistics, forward and backward. Definitions: san/ops/fused_reference.py.
//
// Nothing visits every pair or patch. Sums over a footprint are box sums, which take one axis after the other. All sums
// are in double, so that squares of values far from 0 do not cancel.
#include <tuple>

#include "maps.cuh"
#include "window.cuh"

namespace san::cuda {
namespace {

constexpr int64_t kSlices = 8192;  // of the pixels, one for each thread and channel; enough to fill an H100

// Maps [images, height, width, channels] of one call.
struct Maps {
  const float *center, *around;
  Window f;
  int images, channels;  // of around

  SAN_HOST_DEVICE int64_t pixels() const { return int64_t(images) * f.pixels(); }
  SAN_HOST_DEVICE int64_t elements() const { return pixels() * channels; }
  SAN_HOST_DEVICE double pairs() const { return static_cast<double>(pixels()) * f.positions(); }
};

// Row and column of a pixel, and its image's first pixel.
struct Place {
  int h, w, image;

  __device__ __forceinline__ Place(const Window& f, int64_t pixel) {
    const int line = static_cast<int>(pixel) / f.width;
    w = static_cast<int>(pixel) - line * f.width, h = line % f.height, image = (line - h) * f.width;
  }
};

// Calls visit(i) for the coordinates of one axis that the footprint of coordinate j contains.
template <class Visit>
__device__ __forceinline__ void for_each_seen(int j, int size, int reach, const Visit& visit) {
  for (int d = -reach; d <= reach; ++d) visit(reflect_int(j + d, size));
}

// Calls visit(first, end) for ranges of coordinates i, once for each time that their footprints contain coordinate j.
template <class Visit>
__device__ __forceinline__ void for_each_range_of_readers(int j, int size, int reach, const Visit& visit) {
  for_each_image(j, size, reach, [&](int64_t image) {
    const int at = static_cast<int>(image);
    visit(std::max(at - reach, 0), std::min(at + reach + 1, size));
  });
}

__device__ __forceinline__ int readers_along(int j, int size, int reach) {
  int count = 0;
  for_each_range_of_readers(j, size, reach, [&](int first, int end) { count += end - first; });
  return count;
}

// Box sums of around along the width and, with kReaders, sums of center over the pixels of the same row whose
// footprints contain a pixel.
//
// Predicted for SAN10's stage 2 at batch 32 (18 channels, 56x56, k = 7) on an H100: reads 7 or 14 MB, writes 14 or 29
// MB, no shared memory; 0.01 ms, of memory bandwidth.
template <bool kReaders>
__global__ void __launch_bounds__(kThreads) row_sums_kernel(Maps maps, double* to_seen, double* to_readers) {
  SAN_FOR_EACH(index, maps.elements()) {
    const int64_t pixel = index / maps.channels;
    const Place place(maps.f, pixel);
    const int64_t row = index - int64_t(place.w) * maps.channels;
    double seen = 0, readers = 0;
    for_each_seen(place.w, maps.f.width, maps.f.reach(), [&](int w) { seen += maps.around[row + w * maps.channels]; });
    to_seen[index] = seen;
    if constexpr (!kReaders) continue;
    for_each_range_of_readers(place.w, maps.f.width, maps.f.reach(), [&](int first, int end) {
      for (int w = first; w < end; ++w) readers += maps.center[row + w * maps.channels];
    });
    to_readers[index] = readers;
  }
}

// Sums of delta and of its square: partial [slices, channels, 2]. Of the squares, c^2 - 2 c a + a^2, only the products
// need box sums: a^2 counts once for each footprint that contains a.
//
// Predicted as above: reads 29 MB; 0.01 ms, of memory bandwidth.
__global__ void __launch_bounds__(kThreads)
    pair_sums_kernel(Maps maps, const double* row_sums, int64_t slices, int64_t pixels_per_slice, double* partial) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, slice = thread / maps.channels;
  if (slice >= slices) return;
  const int c = static_cast<int>(thread - slice * maps.channels), reach = maps.f.reach();
  const int64_t first = slice * pixels_per_slice, end = std::min(first + pixels_per_slice, maps.pixels());
  double sum = 0, square = 0;
  for (int64_t pixel = first; pixel < end; ++pixel) {
    const Place place(maps.f, pixel);
    const double i = maps.center[pixel * maps.channels + c], j = maps.around[pixel * maps.channels + c];
    double box = 0;
    for_each_seen(place.h, maps.f.height, reach, [&](int h) {
      box += row_sums[(int64_t(place.image) + h * maps.f.width + place.w) * maps.channels + c];
    });
    const int readers = readers_along(place.h, maps.f.height, reach) * readers_along(place.w, maps.f.width, reach);
    sum += maps.f.positions() * i - box;
    square += maps.f.positions() * i * i - 2 * i * box + readers * j * j;
  }
  partial[2 * thread] = sum, partial[2 * thread + 1] = square;
}

// Mean and biased variance from the sums of a value and of its square in adjacent columns.
struct PlaceMoments {
  double count;
  float *mean, *var;

  __device__ __forceinline__ void operator()(int64_t column, const double* sums) const {
    if (column % 2 == 1) return;
    const double average = sums[0] / count, variance = sums[1] / count - average * average;
    mean[column / 2] = static_cast<float>(average);
    var[column / 2] = static_cast<float>(variance < 0 ? 0 : variance);
  }
};

// Gradients of center and around. The gradient of delta is slope * (delta - mean) + offset, and it is summed over the
// footprint or over the readers of a pixel.
//
// Predicted as above: reads 43 MB, writes 14 MB; 0.02 ms, of memory bandwidth.
__global__ void __launch_bounds__(kThreads)
    pair_gradients_kernel(Maps maps, const double* seen_sums, const double* reader_sums, const float* grad_mean,
                          const float* grad_var, const float* mean, double per_pair, float* to_center,
                          float* to_around) {
  SAN_FOR_EACH(index, maps.elements()) {
    const int64_t pixel = index / maps.channels;
    const int c = static_cast<int>(index - pixel * maps.channels), reach = maps.f.reach();
    const Place place(maps.f, pixel);
    const double slope = 2 * grad_var[c] * per_pair, offset = grad_mean[c] * per_pair;
    const auto row = [&](int h) { return (int64_t(place.image) + h * maps.f.width + place.w) * maps.channels + c; };
    double seen = 0, readers = 0;
    for_each_seen(place.h, maps.f.height, reach, [&](int h) { seen += seen_sums[row(h)]; });
    for_each_range_of_readers(place.h, maps.f.height, reach, [&](int first, int end) {
      for (int h = first; h < end; ++h) readers += reader_sums[row(h)];
    });
    const int K = maps.f.positions();
    const int count = readers_along(place.h, maps.f.height, reach) * readers_along(place.w, maps.f.width, reach);
    const double i = maps.center[index], j = maps.around[index];
    to_center[index] = static_cast<float>(slope * (K * (i - mean[c]) - seen) + offset * K);
    to_around[index] = static_cast<float>(slope * (count * (j + mean[c]) - readers) - offset * count);
  }
}

// Sums of x and x^2 over the pixels of a row, [rows of all images, offsets, 2]: for channel c of around at column o of
// the footprint, offset o * R + c; then for the channels of center.
//
// Predicted for SAN10's stage 2 at batch 32 (16 channels, 56x56, k = 7) on an H100: reads 13 MB, writes 4 MB; 11 M
// sums, no shared memory; 0.005 ms, of memory bandwidth.
__global__ void __launch_bounds__(kThreads) patch_rows_kernel(Maps maps, int offsets, int64_t elements, double* out) {
  SAN_FOR_EACH(index, elements) {
    const int64_t row = index / offsets;
    const int q = static_cast<int>(index - row * offsets), o = q / maps.channels, c = q - o * maps.channels;
    const bool is_center = o == maps.f.kernel_size;
    const float* values = (is_center ? maps.center : maps.around) + row * maps.f.width * maps.channels + c;
    const int shift = is_center ? 0 : o - maps.f.reach();
    double sum = 0, square = 0;
    for (int w = 0; w < maps.f.width; ++w) {
      const double x = values[reflect_int(w + shift, maps.f.width) * maps.channels];
      sum += x, square += x * x;
    }
    out[2 * index] = sum, out[2 * index + 1] = square;
  }
}

// The sums of patch_rows_kernel for row r and column * 2 of a patch, or column * 2 + 1 for the squares.
struct PatchRows {
  Maps maps;
  int C, offsets;
  const double* sums;

  __device__ __forceinline__ double operator()(int64_t row, int64_t index) const {
    const int column = static_cast<int>(index / 2) - C, k = maps.f.kernel_size, R = maps.channels;
    if (column < 0) return sums[(row * offsets + k * R + column + C) * 2 + index % 2];
    const int c = column / (k * k), position = column - c * k * k, down = position / k, right = position - down * k;
    const int h = static_cast<int>(row % maps.f.height);
    const int64_t seen = row - h + reflect_int(h + down - maps.f.reach(), maps.f.height);
    return sums[(seen * offsets + right * R + c) * 2 + index % 2];
  }
};

// Gradients of center and around. The gradient of column q is grad_mean / pixels + 2 grad_var / pixels (x - mean), so
// that of a value x is offset + slope * x. Both sums depend on its place and channel only, and a thread uses them for
// all images, or for a part of them.
//
// Predicted as above: reads and writes 13 MB; no shared memory; 0.02 ms, limited by latency.
__global__ void __launch_bounds__(kThreads)
    patch_gradients_kernel(Maps maps, int C, const float* grad_mean, const float* grad_var, const float* mean,
                           int parts, double per_pixel, float* to_center, float* to_around) {
  const int R = maps.channels, K = maps.f.positions(), width = C + R;
  const int64_t inside = int64_t(maps.f.pixels()) * width;
  SAN_FOR_EACH(index, parts * inside) {
    const int part = static_cast<int>(index / inside), place = static_cast<int>(index - part * inside);
    const int pixel = place / width, q = place - pixel * width, c = q < C ? q : q - C;
    double slope = 0, offset = 0;
    const auto add = [&](int column) {
      const double twice = 2 * double(grad_var[column]);
      slope += twice, offset += grad_mean[column] - twice * mean[column];
    };
    if (q < C) {
      add(q);
    } else {
      const int h = pixel / maps.f.width;
      for_each_reader(maps.f, h, pixel - h * maps.f.width, [&](int position, int) { add(C + c * K + position); });
    }
    const float* from = q < C ? maps.center : maps.around;
    float* to = q < C ? to_center : to_around;
    for (int image = part; image < maps.images; image += parts) {
      const int64_t at = (int64_t(image) * maps.f.pixels() + pixel) * R + c;
      to[at] = static_cast<float>((offset + slope * from[at]) * per_pixel);
    }
  }
}

// The inputs of one call.
class StatisticsWork : public Workspace {
 public:
  const Maps maps;

  StatisticsWork(const Tensor& center, const Tensor& around, const Footprint& f)
      : Workspace(around),
        maps{keep_float(center), keep_float(around), Window(f), static_cast<int>(around.size(0)),
             static_cast<int>(around.size(3))} {
    grid_of(around, f);  // checks the number of pixels
  }
};

std::tuple<Tensor, Tensor> pair_statistics(const Tensor& center, const Tensor& around, int64_t kernel_size,
                                           int64_t products) {
  const Footprint f = check_pair_maps(center, around, kernel_size, products);
  check_supported(center, products);
  const OperatorGuard guard("pair_statistics", center);
  StatisticsWork work(center, around, f);
  const Maps& maps = work.maps;
  Tensor mean = torch::stable::new_empty(center, {maps.channels}), var = torch::stable::empty_like(mean);
  double* rows = work.take<double>(maps.elements());
  SAN_LAUNCH(row_sums_kernel<false>, blocks_for(maps.elements()), kThreads, work.stream(), maps, rows, nullptr);
  const int64_t per_slice = std::max<int64_t>(1, (maps.pixels() + kSlices - 1) / kSlices);
  const int64_t slices = (maps.pixels() + per_slice - 1) / per_slice, columns = 2 * maps.channels;
  double* partial = work.take<double>(slices * columns);
  SAN_LAUNCH(pair_sums_kernel, blocks_for(slices * maps.channels), kThreads, work.stream(), maps, rows, slices,
             per_slice, partial);
  sum_rows(PartialSums<double>{partial, columns}, slices, columns,
           PlaceMoments{maps.pairs(), mean.mutable_data_ptr<float>(), var.mutable_data_ptr<float>()}, work.stream());
  return {mean, var};
}

std::tuple<Tensor, Tensor> pair_statistics_backward(const Tensor& grad_mean, const Tensor& grad_var,
                                                    const Tensor& center, const Tensor& around, const Tensor& mean,
                                                    int64_t kernel_size, int64_t products) {
  const Footprint f = check_pair_maps(center, around, kernel_size, products);
  check_statistics({&grad_mean, &grad_var, &mean}, center, {center.size(3)});
  check_supported(center, products);
  const OperatorGuard guard("pair_statistics_backward", center);
  StatisticsWork work(center, around, f);
  Tensor to_center = work.empty(center.sizes().vec()), to_around = work.empty(center.sizes().vec());
  const int64_t elements = work.maps.elements();
  double *seen = work.take<double>(elements), *readers = work.take<double>(elements);
  SAN_LAUNCH(row_sums_kernel<true>, blocks_for(elements), kThreads, work.stream(), work.maps, seen, readers);
  SAN_LAUNCH(pair_gradients_kernel, blocks_for(elements), kThreads, work.stream(), work.maps, seen, readers,
             work.keep_float(grad_mean), work.keep_float(grad_var), work.keep_float(mean), 1 / work.maps.pairs(),
             to_center.mutable_data_ptr<float>(), to_around.mutable_data_ptr<float>());
  return {to_center, to_around};
}

std::tuple<Tensor, Tensor> patch_statistics(const Tensor& center, const Tensor& around, int64_t kernel_size) {
  const Footprint f = check_patch_maps(center, around, kernel_size);
  check_float32(around);
  const OperatorGuard guard("patch_statistics", around);
  StatisticsWork work(center, around, f);
  const Maps& maps = work.maps;
  const int C = static_cast<int>(center.size(3)), offsets = maps.channels * maps.f.kernel_size + C;
  const int64_t columns = C + int64_t(maps.channels) * f.positions(), rows = int64_t(maps.images) * maps.f.height;
  Tensor mean = torch::stable::new_empty(around, {columns}), var = torch::stable::empty_like(mean);
  double* sums = work.take<double>(rows * offsets * 2);
  SAN_LAUNCH(patch_rows_kernel, blocks_for(rows * offsets), kThreads, work.stream(), maps, offsets, rows * offsets,
             sums);
  sum_rows(
      PatchRows{maps, C, offsets, sums}, rows, 2 * columns,
      PlaceMoments{static_cast<double>(maps.pixels()), mean.mutable_data_ptr<float>(), var.mutable_data_ptr<float>()},
      work.stream());
  return {mean, var};
}

std::tuple<Tensor, Tensor> patch_statistics_backward(const Tensor& grad_mean, const Tensor& grad_var,
                                                     const Tensor& center, const Tensor& around, const Tensor& mean,
                                                     int64_t kernel_size) {
  const Footprint f = check_patch_maps(center, around, kernel_size);
  const int64_t C = center.size(3), columns = C + around.size(3) * f.positions();
  check_statistics({&grad_mean, &grad_var, &mean}, around, {columns});
  check_float32(around);
  const OperatorGuard guard("patch_statistics_backward", around);
  StatisticsWork work(center, around, f);
  Tensor to_center = work.empty(center.sizes().vec()), to_around = work.empty(around.sizes().vec());
  if (around.numel() == 0) return {to_center, to_around};
  constexpr int64_t kThreadsToFill = int64_t(1) << 17;
  const int64_t inside = f.pixels() * (C + work.maps.channels);
  STD_TORCH_CHECK(inside < int64_t(1) << 31, "maps of ", f.pixels(), " pixels are too large");
  const int64_t parts = std::min<int64_t>((kThreadsToFill + inside - 1) / inside, work.maps.images);
  SAN_LAUNCH(patch_gradients_kernel, blocks_for(parts * inside), kThreads, work.stream(), work.maps,
             static_cast<int>(C), work.keep_float(grad_mean), work.keep_float(grad_var), work.keep_float(mean),
             static_cast<int>(parts), 1 / static_cast<double>(work.maps.pixels()), to_center.mutable_data_ptr<float>(),
             to_around.mutable_data_ptr<float>());
  return {to_center, to_around};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("pair_statistics", TORCH_BOX(&san::cuda::pair_statistics));
  m.impl("pair_statistics_backward", TORCH_BOX(&san::cuda::pair_statistics_backward));
  m.impl("patch_statistics", TORCH_BOX(&san::cuda::patch_statistics));
  m.impl("patch_statistics_backward", TORCH_BOX(&san::cuda::patch_statistics_backward));
}
