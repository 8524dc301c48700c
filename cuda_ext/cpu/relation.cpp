// unfold, subtraction and dot, forward and backward. The definitions are in san/ops/reference.py. Threads divide the
// images and channels among them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch.h>

#include <tuple>
#include <vector>

#include "plane.h"

namespace san::cpu {
namespace {

// out[o, i] = sign * padded[i + o] + center[i]; center may be null.
template <class scalar_t, class acc_t>
SAN_VECTOR void spread(const acc_t* padded, const scalar_t* center, acc_t sign, const Footprint& f, scalar_t* out) {
  for (int64_t o = 0; o < f.positions(); ++o) {
    const acc_t* shifted = padded + o / f.kernel_size * f.padded_width() + o % f.kernel_size;
    for (int64_t h = 0; h < f.height; ++h, shifted += f.padded_width(), out += f.width) {
      if (center == nullptr) {
        for (int64_t w = 0; w < f.width; ++w) out[w] = static_cast<scalar_t>(sign * shifted[w]);
      } else {
        const scalar_t* row = center + h * f.width;
        for (int64_t w = 0; w < f.width; ++w)
          out[w] = static_cast<scalar_t>(static_cast<acc_t>(row[w]) + sign * shifted[w]);
      }
    }
  }
}

// padded[i + o] += sign * grad[o, i], and center[i] = sum_o grad[o, i] unless center is null.
template <class scalar_t, class acc_t>
SAN_VECTOR void gather(const scalar_t* grad, acc_t sign, const Footprint& f, acc_t* padded, acc_t* center) {
  for (int64_t o = 0; o < f.positions(); ++o) {
    acc_t* shifted = padded + o / f.kernel_size * f.padded_width() + o % f.kernel_size;
    for (int64_t h = 0; h < f.height; ++h, shifted += f.padded_width(), grad += f.width) {
      for (int64_t w = 0; w < f.width; ++w) shifted[w] += sign * static_cast<acc_t>(grad[w]);
      if (center == nullptr) continue;
      acc_t* row = center + h * f.width;
      for (int64_t w = 0; w < f.width; ++w) row[w] += static_cast<acc_t>(grad[w]);
    }
  }
}

// out[o, i] = sum_c phi[c, i] * padded[c, i + o] over the `channels` of one group. The planes of phi are `stride`
// elements apart.
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

// Runs body(plane, padded scratch) for the N * C planes.
template <class acc_t, class Body>
void for_each_plane(int64_t planes, const Footprint& f, const Body& body) {
  torch::stable::parallel_for(0, planes, 1, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> padded(f.padded_height() * f.padded_width());
    for (int64_t plane = begin; plane < end; ++plane) body(plane, padded);
  });
}

Tensor unfold(const Tensor& x, int64_t kernel_size) {
  check_map(x, "x");
  const Footprint f = footprint_of(x.size(2), x.size(3), kernel_size);
  const Tensor source = torch::stable::contiguous(x);
  Tensor out = torch::stable::new_empty(x, {x.size(0), x.size(1), f.positions(), f.pixels()});
  SAN_DISPATCH(x.scalar_type(), "unfold", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t* in = source.const_data_ptr<scalar_t>();
    scalar_t* result = out.mutable_data_ptr<scalar_t>();
    for_each_plane<acc_t>(x.size(0) * x.size(1), f, [&](int64_t plane, std::vector<acc_t>& padded) {
      pad(in + plane * f.pixels(), f, padded.data());
      spread<scalar_t, acc_t>(padded.data(), nullptr, 1, f, result + plane * f.positions() * f.pixels());
    });
  });
  return out;
}

Tensor unfold_backward(const Tensor& grad, int64_t height, int64_t width, int64_t kernel_size) {
  const Footprint f = footprint_of(height, width, kernel_size);
  check_unfolded(grad, f, "grad");
  const Tensor source = torch::stable::contiguous(grad);
  Tensor out = torch::stable::new_empty(grad, {grad.size(0), grad.size(1), height, width});
  SAN_DISPATCH(grad.scalar_type(), "unfold_backward", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t* in = source.const_data_ptr<scalar_t>();
    scalar_t* result = out.mutable_data_ptr<scalar_t>();
    for_each_plane<acc_t>(grad.size(0) * grad.size(1), f, [&](int64_t plane, std::vector<acc_t>& padded) {
      std::fill(padded.begin(), padded.end(), acc_t(0));
      gather<scalar_t, acc_t>(in + plane * f.positions() * f.pixels(), 1, f, padded.data(), nullptr);
      fold(padded.data(), f, result + plane * f.pixels());
    });
  });
  return out;
}

Tensor subtraction(const Tensor& phi, const Tensor& psi, int64_t kernel_size) {
  check_map(phi, "phi");
  check_map(psi, "psi");
  check_same(phi, psi, "phi and psi");
  STD_TORCH_CHECK(phi.sizes().vec() == psi.sizes().vec(), "phi and psi must have the same shape");
  const Footprint f = footprint_of(phi.size(2), phi.size(3), kernel_size);
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  Tensor out = torch::stable::new_empty(phi, {phi.size(0), phi.size(1), f.positions(), f.pixels()});
  SAN_DISPATCH(phi.scalar_type(), "subtraction", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t *center = left.const_data_ptr<scalar_t>(), *around = right.const_data_ptr<scalar_t>();
    scalar_t* result = out.mutable_data_ptr<scalar_t>();
    for_each_plane<acc_t>(phi.size(0) * phi.size(1), f, [&](int64_t plane, std::vector<acc_t>& padded) {
      pad(around + plane * f.pixels(), f, padded.data());
      spread<scalar_t, acc_t>(padded.data(), center + plane * f.pixels(), -1, f,
                              result + plane * f.positions() * f.pixels());
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> subtraction_backward(const Tensor& grad, int64_t height, int64_t width,
                                                int64_t kernel_size) {
  const Footprint f = footprint_of(height, width, kernel_size);
  check_unfolded(grad, f, "grad");
  const Tensor source = torch::stable::contiguous(grad);
  Tensor grad_phi = torch::stable::new_empty(grad, {grad.size(0), grad.size(1), height, width});
  Tensor grad_psi = torch::stable::empty_like(grad_phi);
  SAN_DISPATCH(grad.scalar_type(), "subtraction_backward", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t* in = source.const_data_ptr<scalar_t>();
    scalar_t *phi = grad_phi.mutable_data_ptr<scalar_t>(), *psi = grad_psi.mutable_data_ptr<scalar_t>();
    for_each_plane<acc_t>(grad.size(0) * grad.size(1), f, [&](int64_t plane, std::vector<acc_t>& padded) {
      std::vector<acc_t> center(f.pixels(), acc_t(0));
      std::fill(padded.begin(), padded.end(), acc_t(0));
      gather<scalar_t, acc_t>(in + plane * f.positions() * f.pixels(), -1, f, padded.data(), center.data());
      fold(padded.data(), f, psi + plane * f.pixels());
      for (int64_t i = 0; i < f.pixels(); ++i) phi[plane * f.pixels() + i] = static_cast<scalar_t>(center[i]);
    });
  });
  return {grad_phi, grad_psi};
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
  m.impl("dot", TORCH_BOX(&san::cpu::dot));
  m.impl("dot_backward", TORCH_BOX(&san::cpu::dot_backward));
  m.impl("unfold", TORCH_BOX(&san::cpu::unfold));
  m.impl("unfold_backward", TORCH_BOX(&san::cpu::unfold_backward));
  m.impl("subtraction", TORCH_BOX(&san::cpu::subtraction));
  m.impl("subtraction_backward", TORCH_BOX(&san::cpu::subtraction_backward));
}
