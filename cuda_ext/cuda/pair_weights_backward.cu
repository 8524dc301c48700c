// pair_weights, backward: the gradients of maps, shifts and weights from w and its gradient. Definition:
// san/ops/definitions.py.
//
// The gradient of the softmax's input, gz = w (gw - sum_j w gw), is computed once and stored in float. Three launches
// then compute a1 and u again: the kernel of pair_gradients.cuh runs for center and for around, and another kernel sums
// the gradients of the weights over pairs.
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

// Computes gz [pixels + 1, K, pitch], whose last pixel is zeros. There is one thread for each pixel and weight channel.
// `pitch` is even.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100: reads 314 MB, and again from the L2 cache; writes 157 MB; 0.16
// ms, of memory bandwidth.
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

// gz for the kernels. gz of pixel i and position o starts at (i * K + o) * pitch; it is 0 for pixels that do not exist.
template <class T>
struct LogitGradients {
  const T* data;
  int pitch, tiles;  // channels, and tiles of 8 of them
  int missing;       // index of the zeros after the last pixel

  __device__ __forceinline__ const T* at(const Pairs<T>& p, int pixel, const Offset& offset) const {
    const int bytes = pitch * static_cast<int>(sizeof(T));
    return row_at(row_at(data, pixel, p.positions() * bytes), offset.position, bytes);
  }
  __device__ __forceinline__ const T* at(const Pairs<T>& p, const Pixel<false>& pixel, const Offset& offset) const {
    return at(p, pixel.exists ? pixel.index : missing, offset);
  }
  __device__ __forceinline__ Pack<2, T> two(const T* pair, int channel) const {
    return channel < pitch ? Pack<2, T>::load(pair + channel) : Pack<2, T>{};
  }
  __device__ __forceinline__ T one(const T* pair, int channel) const { return channel < pitch ? pair[channel] : T(0); }
};

// Computes the gradient of a1 from gz, for pair_gradient_kernel. KE is 0 if there is no hidden layer. KZ is the number
// of tiles of gz, or 0 if it is only known at run time.
template <class F, int KD, int KE, int KZ>
struct LayersSource {
  using T = typename F::Value;

  LogitGradients<T> gz;
  Layers<F> layers;  // weight2 [hidden chunk][tile of gz][KE]
  const F* back;     // the first layer, transposed: [chunk of a1][tile of depth][KD]
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
          if constexpr (KT == 0) __syncwarp();  // else the compiler loads all weights at once and spills registers
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

// Computes u and its gradient, with 8 pairs as columns and 16 hidden channels as rows. The caller applies the ReLU to
// both.
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

// Layout of a block's partial sums for the gradients of the weights: [strips * 16, chunks * 8 KD] of the layer that
// follows a1 and, with a hidden layer, [chunks * 16 KG, strips * 16] of weight2 and [strips * 16] of shift2.
struct Partial {
  int pitch;
  int64_t weight2, shift2, size;
};

// Stores a block's sums of products [KD, 4] and, with a hidden layer, those of weight2 [KG, 2, 4] and shift2 [2].
template <int KD, int KG, int N, class T>
__device__ __forceinline__ void store_weight_sums(const Team& mine, const Plan& plan, const Job<false>& job,
                                                  const Partial& layout, const T (&sums)[N], T* partial) {
  T* out = partial + job.block * layout.size;
  store_sums<1, KD>(mine, sums, 0, out + int64_t(job.strip) * 16 * layout.pitch + job.chunk * KD * 8, layout.pitch);
  if constexpr (KG > 0) {
    const int pitch = plan.strips * 16;
    T* to_weight2 = out + layout.weight2 + int64_t(job.chunk) * KG * 16 * pitch + job.strip * 16;
    store_sums<KG, 2>(mine, sums, 4 * KD, to_weight2, pitch);
    if (job.chunk > 0) return;
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) {
      store_row_sums(mine, sums[4 * KD + 8 * KG + n], out + layout.shift2 + job.strip * 16 + n * 8);
    }
  }
}

// Sums over pairs for the gradients of the weights. The depth of these products runs over pairs, so left factors have
// channels as rows. u and its gradient are first computed with 16 hidden channels as rows and 8 pairs as columns, which
// is already the layout of a left factor. Without a hidden layer, gz replaces the gradient of u.
//
// A block computes a strip of 16 of these rows, KD tiles of a1 and 16 KG weight channels. gz and a1 are needed with
// pairs along rows and with pairs along columns, so each is loaded or computed in both layouts.
//
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32: 9 mma and 145 instructions for 8
// pairs, 24 KB of shared memory; reads 180 MB; 0.097 ms, limited by instruction issue.
template <class F, int KD, int KG, int KZ, bool kWhole, bool kHidden, class T = typename F::Value>
__global__ void __launch_bounds__(kThreads, 1)
    weight_gradient_kernel(Pairs<T> p, LogitGradients<T> gz, Layers<F> layers, Plan plan, Partial layout, T* partial) {
  using Two = Pack<2, T>;
  T* shared = reinterpret_cast<T*>(shared_memory_base());
  const Job<false> job(plan);
  const int strip = job.strip, chunk = job.chunk;
  const Team mine(plan.split);
  const int teams = plan.teams();
  T* flipped = shared + teams * p.tiles * Columns<T>::kCoefficients;
  constexpr int kFirst = 4 * KD, kSecond = kHidden ? 8 * KG : 0;
  T sums[kFirst + kSecond + 2] = {};  // of the first weight [KD, 4], of weight2 [KG, 2, 4], of shift2 [2]
  for (int64_t first = int64_t(job.block) * teams; first * 8 < p.pixels(); first += int64_t(plan.blocks) * teams) {
    Columns<T> columns(p, mine, first + mine.team, shared);
    Columns<T, true> pairs(p, mine, first + mine.team, flipped);
    __syncthreads();
    Offset offset;
    offset.advance(mine.member, p.kernel_size);
    for (; offset.position < p.positions(); offset.advance(plan.split, p.kernel_size)) {
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
  store_weight_sums<KD, kSecond / 8>(mine, plan, job, layout, sums, partial);
}

struct WeightGradients {
  PairGradients pairs;
  Tensor weight1, shift2, weight2;  // in the type of the maps
};

// Copies the parts of Partial to the gradients.
template <class T>
struct PlaceWeights {
  Part<T> parts[3];

  __device__ __forceinline__ void operator()(int64_t column, const double* sum) const {
    for (const Part<T>& part : parts) part(column, sum);
  }
};

// Numbers of tiles for which kernels are compiled: KD of relation channels, KE of hidden channels (for the gradients of
// the maps), KG of 16 weight channels, and KZ of gz, or 0 for any number.
template <int D, int E, int G, int Z, bool kAll, bool kSome>
struct Tiles {
  static constexpr int KD = D, KE = E, KG = G, KZ = Z;
  static constexpr bool kWhole = kAll, kProducts = kSome, kHidden = E > 0;
};

template <class S, class F, class T>
void weight_gradients(LayerWork<F>& work, const LogitGradients<T>& gz, const Layers<F>& layers, WeightGradients& out) {
  const Pairs<T>& p = work.pairs;
  const int rows = S::kHidden ? work.E : work.G, strips = (rows + 15) / 16, d_chunks = (p.tiles + S::KD - 1) / S::KD;
  const int chunks = S::kHidden ? std::max(d_chunks, (work.G + 16 * S::KG - 1) / (16 * S::KG)) : d_chunks;
  const int pitch = chunks * 8 * S::KD, width = strips * 16;
  const int64_t weight2 = int64_t(width) * pitch;
  const int64_t shift2 = weight2 + (S::kHidden ? int64_t(chunks) * 16 * S::KG * width : 0);
  const Partial layout{pitch, weight2, shift2, shift2 + (S::kHidden ? width : 0)};
  const Plan plan(p, (p.pixels() + 7) / 8, strips, chunks, kSumBlocks);
  const size_t bytes = work.shared_bytes(plan, 2 * Columns<T>::bytes(p), 4 * S::KD + 8 * S::KG + 2);
  T* partial = work.take(plan.blocks * layout.size);
  SAN_LAUNCH_SHARED((weight_gradient_kernel<F, S::KD, S::KG, S::KZ, S::kWhole, S::kHidden>), plan.blocks * plan.jobs(),
                    kThreads, bytes, work.stream(), p, gz, layers, plan, layout, partial);
  const auto data = [](Tensor& x) { return x.mutable_data_ptr<T>(); };
  PlaceWeights<T> place{};
  place.parts[0] = {data(S::kHidden ? out.weight1 : out.weight2), rows, p.d, pitch, 0, weight2};
  if constexpr (S::kHidden) {
    place.parts[1] = {data(out.weight2), work.G, work.E, width, weight2, shift2 - weight2};
    place.parts[2] = {data(out.shift2), 1, work.E, width, shift2, width};
  }
  sum_blocks(partial, plan.blocks, layout.size, place, work.stream());
}

template <class S, class F, class T>
void gradients(LayerWork<F>& work, const Footprint& f, const LogitGradients<T>& gz, WeightGradients& out) {
  LayersSource<F, S::KD, S::KE, S::KZ> source{gz, work.template first_layer<S::KE>(), nullptr, gz.tiles};
  Layers<F> layers = work.template first_layer<S::kHidden ? 2 : 0>();
  if constexpr (S::kHidden) {
    source.depth = source.layers.chunks * S::KE;
    source.layers.weight2 = work.transposed2(S::KE, gz.tiles), layers.weight2 = work.transposed2(2, gz.tiles);
  }
  source.back = S::kHidden ? work.transposed1(S::KD, source.depth) : work.transposed2(S::KD, source.depth);
  work.prepare();
  pair_gradients<S::KD, S::kWhole, S::kProducts>(work, f, source, out.pairs);
  weight_gradients<S>(work, gz, layers, out);
}

// Calls run with the numbers of tiles that suit these sizes.
template <class F, class Run>
void with_tiles(const LayerWork<F>& work, const Run& run) {
  [[maybe_unused]] const int tiles = work.pairs.tiles, E = work.E, G = work.G;
  [[maybe_unused]] const bool has_products = work.pairs.products > 0;
  if constexpr (std::is_same_v<typename F::Value, double>) {
    E == 0 ? run(Tiles<3, 0, 1, 0, false, true>()) : run(Tiles<3, 2, 1, 0, false, true>());
  } else {
    constexpr int kHidden = sizeof(F) > 2 * sizeof(float) ? 4 : 8;  // tiles that fit into registers
    if (E == 0) return has_products ? run(Tiles<5, 0, 1, 0, false, true>()) : run(Tiles<9, 0, 1, 0, false, false>());
    if (has_products) return run(Tiles<5, 4, 1, 0, false, true>());
    if (tiles == 1 && E <= 8 && G <= 8) return run(Tiles<1, 1, 1, 1, true, false>());
    if (tiles == 3 && E <= 16 && G <= 8) return run(Tiles<3, 2, 1, 1, true, false>());
    if (tiles == 5 && E <= 32 && G <= 16) return run(Tiles<5, 4, 1, 2, true, false>());
    run(Tiles<9, kHidden, 2, 0, false, false>());
  }
}

template <class weight_t, class F, class T = typename F::Value>
LogitGradients<T> logit_gradients(LayerWork<F>& work, const Tensor& w, const Tensor& grad) {
  const Pairs<T>& p = work.pairs;
  const int pitch = (work.G + 1) / 2 * 2;
  const int64_t elements = (p.pixels() + 1) * pitch;
  T* gz = work.take(elements * p.positions());
  SAN_LAUNCH((logit_gradient_kernel<T, weight_t>), blocks_for(elements), kThreads, work.stream(), Strided<weight_t>(w),
             Strided<weight_t>(grad), p.height * p.width, p.positions(), work.G, pitch, elements, gz);
  return {gz, pitch, (work.G + 7) / 8, static_cast<int>(p.pixels())};
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
    with_operand(center.scalar_type(), weight2.scalar_type(), tf32, [&](auto operand) {
      using F = decltype(operand);
      using T = typename F::Value;
      LayerWork<F> work({center, around, shift1, f, products}, weight1, shift2, weight2);
      LogitGradients<T> gz{};
      with_weight_type<T>(weight2.scalar_type(),
                          [&](auto zero) { gz = logit_gradients<decltype(zero)>(work, w, grad); });
      with_tiles(work, [&]<class S>(S) { gradients<S>(work, f, gz, out); });
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
