// aggregation, forward and backward. Definition: san/ops/reference.py.
//
// Parallel over images and weight channels: one task owns a weight channel g and the S value channels g, g + G, ...
// that share it, so each weight is read once for S channels and no two tasks write the same gradient.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch.h>

#include <tuple>
#include <vector>

#include "plane.h"

namespace san::cpu {
namespace {

// y[i] += weight[o, i] * padded[i + o], all offsets of one channel.
template <class scalar_t, class acc_t>
SAN_VECTOR void accumulate(const scalar_t* weight, const acc_t* padded, const Footprint& f, acc_t* y) {
  for (int64_t o = 0; o < f.positions(); ++o) {
    const acc_t* shifted = padded + o / f.kernel_size * f.padded_width() + o % f.kernel_size;
    acc_t* row = y;
    for (int64_t h = 0; h < f.height; ++h, shifted += f.padded_width(), weight += f.width, row += f.width)
      for (int64_t w = 0; w < f.width; ++w) row[w] += static_cast<acc_t>(weight[w]) * shifted[w];
  }
}

// grad_weight[o, i] += grad[i] * padded[i + o];  grad_padded[i + o] += grad[i] * weight[o, i].
template <class scalar_t, class acc_t>
SAN_VECTOR void accumulate_backward(const acc_t* grad, const scalar_t* weight, const acc_t* padded, const Footprint& f,
                                    acc_t* grad_weight, acc_t* grad_padded) {
  for (int64_t o = 0; o < f.positions(); ++o) {
    const int64_t offset = o / f.kernel_size * f.padded_width() + o % f.kernel_size;
    const acc_t *value = padded + offset, *row = grad;
    acc_t* out = grad_padded + offset;
    for (int64_t h = 0; h < f.height; ++h) {
      for (int64_t w = 0; w < f.width; ++w) {
        grad_weight[w] += row[w] * value[w];
        out[w] += row[w] * static_cast<acc_t>(weight[w]);
      }
      value += f.padded_width(), out += f.padded_width();
      row += f.width, weight += f.width, grad_weight += f.width;
    }
  }
}

Tensor aggregation(const Tensor& beta, const Tensor& weight, int64_t kernel_size) {
  check_map(beta, "beta");
  const Footprint f = footprint_of(beta.size(2), beta.size(3), kernel_size);
  check_aggregation(beta, weight, f);
  const Tensor values = torch::stable::contiguous(beta), weights = torch::stable::contiguous(weight);
  Tensor out = torch::stable::empty_like(values);
  const int64_t C = beta.size(1), G = weight.size(1);
  SAN_DISPATCH(beta.scalar_type(), "aggregation", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t *in = values.const_data_ptr<scalar_t>(), *w = weights.const_data_ptr<scalar_t>();
    scalar_t* result = out.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, beta.size(0) * G, 1, [&](int64_t begin, int64_t end) {
      std::vector<acc_t> padded(f.padded_height() * f.padded_width()), y(f.pixels());
      for (int64_t task = begin; task < end; ++task) {
        for (int64_t c = task % G; c < C; c += G) {
          const int64_t plane = (task / G * C + c) * f.pixels();
          pad(in + plane, f, padded.data());
          std::fill(y.begin(), y.end(), acc_t(0));
          accumulate(w + task * f.positions() * f.pixels(), padded.data(), f, y.data());
          for (int64_t i = 0; i < f.pixels(); ++i) result[plane + i] = static_cast<scalar_t>(y[i]);
        }
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> aggregation_backward(const Tensor& grad, const Tensor& beta, const Tensor& weight,
                                                int64_t kernel_size) {
  check_map(beta, "beta");
  const Footprint f = footprint_of(beta.size(2), beta.size(3), kernel_size);
  check_aggregation(beta, weight, f);
  check_same(grad, beta, "grad and beta");
  STD_TORCH_CHECK(grad.sizes().vec() == beta.sizes().vec(), "grad and beta must have one shape");
  const Tensor grads = torch::stable::contiguous(grad), values = torch::stable::contiguous(beta);
  const Tensor weights = torch::stable::contiguous(weight);
  Tensor grad_beta = torch::stable::empty_like(values), grad_weight = torch::stable::empty_like(weights);
  const int64_t C = beta.size(1), G = weight.size(1), KP = f.positions() * f.pixels();
  SAN_DISPATCH(beta.scalar_type(), "aggregation_backward", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t *gy = grads.const_data_ptr<scalar_t>(), *in = values.const_data_ptr<scalar_t>();
    const scalar_t* w = weights.const_data_ptr<scalar_t>();
    scalar_t *gb = grad_beta.mutable_data_ptr<scalar_t>(), *gw = grad_weight.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, beta.size(0) * G, 1, [&](int64_t begin, int64_t end) {
      const int64_t padded_pixels = f.padded_height() * f.padded_width();
      std::vector<acc_t> padded(padded_pixels), grad_padded(padded_pixels), y(f.pixels()), sum(KP);
      for (int64_t task = begin; task < end; ++task) {
        std::fill(sum.begin(), sum.end(), acc_t(0));
        for (int64_t c = task % G; c < C; c += G) {
          const int64_t plane = (task / G * C + c) * f.pixels();
          pad(in + plane, f, padded.data());
          std::fill(grad_padded.begin(), grad_padded.end(), acc_t(0));
          for (int64_t i = 0; i < f.pixels(); ++i) y[i] = static_cast<acc_t>(gy[plane + i]);
          accumulate_backward(y.data(), w + task * KP, padded.data(), f, sum.data(), grad_padded.data());
          fold(grad_padded.data(), f, gb + plane);
        }
        for (int64_t i = 0; i < KP; ++i) gw[task * KP + i] = static_cast<scalar_t>(sum[i]);
      }
    });
  });
  return {grad_beta, grad_weight};
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("aggregation", TORCH_BOX(&san::cpu::aggregation));
  m.impl("aggregation_backward", TORCH_BOX(&san::cpu::aggregation_backward));
}
