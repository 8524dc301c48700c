// BatchNorm and ReLU in one, forward and backward: a map is read twice and written once each way, and no tensor is kept
// but the input. Definition: torch's batch_norm followed by relu. Memory decides, so loops are left to the compiler.
#include <cmath>

#include "bands.h"
#include "plane.h"

namespace san::cpu {
namespace {

// The mean of some pixels from all over a map [pixels, channels]: one alone could be far from the others.
template <class acc_t, class scalar_t>
void about_the_mean(const scalar_t* x, int64_t pixels, int64_t channels, acc_t* mean) {
  const int64_t some = std::min<int64_t>(pixels, 64);
  std::fill(mean, mean + channels, acc_t(0));
  for (int64_t k = 0; k < some; ++k) {
    const scalar_t* from = x + (2 * k + 1) * pixels / (2 * some) * channels;
    for (int64_t c = 0; c < channels; ++c) mean[c] += static_cast<acc_t>(from[c]) / some;
  }
}

// Parameters and statistics as values that lie in a row; sums are kept in their type.
class Contiguous {
 public:
  Contiguous(std::initializer_list<const Tensor*> tensors, bool is_double) {
    for (const Tensor* x : tensors) {
      STD_TORCH_CHECK(x->scalar_type() == (is_double ? ScalarType::Double : ScalarType::Float),
                      "parameters and statistics must be float64 for float64 maps and float32 for others");
      tensors_.push_back(torch::stable::contiguous(*x));
    }
  }
  const Tensor& operator[](size_t at) const { return tensors_[at]; }

 private:
  std::vector<Tensor> tensors_;
};

constexpr int64_t kChunk = 512;  // pixels of a task
constexpr int64_t kSummed = 32;  // pixels whose sums are kept in the type of sums before they are added up in double

// Sums of x - origin and of its square.
template <class scalar_t, class acc_t>
SAN_VECTOR void sum_distances(const scalar_t* SAN_RESTRICT x, int64_t pixels, int64_t C,
                              const acc_t* SAN_RESTRICT origin, acc_t* SAN_RESTRICT sum, acc_t* SAN_RESTRICT square) {
  for (int64_t i = 0; i < pixels; ++i, x += C)
    for (int64_t c = 0; c < C; ++c) {
      const acc_t distance = static_cast<acc_t>(x[c]) - origin[c];
      sum[c] += distance, square[c] += distance * distance;
    }
}

template <class scalar_t, class acc_t>
SAN_VECTOR void scale_and_rectify(const scalar_t* SAN_RESTRICT x, int64_t pixels, int64_t C,
                                  const acc_t* SAN_RESTRICT mean, const acc_t* SAN_RESTRICT scale,
                                  const acc_t* SAN_RESTRICT bias, scalar_t* SAN_RESTRICT y) {
  for (int64_t i = 0; i < pixels; ++i, x += C, y += C)
    for (int64_t c = 0; c < C; ++c) {
      const acc_t v = scale[c] * (static_cast<acc_t>(x[c]) - mean[c]) + bias[c];
      y[c] = static_cast<scalar_t>(v < acc_t(0) ? acc_t(0) : v);  // NaN stays
    }
}

template <class scalar_t, class acc_t>
SAN_VECTOR void rectify_in_place(scalar_t* SAN_RESTRICT x, int64_t pixels, int64_t C, const acc_t* SAN_RESTRICT mean,
                                 const acc_t* SAN_RESTRICT scale, const acc_t* SAN_RESTRICT bias) {
  for (int64_t i = 0; i < pixels; ++i, x += C)
    for (int64_t c = 0; c < C; ++c) {
      const acc_t v = scale[c] * (static_cast<acc_t>(x[c]) - mean[c]) + bias[c];
      x[c] = static_cast<scalar_t>(v < acc_t(0) ? acc_t(0) : v);  // NaN stays
    }
}

// Sums of g, the gradient where the output is positive, and of g * (x - mean).
template <class scalar_t, class acc_t>
SAN_VECTOR void sum_gradients(const scalar_t* SAN_RESTRICT grad, const scalar_t* SAN_RESTRICT x, int64_t pixels,
                              int64_t C, const acc_t* SAN_RESTRICT mean, const acc_t* SAN_RESTRICT scale,
                              const acc_t* SAN_RESTRICT bias, acc_t* SAN_RESTRICT sum, acc_t* SAN_RESTRICT product) {
  for (int64_t i = 0; i < pixels; ++i, x += C, grad += C)
    for (int64_t c = 0; c < C; ++c) {
      const acc_t distance = static_cast<acc_t>(x[c]) - mean[c];
      const acc_t g = scale[c] * distance + bias[c] > acc_t(0) ? static_cast<acc_t>(grad[c]) : acc_t(0);
      sum[c] += g, product[c] += g * distance;
    }
}

// scale * (g - offset - (x - mean) * tilt).
template <class scalar_t, class acc_t>
SAN_VECTOR void finish_gradients(const scalar_t* SAN_RESTRICT grad, const scalar_t* SAN_RESTRICT x, int64_t pixels,
                                 int64_t C, const acc_t* SAN_RESTRICT mean, const acc_t* SAN_RESTRICT scale,
                                 const acc_t* SAN_RESTRICT bias, const acc_t* SAN_RESTRICT offset,
                                 const acc_t* SAN_RESTRICT tilt, scalar_t* SAN_RESTRICT out) {
  for (int64_t i = 0; i < pixels; ++i, x += C, grad += C, out += C)
    for (int64_t c = 0; c < C; ++c) {
      const acc_t distance = static_cast<acc_t>(x[c]) - mean[c];
      const acc_t g = scale[c] * distance + bias[c] > acc_t(0) ? static_cast<acc_t>(grad[c]) : acc_t(0);
      out[c] = static_cast<scalar_t>(scale[c] * (g - offset[c] - distance * tilt[c]));
    }
}

// Adds up, over pixels in their order, what sum(first pixel, pixels, out [2 C]) leaves.
template <class acc_t, class Sum>
std::vector<double> sum_chunks(int64_t pixels, int64_t C, const Sum& sum) {
  constexpr int64_t kTasks = 64;
  const int64_t chunks = (pixels + kSummed - 1) / kSummed, tasks = std::min(kTasks, chunks);
  std::vector<double> partial(tasks * 2 * C);
  for_each_task<acc_t>(tasks, 2 * C, [&](int64_t task, acc_t* row) {
    for (int64_t chunk = task * chunks / tasks; chunk < (task + 1) * chunks / tasks; ++chunk) {
      std::fill(row, row + 2 * C, acc_t(0));
      sum(chunk * kSummed, std::min(kSummed, pixels - chunk * kSummed), row);
      for (int64_t c = 0; c < 2 * C; ++c) partial[task * 2 * C + c] += row[c];
    }
  });
  return sum_over_tasks(partial, 2 * C);
}

template <class Work>
void for_each_chunk(int64_t pixels, const Work& work) {
  const int64_t chunks = (pixels + kChunk - 1) / kChunk;
  for_each_task<char>(chunks, 0,
                      [&](int64_t chunk, char*) { work(chunk * kChunk, std::min(kChunk, pixels - chunk * kChunk)); });
}

// y = relu(scale * (x - mean) + bias): a large mean goes before anything is rounded.
template <class acc_t>
struct Affine {
  const acc_t *mean, *bias;
  std::vector<acc_t> scale;
  std::vector<double> deviation;  // 1 / standard deviation

  Affine(const Tensor& gain, const Tensor& bias, const acc_t* mean, const acc_t* var, double eps)
      : mean(mean), bias(values<acc_t>(bias)), scale(gain.numel()), deviation(gain.numel()) {
    for (size_t c = 0; c < scale.size(); ++c) {
      deviation[c] = 1 / std::sqrt(var[c] + eps);
      scale[c] = static_cast<acc_t>(values<acc_t>(gain)[c] * deviation[c]);
    }
  }
};

void check_norm(const Tensor& x, const Contiguous& p) {
  check_map(x, "x");
  for (int i = 0; i < 4; ++i)
    STD_TORCH_CHECK(p[i].dim() == 1 && p[i].size(0) == x.size(3) && x.size(3) > 0, "gain, bias, mean and var must be [",
                    x.size(3), "], as x has channels");
}

std::tuple<Tensor, Tensor, Tensor> norm_relu(const Tensor& x, const Tensor& gain, const Tensor& bias,
                                             const Tensor& mean, const Tensor& var, bool training, double eps) {
  const Contiguous p({&gain, &bias, &mean, &var}, x.scalar_type() == ScalarType::Double);
  check_norm(x, p);
  const Tensor map = torch::stable::contiguous(x);
  const int64_t C = x.size(3), pixels = x.numel() / C;
  Tensor y = torch::stable::empty_like(map), new_mean = torch::stable::clone(p[2]),
         new_var = torch::stable::clone(p[3]);
  SAN_DISPATCH(x.scalar_type(), "norm_relu", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t* in = map.const_data_ptr<scalar_t>();
    scalar_t* out = y.mutable_data_ptr<scalar_t>();
    acc_t *m = new_mean.mutable_data_ptr<acc_t>(), *v = new_var.mutable_data_ptr<acc_t>();
    if (training && pixels > 0) {
      std::vector<acc_t> origin(C);  // so that squares do not cancel
      about_the_mean(in, pixels, C, origin.data());
      const std::vector<double> sums = sum_chunks<acc_t>(pixels, C, [&](int64_t first, int64_t count, acc_t* row) {
        sum_distances(in + first * C, count, C, origin.data(), row, row + C);
      });
      for (int64_t c = 0; c < C; ++c) {
        const double distance = sums[c] / pixels;
        m[c] = static_cast<acc_t>(origin[c] + distance);
        v[c] = static_cast<acc_t>(std::max(0.0, sums[C + c] / pixels - distance * distance));
        if (sums[c] != sums[c] || sums[C + c] != sums[C + c]) v[c] = static_cast<acc_t>(sums[C + c]);  // NaN stays
      }
    }
    const Affine<acc_t> affine(p[0], p[1], m, v, eps);
    for_each_chunk(pixels, [&](int64_t first, int64_t count) {
      scale_and_rectify(in + first * C, count, C, affine.mean, affine.scale.data(), affine.bias, out + first * C);
    });
  });
  return {y, new_mean, new_var};
}

// In evaluation, in place: no new map, whose memory would cost more than the arithmetic.
void norm_relu_(Tensor x, const Tensor& gain, const Tensor& bias, const Tensor& mean, const Tensor& var, double eps) {
  const Contiguous p({&gain, &bias, &mean, &var}, x.scalar_type() == ScalarType::Double);
  check_norm(x, p);
  STD_TORCH_CHECK(x.is_contiguous(), "x must be contiguous [N, H, W, C]");
  const int64_t C = x.size(3), pixels = x.numel() / C;
  SAN_DISPATCH(x.scalar_type(), "norm_relu_", [&] {
    using acc_t = accumulate_t<scalar_t>;
    scalar_t* map = x.mutable_data_ptr<scalar_t>();
    const Affine<acc_t> affine(p[0], p[1], values<acc_t>(p[2]), values<acc_t>(p[3]), eps);
    for_each_chunk(pixels, [&](int64_t first, int64_t count) {
      rectify_in_place(map + first * C, count, C, affine.mean, affine.scale.data(), affine.bias);
    });
  });
}

std::tuple<Tensor, Tensor, Tensor> norm_relu_backward(const Tensor& grad, const Tensor& x, const Tensor& gain,
                                                      const Tensor& bias, const Tensor& mean, const Tensor& var,
                                                      bool training, double eps) {
  const Contiguous p({&gain, &bias, &mean, &var}, x.scalar_type() == ScalarType::Double);
  check_norm(x, p);
  check_same(grad, x, "grad and x");
  STD_TORCH_CHECK(grad.sizes().vec() == x.sizes().vec(), "grad and x must have the same shape");
  const Tensor map = torch::stable::contiguous(x), grads = torch::stable::contiguous(grad);
  const int64_t C = x.size(3), pixels = x.numel() / C;
  Tensor grad_x = torch::stable::empty_like(map);
  Tensor grad_gain = torch::stable::empty_like(p[0]), grad_bias = torch::stable::empty_like(p[1]);
  SAN_DISPATCH(x.scalar_type(), "norm_relu_backward", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t *in = map.const_data_ptr<scalar_t>(), *g = grads.const_data_ptr<scalar_t>();
    scalar_t* out = grad_x.mutable_data_ptr<scalar_t>();
    acc_t *to_gain = grad_gain.mutable_data_ptr<acc_t>(), *to_bias = grad_bias.mutable_data_ptr<acc_t>();
    const acc_t* m = values<acc_t>(p[2]);
    const Affine<acc_t> affine(p[0], p[1], m, values<acc_t>(p[3]), eps);
    const acc_t *scale = affine.scale.data(), *b = affine.bias;
    const std::vector<double> sums = sum_chunks<acc_t>(pixels, C, [&](int64_t first, int64_t count, acc_t* row) {
      sum_gradients(g + first * C, in + first * C, count, C, m, scale, b, row, row + C);
    });
    std::vector<acc_t> offset(C), tilt(C);
    for (int64_t c = 0; c < C; ++c) {
      const double deviation = affine.deviation[c];
      to_bias[c] = static_cast<acc_t>(sums[c]), to_gain[c] = static_cast<acc_t>(deviation * sums[C + c]);
      if (!training || pixels == 0) continue;
      offset[c] = static_cast<acc_t>(sums[c] / pixels);
      tilt[c] = static_cast<acc_t>(deviation * deviation * sums[C + c] / pixels);
    }
    for_each_chunk(pixels, [&](int64_t first, int64_t count) {
      finish_gradients(g + first * C, in + first * C, count, C, m, scale, b, offset.data(), tilt.data(),
                       out + first * C);
    });
  });
  return {grad_x, grad_gain, grad_bias};
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("norm_relu", TORCH_BOX(&san::cpu::norm_relu));
  m.impl("norm_relu_", TORCH_BOX(&san::cpu::norm_relu_));
  m.impl("norm_relu_backward", TORCH_BOX(&san::cpu::norm_relu_backward));
}
