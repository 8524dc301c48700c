// aggregation and dot, forward and backward. Definition: san/ops/reference.py.
//
// Each is the other's derivative, so three kernels serve both: `aggregate` has one thread per output pixel and channel,
// `correlate` one per weight, which sums over the channels that share it, `gather` one per input pixel, which sums
// over the outputs that read it. No atomics.
#include <tuple>

#include "launch.h"

namespace san::cuda {

// out[c, i] = sum_o weight[c % G, o, i] * beta[c, i + o]
template <class scalar_t>
__global__ void aggregate_kernel(const scalar_t* beta, const scalar_t* weight, Footprint f, int64_t C, int64_t G,
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

// out[g, o, i] = sum over the channels c of group g of center[c, i] * around[c, i + o]
template <class scalar_t>
__global__ void correlate_kernel(const scalar_t* center, const scalar_t* around, Footprint f, int64_t C, int64_t G,
                                 int64_t elements, scalar_t* out) {
  using acc_t = accumulate_t<scalar_t>;
  SAN_FOR_EACH(index, elements) {
    const int64_t i = index % f.pixels(), o = index / f.pixels() % f.positions();
    const int64_t g = index / f.pixels() / f.positions() % G, n = index / f.pixels() / f.positions() / G;
    const int64_t h = reflect(i / f.width + o / f.kernel_size - f.reach(), f.height);
    const int64_t w = reflect(i % f.width + o % f.kernel_size - f.reach(), f.width);
    acc_t sum = 0;
    for (int64_t c = g; c < C; c += G) {
      const int64_t plane = (n * C + c) * f.pixels();
      sum += static_cast<acc_t>(center[plane + i]) * static_cast<acc_t>(around[plane + h * f.width + w]);
    }
    out[index] = static_cast<scalar_t>(sum);
  }
}

// out[c, j] = sum over all (o, i) that show pixel j of weight[c % G, o, i] * center[c, i]
template <class scalar_t>
__global__ void gather_kernel(const scalar_t* center, const scalar_t* weight, Footprint f, int64_t C, int64_t G,
                              int64_t elements, scalar_t* out) {
  using acc_t = accumulate_t<scalar_t>;
  SAN_FOR_EACH(index, elements) {
    const int64_t i = index % f.pixels(), plane = index / f.pixels();
    const scalar_t* centers = center + plane * f.pixels();
    const scalar_t* weights = weight + (plane / C * G + plane % C % G) * f.positions() * f.pixels();
    acc_t sum = 0;
    for_each_image(i / f.width, f.height, f.reach(), [&](int64_t padded_h) {
      for_each_image(i % f.width, f.width, f.reach(), [&](int64_t padded_w) {
        for (int64_t o = 0; o < f.positions(); ++o) {
          const int64_t from_h = padded_h - (o / f.kernel_size - f.reach());
          const int64_t from_w = padded_w - (o % f.kernel_size - f.reach());
          if (from_h < 0 || from_h >= f.height || from_w < 0 || from_w >= f.width) continue;
          const int64_t from = from_h * f.width + from_w;
          sum += static_cast<acc_t>(weights[o * f.pixels() + from]) * static_cast<acc_t>(centers[from]);
        }
      });
    });
    out[index] = static_cast<scalar_t>(sum);
  }
}

Tensor aggregation(const Tensor& beta, const Tensor& weight, int64_t kernel_size) {
  check_map(beta, "beta");
  const Footprint f = footprint_of(beta.size(2), beta.size(3), kernel_size);
  check_aggregation(beta, weight, f);
  const OperatorGuard guard("aggregation", beta);
  const Tensor values = torch::stable::contiguous(beta), weights = torch::stable::contiguous(weight);
  Tensor out = torch::stable::empty_like(values);
  if (out.numel() == 0) return out;
  SAN_DISPATCH(beta.scalar_type(), "aggregation", [&] {
    SAN_LAUNCH(aggregate_kernel<scalar_t>, blocks_for(out.numel()), kThreads, current_stream(beta),
               values.const_data_ptr<scalar_t>(), weights.const_data_ptr<scalar_t>(), f, beta.size(1), weight.size(1),
               out.numel(), out.mutable_data_ptr<scalar_t>());
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
  const OperatorGuard guard("aggregation_backward", beta);
  const Tensor grads = torch::stable::contiguous(grad), values = torch::stable::contiguous(beta);
  const Tensor weights = torch::stable::contiguous(weight);
  Tensor grad_beta = torch::stable::empty_like(values), grad_weight = torch::stable::empty_like(weights);
  if (grad_beta.numel() == 0) return {grad_beta, grad_weight};
  SAN_DISPATCH(beta.scalar_type(), "aggregation_backward", [&] {
    const scalar_t *gy = grads.const_data_ptr<scalar_t>(), *b = values.const_data_ptr<scalar_t>();
    const scalar_t* w = weights.const_data_ptr<scalar_t>();
    SAN_LAUNCH(correlate_kernel<scalar_t>, blocks_for(grad_weight.numel()), kThreads, current_stream(beta), gy, b, f,
               beta.size(1), weight.size(1), grad_weight.numel(), grad_weight.mutable_data_ptr<scalar_t>());
    SAN_LAUNCH(gather_kernel<scalar_t>, blocks_for(grad_beta.numel()), kThreads, current_stream(beta), gy, w, f,
               beta.size(1), weight.size(1), grad_beta.numel(), grad_beta.mutable_data_ptr<scalar_t>());
  });
  return {grad_beta, grad_weight};
}

Tensor dot(const Tensor& phi, const Tensor& psi, int64_t kernel_size, int64_t groups) {
  check_dot(phi, psi, groups);
  const Footprint f = footprint_of(phi.size(2), phi.size(3), kernel_size);
  const OperatorGuard guard("dot", phi);
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  Tensor out = torch::stable::new_empty(phi, {phi.size(0), groups, f.positions(), f.pixels()});
  if (out.numel() == 0) return out;
  SAN_DISPATCH(phi.scalar_type(), "dot", [&] {
    SAN_LAUNCH(correlate_kernel<scalar_t>, blocks_for(out.numel()), kThreads, current_stream(phi),
               left.const_data_ptr<scalar_t>(), right.const_data_ptr<scalar_t>(), f, phi.size(1), groups, out.numel(),
               out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

std::tuple<Tensor, Tensor> dot_backward(const Tensor& grad, const Tensor& phi, const Tensor& psi, int64_t kernel_size) {
  check_map(phi, "phi");
  const Footprint f = footprint_of(phi.size(2), phi.size(3), kernel_size);
  check_unfolded(grad, f, "grad");
  check_same(grad, phi, "grad and phi");
  check_dot(phi, psi, grad.size(1));
  STD_TORCH_CHECK(grad.size(0) == phi.size(0), "grad and phi must have one batch size");
  const OperatorGuard guard("dot_backward", phi);
  const Tensor grads = torch::stable::contiguous(grad);
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  Tensor grad_phi = torch::stable::empty_like(left), grad_psi = torch::stable::empty_like(right);
  if (grad_phi.numel() == 0) return {grad_phi, grad_psi};
  SAN_DISPATCH(phi.scalar_type(), "dot_backward", [&] {
    const scalar_t* g = grads.const_data_ptr<scalar_t>();
    SAN_LAUNCH(aggregate_kernel<scalar_t>, blocks_for(grad_phi.numel()), kThreads, current_stream(phi),
               right.const_data_ptr<scalar_t>(), g, f, phi.size(1), grad.size(1), grad_phi.numel(),
               grad_phi.mutable_data_ptr<scalar_t>());
    SAN_LAUNCH(gather_kernel<scalar_t>, blocks_for(grad_psi.numel()), kThreads, current_stream(phi),
               left.const_data_ptr<scalar_t>(), g, f, phi.size(1), grad.size(1), grad_psi.numel(),
               grad_psi.mutable_data_ptr<scalar_t>());
  });
  return {grad_phi, grad_psi};
}

}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("aggregation", TORCH_BOX(&san::cuda::aggregation));
  m.impl("aggregation_backward", TORCH_BOX(&san::cuda::aggregation_backward));
  m.impl("dot", TORCH_BOX(&san::cuda::dot));
  m.impl("dot_backward", TORCH_BOX(&san::cuda::dot_backward));
}
