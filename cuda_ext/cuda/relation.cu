// unfold and subtraction, forward and backward. Definition: san/ops/reference.py.
//
// Forward, one thread per pixel and channel writes the values of the footprint. Consecutive threads have consecutive
// pixels. Backward, one thread per pixel and channel gathers from every output that depends on it, also through its
// mirror images. So there are no atomics, and sums have a fixed order. `channels` counts the channels of all images
// together.
#include <tuple>

#include "window.cuh"

namespace san::cuda {

namespace {

// Kernels count the values of one channel in 32 bits.
void check_count(const Footprint& f) {
  const int64_t values = f.positions() * f.pixels();
  STD_TORCH_CHECK(values < int64_t(1) << 32, "a ", f.height, "x", f.width, " map with a ", f.kernel_size, "x",
                  f.kernel_size, " footprint gives ", values, " values in each channel; fewer than 2^32 are supported");
}

// A thread's pixel in one channel of one image.
struct Place {
  unsigned pixels, channel, i;
  int h, w;

  __device__ __forceinline__ Place(const Window& f, unsigned thread)
      : pixels(f.pixels()), channel(thread / pixels), i(thread - channel * pixels) {
    h = static_cast<int>(i) / f.width, w = static_cast<int>(i) - h * f.width;
  }
};

// out = psi_j or, with kSubtraction, phi_i - psi_j.
//
// Predicted for SAN10's stage 2 at batch 32 (16 channels, 56x56, k = 7, float32) on an H100: reads 6 or 13 MB, writes
// 315 MB; 157 M subtractions, no shared memory; 0.11 ms, of memory bandwidth.
template <bool kSubtraction, class scalar_t>
__global__ void __launch_bounds__(kThreads)
    footprints_kernel(const scalar_t* phi, const scalar_t* psi, Window f, unsigned threads, scalar_t* out) {
  using acc_t = accumulate_t<scalar_t>;
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= threads) return;
  const Place own(f, thread);
  const scalar_t* values = psi + int64_t(own.channel) * own.pixels;
  const acc_t center = kSubtraction ? static_cast<acc_t>(phi[thread]) : acc_t(0);
  scalar_t* to = out + int64_t(own.channel) * f.positions() * own.pixels + own.i;
  for_each_neighbour(f, own.h, own.w, [&](int, int j) {
    *to = kSubtraction ? static_cast<scalar_t>(center - static_cast<acc_t>(values[j])) : values[j], to += own.pixels;
  });
}

// The gradient of unfold's x or, with kSubtraction, those of phi and psi. The gradient of psi is computed from -grad.
//
// Predicted as above: reads 315 MB, with kSubtraction twice, of which half comes from the L2 cache; writes 6 or 13 MB;
// 79 M or 157 M sums; 0.11 or 0.2 ms.
template <bool kSubtraction, class scalar_t>
__global__ void __launch_bounds__(kThreads)
    gather_footprints_kernel(const scalar_t* grad, Window f, unsigned threads, scalar_t* grad_phi, scalar_t* grad_psi) {
  using acc_t = accumulate_t<scalar_t>;
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= threads) return;
  const Place own(f, thread);
  const scalar_t* grads = grad + int64_t(own.channel) * f.positions() * own.pixels;
  acc_t sum = 0;
  for_each_reader(f, own.h, own.w,
                  [&](int o, int i) { sum += static_cast<acc_t>(grads[unsigned(o) * own.pixels + i]); });
  grad_psi[thread] = static_cast<scalar_t>(kSubtraction ? -sum : sum);
  if constexpr (kSubtraction) {
    acc_t center = 0;
    for (int o = 0; o < f.positions(); ++o) {
      center += static_cast<acc_t>(grads[unsigned(o) * own.pixels + own.i]);
    }
    grad_phi[thread] = static_cast<scalar_t>(center);
  }
}

// unfold of psi or, with kSubtraction, the difference of phi and psi.
template <bool kSubtraction>
Tensor footprints(const char* name, const Tensor& phi, const Tensor& psi, const Footprint& f) {
  check_count(f);
  const OperatorGuard guard(name, psi);
  Tensor out = torch::stable::new_empty(psi, {psi.size(0), psi.size(1), f.positions(), f.pixels()});
  if (out.numel() == 0) return out;
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  SAN_DISPATCH(psi.scalar_type(), "footprints", [&] {
    const scalar_t *center = left.const_data_ptr<scalar_t>(), *around = right.const_data_ptr<scalar_t>();
    SAN_LAUNCH((footprints_kernel<kSubtraction, scalar_t>), grid_for(psi.numel()), kThreads, current_stream(psi),
               center, around, Window(f), static_cast<unsigned>(psi.numel()), out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

// Gradients of phi and psi; without kSubtraction only psi's is written.
template <bool kSubtraction>
std::tuple<Tensor, Tensor> gather_footprints(const char* name, const Tensor& grad, const Footprint& f) {
  check_unfolded(grad, f, "grad"), check_count(f);
  const OperatorGuard guard(name, grad);
  Tensor grad_psi = torch::stable::new_empty(grad, {grad.size(0), grad.size(1), f.height, f.width});
  Tensor grad_phi = kSubtraction ? torch::stable::empty_like(grad_psi) : grad_psi;
  if (grad_psi.numel() == 0) return {grad_phi, grad_psi};
  const Tensor source = torch::stable::contiguous(grad);
  SAN_DISPATCH(grad.scalar_type(), "gather_footprints", [&] {
    SAN_LAUNCH((gather_footprints_kernel<kSubtraction, scalar_t>), grid_for(grad_psi.numel()), kThreads,
               current_stream(grad), source.const_data_ptr<scalar_t>(), Window(f),
               static_cast<unsigned>(grad_psi.numel()), grad_phi.mutable_data_ptr<scalar_t>(),
               grad_psi.mutable_data_ptr<scalar_t>());
  });
  return {grad_phi, grad_psi};
}

}  // namespace

Tensor unfold(const Tensor& x, int64_t kernel_size) {
  check_map(x, "x");
  return footprints<false>("unfold", x, x, footprint_of(x.size(2), x.size(3), kernel_size));
}

Tensor unfold_backward(const Tensor& grad, int64_t height, int64_t width, int64_t kernel_size) {
  return std::get<1>(gather_footprints<false>("unfold_backward", grad, footprint_of(height, width, kernel_size)));
}

Tensor subtraction(const Tensor& phi, const Tensor& psi, int64_t kernel_size) {
  check_map(phi, "phi"), check_alike(phi, psi, "phi and psi");
  return footprints<true>("subtraction", phi, psi, footprint_of(phi.size(2), phi.size(3), kernel_size));
}

std::tuple<Tensor, Tensor> subtraction_backward(const Tensor& grad, int64_t height, int64_t width,
                                                int64_t kernel_size) {
  return gather_footprints<true>("subtraction_backward", grad, footprint_of(height, width, kernel_size));
}

}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("unfold", TORCH_BOX(&san::cuda::unfold));
  m.impl("unfold_backward", TORCH_BOX(&san::cuda::unfold_backward));
  m.impl("subtraction", TORCH_BOX(&san::cuda::subtraction));
  m.impl("subtraction_backward", TORCH_BOX(&san::cuda::subtraction_backward));
}
