// The layers of a pairwise mapping, u = weight1 a1 + shift2 and z = weight2 relu(u), and what the gradient of z, gz,
// becomes: gradients of center, around and norm, and of the layers.
//
// pair_gradient_kernel runs twice: for pixels of center, whose gradients are sums over the footprint, and for padded
// pixels of around, whose gradients are sums over the pixels of center whose footprints contain them. Each sum stays in
// the registers of one warp, without atomics. finish_kernel then adds the gradients of reflected pixels and applies the
// derivatives of the norm. layer_gradient_kernel sums the gradients of the layers over all pairs.
#pragma once
#include "pairs.cuh"

namespace san::cuda {
namespace {

// The layers as right factors.
template <class F, class S>
struct Layers {
  int chunks;           // of S::hidden tiles of hidden channels
  const F* weight1;     // [chunk][tile of a1][S::hidden]
  const float* shift2;  // [chunks * 8 * S::hidden]
  const F* weight2;     // forward [chunk of S::weights][tile of u][S::weights], backward [chunk][tile of gz][S::hidden]

  // Adds weight1 a1 of 16 pairs in one chunk. `right` are the lane's operands of weight1.
  template <class Activation, class Right>
  __device__ __forceinline__ void add_products(const Pairs& p, int chunk, const Activation& activation,
                                               const Right& right, float (&u)[S::hidden][4]) const {
    add_first_layer<F, S>(p, activation, right, chunk * p.tiles * S::hidden, u);
  }
  // shift2 of the lane's two channels in a tile.
  __device__ __forceinline__ Pack<2, float> shift(const Team& team, int chunk, int tile) const {
    return Pack<2, float>::load(shift2 + (chunk * S::hidden + tile) * 8 + team.column);
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

// Computes the gradient of a1: weight1^T (weight2^T gz where u > 0, plus slope (u - shift2) + constant). Slope and
// constant are the derivatives of the statistics of u if the layers contain the norm of the batch (second_norm.cuh),
// else 0. u is computed without shift2, with which the two terms would cancel.
template <class F, class S>
struct ActivationGradient {
  LogitGradients gz;
  Layers<F, S> layers;
  const float* terms;  // of two adjacent channels of u: both slopes, both constants
  const F* back;       // weight1, transposed: [chunk of a1][tile of u][S::relation]

  template <class Rows, class Activation, int D>
  __device__ __forceinline__ void add(const Rows& rows, const Team& team, const Offset& offset, int chunk,
                                      const Activation& activation, float (&g)[D][4]) const {
    constexpr int KE = S::hidden;
    const F* right = back + int64_t(chunk) * layers.chunks * KE * D * kWarp + team.lane;
    const float *upper = gz.at(rows.p, rows.center(0), offset), *lower = gz.at(rows.p, rows.center(1), offset);
    for_each_tile<(S::is_whole ? 1 : 0)>(layers.chunks, [&](int hidden) {
      float u[KE][4] = {}, gu[KE][4] = {};
      layers.add_products(rows.p, hidden, activation, Loaded<F>{layers.weight1 + team.lane}, u);
      const F* weight2 = layers.weight2 + int64_t(hidden) * gz.tiles * KE * kWarp + team.lane;
      for_each_tile<(S::is_whole ? S::weights : 0)>(gz.tiles, [&](int k) {
        const int channel = 8 * k + team.column;
        multiply_all(gu, gz.two<F>(upper, channel), gz.two<F>(lower, channel), weight2 + k * KE * kWarp);
      });
      SAN_UNROLL
      for (int e = 0; e < KE; ++e) {
        if constexpr (!S::is_whole) __syncwarp();  // else the compiler loads all weights at once and spills registers
        const auto term = Pack<4, float>::load(terms + 16 * (hidden * KE + e) + 2 * team.column);
        const auto shift = layers.shift(team, hidden, e);
        SAN_UNROLL
        for (int n = 0; n < 4; ++n) {
          const float of_relu = u[e][n] > -shift.data[n % 2] ? gu[e][n] : 0;
          gu[e][n] = term.data[n % 2] * u[e][n] + (of_relu + term.data[2 + n % 2]);
        }
        multiply_all(g, F(gu[e][0], gu[e][1]), F(gu[e][2], gu[e][3]), right + (hidden * KE + e) * D * kWarp);
      }
    });
  }
};

// Blocks that must fit into a multiprocessor: as many warps as the compiler can serve without spilling registers.
template <class F, class S>
constexpr int resident_blocks_of_gradients() {
  constexpr bool is_accurate = std::is_same_v<F, Operand<true>>;
  if (S::relation == 1) return 24 / kWarps;
  return S::relation == 3 && !is_accurate ? 16 / kWarps : S::relation == 5 && !is_accurate ? 12 / kWarps : 1;
}

// Writes the sums of g, the gradient of a1 before its ReLU: to [pixels, d] or, with kAround, their negatives to [padded
// pixels, d]. A block computes S::relation tiles of channels.
//
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32: 14 mma for 16 pairs; reads 157 MB of
// gz and 40 MB of maps; 0.07 ms for center and 0.09 for around, limited by instruction issue. Measured on an H200,
// before the statistics were part of it: 0.18 and 0.19 ms.
template <class F, class S, bool kAround>
__global__ void __launch_bounds__(kTeamThreads, resident_blocks_of_gradients<F, S>())
    pair_gradient_kernel(Pairs p, ActivationGradient<F, S> gradient, Plan plan, float* out) {
  constexpr int D = S::relation;
  const Job<S::is_whole> job(plan);
  const int first_tile = job.chunk * D;
  const Team team(plan.warps);
  PixelRows<S, kAround, 2> rows(p, team, (int64_t(job.block) * plan.teams() + team.index) * 16);
  float sums[4 * D] = {};
  for (Offset offset(team, p); offset.position < p.positions(); offset.advance(team.warps, p.kernel_size)) {
    rows.move(team, offset);
    if (kAround && !__any_sync(~0u, rows.is_pair[0] || rows.is_pair[1])) continue;
    float kept[S::is_whole ? D : 1][4];
    if constexpr (S::is_whole) for_each_tile<D>(D, [&](int c) { rows.activate(c, kept[c]); });
    const auto activation = [&](int c, float (&a1)[4]) {
      if constexpr (S::is_whole) {
        SAN_UNROLL
        for (int n = 0; n < 4; ++n) a1[n] = kept[c][n];
      } else {
        rows.activate(c, a1);
      }
    };
    float g[D][4] = {};
    gradient.add(rows, team, offset, job.chunk, activation, g);
    SAN_UNROLL
    for (int c = 0; c < D; ++c) {
      if (!S::is_whole && first_tile + c >= p.tiles) break;
      if constexpr (!S::is_whole) __syncwarp();  // else the compiler loads all tiles at once and spills registers
      float a1[4];
      activation(first_tile + c, a1);
      SAN_UNROLL
      for (int n = 0; n < 4; ++n) sums[4 * c + n] += a1[n] > 0 && rows.is_pair[n / 2] ? g[c][n] : 0;
    }
  }
  sum_over_team(team, reinterpret_cast<float*>(shared_memory_base()), sums);
  if (team.member > 0) return;
  SAN_UNROLL
  for (int n = 0; n < 4 * D; ++n) {
    const int channel = 8 * (first_tile + n / 4) + team.column + n % 2;
    const Pixel<kAround>& pixel = rows.pixels[n % 4 / 2];
    if (pixel.exists && channel < p.d) out[int64_t(pixel.index) * p.d + channel] = kAround ? -sums[n] : sums[n];
  }
}

// What finish_kernel reads and writes.
struct UnfinishedGradients {
  const float *raw_center, *raw_around, *norm, *origin;
  Footprint f;
  int64_t pixels;
  int channels;
  const float* padded;           // the sums of around [padded pixels, channels]
  float *to_center, *to_around;  // [pixels, channels]; to_center already holds its sums
};

// Finishes the gradients of the maps, and writes partial sums for the gradients of scale and shift, [slices, channels,
// 2]. One thread computes a slice of the pixels in a channel.
//
// Predicted for SAN10's stage 2 at batch 32 (18 channels) on an H100: reads 30 MB, writes 14 MB; no shared memory;
// 0.015 ms, of memory bandwidth.
__global__ void __launch_bounds__(kThreads)
    finish_kernel(UnfinishedGradients x, int64_t slices, int64_t pixels_per_slice, double* partial) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, slice = thread / x.channels;
  if (slice >= slices) return;
  const int c = static_cast<int>(thread - slice * x.channels);
  const float mean = x.norm[c], scale = x.norm[x.channels + c];
  double of_scale = 0, of_shift = 0;
  const int64_t first = slice * pixels_per_slice, end = std::min(first + pixels_per_slice, x.pixels);
  for (int64_t pixel = first; pixel < end; ++pixel) {
    const int64_t at = pixel * x.channels + c;
    const int image = static_cast<int>(pixel) / static_cast<int>(x.f.pixels());
    const float origin = x.origin[int64_t(image) * x.channels + c];
    const float center = x.to_center[at], around = folded(x.padded, x.f, x.channels, pixel, c);
    of_shift += center;
    of_scale += double(x.raw_center[at] - origin - mean) * center + double(x.raw_around[at] - origin) * around;
    x.to_center[at] = scale * center, x.to_around[at] = scale * around;
  }
  partial[2 * thread] = of_scale, partial[2 * thread + 1] = of_shift;
}

// Writes the gradient of norm [3, channels] from the sums for scale and shift.
struct PlaceNorm {
  const float* norm;
  int channels;
  float* out;

  __device__ __forceinline__ void operator()(int64_t column, const double* sums) const {
    if (column % 2 == 1) return;
    const int64_t c = column / 2;
    out[c] = static_cast<float>(-norm[channels + c] * sums[1]);
    out[channels + c] = static_cast<float>(sums[0]), out[2 * channels + c] = static_cast<float>(sums[1]);
  }
};

struct PairGradients {
  Tensor center, around, norm;

  PairGradients(const Tensor& center, const Tensor& norm)
      : center(torch::stable::new_empty(center, center.sizes())),
        around(torch::stable::new_empty(center, center.sizes())),
        norm(result_like(norm, center)) {}
};

// Writes the gradients of center, around and norm of a non-empty problem, after prepare_kernel.
template <class F, class S>
void pair_gradients(PairWork& work, const ActivationGradient<F, S>& gradient, PairGradients& out) {
  const Pairs& p = work.pairs;
  const int chunks = (p.tiles + S::relation - 1) / S::relation;
  float *to_center = out.center.mutable_data_ptr<float>(), *padded = work.take(p.padded_pixels() * p.d);
  const Plan plan = Plan::for_groups(p, (p.pixels() + 15) / 16, chunks);
  const Plan padded_plan = Plan::for_groups(p, (p.padded_pixels() + 15) / 16, chunks);
  constexpr size_t kBytes = bytes_of_team_sums(4 * S::relation);
  SAN_LAUNCH_SHARED((pair_gradient_kernel<F, S, false>), plan.grid(), kTeamThreads, kBytes, work.stream(), p, gradient,
                    plan, to_center);
  SAN_LAUNCH_SHARED((pair_gradient_kernel<F, S, true>), padded_plan.grid(), kTeamThreads, kBytes, work.stream(), p,
                    gradient, padded_plan, padded);
  constexpr int64_t kSlices = 8192;  // enough threads to fill an H100
  const int64_t per_slice = (p.pixels() + kSlices - 1) / kSlices, slices = (p.pixels() + per_slice - 1) / per_slice;
  double* partial = work.take<double>(2 * slices * p.d);
  const UnfinishedGradients unfinished{work.raw_center,
                                       work.raw_around,
                                       work.norm,
                                       work.origin,
                                       work.f,
                                       p.pixels(),
                                       p.d,
                                       padded,
                                       to_center,
                                       out.around.mutable_data_ptr<float>()};
  SAN_LAUNCH(finish_kernel, blocks_for(slices * p.d), kThreads, work.stream(), unfinished, slices, per_slice, partial);
  sum_rows(PartialSums<double>{partial, 2 * p.d}, slices, 2 * p.d,
           PlaceNorm{work.norm, p.d, out.norm.mutable_data_ptr<float>()}, work.stream());
}

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
  Tensor weight1, shift2, weight2;
};

// Writes the gradients of the layers.
template <class F, class S>
void layer_gradients(LayerWork& work, const LogitGradients& gz, const LayerGradients& out) {
  const Pairs& p = work.pairs;
  const auto weight1 = work.matrix<F>(work.layer1, 2, p.tiles),
             weight2 = work.matrix<F>(work.layer2.transposed(), 2, gz.tiles);
  const auto shift2 = work.shift2(2);
  prepare(work.stream(), weight1, weight2, shift2);
  constexpr int KG = kLogitTiles<S>;
  const int column_chunks = (p.tiles + S::relation - 1) / S::relation,
            logit_chunks = (work.G + 16 * KG - 1) / (16 * KG);
  const Plan plan = Plan::for_sums(p, weight1.chunks, std::max(column_chunks, logit_chunks));
  const Partial layout(S(), plan);
  float* partial = work.take(plan.blocks * layout.size);
  constexpr size_t kBytes = bytes_of_team_sums(4 * std::max(S::relation, 2 * KG));
  const Layers<F, S> layers{weight1.chunks, weight1.to, shift2.to, weight2.to};
  SAN_LAUNCH_SHARED((layer_gradient_kernel<F, S>), plan.grid(), kTeamThreads, kBytes, work.stream(), p, gz, layers,
                    plan, layout, partial);
  const PlaceLayers place{{{Floats(out.weight1), work.E, p.d, layout.pitch, 0},
                           {Floats(out.weight2), work.G, work.E, layout.width, layout.weight2},
                           {Floats(out.shift2), 1, work.E, layout.width, layout.shift2}}};
  sum_rows(PartialSums<float>{partial, layout.size}, plan.blocks, layout.size, place, work.stream());
}

}  // namespace
}  // namespace san::cuda
