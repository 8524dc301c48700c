// The layers that follow a1, u = weight1 a1 + shift2 and z = weight2 relu(u), for forward and backward of pair_weights.
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
  const F* weight1;  // packed, see Workspace::pack
  const F* weight2;  // packed; the layout depends on the kernel
  const T* shift2;   // [chunks * 8 KE]

  // u of 16 pairs in one chunk.
  template <int KE, int KT, class Activation>
  __device__ __forceinline__ void hidden(const Team& mine, int chunk, int tiles, const Activation& activation,
                                         T (&u)[KE][4]) const {
    hidden_of<KE, KT>(activation, weight1 + int64_t(chunk) * tiles * KE * kWarp + mine.lane,
                      shift2 + chunk * 8 * KE + mine.pair, tiles, u);
  }
};

// One call of pair_weights. The last layer has `G` outputs and `depth` inputs: hidden channels or, without a hidden
// layer, relation channels.
template <class F>
class LayerWork : public PairWork<F> {
 public:
  using T = typename F::Value;
  const int E, G, depth;

  LayerWork(const PairWork<F>& pairs, const Tensor& weight1, const Tensor& shift2, const Tensor& weight2)
      : PairWork<F>(pairs),
        E(static_cast<int>(weight1.size(0))),
        G(static_cast<int>(weight2.size(0))),
        depth(static_cast<int>(weight2.size(1))),
        weight1_(this->keep(weight1)),
        weight2_(this->keep(weight2)),
        shift2_(shift2) {}

  // The first layer in chunks of KE tiles.
  template <int KE>
  Layers<F> first_layer() {
    Layers<F> layers{};
    layers.weights = G;
    if constexpr (KE > 0) {
      layers.chunks = (E + 8 * KE - 1) / (8 * KE);
      layers.weight1 = this->pack({weight1_, E, this->pairs.d, this->pairs.d, 1}, KE, this->pairs.tiles);
      layers.shift2 = this->pad(shift2_, {1, 1, 1}, layers.chunks * KE);
    }
    return layers;
  }
  // Weights as right factors whose rows are the inputs of a layer, for backward.
  const F* transposed1(int wide, int tiles) {
    return this->pack({weight1_, this->pairs.d, E, 1, this->pairs.d}, wide, tiles);
  }
  const F* transposed2(int wide, int tiles) { return this->pack({weight2_, depth, G, 1, depth}, wide, tiles); }
  // weight2 times `factor`, as right factors whose rows are weight channels.
  const F* second_layer(double factor, int wide, int tiles) {
    return this->pack({weight2_, G, depth, depth, 1, 1, factor}, wide, tiles);
  }

 private:
  const T *weight1_, *weight2_;
  const Tensor shift2_;
};

// Calls run with a zero whose type is that of the attention weights: the type of the maps or, with float32 maps,
// possibly a half type.
template <class T, class Run>
void with_weight_type(ScalarType type, const Run& run) {
  if constexpr (std::is_same_v<T, float>) {
    if (type == ScalarType::Half) return run(torch::headeronly::Half());
    if (type == ScalarType::BFloat16) return run(torch::headeronly::BFloat16());
  }
  run(T());
}

}  // namespace
}  // namespace san::cuda
