// pair_weights, backward: from w and its gradient those of the maps, shifts and weights. Definition:
// tests/ops/oracle.py.
//
// gz = w (gw - sum_j w gw) is stored once, in float. Three kernels then compute a1 and u again: the one of
// pair_gradients.cuh for center and for around, and one whose products sum over pairs for the weights.
#include <tuple>

#include "pair_gradients.cuh"
#include "pair_layers.cuh"

namespace san::cuda {
namespace {

// A tensor [N, G, K, P] in any memory order.
template <class weight_t>
struct Strided {
  const weight_t* data;
  int64_t image, channel, position, pixel;

  explicit Strided(const Tensor& x)
      : data(x.const_data_ptr<weight_t>()),
        image(x.stride(0)),
        channel(x.stride(1)),
        position(x.stride(2)),
        pixel(x.stride(3)) {}
};

// gz [pixels + 1, K, pitch] of the softmax's argument, 0 for a pixel more; one thread for each pixel and weight
// channel. `pitch` is even.
//
// SAN's second stage at batch 32: reads 314 MB, once more from L2, writes 157 MB. Predicted for an H100: 200 us.
template <class T, class weight_t>
__global__ void logit_gradient_kernel(Strided<weight_t> w, Strided<weight_t> grad, int pixels, int positions, int G,
                                      int pitch, int64_t elements, T* gz) {
  SAN_FOR_EACH(index, elements) {
    const int64_t at = index / pitch;
    const int channel = static_cast<int>(index - at * pitch);
    const int64_t image = at / pixels, pixel = at - image * pixels;
    const weight_t* weight = w.data + image * w.image + channel * w.channel + pixel * w.pixel;
    const weight_t* gradient = grad.data + image * grad.image + channel * grad.channel + pixel * grad.pixel;
    const bool exists = channel < G && index < elements - pitch;
    T mean = 0;
    for (int64_t j = 0; exists && j < positions; ++j) {
      mean += static_cast<T>(weight[j * w.position]) * static_cast<T>(gradient[j * grad.position]);
    }
    T* out = gz + at * positions * pitch + channel;
    for (int j = 0; j < positions; ++j, out += pitch, weight += w.position, gradient += grad.position) {
      *out = exists ? static_cast<T>(*weight) * (static_cast<T>(*gradient) - mean) : T(0);
    }
  }
}

// gz as the kernels read it: of the pair of pixel i of center and footprint position o from (i * K + o) * pitch on.
// That of pixels that do not exist is 0.
template <class T>
struct LogitGradients {
  const T* data;
  int pitch, tiles;  // channels, and tiles of 8 of them

  __device__ __forceinline__ const T* at(const Pairs<T>& p, int pixel, const Offset& offset) const {
    const int bytes = pitch * static_cast<int>(sizeof(T));
    return row_at(row_at(data, pixel, p.positions() * bytes), offset.position, bytes);
  }
  __device__ __forceinline__ const T* at(const Pairs<T>& p, const Pixel<T, false>& pixel, const Offset& offset) const {
    return at(p, pixel.exists ? pixel.index : static_cast<int>(p.pixels()), offset);
  }
  __device__ __forceinline__ Pack<2, T> two(const T* pair, int channel) const {
    return channel < pitch ? Pack<2, T>::load(pair + channel) : Pack<2, T>{};
  }
  __device__ __forceinline__ T one(const T* pair, int channel) const { return channel < pitch ? pair[channel] : T(0); }
};

// The gradient of a1 through the layers, for pair_gradient_kernel. KE = 0 if there is no hidden one; gz has KZ tiles,
// or any number if KZ is 0.
template <class F, int KD, int KE, int KZ>
struct LayersSource {
  using T = typename F::Value;

  LogitGradients<T> gz;
  Layers<F> layers;  // weight2 [hidden chunk][tile of gz][KE]
  const F* back;     // the transposed first of the layers, [chunk of a1][tile of depth][KD]
  int depth;         // tiles

  template <int kColumns, int KT, class Rows, class Activation>
  __device__ __forceinline__ void add(const Rows& rows, const Team& mine, const Offset& offset, int chunk,
                                      const Activation& activation, T (&g)[KD][4]) const {
    const F* right = back + int64_t(chunk) * depth * KD * kWarp + mine.lane;
    const T *upper = gz.at(rows.p, rows.center(0), offset), *lower = gz.at(rows.p, rows.center(1), offset);
    if constexpr (KE == 0) {
      multiply_logits(mine, upper, lower, right, g);
    } else {
      for_each_tile<(KT > 0)>(layers.chunks, [&](int hidden) {
        T u[KE][4], gu[KE][4] = {};
        layers.template hidden<KE, KT>(mine, hidden, rows.p.tiles, activation, u);
        multiply_logits(mine, upper, lower, layers.weight2 + int64_t(hidden) * gz.tiles * KE * kWarp + mine.lane, gu);
        SAN_UNROLL
        for (int e = 0; e < KE; ++e) {
          if constexpr (KT == 0) __syncwarp();  // else the compiler loads all weights at once, more than registers hold
          SAN_UNROLL
          for (int n = 0; n < 4; ++n) gu[e][n] = u[e][n] > 0 ? gu[e][n] : T(0);
          multiply_all(g, F(gu[e][0], gu[e][1]), F(gu[e][2], gu[e][3]), right + (hidden * KE + e) * KD * kWarp);
        }
      });
    }
  }

  template <int N>
  __device__ __forceinline__ void multiply_logits(const Team& mine, const T* upper, const T* lower, const F* right,
                                                  T (&sum)[N][4]) const {
    for_each_tile<KZ>(gz.tiles, [&](int k) {
      const Pack<2, T> first = gz.two(upper, 8 * k + mine.pair), second = gz.two(lower, 8 * k + mine.pair);
      multiply_all(sum, F(first.data[0], first.data[1]), F(second.data[0], second.data[1]), right + k * N * kWarp);
    });
  }
};

// u and its gradient of 8 pairs as columns and 16 hidden channels as rows; the ReLU between u and its gradient is left
// out.
template <int KT, int KZ, class F, class T>
__device__ __forceinline__ void hidden_columns(const LogitGradients<T>& gz, const Layers<F>& layers, const Team& mine,
                                               int strip, const Columns<T, true>& pairs, const Offset& offset,
                                               T (&u)[4], T (&gu)[4]) {
  const int tiles = pairs.p.tiles;
  const F* weight1 = layers.weight1 + int64_t(strip) * tiles * 2 * kWarp + mine.lane;
  const F* weight2 = layers.weight2 + int64_t(strip) * gz.tiles * 2 * kWarp + mine.lane;
  u[0] = u[1] = layers.shift2[strip * 16 + mine.row], u[2] = u[3] = layers.shift2[strip * 16 + 8 + mine.row];
  for_each_tile<KT>(tiles, [&](int c) {
    const Pack<2, T> a1 = pairs.activate(c);
    multiply(u, weight1[2 * c * kWarp], weight1[(2 * c + 1) * kWarp], F(a1.data[0], a1.data[1]));
  });
  const T* pair = gz.at(pairs.p, pairs.pixels[0], offset);
  for_each_tile<KZ>(gz.tiles, [&](int k) {
    const Pack<2, T> two = gz.two(pair, 8 * k + mine.pair);
    multiply(gu, weight2[2 * k * kWarp], weight2[(2 * k + 1) * kWarp], F(two.data[0], two.data[1]));
  });
}

// Where a block's partial sums of the weights' gradients lie: [strips * 16, chunks * 8 KD] of the layer behind a1, then
// with a hidden layer [chunks * 16 KG, strips * 16] of weight2 and [strips * 16] of shift2.
struct Partial {
  int strips, chunks, pitch;
  int64_t weight2, shift2, size;
};

// Sums over pairs for the gradients of the weights. Pairs are the depth of these products, so left factors have
// channels as rows: first the products of the layers give u and its gradient with 16 hidden channels as rows and 8
// pairs as columns, which are factors of the sums as they are. Without a hidden layer gz takes the place of u's
// gradient.
//
// A block works on a strip of 16 of these rows, KD tiles of a1 and KG times 16 weight channels. gz and a1 are needed
// with pairs along rows and along columns, and are read and computed in both layouts.
//
// SAN's second stage at batch 32, 4.9 million pairs, TF32: 9 mma and 150 instructions for 8 pairs, 24 KB of shared
// memory; reads 180 MB. Predicted for an H100, at half of its issue rate: 200 us.
template <class F, int KD, int KG, int KZ, bool kWhole, bool kHidden, class T = typename F::Value>
__global__ void __launch_bounds__(kPairThreads, 1)
    weight_gradient_kernel(Pairs<T> p, LogitGradients<T> gz, Layers<F> layers, int split, Partial layout, T* partial) {
  using Two = Pack<2, T>;
  T* shared = reinterpret_cast<T*>(shared_memory_base());
  const int jobs = layout.strips * layout.chunks, block = blockIdx.x / jobs, job = blockIdx.x - block * jobs;
  const int strip = job / layout.chunks, chunk = job - strip * layout.chunks, blocks = gridDim.x / jobs;
  const Team mine(split);
  const int teams = kWarps / split;
  T* flipped = shared + size_t(teams) * p.tiles * Columns<T>::kCoefficients;
  constexpr int kFirst = 4 * KD, kSecond = kHidden ? 8 * KG : 0;
  T sums[kFirst + kSecond + 2] = {};  // of the first weight [KD, 4], of weight2 [KG, 2, 4], of shift2 [2]
  for (int64_t first = int64_t(block) * teams; first * 8 < p.pixels(); first += int64_t(blocks) * teams) {
    Columns<T> columns(p, mine, first + mine.team, shared);
    Columns<T, true> pairs(p, mine, first + mine.team, flipped);
    __syncthreads();
    Offset offset;
    offset.advance(mine.member, p.kernel_size);
    for (; offset.position < p.positions(); offset.advance(split, p.kernel_size)) {
      columns.move(mine, offset);
      const T *left = gz.at(p, columns.pixels[0], offset), *right = gz.at(p, columns.pixels[1], offset);
      const auto logits = [&](int channel) { return F(gz.one(left, channel), gz.one(right, channel)); };
      F upper, lower;
      if constexpr (kHidden) {
        T u[4], gu[4] = {};
        pairs.move(mine, offset);
        hidden_columns<kWhole ? KD : 0, KZ>(gz, layers, mine, strip, pairs, offset, u, gu);
        SAN_UNROLL
        for (int n = 0; n < 4; ++n) {
          gu[n] = u[n] > 0 ? gu[n] : T(0), u[n] = rectified(u[n]);
          sums[kFirst + kSecond + n / 2] += gu[n];
        }
        upper = F(gu[0], gu[1]), lower = F(gu[2], gu[3]);
        const F active[2] = {F(u[0], u[1]), F(u[2], u[3])};
        SAN_UNROLL
        for (int m = 0; m < KG; ++m) {
          const int channel = (chunk * KG + m) * 16 + mine.row;
          const F above = logits(channel), below = logits(channel + 8);
          SAN_UNROLL
          for (int n = 0; n < 2; ++n) multiply(four_of(sums, kFirst + 4 * (2 * m + n)), above, below, active[n]);
        }
      } else {
        upper = logits(strip * 16 + mine.row), lower = logits(strip * 16 + mine.row + 8);
      }
      SAN_UNROLL
      for (int c = 0; c < KD; ++c) {
        const int tile = kWhole ? c : chunk * KD + c;
        if (!kWhole && tile >= p.tiles) break;
        const Two a1 = columns.activate(tile);
        multiply(four_of(sums, 4 * c), upper, lower, F(a1.data[0], a1.data[1]));
      }
    }
    __syncthreads();
  }
  sum_over_team(Team(kWarps), shared, sums);
  if (threadIdx.x >= kWarp) return;
  T* out = partial + block * layout.size;
  store_sums<1, KD>(mine, sums, 0, out + int64_t(strip) * 16 * layout.pitch + chunk * KD * 8, layout.pitch);
  if constexpr (kHidden) {
    const int pitch = layout.strips * 16;
    T* to_weight2 = out + layout.weight2 + int64_t(chunk) * KG * 16 * pitch + strip * 16;
    store_sums<KG, 2>(mine, sums, kFirst, to_weight2, pitch);
    if (chunk > 0) return;
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) {
      store_row_sums(mine, sums[kFirst + kSecond + n], out + layout.shift2 + strip * 16 + n * 8);
    }
  }
}

struct WeightGradients {
  PairGradients pairs;
  Tensor weight1, shift2, weight2;  // in the type of the maps
};

template <class F, int KD, int KG, int KZ, bool kWhole, bool kHidden, class weight_t, class T>
void weight_gradients(PairWork<T>& work, const LogitGradients<T>& gz, const LayerTensors& tensors,
                      WeightGradients& out) {
  const Pairs<T>& p = work.pairs;
  const int E = tensors.hidden, G = tensors.weights, rows = kHidden ? E : G;
  Partial layout;
  layout.strips = (rows + 15) / 16, layout.chunks = (p.tiles + KD - 1) / KD;
  if (kHidden) layout.chunks = std::max(layout.chunks, (G + 16 * KG - 1) / (16 * KG));
  layout.pitch = layout.chunks * 8 * KD;
  layout.weight2 = int64_t(layout.strips) * 16 * layout.pitch;
  layout.shift2 = layout.weight2 + (kHidden ? int64_t(layout.chunks) * 16 * KG * layout.strips * 16 : 0);
  layout.size = layout.shift2 + (kHidden ? layout.strips * 16 : 0);
  Layers<F> layers = first_layer<F, kHidden ? 2 : 0, weight_t>(work, tensors);
  if (kHidden) {
    layers.weight2 =
        work.template pack<F>(Matrix<weight_t>{tensors.weight2.const_data_ptr<weight_t>(), E, G, 1, E}, 2, gz.tiles);
  }
  const int jobs = layout.strips * layout.chunks;
  const int64_t groups = (p.pixels() + 7) / 8;
  const int split = split_for(groups * jobs, p.positions(), p.tiles);
  const int64_t needed = (groups * split + kWarps - 1) / kWarps, most = std::max<int64_t>(1, kSumBlocks / jobs);
  const int blocks = static_cast<int>(std::min(needed, most));
  const size_t coefficients = size_t(kWarps / split) * p.tiles * (Columns<T>::kCoefficients * 2);
  const size_t bytes = std::max(coefficients, size_t(kWarps / 2) * (4 * KD + 8 * KG + 2) * kWarp) * sizeof(T);
  check_shared_memory(bytes, p.d);
  T* partial = work.template take<T>(blocks * layout.size);
  SAN_LAUNCH_SHARED((weight_gradient_kernel<F, KD, KG, KZ, kWhole, kHidden>), blocks * jobs, kPairThreads, bytes,
                    work.stream(), p, gz, layers, split, layout, partial);
  Tensor& first = kHidden ? out.weight1 : out.weight2;
  Parts<T> parts{};
  parts.parts[0] = {first.mutable_data_ptr<T>(), rows, p.d, layout.pitch, 0, layout.weight2};
  if constexpr (kHidden) {
    parts.parts[1] = {out.weight2.mutable_data_ptr<T>(), G, E, 16 * layout.strips, layout.weight2,
                      layout.shift2 - layout.weight2};
    parts.parts[2] = {out.shift2.mutable_data_ptr<T>(), 1, E, 16 * layout.strips, layout.shift2,
                      layout.size - layout.shift2};
  }
  work.total(partial, blocks, parts);
}

// KE tiles of hidden channels for the gradients of the maps, none without a hidden layer; KD and KG as in the kernels.
template <class F, int KD, int KE, int KG, int KZ, bool kWhole, bool kProducts, class weight_t, class T>
void gradients(PairWork<T>& work, const Footprint& f, const LogitGradients<T>& gz, const LayerTensors& tensors,
               WeightGradients& out) {
  const Pairs<T>& p = work.pairs;
  const int E = tensors.hidden, G = tensors.weights;
  const weight_t* weight2 = tensors.weight2.const_data_ptr<weight_t>();
  LayersSource<F, KD, KE, KZ> source{gz, first_layer<F, KE, weight_t>(work, tensors), nullptr, gz.tiles};
  if constexpr (KE > 0) {
    source.layers.weight2 = work.template pack<F>(Matrix<weight_t>{weight2, E, G, 1, E}, KE, gz.tiles);
    source.depth = source.layers.chunks * KE;
    const Matrix<weight_t> weight1{tensors.weight1.const_data_ptr<weight_t>(), p.d, E, 1, p.d};
    source.back = work.template pack<F>(weight1, KD, source.depth);
  } else {
    source.back = work.template pack<F>(Matrix<weight_t>{weight2, p.d, G, 1, p.d}, KD, source.depth);
  }
  pair_gradients<F, KD, kWhole, kProducts>(work, f, source, out.pairs);
  weight_gradients<F, KD, KG, KZ, kWhole, (KE > 0), weight_t>(work, gz, tensors, out);
}

template <class F, class weight_t, class T>
void choose(PairWork<T>& work, const Footprint& f, const LogitGradients<T>& gz, const LayerTensors& tensors,
            WeightGradients& out) {
  [[maybe_unused]] const int tiles = work.pairs.tiles, E = tensors.hidden, G = tensors.weights;
  const bool has_products = work.pairs.products > 0;
  if constexpr (std::is_same_v<T, double>) {
    if (E == 0) return gradients<F, 3, 0, 1, 0, false, true, weight_t>(work, f, gz, tensors, out);
    return gradients<F, 3, 2, 1, 0, false, true, weight_t>(work, f, gz, tensors, out);
  } else if (E == 0) {
    if (has_products) return gradients<F, 5, 0, 1, 0, false, true, weight_t>(work, f, gz, tensors, out);
    return gradients<F, 9, 0, 1, 0, false, false, weight_t>(work, f, gz, tensors, out);
  } else {
    if (has_products) return gradients<F, 5, 4, 1, 0, false, true, weight_t>(work, f, gz, tensors, out);
    if (tiles == 1 && E <= 8 && G <= 8)
      return gradients<F, 1, 1, 1, 1, true, false, weight_t>(work, f, gz, tensors, out);
    if (tiles == 3 && E <= 16 && G <= 8)
      return gradients<F, 3, 2, 1, 1, true, false, weight_t>(work, f, gz, tensors, out);
    if (tiles == 5 && E <= 32 && G <= 16)
      return gradients<F, 5, 4, 1, 2, true, false, weight_t>(work, f, gz, tensors, out);
    constexpr int kHidden = sizeof(F) > 2 * sizeof(float) ? 4 : 8;  // tiles that registers hold
    return gradients<F, 9, kHidden, 2, 0, false, false, weight_t>(work, f, gz, tensors, out);
  }
}

template <class T, class weight_t>
LogitGradients<T> logit_gradients(PairWork<T>& work, const Tensor& w, const Tensor& grad) {
  const Pairs<T>& p = work.pairs;
  const int G = static_cast<int>(w.size(1)), pitch = (G + 1) / 2 * 2;
  const int64_t elements = (p.pixels() + 1) * pitch;
  T* gz = work.template take<T>(elements * p.positions());
  SAN_LAUNCH((logit_gradient_kernel<T, weight_t>), blocks_for(elements), kThreads, work.stream(), Strided<weight_t>(w),
             Strided<weight_t>(grad), p.height * p.width, p.positions(), G, pitch, elements, gz);
  return {gz, pitch, (G + 7) / 8};
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Backward pair_weights_backward(const Tensor& grad, const Tensor& w, const Tensor& center, const Tensor& around,
                               const Tensor& shift1, const Tensor& weight1, const Tensor& shift2, const Tensor& weight2,
                               int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, shift1, kernel_size, products);
  check_pair_layers(center, weight1, shift2, weight2);
  check_pair_gradient(grad, w, center, weight2, f);
  const OperatorGuard guard("pair_weights_backward", center);
  const auto zeros = [&](const Tensor& x) { return torch::stable::new_zeros(center, x.sizes()); };
  WeightGradients out{{center, shift1}, zeros(weight1), zeros(shift2), zeros(weight2)};
  if (w.numel() > 0) {
    const LayerTensors tensors(weight1, shift2, weight2);
    with_pair_types(center, weight2, tf32, [&](auto operand, auto weight) {
      using F = decltype(operand);
      using T = typename F::Value;
      using weight_t = decltype(weight);
      PairWork<T> work(center, around, shift1, f, products);
      choose<F, weight_t>(work, f, logit_gradients<T, weight_t>(work, w, grad), tensors, out);
    });
  }
  const auto of_weights = [&](const Tensor& x) {
    return weight2.scalar_type() == x.scalar_type() ? x : torch::stable::to(x, weight2.scalar_type());
  };
  return {out.pairs.center,        out.pairs.around, out.pairs.shift,
          of_weights(out.weight1), out.shift2,       of_weights(out.weight2)};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("pair_weights_backward", TORCH_BOX(&san::cuda::pair_weights_backward));
}
