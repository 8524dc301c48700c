// unfold and subtraction, forward and backward. Definition: san/ops/reference.py.
//
// Forward: one thread per pixel and channel writes its footprint, consecutive threads on consecutive pixels. Backward:
// one thread per pixel and channel gathers from every output that read it, its mirror images included, so there are no
// atomics and sums have a fixed order. `channels` are those of all images.
#include <tuple>

#include "window.cuh"

namespace san::cuda {

// Predicted for SAN10's stage 2 at batch 32 (16 channels, 56x56, k = 7, float32) on an H100: reads 6 MB, writes 315 MB,
// no products, no shared memory; 0.11 ms, of memory bandwidth.
template <class scalar_t>
__global__ void __launch_bounds__(kThreads)
    unfold_kernel(const scalar_t* x, Window f, unsigned threads, scalar_t* out) {
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x, pixels = f.pixels();
  if (thread >= threads) return;
  const unsigned channel = thread / pixels, i = thread - channel * pixels, h = i / f.width;
  const scalar_t* values = x + int64_t(channel) * pixels;
  scalar_t* to = out + int64_t(channel) * f.positions() * pixels + i;
  for_each_neighbour(f, h, i - h * f.width, [&](int, int j) { *to = values[j], to += pixels; });
}

// Predicted as for unfold: reads 13 MB, writes 315 MB; 157 M subtractions; 0.11 ms.
template <class scalar_t>
__global__ void __launch_bounds__(kThreads)
    subtraction_kernel(const scalar_t* phi, const scalar_t* psi, Window f, unsigned threads, scalar_t* out) {
  using acc_t = accumulate_t<scalar_t>;
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x, pixels = f.pixels();
  if (thread >= threads) return;
  const unsigned channel = thread / pixels, i = thread - channel * pixels, h = i / f.width;
  const scalar_t* values = psi + int64_t(channel) * pixels;
  const acc_t center = static_cast<acc_t>(phi[thread]);
  scalar_t* to = out + int64_t(channel) * f.positions() * pixels + i;
  for_each_neighbour(f, h, i - h * f.width, [&](int, int j) {
    *to = static_cast<scalar_t>(center - static_cast<acc_t>(values[j])), to += pixels;
  });
}

// The gradients of unfold's x or, with kSubtraction, of phi and psi: with -grad for psi.
//
// Predicted as for unfold: reads 315 MB, with kSubtraction twice, of which half comes from the L2 cache; writes 6 or
// 13 MB; 79 M or 157 M sums; 0.11 or 0.2 ms.
template <bool kSubtraction, class scalar_t>
__global__ void __launch_bounds__(kThreads)
    gather_footprints_kernel(const scalar_t* grad, Window f, unsigned threads, scalar_t* grad_phi, scalar_t* grad_psi) {
  using acc_t = accumulate_t<scalar_t>;
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x, pixels = f.pixels();
  if (thread >= threads) return;
  const unsigned channel = thread / pixels, j = thread - channel * pixels, h = j / f.width;
  const scalar_t* grads = grad + int64_t(channel) * f.positions() * pixels;
  acc_t sum = 0;
  for_each_reader(f, h, j - h * f.width,
                  [&](int o, int i) { sum += static_cast<acc_t>(grads[unsigned(o) * pixels + i]); });
  grad_psi[thread] = static_cast<scalar_t>(kSubtraction ? -sum : sum);
  if constexpr (kSubtraction) {
    acc_t center = 0;
    for (int o = 0; o < f.positions(); ++o) {
      center += static_cast<acc_t>(grads[unsigned(o) * pixels + j]);
    }
    grad_phi[thread] = static_cast<scalar_t>(center);
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
    const scalar_t* from = source.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_each_part(x.size(0) * x.size(1), f.pixels(), [&](int64_t first, unsigned threads) {
      SAN_LAUNCH(unfold_kernel<scalar_t>, grid_for(threads), kThreads, current_stream(x), from + first * f.pixels(),
                 Window(f), threads, to + first * f.pixels() * f.positions());
    });
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
    const scalar_t* from = source.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_each_part(grad.size(0) * grad.size(1), f.pixels(), [&](int64_t first, unsigned threads) {
      SAN_LAUNCH((gather_footprints_kernel<false, scalar_t>), grid_for(threads), kThreads, current_stream(grad),
                 from + first * f.pixels() * f.positions(), Window(f), threads, static_cast<scalar_t*>(nullptr),
                 to + first * f.pixels());
    });
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
    const scalar_t *center = left.const_data_ptr<scalar_t>(), *around = right.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_each_part(phi.size(0) * phi.size(1), f.pixels(), [&](int64_t first, unsigned threads) {
      const int64_t offset = first * f.pixels();
      SAN_LAUNCH(subtraction_kernel<scalar_t>, grid_for(threads), kThreads, current_stream(phi), center + offset,
                 around + offset, Window(f), threads, to + offset * f.positions());
    });
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
    const scalar_t* from = source.const_data_ptr<scalar_t>();
    scalar_t *to_phi = grad_phi.mutable_data_ptr<scalar_t>(), *to_psi = grad_psi.mutable_data_ptr<scalar_t>();
    for_each_part(grad.size(0) * grad.size(1), f.pixels(), [&](int64_t first, unsigned threads) {
      const int64_t offset = first * f.pixels();
      SAN_LAUNCH((gather_footprints_kernel<true, scalar_t>), grid_for(threads), kThreads, current_stream(grad),
                 from + offset * f.positions(), Window(f), threads, to_phi + offset, to_psi + offset);
    });
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
