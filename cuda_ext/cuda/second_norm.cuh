// The BatchNorm between the two layers of a pairwise mapping, with the statistics of the batch. As h =
// weight1 a1 is linear, the mean and variance of h over all pairs follow from the mean and covariance of a1.
#pragma once
#include "pair_layers.cuh"

namespace san::cuda {
namespace {

__device__ __forceinline__ double sum_over_warp(double x) {
  for (int bits = kWarp / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(~0u, x, bits);
  return x;
}

struct SecondNorm {
  const float *weight1, *weight, *bias;  // [E, d], [E], [E]
  const float *input_mean, *covariance;  // of a1, [d], [d, d]
  int E, d;
  double pairs, eps;

  // Column c of row e of weight1 times the covariance.
  __device__ __forceinline__ double spread(int e, int c) const {
    double sum = 0;
    for (int k = 0; k < d; ++k) sum += double(covariance[int64_t(c) * d + k]) * weight1[int64_t(e) * d + k];
    return sum;
  }
};

// Mean and biased variance of each channel of h [E], and weight1 [E, d] and shift2 [E] with the norm folded in. A warp
// computes a channel.
//
// Predicted for SAN10's stage 2 on an H100: 5,000 products; 0.003 ms, for the launch.
__global__ void fold_norm_kernel(SecondNorm n, float* mean, float* var, float* weight1, float* shift2) {
  const int e = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (e >= n.E) return;
  const float* row = n.weight1 + int64_t(e) * n.d;
  double sum = 0, squares = 0;
  for (int c = lane; c < n.d; c += kWarp) sum += double(row[c]) * n.input_mean[c], squares += row[c] * n.spread(e, c);
  sum = sum_over_warp(sum), squares = sum_over_warp(squares);
  const double scale = n.weight[e] / std::sqrt((squares < 0 ? 0 : squares) + n.eps);
  for (int c = lane; c < n.d; c += kWarp) weight1[int64_t(e) * n.d + c] = static_cast<float>(scale * row[c]);
  if (lane > 0) return;
  mean[e] = static_cast<float>(sum), var[e] = static_cast<float>(squares);
  shift2[e] = static_cast<float>(n.bias[e] - sum * scale);
}

// The gradients of weight1 and of the norm's weight and bias, from those of the folded weight1 and shift2.
struct UnfoldedGradients {
  const float *of_weight1, *of_shift2;  // folded
  float *weight1, *weight, *bias;
  float *scale, *terms;  // [E], and those of ActivationGradient for `channels` channels
  int channels;
};

// Also what the gradient of a1 needs, weight1^T (s gu + grad_mean / pairs + 2 grad_var (h - mean) / pairs), where s
// is the norm's scale. As grad_var has the factor s, the last two terms are slope s h + constant without a division by
// s, which may be 0.
//
// Predicted for SAN10's stage 2 on an H100: 5,000 products; 0.003 ms, for the launch.
__global__ void unfold_norm_kernel(SecondNorm n, const float* mean, const float* var, UnfoldedGradients g) {
  const int e = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (e >= g.channels) return;
  float* terms = g.terms + e / 2 * 4 + e % 2;
  if (e >= n.E) {
    if (lane == 0) terms[0] = terms[2] = 0;
    return;
  }
  const float *row = n.weight1 + int64_t(e) * n.d, *of_row = g.of_weight1 + int64_t(e) * n.d;
  const double inverse = 1 / std::sqrt((var[e] < 0 ? 0 : var[e]) + n.eps), scale = n.weight[e] * inverse;
  double of_scale = 0;
  for (int c = lane; c < n.d; c += kWarp) of_scale += double(of_row[c]) * row[c];
  of_scale = sum_over_warp(of_scale) - double(mean[e]) * g.of_shift2[e];
  const double of_mean = -scale * g.of_shift2[e];
  // Twice the gradient of var, divided by scale.
  const double of_square = var[e] < 0 ? 0 : -of_scale * inverse * inverse;
  for (int c = lane; c < n.d; c += kWarp) {
    const double sum = scale * of_row[c] + of_mean * n.input_mean[c] + scale * of_square * n.spread(e, c);
    g.weight1[int64_t(e) * n.d + c] = static_cast<float>(sum);
  }
  if (lane > 0) return;
  g.scale[e] = static_cast<float>(scale);
  g.weight[e] = static_cast<float>(of_scale * inverse), g.bias[e] = g.of_shift2[e];
  terms[0] = static_cast<float>(of_square / n.pairs);
  terms[2] = static_cast<float>((of_mean - of_square * scale * mean[e]) / n.pairs);
}

}  // namespace
}  // namespace san::cuda
