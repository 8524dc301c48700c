// pair_weights, forward: the softmax over the footprint of the layers behind a1. Definition: tests/ops/oracle.py.
#include <limits>

#include "pair_layers.cuh"

namespace san::cuda {
namespace {

// The running maximum and sum of a softmax to base 2.
template <class T>
struct Softmax {
  T most = std::numeric_limits<T>::lowest(), sum = 0;

  // With one power instead of two: that of the smaller of z and `most`.
  __device__ __forceinline__ void add(T z, T count = 1) {
    const T gap = z - most;
    const bool is_most = gap > 0;
    const T power = power_of_two(is_most ? -gap : gap);
    sum = is_most ? sum * power + count : sum + count * power;
    most = is_most ? z : most;
  }
};

// The maxima and sums of a team's warps become those of all its positions.
template <int N, class T>
__device__ __forceinline__ void merge_over_team(const Team& mine, T* shared, Softmax<T> (&softmax)[N]) {
  if (mine.split == 1) return;
  __syncthreads();
  Softmax<T>* states = reinterpret_cast<Softmax<T>*>(shared) + mine.team * mine.split * N * kWarp + mine.lane;
  SAN_UNROLL
  for (int n = 0; n < N; ++n) states[(mine.member * N + n) * kWarp] = softmax[n];
  __syncthreads();
  SAN_UNROLL
  for (int n = 0; n < N; ++n) {
    softmax[n] = {};
    for (int member = 0; member < mine.split; ++member) {
      const Softmax<T> other = states[(member * N + n) * kWarp];
      softmax[n].add(other.most, other.sum);
    }
  }
}

// z of 16 pairs in KG tiles of weight channels.
template <int KE, int KG, int KT, class F, class T, class Activation>
__device__ __forceinline__ void logits_of(const Layers<F>& layers, const Team& mine, int chunk, int tiles,
                                          const Activation& activation, T (&z)[KG][4]) {
  const F* weight2 = layers.weight2 + int64_t(chunk) * layers.depth2 * KG * kWarp + mine.lane;
  if constexpr (KE == 0) {
    for_each_tile<KT>(tiles, [&](int c) {
      T a1[4];
      activation(c, a1);
      multiply_all(z, F(a1[0], a1[1]), F(a1[2], a1[3]), weight2 + c * KG * kWarp);
    });
  } else {
    for_each_tile<(KT > 0)>(layers.chunks, [&](int hidden) {
      T u[KE][4];
      layers.template hidden<KE, KT>(mine, hidden, tiles, activation, u);
      SAN_UNROLL
      for (int e = 0; e < KE; ++e) {
        const F upper(rectified(u[e][0]), rectified(u[e][1])), lower(rectified(u[e][2]), rectified(u[e][3]));
        multiply_all(z, upper, lower, weight2 + (hidden * KE + e) * KG * kWarp);
      }
    });
  }
}

// Two passes over the pairs of 16 pixels: the first finds maxima and sums, the second computes the same z again and
// writes w [pixels, K, G]. Computing twice costs less than writing z, reading it and writing w. weight2 carries
// log2(e). A block computes chunk `blockIdx.x % chunks` of KG tiles of the weight channels.
//
// SAN's second stage at batch 32, 4.9 million pairs, TF32: 16 mma and about 280 instructions for 16 pairs, 24 KB of
// shared memory; reads 20 MB, writes 157 MB (79 MB in half types). Predicted for an H100, at half of its issue rate:
// 185 us.
template <class F, int KE, int KG, int KT, class out_t, class T = typename F::Value>
__global__ void __launch_bounds__(kPairThreads, 1)
    pair_weights_kernel(Pairs<T> p, Layers<F> layers, int split, int chunks, out_t* w) {
  T* shared = reinterpret_cast<T*>(shared_memory_base());
  const int block = blockIdx.x / chunks, chunk = blockIdx.x - block * chunks, G = layers.weights;
  const Team mine(split);
  Rows<T, false> rows(p, mine, int64_t(block) * (kWarps / split) + mine.team, shared);
  const auto visit_all = [&](const auto& visit) {
    Offset offset;
    offset.advance(mine.member, p.kernel_size);
    for (; offset.position < p.positions(); offset.advance(split, p.kernel_size)) {
      rows.move(mine, offset);
      T z[KG][4] = {};
      logits_of<KE, KG, KT>(layers, mine, chunk, p.tiles, [&](int c, T(&a1)[4]) { rows.activate(c, a1); }, z);
      visit(offset.position, z);
    }
  };
  Softmax<T> softmax[4 * KG];
  visit_all([&](int, const T(&z)[KG][4]) {
    SAN_UNROLL
    for (int n = 0; n < 4 * KG; ++n) softmax[n].add(z[n / 4][n % 4]);
  });
  merge_over_team(mine, shared + Rows<T, false>::bytes(p, split) / sizeof(T), softmax);
  SAN_UNROLL
  for (int n = 0; n < 4 * KG; ++n) softmax[n].most += std::log2(softmax[n].sum);
  const int channel = chunk * 8 * KG + mine.pair;
  visit_all([&](int position, const T(&z)[KG][4]) {
    SAN_UNROLL
    for (int n = 0; n < 2 * KG; ++n) {
      const Pixel<T, false>& pixel = rows.pixels[n % 2];
      const int first = channel + n / 2 * 8;
      if (!pixel.exists || first >= G) continue;
      Pack<2, out_t> two;
      SAN_UNROLL
      for (int k = 0; k < 2; ++k) {
        two.data[k] = static_cast<out_t>(power_of_two(z[n / 2][n % 2 * 2 + k] - softmax[2 * n + k].most));
      }
      out_t* out = w + (int64_t(pixel.index) * p.positions() + position) * G + first;
      if (G % 2 == 0) {
        two.store(out);
      } else {
        out[0] = two.data[0];
        if (first + 1 < G) out[1] = two.data[1];
      }
    }
  });
}

template <class F, int KE, int KG, int KT, class weight_t, class T>
void weights_of(PairWork<T>& work, const LayerTensors& tensors, Tensor& w) {
  const Pairs<T>& p = work.pairs;
  const int64_t groups = (p.pixels() + 15) / 16;
  const int E = tensors.hidden, G = tensors.weights, chunks = (G + 8 * KG - 1) / (8 * KG);
  Layers<F> layers = first_layer<F, KE, weight_t>(work, tensors);
  layers.depth2 = KE > 0 ? layers.chunks * KE : p.tiles;
  constexpr double kLog2e = 1.4426950408889634;
  const int depth = E > 0 ? E : p.d;
  const Matrix<weight_t> weight2{tensors.weight2.const_data_ptr<weight_t>(), G, depth, depth, 1, kLog2e};
  layers.weight2 = work.template pack<F>(weight2, KG, layers.depth2);
  const int split = split_for(groups * chunks, p.positions(), p.tiles);
  const size_t states = split > 1 ? kWarps * 4 * KG * kWarp * sizeof(Softmax<T>) : 0;
  const size_t bytes = Rows<T, false>::bytes(p, split) + states;
  check_shared_memory(bytes, p.d);
  const int blocks = static_cast<int>((groups * split + kWarps - 1) / kWarps) * chunks;
  SAN_LAUNCH_SHARED((pair_weights_kernel<F, KE, KG, KT, weight_t>), blocks, kPairThreads, bytes, work.stream(), p,
                    layers, split, chunks, w.mutable_data_ptr<weight_t>());
}

template <class F, class weight_t, class T>
void choose(PairWork<T>& work, const LayerTensors& tensors, Tensor& w) {
  const int tiles = work.pairs.tiles, E = tensors.hidden, G = tensors.weights;
  if (E == 0) {
    if (G <= 8) return weights_of<F, 0, 1, 0, weight_t>(work, tensors, w);
    return weights_of<F, 0, 4, 0, weight_t>(work, tensors, w);
  }
  if constexpr (std::is_same_v<T, double>) {
    return weights_of<F, 2, 1, 0, weight_t>(work, tensors, w);
  } else {
    if (tiles == 1 && E <= 8 && G <= 8) return weights_of<F, 1, 1, 1, weight_t>(work, tensors, w);
    if (tiles == 3 && E <= 16 && G <= 8) return weights_of<F, 2, 1, 3, weight_t>(work, tensors, w);
    if (tiles == 5 && E <= 32 && G <= 16) return weights_of<F, 4, 2, 5, weight_t>(work, tensors, w);
    return weights_of<F, 8, 4, 0, weight_t>(work, tensors, w);
  }
}

Tensor pair_weights(const Tensor& center, const Tensor& around, const Tensor& shift1, const Tensor& weight1,
                    const Tensor& shift2, const Tensor& weight2, int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, shift1, kernel_size, products);
  check_pair_layers(center, weight1, shift2, weight2);
  const OperatorGuard guard("pair_weights", center);
  const LayerTensors tensors(weight1, shift2, weight2);
  Tensor w = torch::stable::new_empty(weight2, {center.size(0), f.pixels(), f.positions(), weight2.size(0)});
  if (w.numel() > 0) {
    with_pair_types(center, weight2, tf32, [&](auto operand, auto weight) {
      using F = decltype(operand);
      PairWork<typename F::Value> work(center, around, shift1, f, products);
      choose<F, decltype(weight)>(work, tensors, w);
    });
  }
  return torch::stable::transpose(w, 1, 3);
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) { m.impl("pair_weights", TORCH_BOX(&san::cuda::pair_weights)); }
