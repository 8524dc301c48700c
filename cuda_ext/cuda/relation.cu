// unfold and subtraction, forward and backward. Definition: san/ops/reference.py.
//
// Forward: one thread per output element, consecutive threads on consecutive pixels. Backward: one thread per input
// pixel gathers from every output that read it, its mirror images included, so there are no atomics and sums have a
// fixed order.
#include <tuple>

#include "launch.h"

namespace san::cuda {

template <class scalar_t>
__global__ void unfold_kernel(const scalar_t* x, Footprint f, int64_t elements, scalar_t* out) {
  SAN_FOR_EACH(index, elements) {
    const int64_t i = index % f.pixels(), o = index / f.pixels() % f.positions();
    const int64_t plane = index / f.pixels() / f.positions();
    const int64_t h = reflect(i / f.width + o / f.kernel_size - f.reach(), f.height);
    const int64_t w = reflect(i % f.width + o % f.kernel_size - f.reach(), f.width);
    out[index] = x[plane * f.pixels() + h * f.width + w];
  }
}

template <class scalar_t>
__global__ void subtraction_kernel(const scalar_t* phi, const scalar_t* psi, Footprint f, int64_t elements,
                                   scalar_t* out) {
  using acc_t = accumulate_t<scalar_t>;
  SAN_FOR_EACH(index, elements) {
    const int64_t i = index % f.pixels(), o = index / f.pixels() % f.positions();
    const int64_t plane = index / f.pixels() / f.positions() * f.pixels();
    const int64_t h = reflect(i / f.width + o / f.kernel_size - f.reach(), f.height);
    const int64_t w = reflect(i % f.width + o % f.kernel_size - f.reach(), f.width);
    out[index] =
        static_cast<scalar_t>(static_cast<acc_t>(phi[plane + i]) - static_cast<acc_t>(psi[plane + h * f.width + w]));
  }
}

// The sum of grad [K, P] over all (offset, pixel) pairs that show pixel (h, w).
template <class scalar_t>
SAN_HOST_DEVICE accumulate_t<scalar_t> gather(const scalar_t* grad, const Footprint& f, int64_t h, int64_t w) {
  accumulate_t<scalar_t> sum = 0;
  for_each_image(h, f.height, f.reach(), [&](int64_t padded_h) {
    for_each_image(w, f.width, f.reach(), [&](int64_t padded_w) {
      for (int64_t o = 0; o < f.positions(); ++o) {
        const int64_t from_h = padded_h - (o / f.kernel_size - f.reach());
        const int64_t from_w = padded_w - (o % f.kernel_size - f.reach());
        if (from_h < 0 || from_h >= f.height || from_w < 0 || from_w >= f.width) continue;
        sum += static_cast<accumulate_t<scalar_t>>(grad[o * f.pixels() + from_h * f.width + from_w]);
      }
    });
  });
  return sum;
}

template <class scalar_t>
__global__ void unfold_backward_kernel(const scalar_t* grad, Footprint f, int64_t elements, scalar_t* out) {
  SAN_FOR_EACH(index, elements) {
    const int64_t i = index % f.pixels(), plane = index / f.pixels();
    const scalar_t* grads = grad + plane * f.positions() * f.pixels();
    out[index] = static_cast<scalar_t>(gather(grads, f, i / f.width, i % f.width));
  }
}

template <class scalar_t>
__global__ void subtraction_backward_kernel(const scalar_t* grad, Footprint f, int64_t elements, scalar_t* grad_phi,
                                            scalar_t* grad_psi) {
  using acc_t = accumulate_t<scalar_t>;
  SAN_FOR_EACH(index, elements) {
    const int64_t i = index % f.pixels(), plane = index / f.pixels();
    const scalar_t* grads = grad + plane * f.positions() * f.pixels();
    acc_t center = 0;
    for (int64_t o = 0; o < f.positions(); ++o) center += static_cast<acc_t>(grads[o * f.pixels() + i]);
    grad_phi[index] = static_cast<scalar_t>(center);
    grad_psi[index] = static_cast<scalar_t>(-gather(grads, f, i / f.width, i % f.width));
  }
}

Tensor unfold(const Tensor& x, int64_t kernel_size) {
  check_map(x, "x");
  const Footprint f = footprint_of(x.size(2), x.size(3), kernel_size);
  const OperatorGuard guard("unfold", x);
  Tensor out = torch::stable::new_empty(x, {x.size(0), x.size(1), f.positions(), f.pixels()});
  if (out.numel() == 0) return out;
  const Tensor source = torch::stable::contiguous(x);
  SAN_DISPATCH(x.scalar_type(), "unfold", [&] {
    SAN_LAUNCH(unfold_kernel<scalar_t>, blocks_for(out.numel()), kThreads, current_stream(x),
               source.const_data_ptr<scalar_t>(), f, out.numel(), out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

Tensor unfold_backward(const Tensor& grad, int64_t height, int64_t width, int64_t kernel_size) {
  const Footprint f = footprint_of(height, width, kernel_size);
  check_unfolded(grad, f, "grad");
  const OperatorGuard guard("unfold_backward", grad);
  Tensor out = torch::stable::new_empty(grad, {grad.size(0), grad.size(1), height, width});
  if (out.numel() == 0) return out;
  const Tensor source = torch::stable::contiguous(grad);
  SAN_DISPATCH(grad.scalar_type(), "unfold_backward", [&] {
    SAN_LAUNCH(unfold_backward_kernel<scalar_t>, blocks_for(out.numel()), kThreads, current_stream(grad),
               source.const_data_ptr<scalar_t>(), f, out.numel(), out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

Tensor subtraction(const Tensor& phi, const Tensor& psi, int64_t kernel_size) {
  check_map(phi, "phi");
  check_same(phi, psi, "phi and psi");
  STD_TORCH_CHECK(phi.sizes().vec() == psi.sizes().vec(), "phi and psi must have the same shape");
  const Footprint f = footprint_of(phi.size(2), phi.size(3), kernel_size);
  const OperatorGuard guard("subtraction", phi);
  Tensor out = torch::stable::new_empty(phi, {phi.size(0), phi.size(1), f.positions(), f.pixels()});
  if (out.numel() == 0) return out;
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  SAN_DISPATCH(phi.scalar_type(), "subtraction", [&] {
    SAN_LAUNCH(subtraction_kernel<scalar_t>, blocks_for(out.numel()), kThreads, current_stream(phi),
               left.const_data_ptr<scalar_t>(), right.const_data_ptr<scalar_t>(), f, out.numel(),
               out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

std::tuple<Tensor, Tensor> subtraction_backward(const Tensor& grad, int64_t height, int64_t width,
                                                int64_t kernel_size) {
  const Footprint f = footprint_of(height, width, kernel_size);
  check_unfolded(grad, f, "grad");
  const OperatorGuard guard("subtraction_backward", grad);
  Tensor grad_phi = torch::stable::new_empty(grad, {grad.size(0), grad.size(1), height, width});
  Tensor grad_psi = torch::stable::empty_like(grad_phi);
  if (grad_phi.numel() == 0) return {grad_phi, grad_psi};
  const Tensor source = torch::stable::contiguous(grad);
  SAN_DISPATCH(grad.scalar_type(), "subtraction_backward", [&] {
    SAN_LAUNCH(subtraction_backward_kernel<scalar_t>, blocks_for(grad_phi.numel()), kThreads, current_stream(grad),
               source.const_data_ptr<scalar_t>(), f, grad_phi.numel(), grad_phi.mutable_data_ptr<scalar_t>(),
               grad_psi.mutable_data_ptr<scalar_t>());
  });
  return {grad_phi, grad_psi};
}

}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("unfold", TORCH_BOX(&san::cuda::unfold));
  m.impl("unfold_backward", TORCH_BOX(&san::cuda::unfold_backward));
  m.impl("subtraction", TORCH_BOX(&san::cuda::subtraction));
  m.impl("subtraction_backward", TORCH_BOX(&san::cuda::subtraction_backward));
}
