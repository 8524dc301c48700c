// pair_weights, forward: the layers that follow a1, then the softmax over the footprint. Definition:
// san/ops/definitions.py.
#include <limits>

#include "pair_layers.cuh"

namespace san::cuda {
namespace {

// The running maximum and sum of a softmax to base 2.
template <class T>
struct Softmax {
  T most = std::numeric_limits<T>::lowest(), sum = 0;

  // Computes one power of 2 instead of two: only that of the smaller of z and `most`.
  __device__ __forceinline__ void add(T z, T count = 1) {
    const T gap = z - most;
    const bool is_most = gap > 0;
    const T power = power_of_two(is_most ? -gap : gap);
    sum = is_most ? sum * power + count : sum + count * power;
    most = is_most ? z : most;
  }
};

// Combines the maxima and sums of a team's warps into those of all positions.
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
    SAN_ROLLED
    for (int member = 0; member < mine.split; ++member) {
      const Softmax<T> other = states[(member * N + n) * kWarp];
      softmax[n].add(other.most, other.sum);
    }
  }
}

// Computes z of 16 pairs in KG tiles of weight channels.
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
// writes w [pixels, K, G]. Computing z twice takes less time than writing z, reading it and writing w. weight2 contains
// the factor log2(e), because powers are to base 2. A block computes one chunk of KG tiles of the weight channels.
//
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32: 16 mma and 290 instructions for 16
// pairs, 24 KB of shared memory; reads 20 MB, writes 157 MB (79 MB in half types); 0.096 ms, limited by instruction
// issue.
template <class F, int KE, int KG, int KT, class out_t, class T = typename F::Value>
__global__ void __launch_bounds__(kThreads, 1) pair_weights_kernel(Pairs<T> p, Layers<F> layers, Plan plan, out_t* w) {
  T* shared = reinterpret_cast<T*>(shared_memory_base());
  const Job<false> job(plan);
  const int G = layers.weights, chunk = job.chunk;
  const Team mine(plan.split);
  Rows<T, false> rows(p, mine, int64_t(job.block) * plan.teams() + mine.team, shared);
  const auto visit_all = [&](const auto& visit) {
    Offset offset;
    offset.advance(mine.member, p.kernel_size);
    for (; offset.position < p.positions(); offset.advance(plan.split, p.kernel_size)) {
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
  merge_over_team(mine, shared + plan.teams() * Rows<T, false>::bytes(p) / sizeof(T), softmax);
  SAN_UNROLL
  for (int n = 0; n < 4 * KG; ++n) softmax[n].most += std::log2(softmax[n].sum);
  const int channel = chunk * 8 * KG + mine.pair;
  visit_all([&](int position, const T(&z)[KG][4]) {
    SAN_UNROLL
    for (int n = 0; n < 2 * KG; ++n) {
      const Pixel<false>& pixel = rows.pixels[n % 2];
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

template <int KE, int KG, int KT, class out_t, class F>
void weights_of(LayerWork<F>& work, out_t* w) {
  using T = typename F::Value;
  const Pairs<T>& p = work.pairs;
  Layers<F> layers = work.template first_layer<KE>();
  layers.depth2 = KE > 0 ? layers.chunks * KE : p.tiles;
  constexpr double kLog2e = 1.4426950408889634;
  layers.weight2 = work.second_layer(kLog2e, KG, layers.depth2);
  work.prepare();
  const Plan plan(p, (p.pixels() + 15) / 16, 1, (work.G + 8 * KG - 1) / (8 * KG));
  const size_t states = plan.split > 1 ? plan.split * 4 * KG * kWarp * sizeof(Softmax<T>) : 0;
  const size_t bytes = work.shared_bytes(plan, Rows<T, false>::bytes(p) + states, 0);
  SAN_LAUNCH_SHARED((pair_weights_kernel<F, KE, KG, KT, out_t>), plan.blocks * plan.jobs(), kThreads, bytes,
                    work.stream(), p, layers, plan, w);
}

template <class out_t, class F>
void choose(LayerWork<F>& work, out_t* w) {
  [[maybe_unused]] const int tiles = work.pairs.tiles, E = work.E, G = work.G;
  if (E == 0) return G <= 8 ? weights_of<0, 1, 0>(work, w) : weights_of<0, 4, 0>(work, w);
  if constexpr (std::is_same_v<typename F::Value, double>) {
    weights_of<2, 1, 0>(work, w);
  } else {
    if (tiles == 1 && E <= 8 && G <= 8) return weights_of<1, 1, 1>(work, w);
    if (tiles == 3 && E <= 16 && G <= 8) return weights_of<2, 1, 3>(work, w);
    if (tiles == 5 && E <= 32 && G <= 16) return weights_of<4, 2, 5>(work, w);
    weights_of<8, 4, 0>(work, w);
  }
}

Tensor pair_weights(const Tensor& center, const Tensor& around, const Tensor& shift1, const Tensor& weight1,
                    const Tensor& shift2, const Tensor& weight2, int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, shift1, kernel_size, products);
  check_pair_layers(center, weight1, shift2, weight2);
  const OperatorGuard guard("pair_weights", center);
  Tensor w = torch::stable::new_empty(weight2, {center.size(0), f.pixels(), f.positions(), weight2.size(0)});
  if (w.numel() > 0) {
    with_operand(center.scalar_type(), weight2.scalar_type(), tf32, [&](auto operand) {
      using F = decltype(operand);
      LayerWork<F> work({center, around, shift1, f, products}, weight1, shift2, weight2);
      with_weight_type<typename F::Value>(weight2.scalar_type(),
                                          [&](auto zero) { choose(work, w.mutable_data_ptr<decltype(zero)>()); });
    });
  }
  return torch::stable::transpose(w, 1, 3);
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) { m.impl("pair_weights", TORCH_BOX(&san::cuda::pair_weights)); }
