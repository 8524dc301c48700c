// The layers behind a1, u = weight1 a1 + shift2 and z = weight2 relu(u), as forward and backward of pair_weights use
// them.
#pragma once
#include "pairs.cuh"

namespace san::cuda {
namespace {

template <class F>
struct Layers {
  using T = typename F::Value;

  int weights = 0;   // weight channels
  int chunks = 0;    // of KE tiles of hidden channels; 0 without a hidden layer
  int depth2 = 0;    // tiles of depth of the product with `weight2`
  const F* weight1;  // packed, see PairWork::pack
  const F* weight2;  // packed; what for, the kernel decides
  const T* shift2;   // [chunks * 8 KE]

  // u of 16 pairs in one chunk.
  template <int KE, int KT, class Activation>
  __device__ __forceinline__ void hidden(const Team& mine, int chunk, int tiles, const Activation& activation,
                                         T (&u)[KE][4]) const {
    hidden_of<KE, KT>(activation, weight1 + int64_t(chunk) * tiles * KE * kWarp + mine.lane,
                      shift2 + chunk * 8 * KE + mine.pair, tiles, u);
  }
};

// sum += left right, for the right factor's N tiles.
template <int N, class F, class T>
__device__ __forceinline__ void multiply_all(T (&sum)[N][4], const F& upper, const F& lower, const F* right) {
  SAN_UNROLL
  for (int n = 0; n < N; ++n) multiply(sum[n], upper, lower, right[n * kWarp]);
}

struct LayerTensors {
  Tensor weight1, shift2, weight2;
  int hidden, weights;

  LayerTensors(const Tensor& weight1, const Tensor& shift2, const Tensor& weight2)
      : weight1(torch::stable::contiguous(weight1)),
        shift2(torch::stable::contiguous(shift2)),
        weight2(torch::stable::contiguous(weight2)),
        hidden(static_cast<int>(weight1.size(0))),
        weights(static_cast<int>(weight2.size(0))) {}
};

// The first layer in chunks of KE tiles.
template <class F, int KE, class weight_t, class T>
Layers<F> first_layer(PairWork<T>& work, const LayerTensors& tensors) {
  Layers<F> layers{};
  layers.weights = tensors.weights;
  if constexpr (KE > 0) {
    const int E = tensors.hidden, d = work.pairs.d;
    layers.chunks = (E + 8 * KE - 1) / (8 * KE);
    const Matrix<weight_t> weight1{tensors.weight1.const_data_ptr<weight_t>(), E, d, d, 1};
    layers.weight1 = work.template pack<F>(weight1, KE, work.pairs.tiles);
    layers.shift2 = work.pad(tensors.shift2, {1, 1, 1}, layers.chunks * KE);
  }
  return layers;
}

// Calls run with an operand type and a zero of the weights' type. Half types are rounded to TF32, which holds them.
template <class Run>
void with_pair_types(const Tensor& center, const Tensor& weight, bool tf32, const Run& run) {
  using torch::headeronly::BFloat16;
  using torch::headeronly::Half;
  switch (weight.scalar_type()) {
    case ScalarType::Double:
      return run(Operand<double, true>(), double());
    case ScalarType::Half:
      return run(Operand<float, false>(), Half());
    case ScalarType::BFloat16:
      return run(Operand<float, false>(), BFloat16());
    default:
      return tf32 ? run(Operand<float, false>(), float()) : run(Operand<float, true>(), float());
  }
}

}  // namespace
}  // namespace san::cuda
