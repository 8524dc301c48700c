// aggregation, forward and backward. Definition: san/ops/reference.py.
//
// Forward: one thread per output pixel and channel. Backward: grad_weight has one thread per weight, which sums over
// the channels that share it; grad_beta one per input pixel, which gathers from the outputs that read it. No atomics.
#include <tuple>

#include "launch.h"

namespace san::cuda {

template <class scalar_t>
__global__ void aggregation_kernel(const scalar_t* beta, const scalar_t* weight, Footprint f, int64_t C, int64_t G,
                                   int64_t elements, scalar_t* out) {
  using acc_t = accumulate_t<scalar_t>;
  SAN_FOR_EACH(index, elements) {
    const int64_t i = index % f.pixels(), plane = index / f.pixels();
    const scalar_t* values = beta + plane * f.pixels();
    const scalar_t* weights = weight + (plane / C * G + plane % C % G) * f.positions() * f.pixels() + i;
    acc_t sum = 0;
    for (int64_t o = 0; o < f.positions(); ++o) {
      const int64_t h = reflect(i / f.width + o / f.kernel_size - f.reach(), f.height);
      const int64_t w = reflect(i % f.width + o % f.kernel_size - f.reach(), f.width);
      sum += static_cast<acc_t>(weights[o * f.pixels()]) * static_cast<acc_t>(values[h * f.width + w]);
    }
    out[index] = static_cast<scalar_t>(sum);
  }
}

template <class scalar_t>
__global__ void grad_weight_kernel(const scalar_t* grad, const scalar_t* beta, Footprint f, int64_t C, int64_t G,
                                   int64_t elements, scalar_t* grad_weight) {
  using acc_t = accumulate_t<scalar_t>;
  SAN_FOR_EACH(index, elements) {
    const int64_t i = index % f.pixels(), o = index / f.pixels() % f.positions();
    const int64_t g = index / f.pixels() / f.positions() % G, n = index / f.pixels() / f.positions() / G;
    const int64_t h = reflect(i / f.width + o / f.kernel_size - f.reach(), f.height);
    const int64_t w = reflect(i % f.width + o % f.kernel_size - f.reach(), f.width);
    acc_t sum = 0;
    for (int64_t c = g; c < C; c += G) {
      const int64_t plane = (n * C + c) * f.pixels();
      sum += static_cast<acc_t>(grad[plane + i]) * static_cast<acc_t>(beta[plane + h * f.width + w]);
    }
    grad_weight[index] = static_cast<scalar_t>(sum);
  }
}

template <class scalar_t>
__global__ void grad_beta_kernel(const scalar_t* grad, const scalar_t* weight, Footprint f, int64_t C, int64_t G,
                                 int64_t elements, scalar_t* grad_beta) {
  using acc_t = accumulate_t<scalar_t>;
  SAN_FOR_EACH(index, elements) {
    const int64_t i = index % f.pixels(), plane = index / f.pixels();
    const scalar_t* grads = grad + plane * f.pixels();
    const scalar_t* weights = weight + (plane / C * G + plane % C % G) * f.positions() * f.pixels();
    acc_t sum = 0;
    for_each_image(i / f.width, f.height, f.reach(), [&](int64_t padded_h) {
      for_each_image(i % f.width, f.width, f.reach(), [&](int64_t padded_w) {
        for (int64_t o = 0; o < f.positions(); ++o) {
          const int64_t from_h = padded_h - (o / f.kernel_size - f.reach());
          const int64_t from_w = padded_w - (o % f.kernel_size - f.reach());
          if (from_h < 0 || from_h >= f.height || from_w < 0 || from_w >= f.width) continue;
          const int64_t from = from_h * f.width + from_w;
          sum += static_cast<acc_t>(weights[o * f.pixels() + from]) * static_cast<acc_t>(grads[from]);
        }
      });
    });
    grad_beta[index] = static_cast<scalar_t>(sum);
  }
}

Tensor aggregation(const Tensor& beta, const Tensor& weight, int64_t kernel_size) {
  check_map(beta, "beta");
  const Footprint f = footprint_of(beta.size(2), beta.size(3), kernel_size);
  check_aggregation(beta, weight, f);
  const DeviceGuard guard(beta.get_device());
  const Tensor values = torch::stable::contiguous(beta), weights = torch::stable::contiguous(weight);
  Tensor out = torch::stable::empty_like(values);
  if (out.numel() == 0) return out;
  SAN_DISPATCH(beta.scalar_type(), "aggregation", [&] {
    SAN_LAUNCH(aggregation_kernel<scalar_t>, blocks_for(out.numel()), kThreads, current_stream(beta),
               values.const_data_ptr<scalar_t>(), weights.const_data_ptr<scalar_t>(), f, beta.size(1), weight.size(1),
               out.numel(), out.mutable_data_ptr<scalar_t>());
  });
  check_launch("aggregation");
  return out;
}

std::tuple<Tensor, Tensor> aggregation_backward(const Tensor& grad, const Tensor& beta, const Tensor& weight,
                                                int64_t kernel_size) {
  check_map(beta, "beta");
  const Footprint f = footprint_of(beta.size(2), beta.size(3), kernel_size);
  check_aggregation(beta, weight, f);
  check_same(grad, beta, "grad and beta");
  STD_TORCH_CHECK(grad.sizes().vec() == beta.sizes().vec(), "grad and beta must have one shape");
  const DeviceGuard guard(beta.get_device());
  const Tensor grads = torch::stable::contiguous(grad), values = torch::stable::contiguous(beta);
  const Tensor weights = torch::stable::contiguous(weight);
  Tensor grad_beta = torch::stable::empty_like(values), grad_weight = torch::stable::empty_like(weights);
  if (grad_beta.numel() == 0) return {grad_beta, grad_weight};
  SAN_DISPATCH(beta.scalar_type(), "aggregation_backward", [&] {
    const scalar_t *gy = grads.const_data_ptr<scalar_t>(), *b = values.const_data_ptr<scalar_t>();
    const scalar_t* w = weights.const_data_ptr<scalar_t>();
    SAN_LAUNCH(grad_weight_kernel<scalar_t>, blocks_for(grad_weight.numel()), kThreads, current_stream(beta), gy, b, f,
               beta.size(1), weight.size(1), grad_weight.numel(), grad_weight.mutable_data_ptr<scalar_t>());
    SAN_LAUNCH(grad_beta_kernel<scalar_t>, blocks_for(grad_beta.numel()), kThreads, current_stream(beta), gy, w, f,
               beta.size(1), weight.size(1), grad_beta.numel(), grad_beta.mutable_data_ptr<scalar_t>());
  });
  check_launch("aggregation_backward");
  return {grad_beta, grad_weight};
}

}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("aggregation", TORCH_BOX(&san::cuda::aggregation));
  m.impl("aggregation_backward", TORCH_BOX(&san::cuda::aggregation_backward));
}
