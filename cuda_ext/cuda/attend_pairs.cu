// pair_weights, forward and backward: the layers u = weight1 a1 + shift2 and z = weight2 relu(u), then the softmax over
// the footprint. Definition: san/ops/fused_reference.py.
//
// The gradient of the softmax's input, gz = w (gw - sum_j w gw), is computed once and stored in float. Three launches
// then compute a1 and u again: the kernel of pair_gradients.cuh runs for center and for around, and another kernel sums
// the gradients of the layers over pairs.
#include <tuple>

#include "pair_gradients.cuh"
#include "values.cuh"

namespace san::cuda {
namespace {

// The layers as right factors.
template <class F, class S>
struct Layers {
  int G, chunks;        // weight channels, and chunks of S::hidden tiles of hidden channels
  const F* weight1;     // [chunk][tile of a1][S::hidden]
  const float* shift2;  // [chunks * 8 * S::hidden]
  const F* weight2;     // forward [chunk of S::weights][tile of u][S::weights], backward [chunk][tile of gz][S::hidden]

  // u of 16 pairs in one chunk.
  template <class Activation>
  __device__ __forceinline__ void hidden(const Pairs& p, const Team& team, int chunk, const Activation& activation,
                                         float (&u)[S::hidden][4]) const {
    first_layer<S>(p, activation, weight1 + int64_t(chunk) * p.tiles * S::hidden * kWarp + team.lane,
                   shift2 + chunk * 8 * S::hidden + team.column, u);
  }

  // Adds z of 16 pairs in N tiles of weight channels, whose operands for the lane start at `matrix`.
  template <class Rows, int N>
  __device__ __forceinline__ void add_logits(const Rows& rows, const Team& team, const F* matrix,
                                             float (&z)[N][4]) const {
    for_each_tile<(S::is_whole ? 1 : 0)>(chunks, [&](int chunk) {
      float u[S::hidden][4];
      hidden(rows.p, team, chunk, [&](int c, float (&a1)[4]) { rows.activate(c, a1); }, u);
      SAN_UNROLL
      for (int e = 0; e < S::hidden; ++e) {
        const F upper = F::of_rectified(rectified(u[e][0]), rectified(u[e][1]));
        const F lower = F::of_rectified(rectified(u[e][2]), rectified(u[e][3]));
        multiply_all(z, upper, lower, matrix + (chunk * S::hidden + e) * N * kWarp);
      }
    });
  }
};

// One call: the inputs of PairWork, and the layers.
class LayerWork : public PairWork {
 public:
  const int E, G;
  const Matrix layer1, layer2;

  template <class S>
  LayerWork(S, const Tensor& center, const Tensor& around, const Tensor& norm, const Footprint& f,
            const Tensor& weight1, const Tensor& shift2, const Tensor& weight2)
      : PairWork(center, around, norm, f, relation_tiles<S>(center)),
        E(static_cast<int>(weight1.size(0))),
        G(static_cast<int>(weight2.size(0))),
        layer1{keep(weight1), E, pairs.d, pairs.d, 1},
        layer2{keep(weight2), G, E, E, 1},
        shift2_(shift2) {}

  // Chunks of hidden channels that have this many tiles each.
  int chunks(int tiles) const { return (E + 8 * tiles - 1) / (8 * tiles); }
  PaddedVector shift2(int tiles) { return vector(shift2_, chunks(tiles) * 8 * tiles); }

 private:
  const Tensor& shift2_;
};

// Calls run with a zero of the type of the attention weights.
template <class Run>
void with_weight_type(ScalarType type, const Run& run) {
  if (type == ScalarType::Half) return run(torch::headeronly::Half());
  if (type == ScalarType::BFloat16) return run(torch::headeronly::BFloat16());
  run(float());
}

// The running maximum and sum of a softmax to base 2.
struct Softmax {
  float most = std::numeric_limits<float>::lowest(), sum = 0;

  // Computes one power of 2 instead of two: only that of the smaller of z and `most`.
  __device__ __forceinline__ void add(float z, float count = 1) {
    const float gap = z - most;
    const bool is_most = gap > 0;
    const float power = power_of_two(is_most ? -gap : gap);
    sum = is_most ? sum * power + count : sum + count * power;
    most = is_most ? z : most;
  }
};

// Combines the maxima and sums of a team's warps into those of all positions.
template <int N>
__device__ __forceinline__ void merge_over_team(const Team& team, Softmax (&softmax)[N]) {
  if (team.warps == 1) return;
  Softmax* states = reinterpret_cast<Softmax*>(shared_memory_base()) + team.index * team.warps * N * kWarp + team.lane;
  SAN_UNROLL
  for (int n = 0; n < N; ++n) states[(team.member * N + n) * kWarp] = softmax[n];
  __syncthreads();
  SAN_UNROLL
  for (int n = 0; n < N; ++n) {
    softmax[n] = {};
    SAN_ROLLED
    for (int member = 0; member < team.warps; ++member) {
      const Softmax other = states[(member * N + n) * kWarp];
      softmax[n].add(other.most, other.sum);
    }
  }
}

// Two passes over the pairs of 16 pixels: the first finds maxima and sums, the second computes the same z again and
// writes w [pixels, K, G]. Computing z twice takes less time than writing z, reading it and writing w. weight2 contains
// the factor log2(e), because powers are to base 2. A block computes one chunk of S::weights tiles of weight channels.
//
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32: 16 mma for 16 pairs; reads 20 MB,
// writes 157 MB (79 MB in half types); 0.1 ms, limited by instruction issue. Measured on an H200: 0.18
// ms.
template <class F, class S, class out_t>
__global__ void __launch_bounds__(kThreads, 1) pair_weights_kernel(Pairs p, Layers<F, S> layers, Plan plan, out_t* w) {
  constexpr int KG = S::weights;
  const Job<S::is_whole> job(plan);
  const Team team(plan.warps);
  PixelRows<S, false, 2> rows(p, team, (int64_t(job.block) * plan.teams() + team.index) * 16);
  const F* weight2 = layers.weight2 + int64_t(job.chunk) * layers.chunks * S::hidden * KG * kWarp + team.lane;
  const auto visit_all = [&](const auto& visit) {
    for (Offset offset(team, p); offset.position < p.positions(); offset.advance(team.warps, p.kernel_size)) {
      rows.move(team, offset);
      float z[KG][4] = {};
      layers.add_logits(rows, team, weight2, z);
      visit(offset.position, z);
    }
  };
  Softmax softmax[4 * KG];
  visit_all([&](int, const float (&z)[KG][4]) {
    SAN_UNROLL
    for (int n = 0; n < 4 * KG; ++n) softmax[n].add(z[n / 4][n % 4]);
  });
  merge_over_team(team, softmax);
  SAN_UNROLL
  for (int n = 0; n < 4 * KG; ++n) softmax[n].most += std::log2(softmax[n].sum);
  visit_all([&](int position, const float (&z)[KG][4]) {
    SAN_UNROLL
    for (int n = 0; n < 2 * KG; ++n) {
      const Pixel<false>& pixel = rows.pixels[n % 2];
      const int G = layers.G, first = (job.chunk * KG + n / 2) * 8 + team.column;
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

template <class F, class S, class out_t>
void forward(LayerWork& work, out_t* w) {
  const Pairs& p = work.pairs;
  constexpr double kLog2e = 1.4426950408889634;
  const int chunks = work.chunks(S::hidden);
  const auto shift2 = work.shift2(S::hidden);
  const auto weight1 = work.matrix<F>(work.layer1, S::hidden, p.tiles);
  const auto weight2 = work.matrix<F>(work.layer2.times(kLog2e), S::weights, chunks * S::hidden);
  prepare(work.stream(), work.center, work.around, shift2, weight1, weight2);
  const Layers<F, S> layers{work.G, chunks, weight1.to, shift2.to, weight2.to};
  const Plan plan = Plan::for_groups(p, (p.pixels() + 15) / 16, weight2.chunks);
  SAN_LAUNCH_SHARED((pair_weights_kernel<F, S, out_t>), plan.grid(), kThreads,
                    plan.warps > 1 ? kWarps * 4 * S::weights * kWarp * sizeof(Softmax) : 0, work.stream(), p, layers,
                    plan, w);
}

// Weights and weighted sums in one pass: the powers of 2 are relative to a reference, which is raised only if a logit
// exceeds it by far, because that changes all sums. A block computes kTiles tiles of weight channels.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100, TF32: 8 mma for 16 pairs; reads 60 MB, writes 26 MB; 0.07 ms,
// limited by instruction issue.
template <class F, class S, int kTiles, class V>
__global__ void __launch_bounds__(kThreads, 1)
    attend_pairs_kernel(Pairs p, Layers<F, S> layers, Plan plan, Values v, const float* beta, V* y, float* softmax) {
  constexpr int kStates = 4 * kTiles;
  constexpr float kMostAbove = 6;  // powers of 2
  const Job<S::is_whole && kTiles == S::weights> job(plan);
  const Team team(plan.warps);
  PixelRows<S, false, 2> rows(p, team, (int64_t(job.block) * plan.teams() + team.index) * 16);
  const F* weight2 = layers.weight2 + int64_t(job.chunk) * layers.chunks * S::hidden * kTiles * kWarp + team.lane;
  const float* values = beta + v.value_at(job.chunk * kTiles, team.column);
  Softmax state[kStates];
  float sums[kTiles][kShares][4] = {};
  for (Offset offset(team, p); offset.position < p.positions(); offset.advance(team.warps, p.kernel_size)) {
    rows.move(team, offset);
    float z[kTiles][4] = {};
    layers.add_logits(rows, team, weight2, z);
    bool is_above = false;
    SAN_UNROLL
    for (int n = 0; n < kStates; ++n) is_above |= z[n / 4][n % 4] > state[n].most + kMostAbove;
    if (__any_sync(~0u, is_above)) {
      SAN_UNROLL
      for (int n = 0; n < kStates; ++n) {
        const float most = std::max(state[n].most, z[n / 4][n % 4]), factor = power_of_two(state[n].most - most);
        state[n].most = most, state[n].sum *= factor;
        SAN_UNROLL
        for (int s = 0; s < kShares; ++s) sums[n / 4][s][n % 4] *= factor;
      }
    }
    SAN_UNROLL
    for (int n = 0; n < kStates; ++n) {
      z[n / 4][n % 4] = power_of_two(z[n / 4][n % 4] - state[n].most);
      state[n].sum += z[n / 4][n % 4];
    }
    SAN_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const float* first = values + v.value_at(tile, 0);
      const float* const partners[2] = {row_at(first, rows.partner[0], v.value_bytes()),
                                        row_at(first, rows.partner[1], v.value_bytes())};
      add_weighted(z[tile], partners, sums[tile]);
    }
  }
  if (team.warps > 1) {
    Softmax own[kStates];
    SAN_UNROLL
    for (int n = 0; n < kStates; ++n) own[n] = state[n];
    merge_over_team(team, state);
    SAN_UNROLL
    for (int n = 0; n < kStates * kShares; ++n) {
      const int at = n / kShares;
      sums[at / 4][n % kShares][at % 4] *= power_of_two(own[at].most - state[at].most);
    }
    SAN_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      sum_over_team(team, reinterpret_cast<float*>(shared_memory_base()), sums[tile]);
    }
  }
  if (team.member > 0) return;
  SAN_UNROLL
  for (int n = 0; n < kStates; ++n) {
    const float scale = 1 / state[n].sum;
    SAN_UNROLL
    for (int s = 0; s < kShares; ++s) sums[n / 4][s][n % 4] *= scale;
    const Pixel<false>& pixel = rows.pixels[n % 4 / 2];
    const int g = (job.chunk * kTiles + n / 4) * 8 + team.column + n % 2, size = p.height * p.width;
    if (!pixel.exists || g >= v.G) continue;
    const int image = pixel.index / size;
    float* out = softmax + (int64_t(image) * 2 * v.G + g) * size + pixel.index - image * size;
    out[0] = state[n].most * 0.6931471805599453f, out[int64_t(v.G) * size] = scale;
  }
  SAN_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    store_values(v, rows.pixels, job.chunk * kTiles + tile, team, sums[tile], y);
  }
}

template <class F, class S, class V>
void attend(LayerWork& work, const Tensor& beta, V* y, float* softmax) {
  const Pairs& p = work.pairs;
  constexpr double kLog2e = 1.4426950408889634;
  constexpr int kTiles = S::weights > 2 ? 2 : S::weights;  // more sums would not fit into registers
  const int chunks = work.chunks(S::hidden);
  const auto shift2 = work.shift2(S::hidden);
  const auto weight1 = work.matrix<F>(work.layer1, S::hidden, p.tiles);
  const auto weight2 = work.matrix<F>(work.layer2.times(kLog2e), kTiles, chunks * S::hidden);
  Values v = values_of(beta, work.G);
  v.g_tiles = weight2.chunks * kTiles;  // so that every chunk has values
  const ValueMap values(work, beta, work.f, v, 0);
  prepare(work.stream(), work.center, work.around, shift2, weight1, weight2, values);
  const Layers<F, S> layers{work.G, chunks, weight1.to, shift2.to, weight2.to};
  const Plan plan = Plan::for_groups(p, (p.pixels() + 15) / 16, weight2.chunks);
  constexpr size_t kBytes = std::max(kWarps * 4 * kTiles * kWarp * sizeof(Softmax), bytes_of_team_sums(4 * kShares));
  SAN_LAUNCH_SHARED((attend_pairs_kernel<F, S, kTiles, V>), plan.grid(), kThreads, plan.warps > 1 ? kBytes : 0,
                    work.stream(), p, layers, plan, v, values.to, y, softmax);
}

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

// Computes gz [pixels + 1, K, pitch], rounded for products of operands F; its last pixel is zeros. There is one thread
// for each pixel and weight channel. `pitch` is even.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100: reads 314 MB, and again from the L2 cache; writes 157 MB; 0.16
// ms, of memory bandwidth. Measured on an H200: 0.30 ms.
template <class F, class weight_t>
__global__ void logit_gradient_kernel(Strided<weight_t> w, Strided<weight_t> grad, int pixels, int positions, int G,
                                      int pitch, int64_t elements, float* gz) {
  SAN_FOR_EACH(index, elements) {
    const int64_t at = index / pitch;
    const int channel = static_cast<int>(index - at * pitch);
    const int64_t image = at / pixels, pixel = at - image * pixels;
    const weight_t* weight = w.data + image * w.image + channel * w.channel + pixel * w.pixel;
    const weight_t* gradient = grad.data + image * grad.image + channel * grad.channel + pixel * grad.pixel;
    const bool exists = channel < G && index < elements - pitch;
    float mean = 0;
    for (int64_t j = 0; exists && j < positions; ++j) {
      mean += static_cast<float>(weight[j * w.position]) * static_cast<float>(gradient[j * grad.position]);
    }
    float* out = gz + at * positions * pitch + channel;
    for (int j = 0; j < positions; ++j, out += pitch, weight += w.position, gradient += grad.position) {
      *out = exists ? F::rounded(static_cast<float>(*weight) * (static_cast<float>(*gradient) - mean)) : 0;
    }
  }
}

// gz for the kernels. gz of pixel i and position o starts at (i * K + o) * pitch; it is 0 for pixels that do not exist.
struct LogitGradients {
  const float* data;
  int pitch, tiles;  // channels, and tiles of 8 of them
  int missing;       // index of the zeros after the last pixel

  __device__ __forceinline__ const float* at(const Pairs& p, int pixel, const Offset& offset) const {
    const int bytes = pitch * static_cast<int>(sizeof(float));
    return row_at(row_at(data, pixel, p.positions() * bytes), offset.position, bytes);
  }
  __device__ __forceinline__ const float* at(const Pairs& p, const Pixel<false>& pixel, const Offset& offset) const {
    return at(p, pixel.exists ? pixel.index : missing, offset);
  }
  // Two channels of one pair, or one channel of two pairs, as factors.
  template <class F>
  __device__ __forceinline__ F two(const float* pair, int channel) const {
    const auto found = channel < pitch ? Pack<2, float>::load(pair + channel) : Pack<2, float>{};
    return F::of_rounded(found.data[0], found.data[1]);
  }
  template <class F>
  __device__ __forceinline__ F of_pairs(const float* first, const float* second, int channel) const {
    return channel < pitch ? F::of_rounded(first[channel], second[channel]) : F(0, 0);
  }
};

// Computes the gradient of a1 from gz, for pair_gradient_kernel.
template <class F, class S>
struct LayersSource {
  LogitGradients gz;
  Layers<F, S> layers;
  const F* back;  // weight1, transposed: [chunk of a1][tile of u][S::relation]

  template <class Rows, class Activation, int D>
  __device__ __forceinline__ void add(const Rows& rows, const Team& team, const Offset& offset, int chunk,
                                      const Activation& activation, float (&g)[D][4]) const {
    constexpr int KE = S::hidden;
    const F* right = back + int64_t(chunk) * layers.chunks * KE * D * kWarp + team.lane;
    const float *upper = gz.at(rows.p, rows.center(0), offset), *lower = gz.at(rows.p, rows.center(1), offset);
    for_each_tile<(S::is_whole ? 1 : 0)>(layers.chunks, [&](int hidden) {
      float u[KE][4], gu[KE][4] = {};
      layers.hidden(rows.p, team, hidden, activation, u);
      const F* weight2 = layers.weight2 + int64_t(hidden) * gz.tiles * KE * kWarp + team.lane;
      for_each_tile<(S::is_whole ? S::weights : 0)>(gz.tiles, [&](int k) {
        const int channel = 8 * k + team.column;
        multiply_all(gu, gz.two<F>(upper, channel), gz.two<F>(lower, channel), weight2 + k * KE * kWarp);
      });
      SAN_UNROLL
      for (int e = 0; e < KE; ++e) {
        if constexpr (!S::is_whole) __syncwarp();  // else the compiler loads all weights at once and spills registers
        SAN_UNROLL
        for (int n = 0; n < 4; ++n) gu[e][n] = u[e][n] > 0 ? gu[e][n] : 0;
        multiply_all(g, F(gu[e][0], gu[e][1]), F(gu[e][2], gu[e][3]), right + (hidden * KE + e) * D * kWarp);
      }
    });
  }
};

// Tiles of 16 weight channels in a chunk of layer_gradient_kernel.
template <class S>
constexpr int kLogitTiles = (S::weights + 1) / 2;

// Layout of a block's partial sums for the gradients of the layers: [strips * 16, chunks * 8 KD] of weight1, [chunks *
// 16 KG, strips * 16] of weight2 and [strips * 16] of shift2.
struct Partial {
  int pitch, width;
  int64_t weight2, shift2, size;

  template <class S>
  Partial(S, const Plan& plan)
      : pitch(plan.chunks * 8 * S::relation),
        width(plan.strips * 16),
        weight2(int64_t(width) * pitch),
        shift2(weight2 + int64_t(plan.chunks) * 16 * kLogitTiles<S> * width),
        size(shift2 + width) {}
};

// relu(u) and the gradient of u for 8 pairs as columns and the 16 hidden channels of a strip as rows. `weight1` and
// `weight2` are left factors: two right factors of 8 rows each.
template <class F, class S>
__device__ __forceinline__ void hidden_of_columns(const LogitGradients& gz, const F* weight1, const F* weight2,
                                                  const float* shift2, const Team& team,
                                                  const PixelRows<S, false, 1>& pairs, const Offset& offset,
                                                  float (&u)[4], float (&gu)[4]) {
  u[0] = u[1] = shift2[team.row], u[2] = u[3] = shift2[8 + team.row];
  for_each_relation_tile<S>(pairs.p, [&](int c) {
    float a1[2];
    pairs.activate(c, a1);
    multiply(u, weight1[2 * c * kWarp], weight1[(2 * c + 1) * kWarp], F::of_rectified(a1[0], a1[1]));
  });
  const float* pair = gz.at(pairs.p, pairs.pixels[0], offset);
  for_each_tile<(S::is_whole ? S::weights : 0)>(gz.tiles, [&](int k) {
    multiply(gu, weight2[2 * k * kWarp], weight2[(2 * k + 1) * kWarp], gz.two<F>(pair, 8 * k + team.column));
  });
  SAN_UNROLL
  for (int n = 0; n < 4; ++n) gu[n] = u[n] > 0 ? gu[n] : 0, u[n] = rectified(u[n]);
}

// Sums over pairs for the gradients of the layers: gu a1^T, gz relu(u)^T and gu. The depth of these products runs over
// pairs, so left factors have channels as rows. u and its gradient are first computed with hidden channels as rows and
// pairs as columns, which is already the layout of a left factor. gz and a1 are needed with pairs along rows and along
// columns, so each is loaded or computed in both layouts.
//
// A block computes a strip of 16 hidden channels, and a chunk: KD tiles of a1 and 16 KG weight channels.
//
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32: 9 mma for 8 pairs; reads 180 MB; 0.1
// ms, limited by instruction issue. Measured on an H200: 0.25 ms.
template <class F, class S>
__global__ void __launch_bounds__(kThreads, 1)
    layer_gradient_kernel(Pairs p, LogitGradients gz, Layers<F, S> layers, Plan plan, Partial layout, float* partial) {
  constexpr int KD = S::relation, KG = kLogitTiles<S>;
  const Job<false> job(plan);
  const Team team(plan.warps);
  const F* weight1 = layers.weight1 + int64_t(job.strip) * p.tiles * 2 * kWarp + team.lane;
  const F* weight2 = layers.weight2 + int64_t(job.strip) * gz.tiles * 2 * kWarp + team.lane;
  float to_weight1[KD][4] = {}, to_weight2[KG * 2][4] = {}, to_shift2[2] = {};
  const int teams = plan.teams();
  for (int64_t group = int64_t(job.block) * teams + team.index; group * 8 < p.pixels(); group += plan.blocks * teams) {
    PixelColumns<S> columns(p, team, group * 8);
    PixelRows<S, false, 1> pairs(p, team, group * 8);
    for (Offset offset(team, p); offset.position < p.positions(); offset.advance(team.warps, p.kernel_size)) {
      columns.move(team, offset), pairs.move(team, offset);
      float u[4], gu[4] = {};
      hidden_of_columns<F, S>(gz, weight1, weight2, layers.shift2 + job.strip * 16, team, pairs, offset, u, gu);
      to_shift2[0] += gu[0] + gu[1], to_shift2[1] += gu[2] + gu[3];
      const F hidden[2] = {F::of_rectified(u[0], u[1]), F::of_rectified(u[2], u[3])}, upper(gu[0], gu[1]),
              lower(gu[2], gu[3]);
      const float *first = gz.at(p, columns.pixels[0], offset), *second = gz.at(p, columns.pixels[1], offset);
      SAN_UNROLL
      for (int m = 0; m < KG; ++m) {
        const int channel = (job.chunk * KG + m) * 16 + team.row;
        const F above = gz.of_pairs<F>(first, second, channel), below = gz.of_pairs<F>(first, second, channel + 8);
        SAN_UNROLL
        for (int n = 0; n < 2; ++n) multiply(to_weight2[2 * m + n], above, below, hidden[n]);
      }
      SAN_UNROLL
      for (int c = 0; c < KD; ++c) {
        const int tile = S::is_whole ? c : job.chunk * KD + c;
        if (!S::is_whole && tile >= p.tiles) break;
        const auto a1 = columns.activate(tile);
        multiply(to_weight1[c], upper, lower, F::of_rectified(a1.data[0], a1.data[1]));
      }
    }
  }
  float* shared = reinterpret_cast<float*>(shared_memory_base());
  const Team block(kWarps);
  sum_over_team(block, shared, to_weight1), sum_over_team(block, shared, to_weight2);
  sum_over_team(block, shared, to_shift2);
  if (threadIdx.x >= kWarp) return;
  float* out = partial + job.block * layout.size;
  store_sums<KD>(team, to_weight1, out + int64_t(job.strip) * 16 * layout.pitch + job.chunk * KD * 8, layout.pitch);
  store_sums<2>(team, to_weight2, out + layout.weight2 + int64_t(job.chunk) * KG * 16 * layout.width + job.strip * 16,
                layout.width);
  if (job.chunk > 0) return;
  SAN_UNROLL
  for (int n = 0; n < 2; ++n) store_row_sums(team, to_shift2[n], out + layout.shift2 + job.strip * 16 + n * 8);
}

// Copies the parts of Partial to the gradients.
struct PlaceLayers {
  struct Part {
    Floats out;  // [rows, columns]
    int rows, columns, pitch;
    int64_t first;
  };
  Part parts[3];  // by their first columns

  __device__ __forceinline__ void operator()(int64_t column, const double* sum) const {
    SAN_UNROLL
    for (int n = 0; n < 3; ++n) {
      const Part& part = parts[n];
      if (column < part.first || (n < 2 && column >= parts[n < 2 ? n + 1 : 0].first)) continue;
      const int64_t at = column - part.first, row = at / part.pitch, inside = at - row * part.pitch;
      if (row < part.rows && inside < part.columns) part.out.set(row * part.columns + inside, *sum);
    }
  }
};

struct LayerGradients {
  PairGradients pairs;
  Tensor weight1, shift2, weight2;
};

template <class F, class S>
void backward(LayerWork& work, const LogitGradients& gz, LayerGradients& out) {
  const Pairs& p = work.pairs;
  const int chunks = work.chunks(S::hidden), hidden_tiles = chunks * S::hidden;
  const Matrix back1 = work.layer1.transposed(), back2 = work.layer2.transposed();
  const auto weight1 = work.matrix<F>(work.layer1, S::hidden, p.tiles);
  const auto weight2 = work.matrix<F>(back2, S::hidden, gz.tiles);
  const auto back = work.matrix<F>(back1, S::relation, hidden_tiles);
  // For layer_gradient_kernel.
  const auto left1 = work.matrix<F>(work.layer1, 2, p.tiles), left2 = work.matrix<F>(back2, 2, gz.tiles);
  const auto shift2 = work.shift2(S::hidden), left_shift2 = work.shift2(2);
  prepare(work.stream(), work.center, work.around, weight1, weight2, back, left1, left2, shift2, left_shift2);
  const Layers<F, S> layers{work.G, chunks, weight1.to, shift2.to, weight2.to};
  pair_gradients<F, S>(work, LayersSource<F, S>{gz, layers, back.to}, out.pairs);
  constexpr int KG = kLogitTiles<S>;
  const int column_chunks = (p.tiles + S::relation - 1) / S::relation,
            logit_chunks = (work.G + 16 * KG - 1) / (16 * KG);
  const Plan plan = Plan::for_sums(p, left1.chunks, std::max(column_chunks, logit_chunks));
  const Partial layout(S(), plan);
  float* partial = work.take(plan.blocks * layout.size);
  constexpr size_t kBytes = bytes_of_team_sums(4 * std::max(S::relation, 2 * KG));
  const Layers<F, S> left{work.G, left1.chunks, left1.to, left_shift2.to, left2.to};
  SAN_LAUNCH_SHARED((layer_gradient_kernel<F, S>), plan.grid(), kThreads, kBytes, work.stream(), p, gz, left, plan,
                    layout, partial);
  const PlaceLayers place{{{Floats(out.weight1), work.E, p.d, layout.pitch, 0},
                           {Floats(out.weight2), work.G, work.E, layout.width, layout.weight2},
                           {Floats(out.shift2), 1, work.E, layout.width, layout.shift2}}};
  sum_rows(PartialSums<float>{partial, layout.size}, plan.blocks, layout.size, place, work.stream());
}

template <class F, class weight_t>
LogitGradients logit_gradients(LayerWork& work, const Tensor& w, const Tensor& grad) {
  const Pairs& p = work.pairs;
  const int pitch = (work.G + 1) / 2 * 2;
  const int64_t elements = (p.pixels() + 1) * pitch;
  float* gz = work.take(elements * p.positions());
  SAN_LAUNCH((logit_gradient_kernel<F, weight_t>), blocks_for(elements), kThreads, work.stream(), Strided<weight_t>(w),
             Strided<weight_t>(grad), p.height * p.width, p.positions(), work.G, pitch, elements, gz);
  return {gz, pitch, tiles_for(work.G), static_cast<int>(p.pixels())};
}

Tensor pair_weights(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight1,
                    const Tensor& shift2, const Tensor& weight2, int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, norm, kernel_size, products);
  check_pair_layers(center, weight1, shift2, weight2);
  check_supported(center, products, weight1.size(0) > 0);
  const OperatorGuard guard("pair_weights", center);
  Tensor w = torch::stable::new_empty(weight2, {center.size(0), f.pixels(), f.positions(), weight2.size(0)});
  if (w.numel() > 0) {
    const ScalarType type = weight2.scalar_type();
    with_stage(type, tf32, center.size(3), weight1.size(0), weight2.size(0), [&]<class F, class S>(F, S stage) {
      LayerWork work(stage, center, around, norm, f, weight1, shift2, weight2);
      with_weight_type(type, [&]<class out_t>(out_t) { forward<F, S>(work, w.mutable_data_ptr<out_t>()); });
    });
  }
  return torch::stable::transpose(w, 1, 3);
}

std::tuple<Tensor, Tensor> attend_pairs(const Tensor& center, const Tensor& around, const Tensor& norm,
                                        const Tensor& weight1, const Tensor& shift2, const Tensor& weight2,
                                        const Tensor& beta, int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, norm, kernel_size, products);
  check_pair_layers(center, weight1, shift2, weight2), check_values({&beta}, center, weight2.size(0));
  check_supported(center, products, weight1.size(0) > 0);
  const OperatorGuard guard("attend_pairs", center);
  const int64_t G = weight2.size(0);
  Tensor y = torch::stable::new_empty(beta, beta.sizes());
  Tensor softmax = torch::stable::new_empty(center, {center.size(0), 2, G, f.pixels()});
  if (y.numel() > 0) {
    with_stage(weight2.scalar_type(), tf32, center.size(3), weight1.size(0), G, [&]<class F, class S>(F, S stage) {
      LayerWork work(stage, center, around, norm, f, weight1, shift2, weight2);
      with_value_type(beta, [&]<class V>(V) {
        attend<F, S>(work, beta, y.mutable_data_ptr<V>(), softmax.mutable_data_ptr<float>());
      });
    });
  }
  return {y, softmax};
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Backward pair_weights_backward(const Tensor& grad, const Tensor& w, const Tensor& center, const Tensor& around,
                               const Tensor& norm, const Tensor& weight1, const Tensor& shift2, const Tensor& weight2,
                               int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, norm, kernel_size, products);
  check_pair_layers(center, weight1, shift2, weight2);
  check_pair_gradient(grad, w, center, weight2, f);
  check_supported(center, products, weight1.size(0) > 0);
  const OperatorGuard guard("pair_weights_backward", center);
  const auto zeros = [](const Tensor& x) { return torch::stable::new_zeros(x, x.sizes()); };
  LayerGradients out{{center, norm}, zeros(weight1), zeros(shift2), zeros(weight2)};
  if (w.numel() > 0) {
    const ScalarType type = weight2.scalar_type();
    with_stage(type, tf32, center.size(3), weight1.size(0), weight2.size(0), [&]<class F, class S>(F, S stage) {
      LayerWork work(stage, center, around, norm, f, weight1, shift2, weight2);
      with_weight_type(type, [&]<class weight_t>(weight_t) {
        backward<F, S>(work, logit_gradients<F, weight_t>(work, w, grad), out);
      });
    });
  }
  return {out.pairs.center, out.pairs.around, out.pairs.norm, out.weight1, out.shift2, out.weight2};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("pair_weights", TORCH_BOX(&san::cuda::pair_weights));
  m.impl("pair_weights_backward", TORCH_BOX(&san::cuda::pair_weights_backward));
  m.impl("attend_pairs", TORCH_BOX(&san::cuda::attend_pairs));
}
