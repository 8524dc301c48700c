// 2x2 max pooling of channels-last maps, alone and after the Linear layer and ReLU of SAN's stem, forward and backward.
// Definition: san/ops/fused_reference.py.
//
// The index says which of the four pixels of a cell is the largest. It takes a byte, and the map of the stem before the
// pool, the largest of the network, is never in memory.
#include <tuple>

#include "channels.cuh"

namespace san::cuda {
namespace {

// A cell of a map with rows x columns cells. Kernels count in 32 bits: a 64-bit division takes a hundred instructions.
struct Place {
  int image, row, column;

  SAN_HOST_DEVICE Place(int64_t cell, int rows, int columns) {
    const int line = static_cast<int>(static_cast<unsigned>(cell) / static_cast<unsigned>(columns));
    image = line / rows, row = line - image * rows, column = static_cast<int>(cell) - line * columns;
  }
};

// A map that is divided into cells. The last ones are not whole if its height or width is odd.
struct Cells {
  int images, height, width;

  explicit Cells(const Tensor& x) : Cells(x.size(0), x.size(1), x.size(2)) {}
  Cells(int64_t images, int64_t height, int64_t width)
      : images(static_cast<int>(images)), height(static_cast<int>(height)), width(static_cast<int>(width)) {
    STD_TORCH_CHECK(images * height * width < int64_t(1) << 31, "the maps have too many pixels; use smaller batches");
  }

  SAN_HOST_DEVICE int rows() const { return height / 2; }
  SAN_HOST_DEVICE int columns() const { return width / 2; }
  SAN_HOST_DEVICE int64_t whole() const { return int64_t(images) * rows() * columns(); }
  SAN_HOST_DEVICE int64_t first_pixel(const Place& at) const {
    return (int64_t(at.image) * height + 2 * at.row) * width + 2 * at.column;
  }
  SAN_HOST_DEVICE int64_t first_pixel(int64_t whole_cell) const {
    return first_pixel(Place(whole_cell, rows(), columns()));
  }
  // From a cell's first pixel to its pixel k.
  SAN_HOST_DEVICE int64_t step(int k) const { return k / 2 * width + k % 2; }
};

// Predicted for SAN10's stage 2 at batch 32 (64 channels, 112x112, float32) on an H100: reads 103 MB, writes 32 MB;
// 0.045 ms, of memory bandwidth. Backward reads and writes as much.
template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    max_pool_kernel(Layout layout, Cells cells, const T* x, T* y, uint8_t* index) {
  const Own<kWidth> own(layout);
  own.for_each_pixel(layout, [&](int64_t pixel) {
    const T* from = x + own.index(layout, cells.first_pixel(pixel));
    Pack<kWidth, T> values[kCellPixels];
    SAN_UNROLL
    for (int k = 0; k < kCellPixels; ++k) values[k] = Pack<kWidth, T>::load(from + cells.step(k) * layout.channels);
    Pack<kWidth, uint8_t> where;
    SAN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      float best = static_cast<float>(values[0].data[i]);
      int at = 0;
      SAN_UNROLL
      for (int k = 1; k < kCellPixels; ++k) keep_larger(static_cast<float>(values[k].data[i]), k, best, at);
      values[0].data[i] = static_cast<T>(best), where.data[i] = static_cast<uint8_t>(at);
    }
    values[0].store(y + own.index(layout, pixel)), where.store(index + own.index(layout, pixel));
  });
}

// Threads visit all cells, also those that are not whole, whose gradients are 0.
template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    max_pool_gradient_kernel(Layout layout, Cells cells, const T* grad, const uint8_t* index, T* grad_x) {
  const Own<kWidth> own(layout);
  own.for_each_pixel(layout, [&](int64_t cell) {
    const Place at(cell, (cells.height + 1) / 2, (cells.width + 1) / 2);
    const bool right = 2 * at.column + 1 < cells.width, below = 2 * at.row + 1 < cells.height;
    Pack<kWidth, T> grads = {};
    Pack<kWidth, uint8_t> where = {};
    if (right && below) {
      const int64_t pooled = (int64_t(at.image) * cells.rows() + at.row) * cells.columns() + at.column;
      grads = Pack<kWidth, T>::load(grad + own.index(layout, pooled));
      where = Pack<kWidth, uint8_t>::load(index + own.index(layout, pooled));
    }
    T* to = grad_x + own.index(layout, cells.first_pixel(at));
    SAN_UNROLL
    for (int k = 0; k < kCellPixels; ++k) {
      Pack<kWidth, T> own_grads;
      SAN_UNROLL
      for (int i = 0; i < kWidth; ++i) own_grads.data[i] = where.data[i] == k ? grads.data[i] : static_cast<T>(0.0f);
      if ((k % 2 == 0 || right) && (k < 2 || below)) own_grads.store(to + cells.step(k) * layout.channels);
    }
  });
}

// The values of a cell of images with D channels.
template <int D>
struct Cell {
  float values[kCellPixels][D];

  __device__ __forceinline__ Cell(const Cells& cells, const float* x, int64_t pixel) {
    const float* from = x + cells.first_pixel(pixel) * D;
    SAN_UNROLL
    for (int k = 0; k < kCellPixels; ++k) {
      SAN_UNROLL
      for (int d = 0; d < D; ++d) values[k][d] = from[cells.step(k) * D + d];
    }
  }
};

// Predicted for SAN10 at batch 32 (4 input and 64 output channels, 224x224, float32) on an H100: reads 26 MB, writes
// 129 MB; 0.05 ms, of memory bandwidth. Backward reads 154 MB: 0.05 ms.
template <int D, int kWidth, class T>
__global__ void __launch_bounds__(kThreads) stem_kernel(Layout layout, Cells cells, const float* weight,
                                                        const float* bias, const float* x, T* y, uint8_t* index) {
  const Own<kWidth> own(layout);
  if (!own.exists) return;
  float own_weight[kWidth][D], own_bias[kWidth];
  SAN_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    own_bias[i] = bias[own.channel + i];
    SAN_UNROLL
    for (int d = 0; d < D; ++d) own_weight[i][d] = weight[(own.channel + i) * D + d];
  }
  own.for_each_pixel(layout, [&](int64_t pixel) {
    const Cell<D> cell(cells, x, pixel);
    Pack<kWidth, T> out;
    Pack<kWidth, uint8_t> where;
    SAN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      float best = 0;
      int at = 0;
      SAN_UNROLL
      for (int k = 0; k < kCellPixels; ++k) {
        float value = own_bias[i];
        SAN_UNROLL
        for (int d = 0; d < D; ++d) value += own_weight[i][d] * cell.values[k][d];
        if (k == 0) best = value;
        keep_larger(value, k, best, at);
      }
      out.data[i] = static_cast<T>(best < 0 ? 0 : best);  // NaN stays
      where.data[i] = static_cast<uint8_t>(best <= 0 ? kCellPixels : at);
    }
    out.store(y + own.index(layout, pixel)), where.store(index + own.index(layout, pixel));
  });
}

// Sums for the gradients of weight and bias, to partial [slices, channels, D + 1].
template <int D, int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    stem_gradient_kernel(Layout layout, Cells cells, const T* grad, const uint8_t* index, const float* x,
                         double* partial) {
  const Own<kWidth> own(layout);
  sum_channels<D + 1>(layout, own, partial, [&](int64_t pixel, float* sums) {
    const Cell<D> cell(cells, x, pixel);
    const auto grads = Pack<kWidth, T>::load(grad + own.index(layout, pixel));
    const auto where = Pack<kWidth, uint8_t>::load(index + own.index(layout, pixel));
    SAN_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      SAN_UNROLL
      for (int k = 0; k < kCellPixels; ++k) {
        const float g = where.data[i] == k ? static_cast<float>(grads.data[i]) : 0;
        SAN_UNROLL
        for (int d = 0; d < D; ++d) sums[i * (D + 1) + d] += g * cell.values[k][d];
        sums[i * (D + 1) + D] += g;
      }
    }
  });
}

struct PlaceStemGradients {
  int inputs;
  float *weight, *bias;

  __device__ __forceinline__ void operator()(int64_t column, const double* sum) const {
    const int c = static_cast<int>(column) / (inputs + 1), d = static_cast<int>(column) - c * (inputs + 1);
    (d < inputs ? weight[c * inputs + d] : bias[c]) = static_cast<float>(*sum);
  }
};

void check_pooled(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4 && x.size(3) > 0 &&
                      (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16),
                  "x must be a float32 or bfloat16 map [N, H, W, C]");
}

Tensor indices_like(const Tensor& y) {
  return torch::stable::new_empty(y, y.sizes(), std::optional<ScalarType>(ScalarType::Byte));
}

std::tuple<Tensor, Tensor> max_pool(const Tensor& x) {
  check_pooled(x), check_poolable(x.size(1), x.size(2));
  const OperatorGuard guard("max_pool", x);
  const Tensor map = torch::stable::contiguous(x);
  const Cells cells(map);
  Tensor y = torch::stable::new_empty(map, {map.size(0), cells.rows(), cells.columns(), map.size(3)});
  Tensor index = indices_like(y);
  if (y.numel() == 0) return {y, index};
  const auto stream = current_stream(map);
  for_type_and_width(map, {&y, &index}, [&]<class T, int kWidth>(T, Int<kWidth>) {
    const Layout layout(cells.whole(), map.size(3), kWidth);
    SAN_LAUNCH((max_pool_kernel<kWidth, T>), layout.blocks(), kThreads, stream, layout, cells, map.const_data_ptr<T>(),
               y.mutable_data_ptr<T>(), index.mutable_data_ptr<uint8_t>());
  });
  return {y, index};
}

Tensor max_pool_backward(const Tensor& grad, const Tensor& index, int64_t height, int64_t width) {
  check_pooled_gradient(grad, index, height, width);
  check_pooled(grad);
  const OperatorGuard guard("max_pool_backward", grad);
  const Tensor grad_y = torch::stable::contiguous(grad), where = torch::stable::contiguous(index);
  const Cells cells(grad.size(0), height, width);
  Tensor grad_x = torch::stable::new_empty(grad_y, {grad.size(0), height, width, grad.size(3)});
  if (grad_x.numel() == 0) return grad_x;
  const auto stream = current_stream(grad_y);
  for_type_and_width(grad_y, {&where, &grad_x}, [&]<class T, int kWidth>(T, Int<kWidth>) {
    const Layout layout(grad.size(0) * ((height + 1) / 2) * ((width + 1) / 2), grad.size(3), kWidth);
    SAN_LAUNCH((max_pool_gradient_kernel<kWidth, T>), layout.blocks(), kThreads, stream, layout, cells,
               grad_y.const_data_ptr<T>(), where.const_data_ptr<uint8_t>(), grad_x.mutable_data_ptr<T>());
  });
  return grad_x;
}

std::tuple<Tensor, Tensor> stem(const Tensor& weight, const Tensor& bias, const Tensor& x, bool half) {
  check_stem(weight, bias, x);
  const OperatorGuard guard("stem", x);
  const Tensor images = torch::stable::contiguous(x), w = torch::stable::contiguous(weight),
               b = torch::stable::contiguous(bias);
  const Cells cells(images);
  Tensor y = torch::stable::new_empty(images, {x.size(0), cells.rows(), cells.columns(), weight.size(0)},
                                      std::optional<ScalarType>(half ? ScalarType::BFloat16 : ScalarType::Float));
  Tensor index = indices_like(y);
  if (y.numel() == 0) return {y, index};
  const auto stream = current_stream(images);
  for_type_and_width(y, {&index}, [&]<class T, int kWidth>(T, Int<kWidth>) {
    with_inputs(x.size(3), [&]<int D>(Int<D>) {
      const Layout layout(cells.whole(), weight.size(0), kWidth);
      SAN_LAUNCH((stem_kernel<D, kWidth, T>), layout.blocks(), kThreads, stream, layout, cells,
                 w.const_data_ptr<float>(), b.const_data_ptr<float>(), images.const_data_ptr<float>(),
                 y.mutable_data_ptr<T>(), index.mutable_data_ptr<uint8_t>());
    });
  });
  return {y, index};
}

std::tuple<Tensor, Tensor> stem_backward(const Tensor& grad, const Tensor& index, const Tensor& x) {
  check_stem_gradient(grad, index, x), check_pooled(grad);
  const OperatorGuard guard("stem_backward", x);
  const Tensor grad_y = torch::stable::contiguous(grad), where = torch::stable::contiguous(index),
               images = torch::stable::contiguous(x);
  const int64_t C = grad.size(3), inputs = x.size(3);
  Tensor to_weight = torch::stable::new_empty(images, {C, inputs}), to_bias = torch::stable::new_empty(images, {C});
  if (grad.numel() == 0) {
    torch::stable::zero_(to_weight), torch::stable::zero_(to_bias);
    return {to_weight, to_bias};
  }
  const Cells cells(images);
  const auto stream = current_stream(images);
  for_type_and_width(grad_y, {&where}, [&]<class T, int kWidth>(T, Int<kWidth>) {
    with_inputs(inputs, [&]<int D>(Int<D>) {
      const Layout layout(cells.whole(), C, kWidth);
      const int64_t columns = C * (D + 1);
      Tensor partial = doubles_like(images, layout.slices * columns);
      SAN_LAUNCH_SHARED((stem_gradient_kernel<D, kWidth, T>), layout.blocks(), kThreads,
                        bytes_of_sums((D + 1) * kWidth), stream, layout, cells, grad_y.const_data_ptr<T>(),
                        where.const_data_ptr<uint8_t>(), images.const_data_ptr<float>(),
                        partial.mutable_data_ptr<double>());
      sum_rows(PartialSums<double>{partial.const_data_ptr<double>(), columns}, layout.slices, columns,
               PlaceStemGradients{D, to_weight.mutable_data_ptr<float>(), to_bias.mutable_data_ptr<float>()}, stream);
    });
  });
  return {to_weight, to_bias};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("max_pool", TORCH_BOX(&san::cuda::max_pool));
  m.impl("max_pool_backward", TORCH_BOX(&san::cuda::max_pool_backward));
  m.impl("stem", TORCH_BOX(&san::cuda::stem));
  m.impl("stem_backward", TORCH_BOX(&san::cuda::stem_backward));
}
