// aggregation and dot, forward and backward: each is the other's derivative. Definition: san/ops/reference.py.
//
// Parallel over images and weight channels: one task owns a weight channel g and the S value channels g, g + G, ...
// that share it, so each weight is read once for S channels and no two tasks write the same gradient. The backward of
// dot, which reads weights only, is parallel over images and value channels.
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
SAN_VECTOR void aggregate(const scalar_t* weight, const acc_t* padded, const Footprint& f, acc_t* y) {
  for (int64_t o = 0; o < f.positions(); ++o) {
    const acc_t* shifted = padded + o / f.kernel_size * f.padded_width() + o % f.kernel_size;
    acc_t* row = y;
    for (int64_t h = 0; h < f.height; ++h, shifted += f.padded_width(), weight += f.width, row += f.width)
      for (int64_t w = 0; w < f.width; ++w) row[w] += static_cast<acc_t>(weight[w]) * shifted[w];
  }
}

// grad_weight[o, i] += grad[i] * padded[i + o];  grad_padded[i + o] += grad[i] * weight[o, i].
template <class scalar_t, class acc_t>
SAN_VECTOR void aggregate_backward(const acc_t* grad, const scalar_t* weight, const acc_t* padded, const Footprint& f,
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

// out[o, i] = sum_c phi[c, i] * padded[c, i + o] over the `channels` of one group; phi's planes lie `stride` apart.
template <class scalar_t, class acc_t>
SAN_VECTOR void correlate(const scalar_t* phi, int64_t stride, int64_t channels, const acc_t* padded,
                          const Footprint& f, acc_t* sum, scalar_t* out) {
  const int64_t padded_pixels = f.padded_height() * f.padded_width();
  for (int64_t o = 0; o < f.positions(); ++o) {
    const acc_t* shifted = padded + o / f.kernel_size * f.padded_width() + o % f.kernel_size;
    for (int64_t h = 0; h < f.height; ++h, shifted += f.padded_width(), out += f.width) {
      for (int64_t w = 0; w < f.width; ++w) sum[w] = 0;
      for (int64_t c = 0; c < channels; ++c) {
        const scalar_t* center = phi + c * stride + h * f.width;
        const acc_t* around = shifted + c * padded_pixels;
        for (int64_t w = 0; w < f.width; ++w) sum[w] += static_cast<acc_t>(center[w]) * around[w];
      }
      for (int64_t w = 0; w < f.width; ++w) out[w] = static_cast<scalar_t>(sum[w]);
    }
  }
}

// grad_phi[i] += grad[o, i] * padded[i + o];  grad_padded[i + o] += grad[o, i] * phi[i], all offsets of one channel.
template <class scalar_t, class acc_t>
SAN_VECTOR void correlate_backward(const scalar_t* grad, const scalar_t* phi, const acc_t* padded, const Footprint& f,
                                   acc_t* grad_phi, acc_t* grad_padded) {
  for (int64_t o = 0; o < f.positions(); ++o) {
    const int64_t offset = o / f.kernel_size * f.padded_width() + o % f.kernel_size;
    for (int64_t h = 0; h < f.height; ++h, grad += f.width) {
      const acc_t* around = padded + offset + h * f.padded_width();
      const scalar_t* center = phi + h * f.width;
      acc_t *to_phi = grad_phi + h * f.width, *to_psi = grad_padded + offset + h * f.padded_width();
      for (int64_t w = 0; w < f.width; ++w) {
        to_phi[w] += static_cast<acc_t>(grad[w]) * around[w];
        to_psi[w] += static_cast<acc_t>(grad[w]) * static_cast<acc_t>(center[w]);
      }
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
          aggregate(w + task * f.positions() * f.pixels(), padded.data(), f, y.data());
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
  STD_TORCH_CHECK(grad.sizes().vec() == beta.sizes().vec(), "grad and beta must have the same shape");
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
          aggregate_backward(y.data(), w + task * KP, padded.data(), f, sum.data(), grad_padded.data());
          fold(grad_padded.data(), f, gb + plane);
        }
        for (int64_t i = 0; i < KP; ++i) gw[task * KP + i] = static_cast<scalar_t>(sum[i]);
      }
    });
  });
  return {grad_beta, grad_weight};
}

Tensor dot(const Tensor& phi, const Tensor& psi, int64_t kernel_size, int64_t groups) {
  check_dot(phi, psi, groups);
  const Footprint f = footprint_of(phi.size(2), phi.size(3), kernel_size);
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  Tensor out = torch::stable::new_empty(phi, {phi.size(0), groups, f.positions(), f.pixels()});
  const int64_t R = phi.size(1), S = R / groups;
  SAN_DISPATCH(phi.scalar_type(), "dot", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t *center = left.const_data_ptr<scalar_t>(), *around = right.const_data_ptr<scalar_t>();
    scalar_t* result = out.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, phi.size(0) * groups, 1, [&](int64_t begin, int64_t end) {
      const int64_t padded_pixels = f.padded_height() * f.padded_width();
      std::vector<acc_t> padded(S * padded_pixels), sum(f.width);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = (task / groups * R + task % groups) * f.pixels(), stride = groups * f.pixels();
        for (int64_t s = 0; s < S; ++s) pad(around + first + s * stride, f, padded.data() + s * padded_pixels);
        correlate(center + first, stride, S, padded.data(), f, sum.data(), result + task * f.positions() * f.pixels());
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> dot_backward(const Tensor& grad, const Tensor& phi, const Tensor& psi, int64_t kernel_size) {
  check_map(phi, "phi");
  const Footprint f = footprint_of(phi.size(2), phi.size(3), kernel_size);
  check_unfolded(grad, f, "grad");
  check_same(grad, phi, "grad and phi");
  const int64_t R = phi.size(1), G = grad.size(1);
  check_dot(phi, psi, G);
  STD_TORCH_CHECK(grad.size(0) == phi.size(0), "grad and phi must have one batch size");
  const Tensor grads = torch::stable::contiguous(grad);
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  Tensor grad_phi = torch::stable::empty_like(left), grad_psi = torch::stable::empty_like(right);
  SAN_DISPATCH(phi.scalar_type(), "dot_backward", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t *center = left.const_data_ptr<scalar_t>(), *around = right.const_data_ptr<scalar_t>();
    const scalar_t* g = grads.const_data_ptr<scalar_t>();
    scalar_t *to_phi = grad_phi.mutable_data_ptr<scalar_t>(), *to_psi = grad_psi.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, phi.size(0) * R, 1, [&](int64_t begin, int64_t end) {
      const int64_t padded_pixels = f.padded_height() * f.padded_width();
      std::vector<acc_t> padded(padded_pixels), grad_padded(padded_pixels), sum(f.pixels());
      for (int64_t task = begin; task < end; ++task) {
        const int64_t plane = task * f.pixels(), weight = task / R * G + task % R % G;
        pad(around + plane, f, padded.data());
        std::fill(grad_padded.begin(), grad_padded.end(), acc_t(0));
        std::fill(sum.begin(), sum.end(), acc_t(0));
        correlate_backward(g + weight * f.positions() * f.pixels(), center + plane, padded.data(), f, sum.data(),
                           grad_padded.data());
        for (int64_t i = 0; i < f.pixels(); ++i) to_phi[plane + i] = static_cast<scalar_t>(sum[i]);
        fold(grad_padded.data(), f, to_psi + plane);
      }
    });
  });
  return {grad_phi, grad_psi};
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("aggregation", TORCH_BOX(&san::cpu::aggregation));
  m.impl("aggregation_backward", TORCH_BOX(&san::cpu::aggregation_backward));
  m.impl("dot", TORCH_BOX(&san::cpu::dot));
  m.impl("dot_backward", TORCH_BOX(&san::cpu::dot_backward));
}
