// Gradients of center, around and norm, for pair_covariance and attend_pairs. A `Source` recomputes the gradient of a1
// for each pair.
//
// The same kernel runs twice: for pixels of center, whose gradients are sums over the footprint, and for padded pixels
// of around, whose gradients are sums over the pixels of center whose footprints contain them. Each sum stays in the
// registers of one warp, without atomics. finish_kernel then adds the gradients of reflected pixels and applies the
// derivatives of the norm.
#pragma once
#include "pairs.cuh"

namespace san::cuda {
namespace {

// Blocks that must fit into a multiprocessor: as many warps as the compiler can serve without spilling registers.
template <class F, class S>
constexpr int resident_blocks_of_gradients() {
  constexpr bool is_accurate = std::is_same_v<F, Operand<true>>;
  if (S::relation == 1) return 24 / kWarps;
  return S::relation == 3 && !is_accurate ? 20 / kWarps : S::relation == 5 && !is_accurate ? 12 / kWarps : 1;
}

// Writes the sums of g, the gradient of a1 before its ReLU: to [pixels, d] or, with kAround, their negatives to [padded
// pixels, d]. A block computes S::relation tiles of channels.
//
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32, all limited by instruction issue.
// pair_covariance: 9 mma for 16 pairs; reads and writes 40 MB; 0.05 ms each for center and around. attend_pairs: 14
// mma; reads another 157 MB of gz; 0.07 and 0.08 ms. Measured on an H200: 0.18 and 0.19 ms.
template <class F, class S, bool kAround, class Source>
__global__ void __launch_bounds__(kTeamThreads, resident_blocks_of_gradients<F, S>())
    pair_gradient_kernel(Pairs p, Source source, Plan plan, float* out) {
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
    source.add(rows, team, offset, job.chunk, activation, g);
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
        norm(torch::stable::new_zeros(norm, norm.sizes())) {}
};

// Writes the gradients of a non-empty problem, after prepare_kernel.
template <class F, class S, class Source>
void pair_gradients(PairWork& work, const Source& source, PairGradients& out) {
  const Pairs& p = work.pairs;
  const int chunks = (p.tiles + S::relation - 1) / S::relation;
  float *to_center = out.center.mutable_data_ptr<float>(), *padded = work.take(p.padded_pixels() * p.d);
  const Plan plan = Plan::for_groups(p, (p.pixels() + 15) / 16, chunks);
  const Plan padded_plan = Plan::for_groups(p, (p.padded_pixels() + 15) / 16, chunks);
  constexpr size_t kBytes = bytes_of_team_sums(4 * S::relation);
  SAN_LAUNCH_SHARED((pair_gradient_kernel<F, S, false, Source>), plan.grid(), kTeamThreads, kBytes, work.stream(), p,
                    source, plan, to_center);
  SAN_LAUNCH_SHARED((pair_gradient_kernel<F, S, true, Source>), padded_plan.grid(), kTeamThreads, kBytes, work.stream(),
                    p, source, padded_plan, padded);
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

}  // namespace
}  // namespace san::cuda
