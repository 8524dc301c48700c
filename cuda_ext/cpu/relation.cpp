// unfold and subtraction, forward and backward. The definitions are in san/ops/reference.py. Threads divide the images
// and channels among them. A plane, one channel of one image, is padded by reflection once, so inner loops run over
// whole rows without special cases at the border.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "../check.h"
#include "vectorize.h"

namespace san::cpu {
namespace {

template <class scalar_t, class acc_t>
void pad(const scalar_t* map, const Footprint& f, acc_t* padded) {
  const int64_t reach = f.reach();
  for (int64_t h = -reach; h < f.height + reach; ++h) {
    const scalar_t* row = map + reflect(h, f.height) * f.width;
    acc_t* out = padded + (h + reach) * f.padded_width() + reach;
    for (int64_t w = 0; w < f.width; ++w) out[w] = static_cast<acc_t>(row[w]);
    for (int64_t w = 1; w <= reach; ++w) out[-w] = out[w], out[f.width - 1 + w] = out[f.width - 1 - w];
  }
}

// The adjoint of pad: adds each value of the padded plane to the pixel that it was copied from.
template <class scalar_t, class acc_t>
void fold(acc_t* padded, const Footprint& f, scalar_t* map) {
  const int64_t reach = f.reach();
  const auto row = [&](int64_t h) { return padded + (h + reach) * f.padded_width() + reach; };
  for (int64_t h = -reach; h < f.height + reach; ++h) {
    acc_t *from = row(h), *to = row(reflect(h, f.height));
    for (int64_t w = 1; w <= reach; ++w) from[w] += from[-w], from[f.width - 1 - w] += from[f.width - 1 + w];
    for (int64_t w = 0; from != to && w < f.width; ++w) to[w] += from[w];
  }
  for (int64_t h = 0; h < f.height; ++h)
    for (int64_t w = 0; w < f.width; ++w) map[h * f.width + w] = static_cast<scalar_t>(row(h)[w]);
}

// out[o, i] = padded[i + o] or, if there is a center, center[i] - padded[i + o].
template <class scalar_t, class acc_t>
SAN_VECTOR void spread(const acc_t* padded, const scalar_t* center, const Footprint& f, scalar_t* out) {
  for (int64_t o = 0; o < f.positions(); ++o) {
    const acc_t* shifted = padded + o / f.kernel_size * f.padded_width() + o % f.kernel_size;
    const scalar_t* row = center;
    for (int64_t h = 0; h < f.height; ++h, shifted += f.padded_width(), out += f.width) {
      if (center == nullptr) {
        for (int64_t w = 0; w < f.width; ++w) out[w] = static_cast<scalar_t>(shifted[w]);
      } else {
        for (int64_t w = 0; w < f.width; ++w) out[w] = static_cast<scalar_t>(static_cast<acc_t>(row[w]) - shifted[w]);
        row += f.width;
      }
    }
  }
}

// padded[i + o] += sign * grad[o, i], and center[i] += grad[o, i] unless center is null.
template <class scalar_t, class acc_t>
SAN_VECTOR void gather(const scalar_t* grad, acc_t sign, const Footprint& f, acc_t* padded, acc_t* center) {
  for (int64_t o = 0; o < f.positions(); ++o) {
    acc_t *shifted = padded + o / f.kernel_size * f.padded_width() + o % f.kernel_size, *row = center;
    for (int64_t h = 0; h < f.height; ++h, shifted += f.padded_width(), grad += f.width) {
      for (int64_t w = 0; w < f.width; ++w) shifted[w] += sign * static_cast<acc_t>(grad[w]);
      if (center == nullptr) continue;
      for (int64_t w = 0; w < f.width; ++w) row[w] += static_cast<acc_t>(grad[w]);
      row += f.width;
    }
  }
}

// unfold of psi or, with is_subtraction, the difference of phi and psi.
Tensor footprints(const Tensor& phi, const Tensor& psi, int64_t kernel_size, bool is_subtraction) {
  check_map(phi, is_subtraction ? "phi" : "x");
  const Footprint f = footprint_of(psi.size(2), psi.size(3), kernel_size);
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  Tensor out = torch::stable::new_empty(psi, {psi.size(0), psi.size(1), f.positions(), f.pixels()});
  SAN_DISPATCH(psi.scalar_type(), "footprints", [&] {
    const scalar_t *center = left.const_data_ptr<scalar_t>(), *around = right.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, psi.size(0) * psi.size(1), 1, [&](int64_t begin, int64_t end) {
      std::vector<accumulate_t<scalar_t>> padded(f.padded_height() * f.padded_width());
      for (int64_t plane = begin; plane < end; ++plane) {
        pad(around + plane * f.pixels(), f, padded.data());
        spread(padded.data(), is_subtraction ? center + plane * f.pixels() : nullptr, f,
               to + plane * f.positions() * f.pixels());
      }
    });
  });
  return out;
}

// Gradients of phi and psi; without is_subtraction, only psi's is written.
std::tuple<Tensor, Tensor> gather_footprints(const Tensor& grad, int64_t height, int64_t width, int64_t kernel_size,
                                             bool is_subtraction) {
  const Footprint f = footprint_of(height, width, kernel_size);
  check_unfolded(grad, f, "grad");
  const Tensor source = torch::stable::contiguous(grad);
  Tensor grad_psi = torch::stable::new_empty(grad, {grad.size(0), grad.size(1), height, width});
  Tensor grad_phi = is_subtraction ? torch::stable::empty_like(grad_psi) : grad_psi;
  SAN_DISPATCH(grad.scalar_type(), "gather_footprints", [&] {
    using acc_t = accumulate_t<scalar_t>;
    const scalar_t* from = source.const_data_ptr<scalar_t>();
    scalar_t *phi = grad_phi.mutable_data_ptr<scalar_t>(), *psi = grad_psi.mutable_data_ptr<scalar_t>();
    torch::stable::parallel_for(0, grad.size(0) * grad.size(1), 1, [&](int64_t begin, int64_t end) {
      for (int64_t plane = begin; plane < end; ++plane) {
        std::vector<acc_t> padded(f.padded_height() * f.padded_width()), center(is_subtraction ? f.pixels() : 0);
        gather(from + plane * f.positions() * f.pixels(), acc_t(is_subtraction ? -1 : 1), f, padded.data(),
               is_subtraction ? center.data() : nullptr);
        fold(padded.data(), f, psi + plane * f.pixels());
        std::transform(center.begin(), center.end(), phi + plane * f.pixels(),
                       [](acc_t sum) { return static_cast<scalar_t>(sum); });
      }
    });
  });
  return {grad_phi, grad_psi};
}

Tensor unfold(const Tensor& x, int64_t kernel_size) { return footprints(x, x, kernel_size, false); }

Tensor unfold_backward(const Tensor& grad, int64_t height, int64_t width, int64_t kernel_size) {
  return std::get<1>(gather_footprints(grad, height, width, kernel_size, false));
}

Tensor subtraction(const Tensor& phi, const Tensor& psi, int64_t kernel_size) {
  check_alike(phi, psi, "phi and psi");
  return footprints(phi, psi, kernel_size, true);
}

std::tuple<Tensor, Tensor> subtraction_backward(const Tensor& grad, int64_t height, int64_t width,
                                                int64_t kernel_size) {
  return gather_footprints(grad, height, width, kernel_size, true);
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("unfold", TORCH_BOX(&san::cpu::unfold));
  m.impl("unfold_backward", TORCH_BOX(&san::cpu::unfold_backward));
  m.impl("subtraction", TORCH_BOX(&san::cpu::subtraction));
  m.impl("subtraction_backward", TORCH_BOX(&san::cpu::subtraction_backward));
}
