// attend_pairs, forward and backward: the layers u = weight1 a1 + shift2 and z = weight2 relu(u), the softmax over the
// footprint, and the weighted sum of values. The weights are never stored. Definition: san/ops/fused_reference.py.
//
// Backward computes the weights twice more: from the side of pixels for the gradient of the logits, gz, which is stored
// in float, and from the side of their partners for that of the values. Three launches then compute a1 and u again: the
// kernel of pair_gradients.cuh runs for center and for around, and another kernel sums the gradients of the layers over
// pairs.
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

  // u of 16 pairs in one chunk. `right` are the lane's operands of weight1.
  template <class Activation, class Right>
  __device__ __forceinline__ void hidden(const Pairs& p, const Team& team, int chunk, const Activation& activation,
                                         const Right& right, float (&u)[S::hidden][4]) const {
    first_layer<F, S>(p, activation, right, chunk * p.tiles * S::hidden, shift2 + chunk * 8 * S::hidden + team.column,
                      u);
  }
};

// The layers up to the logits, for a chunk of kTiles tiles of weight channels. Small layers stay in registers.
template <class F, class S, int kTiles>
class Logits {
 public:
  __device__ __forceinline__ Logits(const Layers<F, S>& layers, const Team& team, int chunk)
      : layers_(layers),
        weight1_(Loaded<F>{layers.weight1 + team.lane}),
        weight2_(Loaded<F>{layers.weight2 + int64_t(chunk) * layers.chunks * S::hidden * kTiles * kWarp + team.lane}) {}

  // Adds z of 16 pairs.
  template <class Rows>
  __device__ __forceinline__ void add(const Rows& rows, const Team& team, float (&z)[kTiles][4]) const {
    for_each_tile<(S::is_whole ? 1 : 0)>(layers_.chunks, [&](int chunk) {
      float u[S::hidden][4];
      layers_.hidden(rows.p, team, chunk, [&](int c, float (&a1)[4]) { rows.activate(c, a1); }, weight1_, u);
      SAN_UNROLL
      for (int e = 0; e < S::hidden; ++e) {
        const F upper = F::of_rectified(rectified(u[e][0]), rectified(u[e][1]));
        const F lower = F::of_rectified(rectified(u[e][2]), rectified(u[e][3]));
        multiply_all(z, upper, lower, weight2_, (chunk * S::hidden + e) * kTiles);
      }
    });
  }

 private:
  static constexpr int kFirst = S::relation * S::hidden, kSecond = S::hidden * kTiles;
  static constexpr bool kKeeps = S::is_whole && (kFirst + kSecond) * sizeof(F) <= SAN_KEPT_BYTES;
  template <int N>
  using Right = std::conditional_t<kKeeps, Kept<F, N>, Loaded<F>>;

  const Layers<F, S>& layers_;
  const Right<kFirst> weight1_;
  const Right<kSecond> weight2_;
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

// Per pixel and weight channel, padded to whole tiles: the binary logarithm of the sum of the softmax, and sum_j w
// grad_w, which is the sum over the values that share a weight of y times its gradient.
struct SoftmaxSums {
  const float* softmax;
  Floats y, grad;
  Values v;
  int size;  // pixels of an image
  int64_t elements;
  float *logs, *dots;  // [pixels, g_tiles * 8]

  __device__ __forceinline__ void write(int64_t index) const {
    const unsigned width = v.g_tiles * 8;
    const int pixel = static_cast<int>(static_cast<uint32_t>(index) / width), image = pixel / size;
    const int g = static_cast<int>(index - int64_t(pixel) * width);
    const float* found = softmax + (int64_t(image) * 2 * v.G + g) * size + pixel - image * size;
    logs[index] = g < v.G ? found[0] * 1.4426950408889634f - std::log2(found[int64_t(v.G) * size]) : 0;
    double dot = 0;
    for (int s = 0; s < v.shares && g < v.G; ++s) {
      const int64_t at = int64_t(pixel) * v.values() + s * v.G + g;
      dot += y.get(at) * grad.get(at);
    }
    dots[index] = static_cast<float>(dot);
  }
  // Two adjacent channels of `sums`, which are the logs or the dots.
  static __device__ __forceinline__ Pack<2, float> of(const float* sums, const Values& v, int pixel, int channel) {
    return Pack<2, float>::load(row_at(sums + channel, pixel, v.g_tiles * 8 * static_cast<int>(sizeof(float))));
  }
};

// Blocks of the next three kernels that must fit into a multiprocessor.
template <class F, class S>
constexpr int kResident =
    std::is_same_v<F, Operand<false>> && S::is_whole && S::hidden <= 2 ? SAN_ATTEND_WARPS / kWarps : 1;

// Weights and weighted sums in one pass: the powers of 2 are relative to a reference, which is raised only if a logit
// exceeds it by far, because that changes all sums. A block computes kTiles tiles of weight channels.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100, TF32: 8 mma for 16 pairs; reads 60 MB, writes 26 MB; 0.07 ms,
// limited by instruction issue.
template <class F, class S, int kTiles>
__global__ void __launch_bounds__(kTeamThreads, kResident<F, S>)
    attend_pairs_kernel(Pairs p, Layers<F, S> layers, Plan plan, Values v, const float* beta, Floats y,
                        float* softmax) {
  constexpr int kStates = 4 * kTiles;
  constexpr float kMostAbove = 6;  // powers of 2
  const Job<S::is_whole && kTiles == S::weights> job(plan);
  const Team team(plan.warps);
  PixelRows<S, false, 2> rows(p, team, (int64_t(job.block) * plan.teams() + team.index) * 16);
  const Logits<F, S, kTiles> logits(layers, team, job.chunk);
  const float* values = beta + v.value_at(job.chunk * kTiles, team.column);
  Softmax state[kStates];
  float sums[kTiles][kShares][4] = {};
  for (Offset offset(team, p); offset.position < p.positions(); offset.advance(team.warps, p.kernel_size)) {
    rows.move(team, offset);
    float z[kTiles][4] = {};
    logits.add(rows, team, z);
    bool is_above = false;
    SAN_UNROLL
    for (int n = 0; n < kStates; ++n) is_above |= z[n / 4][n % 4] > state[n].most + kMostAbove;
    if (__any_sync(~0u, is_above)) {
      SAN_UNROLL
      for (int n = 0; n < kStates; ++n) {
        // Only where a logit is above, so that other images do not change a result.
        const float logit = z[n / 4][n % 4], most = logit > state[n].most + kMostAbove ? logit : state[n].most;
        const float factor = power_of_two(state[n].most - most);
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

// The gradient of the logits, gz = w (grad_w - sum_j w grad_w), of each pixel, position and weight channel, rounded for
// products of operands F. The weights are computed again, and grad_w is the product of the gradient of y at the pixel
// and the values at its partner. A block computes kTiles tiles of weight channels.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100, TF32: 8 mma for 16 pairs; reads 90 MB, writes 157 MB; 0.08 ms,
// limited by instruction issue.
template <class F, class S, int kTiles>
__global__ void __launch_bounds__(kTeamThreads, kResident<F, S>)
    logit_gradient_kernel(Pairs p, Layers<F, S> layers, Plan plan, Values v, const float* beta, const float* grad,
                          SoftmaxSums sums, int pitch, float* gz) {
  const Job<S::is_whole && kTiles == S::weights> job(plan);
  const Team team(plan.warps);
  PixelRows<S, false, 2> rows(p, team, (int64_t(job.block) * plan.teams() + team.index) * 16);
  const Logits<F, S, kTiles> logits(layers, team, job.chunk);
  const int first = v.value_at(job.chunk * kTiles, team.column), channel = job.chunk * kTiles * 8 + team.column;
  PixelValues own[kTiles][2];
  Pack<2, float> log_sum[kTiles][2], dot[kTiles][2];
  SAN_UNROLL
  for (int n = 0; n < 2 * kTiles; ++n) {
    const int tile = n / 2, pixel = rows.pixels[n % 2].index;
    log_sum[tile][n % 2] = sums.of(sums.logs, v, pixel, channel + 8 * tile);
    dot[tile][n % 2] = sums.of(sums.dots, v, pixel, channel + 8 * tile);
    own[tile][n % 2] = PixelValues(row_at(grad + first + v.value_at(tile, 0), pixel, v.value_bytes()));
  }
  for (Offset offset(team, p); offset.position < p.positions(); offset.advance(team.warps, p.kernel_size)) {
    rows.move(team, offset);
    float z[kTiles][4] = {};
    logits.add(rows, team, z);
    SAN_UNROLL
    for (int n = 0; n < 2 * kTiles; ++n) {
      const int tile = n / 2, i = n % 2;
      const auto to_w =
          own[tile][i].times(row_at(beta + first + v.value_at(tile, 0), rows.partner[i], v.value_bytes()));
      Pack<2, float> two;
      SAN_UNROLL
      for (int k = 0; k < 2; ++k) {
        const float w = power_of_two(z[tile][2 * i + k] - log_sum[tile][i].data[k]);
        two.data[k] = F::rounded(w * (to_w.data[k] - dot[tile][i].data[k]));
      }
      if (!rows.pixels[i].exists || channel + 8 * tile >= pitch) continue;
      two.store(gz + (int64_t(rows.pixels[i].index) * p.positions() + offset.position) * pitch + channel + 8 * tile);
    }
  }
}

// The gradient of beta on the padded grid, [padded pixels, values()]: the sums of w and the gradients of y over the
// pixels whose footprints contain the padded pixel. The weights are computed again.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100, TF32: 1.23 times the products of attend_pairs_kernel; reads 60
// MB, writes 32 MB; 0.09 ms, limited by instruction issue.
template <class F, class S, int kTiles>
__global__ void __launch_bounds__(kTeamThreads, kResident<F, S>)
    value_gradient_kernel(Pairs p, Layers<F, S> layers, Plan plan, Values v, const float* grad, SoftmaxSums softmax,
                          Floats out) {
  const Job<S::is_whole && kTiles == S::weights> job(plan);
  const Team team(plan.warps);
  PixelRows<S, true, 2> rows(p, team, (int64_t(job.block) * plan.teams() + team.index) * 16);
  const Logits<F, S, kTiles> logits(layers, team, job.chunk);
  const int channel = job.chunk * kTiles * 8 + team.column;
  float sums[kTiles][kShares][4] = {};
  for (Offset offset(team, p); offset.position < p.positions(); offset.advance(team.warps, p.kernel_size)) {
    rows.move(team, offset);
    if (!__any_sync(~0u, rows.is_pair[0] || rows.is_pair[1])) continue;
    float z[kTiles][4] = {};
    logits.add(rows, team, z);
    SAN_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      const float* grads[2];
      SAN_UNROLL
      for (int i = 0; i < 2; ++i) {
        const auto log_sum = softmax.of(softmax.logs, v, rows.partner[i], channel + 8 * tile);
        SAN_UNROLL
        for (int k = 0; k < 2; ++k) {
          float& w = z[tile][2 * i + k];
          w = rows.is_pair[i] ? power_of_two(w - log_sum.data[k]) : 0;
        }
        const int pixel = rows.is_pair[i] ? rows.partner[i] : static_cast<int>(p.pixels());  // the last one is zeros
        grads[i] = row_at(grad + v.value_at(job.chunk * kTiles + tile, team.column), pixel, v.value_bytes());
      }
      add_weighted(z[tile], grads, sums[tile]);
    }
  }
  SAN_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    if (team.warps > 1) sum_over_team(team, reinterpret_cast<float*>(shared_memory_base()), sums[tile]);
    if (team.member == 0) store_values(v, rows.pixels, job.chunk * kTiles + tile, team, sums[tile], out);
  }
}

// A call with values: the layers and the values as the three kernels above read them, and the jobs that prepare them.
template <class F, class S>
struct ValueWork : LayerWork {
  static constexpr int kTiles = std::min(S::weights, SAN_MOST_TILES);

  const PaddedVector shift2;
  const PackedMatrix<F> weight1, weight2;
  const Values v;
  const ValueMap values;
  const Layers<F, S> layers;

  ValueWork(S stage, const Tensor& center, const Tensor& around, const Tensor& norm, const Footprint& f,
            const Tensor& weight1, const Tensor& shift2, const Tensor& weight2, const Tensor& beta)
      : LayerWork(stage, center, around, norm, f, weight1, shift2, weight2),
        shift2(LayerWork::shift2(S::hidden)),
        weight1(matrix<F>(layer1, S::hidden, pairs.tiles)),
        weight2(matrix<F>(layer2.times(1.4426950408889634), kTiles, chunks(S::hidden) * S::hidden)),  // log2(e)
        v(values_of(beta, G, this->weight2.chunks * kTiles)),
        values(*this, beta, f, v, 0),
        layers{G, chunks(S::hidden), this->weight1.to, this->shift2.to, this->weight2.to} {}

  void prepare_all() const { prepare(stream(), center, around, shift2, weight1, weight2, values); }
  // Calls launch(plan, bytes of shared memory) for groups of 16 of these pixels.
  template <class Launch>
  void with_plan(int64_t pixels, const Launch& launch) const {
    const Plan plan = Plan::for_groups(pairs, (pixels + 15) / 16, weight2.chunks);
    constexpr size_t kBytes = std::max(kWarps * 4 * kTiles * kWarp * sizeof(Softmax), bytes_of_team_sums(4 * kShares));
    launch(plan, plan.warps > 1 ? kBytes : 0);
  }
};

template <class F, class S>
void forward(ValueWork<F, S>& work, const Tensor& y, float* softmax) {
  work.prepare_all();
  work.with_plan(work.pairs.pixels(), [&](const Plan& plan, size_t bytes) {
    SAN_LAUNCH_SHARED((attend_pairs_kernel<F, S, work.kTiles>), plan.grid(), kTeamThreads, bytes, work.stream(),
                      work.pairs, work.layers, plan, work.v, work.values.to, Floats(y), softmax);
  });
}

// gz for the kernels. gz of pixel i and position o starts at (i * K + o) * pitch; it is 0 for pixels that do not exist.
struct LogitGradients {
  const float* data;
  int pitch, tiles;  // channels, and the tiles of 8 that the kernels visit
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
      layers.hidden(rows.p, team, hidden, activation, Loaded<F>{layers.weight1 + team.lane}, u);
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
__global__ void __launch_bounds__(kTeamThreads, 1)
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
  Tensor weight1, shift2, weight2, beta;
};

// Computes gz, and writes the gradient of beta.
template <class F, class S>
LogitGradients logit_gradients(ValueWork<F, S>& work, const Tensor& grad, const Tensor& y, const Tensor& softmax,
                               const Tensor& to_beta) {
  const Pairs& p = work.pairs;
  const Values& v = work.v;
  const int pitch = (work.G + 1) / 2 * 2;
  const int64_t gz_size = p.pixels() * p.positions() * pitch, sums_size = p.pixels() * v.g_tiles * 8;
  float *gz = work.take(gz_size + p.positions() * pitch), *padded = work.take(p.padded_pixels() * v.values());
  const PaddedVector missing{nullptr, 0, p.positions() * pitch, gz + gz_size};
  const ValueMap grads(work, grad, {1, work.f.height, work.f.width}, v, 1);
  Tensor exact = y;
  if (y.scalar_type() == ScalarType::Float) {
    work.prepare_all();
  } else {  // y is rounded, which would not cancel in the gradients of the logits
    exact = work.empty({y.numel()});
    forward(work, exact, work.take(softmax.numel()));
  }
  const SoftmaxSums sums{work.keep_float(softmax), work.keep(exact), work.keep(grad),      v,
                         p.height * p.width,       sums_size,        work.take(sums_size), work.take(sums_size)};
  prepare(work.stream(), grads, sums, missing);
  work.with_plan(p.pixels(), [&](const Plan& plan, size_t) {
    SAN_LAUNCH_SHARED((logit_gradient_kernel<F, S, work.kTiles>), plan.grid(), kTeamThreads, 0, work.stream(), p,
                      work.layers, plan, v, work.values.to, grads.to, sums, pitch, gz);
  });
  work.with_plan(p.padded_pixels(), [&](const Plan& plan, size_t bytes) {
    SAN_LAUNCH_SHARED((value_gradient_kernel<F, S, work.kTiles>), plan.grid(), kTeamThreads, bytes, work.stream(), p,
                      work.layers, plan, v, grads.to, sums, Floats(padded));
  });
  fold_values(work.stream(), padded, work.f, v, to_beta);
  return {gz, pitch, S::is_whole ? S::weights : tiles_for(work.G), static_cast<int>(p.pixels())};
}

template <class F, class S>
void backward(ValueWork<F, S>& work, const LogitGradients& gz, LayerGradients& out) {
  const Pairs& p = work.pairs;
  const int chunks = work.chunks(S::hidden), hidden_tiles = chunks * S::hidden;
  const Matrix back1 = work.layer1.transposed(), back2 = work.layer2.transposed();
  const auto weight2 = work.template matrix<F>(back2, S::hidden, gz.tiles);
  const auto back = work.template matrix<F>(back1, S::relation, hidden_tiles);
  // For layer_gradient_kernel.
  const auto left1 = work.template matrix<F>(work.layer1, 2, p.tiles),
             left2 = work.template matrix<F>(back2, 2, gz.tiles);
  const auto left_shift2 = work.LayerWork::shift2(2);
  prepare(work.stream(), weight2, back, left1, left2, left_shift2);
  const Layers<F, S> layers{work.G, chunks, work.weight1.to, work.shift2.to, weight2.to};
  pair_gradients<F, S>(work, LayersSource<F, S>{gz, layers, back.to}, out.pairs);
  constexpr int KG = kLogitTiles<S>;
  const int column_chunks = (p.tiles + S::relation - 1) / S::relation,
            logit_chunks = (work.G + 16 * KG - 1) / (16 * KG);
  const Plan plan = Plan::for_sums(p, left1.chunks, std::max(column_chunks, logit_chunks));
  const Partial layout(S(), plan);
  float* partial = work.take(plan.blocks * layout.size);
  constexpr size_t kBytes = bytes_of_team_sums(4 * std::max(S::relation, 2 * KG));
  const Layers<F, S> left{work.G, left1.chunks, left1.to, left_shift2.to, left2.to};
  SAN_LAUNCH_SHARED((layer_gradient_kernel<F, S>), plan.grid(), kTeamThreads, kBytes, work.stream(), p, gz, left, plan,
                    layout, partial);
  const PlaceLayers place{{{Floats(out.weight1), work.E, p.d, layout.pitch, 0},
                           {Floats(out.weight2), work.G, work.E, layout.width, layout.weight2},
                           {Floats(out.shift2), 1, work.E, layout.width, layout.shift2}}};
  sum_rows(PartialSums<float>{partial, layout.size}, plan.blocks, layout.size, place, work.stream());
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
      ValueWork<F, S> work(stage, center, around, norm, f, weight1, shift2, weight2, beta);
      forward(work, y, softmax.mutable_data_ptr<float>());
    });
  }
  return {y, softmax};
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Backward attend_pairs_backward(const Tensor& grad, const Tensor& y, const Tensor& softmax, const Tensor& center,
                               const Tensor& around, const Tensor& norm, const Tensor& weight1, const Tensor& shift2,
                               const Tensor& weight2, const Tensor& beta, int64_t kernel_size, int64_t products,
                               bool tf32) {
  const Footprint f = check_pairs(center, around, norm, kernel_size, products);
  check_pair_layers(center, weight1, shift2, weight2), check_values({&beta, &grad, &y}, center, weight2.size(0));
  check_softmax(softmax, center, weight2.size(0));
  check_supported(center, products, weight1.size(0) > 0);
  const OperatorGuard guard("attend_pairs_backward", center);
  const auto zeros = [](const Tensor& x) { return torch::stable::new_zeros(x, x.sizes()); };
  LayerGradients out{{center, norm}, zeros(weight1), zeros(shift2), zeros(weight2), zeros(beta)};
  if (beta.numel() > 0) {
    with_stage(weight2.scalar_type(), tf32, center.size(3), weight1.size(0), weight2.size(0),
               [&]<class F, class S>(F, S stage) {
                 ValueWork<F, S> work(stage, center, around, norm, f, weight1, shift2, weight2, beta);
                 backward(work, logit_gradients(work, grad, y, softmax, out.beta), out);
               });
  }
  return {out.pairs.center, out.pairs.around, out.pairs.norm, out.weight1, out.shift2, out.weight2, out.beta};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("attend_pairs", TORCH_BOX(&san::cuda::attend_pairs));
  m.impl("attend_pairs_backward", TORCH_BOX(&san::cuda::attend_pairs_backward));
}
