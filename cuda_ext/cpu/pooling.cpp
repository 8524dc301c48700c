// 2x2 max pooling of channels-last float32 maps, alone and after the Linear layer and ReLU of SAN's stem; the
// definition is in schemas.py. The compiler vectorizes the loops over channels.
#include <array>
#include <tuple>

#include "bands.h"
#include "vectorize.h"

namespace san::cpu {
namespace {

// A map [N, H, W, C] whose rows are pooled in pairs.
struct Cells {
  Cells(int64_t N, int64_t H, int64_t W, int64_t C) : H(H), W(W), C(C), h(H / 2), w(W / 2), rows(N * h) {}

  // Calls work(task, first row, end, index of one row) in threads; rows are those of the pooled maps of all images.
  template <class Work>
  void for_each(const Work& work) const {
    for_each_task<int32_t>(tasks(), w * C, [&](int64_t task, int32_t* index) {
      work(task, task * task_rows, std::min((task + 1) * task_rows, rows), index);
    });
  }
  int64_t tasks() const { return (rows + task_rows - 1) / task_rows; }
  // The first pixel of a pooled row in the map.
  int64_t pixel(int64_t row) const { return (row / h * H + row % h * 2) * W; }

  static constexpr int64_t kTaskValues = 1 << 14;
  const int64_t H, W, C, h, w, rows, task_rows = std::max<int64_t>(1, kTaskValues / std::max<int64_t>(1, w* C));
};

// The index of a row, in the type of the loops below: with bytes, the compiler would want 64 channels.
SAN_VECTOR void widen(const uint8_t* from, int64_t count, int32_t* SAN_RESTRICT to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}
SAN_VECTOR void narrow(const int32_t* from, int64_t count, uint8_t* SAN_RESTRICT to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(from[i]);
}

// `below` is the distance of the two rows.
SAN_VECTOR void pool_row(const float* x, int64_t below, int64_t columns, int64_t C, float* SAN_RESTRICT y,
                         int32_t* SAN_RESTRICT index) {
  for (; columns > 0; --columns, x += 2 * C, y += C, index += C)
    for (int64_t c = 0; c < C; ++c) {
      float best = x[c];
      int at = 0;
      keep_larger(x[C + c], 1, best, at), keep_larger(x[below + c], 2, best, at);
      keep_larger(x[below + C + c], 3, best, at);
      y[c] = best, index[c] = at;
    }
}

SAN_VECTOR void unpool_row(const float* grad, const int32_t* index, int64_t below, int64_t columns, int64_t C,
                           float* SAN_RESTRICT grad_x) {
  for (; columns > 0; --columns, grad_x += 2 * C, grad += C, index += C)
    for (int k = 0; k < kCellPixels; ++k) {
      float* SAN_RESTRICT to = grad_x + (k / 2 * below + k % 2 * C);
      for (int64_t c = 0; c < C; ++c) {
        const float g = grad[c];
        to[c] = index[c] == k ? g : 0;
      }
    }
}

// A cell of an image with D channels.
template <int D>
std::array<float, kCellPixels * D> cell(const float* x, int64_t below) {
  std::array<float, kCellPixels * D> values;
  std::copy_n(x, 2 * D, values.begin()), std::copy_n(x + below, 2 * D, values.begin() + 2 * D);
  return values;
}

// weight is [D, C].
template <int D>
SAN_VECTOR void stem_row(const float* x, int64_t below, int64_t columns, int64_t C, const float* weight,
                         const float* bias, float* SAN_RESTRICT y, int32_t* SAN_RESTRICT index) {
  for (; columns > 0; --columns, x += 2 * D, y += C, index += C) {
    const auto pixels = cell<D>(x, below);
    for (int64_t c = 0; c < C; ++c) {
      float values[kCellPixels];
      for (int k = 0; k < kCellPixels; ++k) {
        values[k] = bias[c];
        for (int d = 0; d < D; ++d) values[k] += weight[d * C + c] * pixels[k * D + d];
      }
      float best = values[0];
      int at = 0;
      for (int k = 1; k < kCellPixels; ++k) keep_larger(values[k], k, best, at);
      y[c] = best < 0 ? 0 : best;  // NaN stays
      index[c] = best <= 0 ? kCellPixels : at;
    }
  }
}

// Adds the gradients of weight [D, C] and of bias to `sums` [D + 1, C].
template <int D>
SAN_VECTOR void add_stem_gradients(const float* grad, const int32_t* index, const float* x, int64_t below,
                                   int64_t columns, int64_t C, float* SAN_RESTRICT sums) {
  for (; columns > 0; --columns, x += 2 * D, grad += C, index += C) {
    const auto pixels = cell<D>(x, below);
    for (int64_t c = 0; c < C; ++c) {
      const float g = grad[c];
      float of_pixels[kCellPixels], sum = 0;
      for (int k = 0; k < kCellPixels; ++k) of_pixels[k] = index[c] == k ? g : 0, sum += of_pixels[k];
      for (int d = 0; d < D; ++d)
        for (int k = 0; k < kCellPixels; ++k) sums[d * C + c] += of_pixels[k] * pixels[k * D + d];
      sums[D * C + c] += sum;
    }
  }
}

void check_float(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4 && x.scalar_type() == ScalarType::Float, "x must be a float32 map [N, H, W, C]");
}

std::tuple<Tensor, Tensor> max_pool(const Tensor& x) {
  check_float(x), check_poolable(x.size(1), x.size(2));
  const Tensor map = as<float>(x);
  const Cells cells(x.size(0), x.size(1), x.size(2), x.size(3));
  Tensor y = torch::stable::new_empty(map, {x.size(0), cells.h, cells.w, cells.C});
  Tensor index = torch::stable::new_empty(y, y.sizes(), ScalarType::Byte);
  ask_for_large_pages(y);
  const float* in = values<float>(map);
  float* out = y.mutable_data_ptr<float>();
  uint8_t* at = index.mutable_data_ptr<uint8_t>();
  cells.for_each([&](int64_t, int64_t first, int64_t end, int32_t* index_of_row) {
    for (int64_t row = first; row < end; ++row) {
      const int64_t to = row * cells.w * cells.C;
      pool_row(in + cells.pixel(row) * cells.C, cells.W * cells.C, cells.w, cells.C, out + to, index_of_row);
      narrow(index_of_row, cells.w * cells.C, at + to);
    }
  });
  return {y, index};
}

Tensor max_pool_backward(const Tensor& grad, const Tensor& index, int64_t height, int64_t width) {
  check_pooled_gradient(grad, index, height, width);
  check_float(grad);
  const Tensor grad_y = as<float>(grad), indices = torch::stable::contiguous(index);
  const Cells cells(grad.size(0), height, width, grad.size(3));
  Tensor grad_x = torch::stable::new_empty(grad_y, {grad.size(0), height, width, cells.C});
  ask_for_large_pages(grad_x);
  const float* g = values<float>(grad_y);
  const uint8_t* at = indices.const_data_ptr<uint8_t>();
  float* out = grad_x.mutable_data_ptr<float>();
  const int64_t below = width * cells.C, pooled = 2 * cells.w * cells.C;
  cells.for_each([&](int64_t, int64_t first, int64_t end, int32_t* index_of_row) {
    for (int64_t row = first; row < end; ++row) {
      const int64_t from = row * cells.w * cells.C;
      float* to = out + cells.pixel(row) * cells.C;
      widen(at + from, cells.w * cells.C, index_of_row);
      unpool_row(g + from, index_of_row, below, cells.w, cells.C, to);
      const bool is_last = row % cells.h == cells.h - 1;
      std::fill(to + pooled, to + below, 0.0f), std::fill(to + below + pooled, to + 2 * below, 0.0f);
      if (is_last && height % 2 == 1) std::fill(to + 2 * below, to + 3 * below, 0.0f);
    }
  });
  return grad_x;
}

std::tuple<Tensor, Tensor> stem(const Tensor& weight, const Tensor& bias, const Tensor& x, bool half) {
  check_stem(weight, bias, x);
  STD_TORCH_CHECK(!half, "on the CPU, results are float32");
  const Tensor images = as<float>(x), w = as<float>(torch::stable::transpose(weight, 0, 1)), b = as<float>(bias);
  const Cells cells(x.size(0), x.size(1), x.size(2), weight.size(0));
  Tensor y = torch::stable::new_empty(images, {x.size(0), cells.h, cells.w, cells.C});
  Tensor index = torch::stable::new_empty(y, y.sizes(), ScalarType::Byte);
  ask_for_large_pages(y);
  const float *in = values<float>(images), *weights = values<float>(w), *biases = values<float>(b);
  float* out = y.mutable_data_ptr<float>();
  uint8_t* at = index.mutable_data_ptr<uint8_t>();
  with_inputs(x.size(3), [&]<int D>(Int<D>) {
    cells.for_each([&](int64_t, int64_t first, int64_t end, int32_t* index_of_row) {
      for (int64_t row = first; row < end; ++row) {
        const int64_t to = row * cells.w * cells.C;
        stem_row<D>(in + cells.pixel(row) * D, cells.W * D, cells.w, cells.C, weights, biases, out + to, index_of_row);
        narrow(index_of_row, cells.w * cells.C, at + to);
      }
    });
  });
  return {y, index};
}

std::tuple<Tensor, Tensor> stem_backward(const Tensor& grad, const Tensor& index, const Tensor& x) {
  check_stem_gradient(grad, index, x), check_float(grad);
  const Tensor grad_y = as<float>(grad), indices = torch::stable::contiguous(index), images = as<float>(x);
  const Cells cells(x.size(0), x.size(1), x.size(2), grad.size(3));
  const float *g = values<float>(grad_y), *in = values<float>(images);
  const uint8_t* at = indices.const_data_ptr<uint8_t>();
  const int64_t C = cells.C, inputs = x.size(3);
  std::vector<double> of_tasks(cells.tasks() * (inputs + 1) * C);
  with_inputs(inputs, [&]<int D>(Int<D>) {
    cells.for_each([&](int64_t task, int64_t first, int64_t end, int32_t* index_of_row) {
      std::vector<float> of_row((D + 1) * C);
      double* sums = &of_tasks[task * (D + 1) * C];
      for (int64_t row = first; row < end; ++row) {
        const int64_t from = row * cells.w * C;
        std::fill(of_row.begin(), of_row.end(), 0.0f);
        widen(at + from, cells.w * C, index_of_row);
        add_stem_gradients<D>(g + from, index_of_row, in + cells.pixel(row) * D, cells.W * D, cells.w, C,
                              of_row.data());
        for (int64_t i = 0; i < (D + 1) * C; ++i) sums[i] += of_row[i];
      }
    });
  });
  const std::vector<double> sums = sum_over_tasks(of_tasks, (inputs + 1) * C);
  const Tensor to_weight = tensor_of<float>(sums.data(), images, {inputs, C});
  return {torch::stable::contiguous(torch::stable::transpose(to_weight, 0, 1)),
          tensor_of<float>(sums.data() + inputs * C, images, {C})};
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("max_pool", TORCH_BOX(&san::cpu::max_pool));
  m.impl("max_pool_backward", TORCH_BOX(&san::cpu::max_pool_backward));
  m.impl("stem", TORCH_BOX(&san::cpu::stem));
  m.impl("stem_backward", TORCH_BOX(&san::cpu::stem_backward));
}
