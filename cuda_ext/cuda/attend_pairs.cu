// attend_pairs and attend_pairs_of_batch, forward and backward: the layers u = weight1 a1 + shift2 and z = weight2
// relu(u), the softmax over the footprint, and the weighted sum of values. The weights are never stored. Definitions:
// san/ops/fused_reference.py.
//
// Backward computes the weights twice more: from the side of pixels for the gradient of the logits, gz, which is stored
// in float, and from the side of their partners for that of the values. The kernels of pair_layers.cuh then compute a1
// and u again for the other gradients.
#include <tuple>

#include "second_norm.cuh"
#include "values.cuh"

namespace san::cuda {
namespace {

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
      SAN_UNROLL
      for (int e = 0; e < S::hidden; ++e) {
        const auto shift = layers_.shift(team, chunk, e);
        u[e][0] = u[e][2] = shift.data[0], u[e][1] = u[e][3] = shift.data[1];
      }
      layers_.add_products(rows.p, chunk, [&](int c, float (&a1)[4]) { rows.activate(c, a1); }, weight1_, u);
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
        layers{chunks(S::hidden), this->weight1.to, this->shift2.to, this->weight2.to} {}

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
  fold_map(work.stream(), padded, work.f, v.values(), to_beta);
  return {gz, pitch, S::is_whole ? S::weights : tiles_for(work.G), static_cast<int>(p.pixels())};
}

// The gradients of center, around and norm. `weight1` is the first layer without a norm, `weight2` the second one times
// the norm's scale, and `terms` are those of ActivationGradient.
template <class F, class S>
void map_gradients(ValueWork<F, S>& work, const LogitGradients& gz, const Matrix& weight1, const Matrix& weight2,
                   const float* terms, PairGradients& out) {
  const int chunks = work.chunks(S::hidden);
  const auto back1 = work.template matrix<F>(weight1.transposed(), S::relation, chunks * S::hidden);
  const auto back2 = work.template matrix<F>(weight2, S::hidden, gz.tiles);
  prepare(work.stream(), back1, back2);
  const Layers<F, S> layers{chunks, work.weight1.to, work.shift2.to, back2.to};
  pair_gradients(work, ActivationGradient<F, S>{gz, layers, terms, back1.to}, out);
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
  PairGradients maps(center, norm);
  const auto result = [&](const Tensor& x) { return result_like(x, beta); };
  const LayerGradients layers{result(weight1), result(shift2), result(weight2)};
  const Tensor to_beta = result(beta);
  if (beta.numel() > 0) {
    with_stage(weight2.scalar_type(), tf32, center.size(3), weight1.size(0), weight2.size(0),
               [&]<class F, class S>(F, S stage) {
                 ValueWork<F, S> work(stage, center, around, norm, f, weight1, shift2, weight2, beta);
                 const LogitGradients gz = logit_gradients(work, grad, y, softmax, to_beta);
                 layer_gradients<F, S>(work, gz, layers);
                 const int64_t terms = 2 * work.shift2.elements;
                 const PaddedVector none{nullptr, 0, terms, work.take(terms)};
                 prepare(work.stream(), none);
                 map_gradients(work, gz, work.layer1, work.layer2.transposed(), none.to, maps);
               });
  }
  return {maps.center, maps.around, maps.norm, layers.weight1, layers.shift2, layers.weight2, to_beta};
}

// The second norm of attend_pairs_of_batch, and the first layer with the norm folded in.
class FoldedNorm : public Workspace {
 public:
  const SecondNorm norm;
  Tensor weight1, shift2, mean, var;

  FoldedNorm(const Tensor& center, const Tensor& weight1, const Tensor& weight, const Tensor& bias,
             const Tensor& input_mean, const Tensor& covariance, int64_t pairs, double eps)
      : Workspace(center),
        norm{keep_float(weight1),
             keep_float(weight),
             keep_float(bias),
             keep_float(input_mean),
             keep_float(covariance),
             static_cast<int>(weight1.size(0)),
             static_cast<int>(weight1.size(1)),
             static_cast<double>(pairs),
             eps},
        weight1(empty({norm.E, norm.d})),
        shift2(empty({norm.E})),
        mean(empty({norm.E})),
        var(empty({norm.E})) {
    SAN_LAUNCH_SHARED(fold_norm_kernel, blocks_of_teams(norm.E, 1), kTeamThreads, 0, stream(), norm,
                      mean.mutable_data_ptr<float>(), var.mutable_data_ptr<float>(),
                      this->weight1.mutable_data_ptr<float>(), shift2.mutable_data_ptr<float>());
  }
};

Footprint check_batch(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight1,
                      const Tensor& norm_weight, const Tensor& norm_bias, const Tensor& weight2, int64_t kernel_size) {
  const Footprint f = check_pairs(center, around, norm, kernel_size, 0);
  check_same(weight1, center, "weight1 and center"), check_same(norm_weight, norm_bias, "norm_weight and norm_bias");
  STD_TORCH_CHECK(norm_weight.dim() == 1 && norm_weight.numel() == norm_bias.numel(),
                  "norm_weight and norm_bias must be vectors of one length");
  check_pair_layers(center, weight1, norm_bias, weight2);
  check_supported(center, 0, weight1.size(0) > 0);
  return f;
}

using OfBatch = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

OfBatch attend_pairs_of_batch(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight1,
                              const Tensor& norm_weight, const Tensor& norm_bias, const Tensor& weight2,
                              const Tensor& beta, int64_t kernel_size, bool tf32, double eps) {
  const Footprint f = check_batch(center, around, norm, weight1, norm_weight, norm_bias, weight2, kernel_size);
  check_values({&beta}, center, weight2.size(0));
  const OperatorGuard guard("attend_pairs_of_batch", center);
  const int64_t d = center.size(3), E = weight1.size(0), G = weight2.size(0);
  const bool fast = tf32 || beta.scalar_type() != ScalarType::Float;
  Tensor y = torch::stable::new_empty(beta, beta.sizes());
  Tensor softmax = torch::stable::new_empty(center, {center.size(0), 2, G, f.pixels()});
  const auto zeros = [&](const std::vector<int64_t>& shape) { return torch::stable::new_zeros(center, shape); };
  if (y.numel() == 0) return {y, zeros({E}), zeros({E}), softmax, zeros({d}), zeros({d, d})};
  Tensor input_mean = torch::stable::new_empty(center, {d}), covariance = torch::stable::new_empty(center, {d, d});
  pair_covariance(center, around, norm, f, fast, input_mean, covariance);
  FoldedNorm batch(center, weight1, norm_weight, norm_bias, input_mean, covariance,
                   center.size(0) * f.pixels() * f.positions(), eps);
  with_stage(ScalarType::Float, fast, d, E, G, [&]<class F, class S>(F, S stage) {
    ValueWork<F, S> work(stage, center, around, norm, f, batch.weight1, batch.shift2, weight2, beta);
    forward(work, y, softmax.mutable_data_ptr<float>());
  });
  return {y, batch.mean, batch.var, softmax, input_mean, covariance};
}

using OfBatchBackward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

OfBatchBackward attend_pairs_of_batch_backward(const Tensor& grad, const Tensor& y, const Tensor& softmax,
                                               const Tensor& input_mean, const Tensor& covariance, const Tensor& center,
                                               const Tensor& around, const Tensor& norm, const Tensor& weight1,
                                               const Tensor& norm_weight, const Tensor& norm_bias,
                                               const Tensor& weight2, const Tensor& beta, int64_t kernel_size,
                                               bool tf32, double eps) {
  const Footprint f = check_batch(center, around, norm, weight1, norm_weight, norm_bias, weight2, kernel_size);
  check_values({&beta, &grad, &y}, center, weight2.size(0)), check_softmax(softmax, center, weight2.size(0));
  const int64_t d = center.size(3), E = weight1.size(0);
  check_statistics({&input_mean}, center, {d}), check_statistics({&covariance}, center, {d, d});
  const OperatorGuard guard("attend_pairs_of_batch_backward", center);
  PairGradients maps(center, norm);
  const auto result = [&](const Tensor& x) { return result_like(x, beta); };
  Tensor to_weight1 = result(weight1), to_weight = result(norm_weight), to_bias = result(norm_bias);
  const LayerGradients layers{result(weight1), result(norm_bias), result(weight2)};
  const Tensor to_beta = result(beta);
  if (beta.numel() > 0) {
    FoldedNorm batch(center, weight1, norm_weight, norm_bias, input_mean, covariance,
                     center.size(0) * f.pixels() * f.positions(), eps);
    const bool fast = tf32 || beta.scalar_type() != ScalarType::Float;
    with_stage(ScalarType::Float, fast, d, E, weight2.size(0), [&]<class F, class S>(F, S stage) {
      ValueWork<F, S> work(stage, center, around, norm, f, batch.weight1, batch.shift2, weight2, beta);
      const LogitGradients gz = logit_gradients(work, grad, y, softmax, to_beta);
      layer_gradients<F, S>(work, gz, layers);
      const int channels = static_cast<int>(work.shift2.elements);
      const UnfoldedGradients unfolded{layers.weight1.const_data_ptr<float>(),
                                       layers.shift2.const_data_ptr<float>(),
                                       to_weight1.mutable_data_ptr<float>(),
                                       to_weight.mutable_data_ptr<float>(),
                                       to_bias.mutable_data_ptr<float>(),
                                       work.take(E),
                                       work.take(2 * channels),
                                       channels};
      SAN_LAUNCH_SHARED(unfold_norm_kernel, blocks_of_teams(channels, 1), kTeamThreads, 0, work.stream(), batch.norm,
                        batch.mean.const_data_ptr<float>(), batch.var.const_data_ptr<float>(), unfolded);
      const Matrix without_norm{work.keep(weight1), work.E, work.pairs.d, work.pairs.d, 1};
      map_gradients(work, gz, without_norm, work.layer2.transposed().times_rows(unfolded.scale), unfolded.terms, maps);
    });
  }
  return {maps.center, maps.around, maps.norm, to_weight1, to_weight, to_bias, layers.weight2, to_beta};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("attend_pairs", TORCH_BOX(&san::cuda::attend_pairs));
  m.impl("attend_pairs_backward", TORCH_BOX(&san::cuda::attend_pairs_backward));
  m.impl("attend_pairs_of_batch", TORCH_BOX(&san::cuda::attend_pairs_of_batch));
  m.impl("attend_pairs_of_batch_backward", TORCH_BOX(&san::cuda::attend_pairs_of_batch_backward));
}
