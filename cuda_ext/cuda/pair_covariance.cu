// The mean and covariance of a1 over all pairs, for attend_pairs_of_batch. Definition: pair_covariance in
// san/ops/fused_reference.py.
//
// The kernel sums a1 - typical and its products, where `typical` is near the mean, so the sums do not cancel. A block
// sums its pairs in float32, and blocks are summed in double.
#include "pairs.cuh"

namespace san::cuda {
namespace {

// A value near the mean of a channel of a1: the median of three means over some pairs each, so one outlier does no
// harm.
__device__ __forceinline__ float typical_a1(const Pairs& p, int channel) {
  constexpr int kSamples = 8;
  if (p.pixels() == 0) return 0;
  return middle_of_three([&](int part) {
    float mean = 0;
    SAN_ROLLED
    for (int n = 0; n < kSamples; ++n) {
      const Pixel<false> pixel(p, p.pixels() * (part + 3 * n) / (3 * kSamples));
      const float partner = p.around[int64_t(pixel.partners) * p.pitch() + channel];
      mean += rectified(p.center[int64_t(pixel.index) * p.pitch() + channel] - partner) / kSamples;
    }
    return mean;
  });
}

// Tiles of 16 rows in a strip of the product.
template <class S>
constexpr int kRowTiles = S::is_whole ? (S::relation + 1) / 2 : 1;

// Sums over pairs of deviations a1 - typical and of their products. Each block computes one strip of the rows and one
// chunk of the columns, and writes its part of the partial sums of products [strips * 16 KM, chunks * 8 KD] and of
// deviations [chunks * 8 KD]. If S is whole, there is one strip and one chunk, and the left factor reuses the tiles of
// the right one.
//
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32: 6 mma for 8 pairs, 6 KB of shared
// memory; reads 20 MB; 0.05 ms, limited by instruction issue. Measured on an H200: 0.13 ms.
template <class F, class S>
__global__ void __launch_bounds__(kTeamThreads, 1) gram_kernel(Pairs p, Plan plan, float* partial) {
  constexpr int KM = kRowTiles<S>, KD = S::relation;
  float* shared = reinterpret_cast<float*>(shared_memory_base());
  const Job<S::is_whole> job(plan);
  const Team team(plan.warps);
  float* typical = shared + bytes_of_team_sums(4 * KM * KD) / sizeof(float);  // [pitch]
  for (int channel = threadIdx.x; channel < p.pitch(); channel += kTeamThreads)
    typical[channel] = typical_a1(p, channel);
  __syncthreads();
  float kept[S::is_whole ? KD : 1];
  if constexpr (S::is_whole) for_each_tile<KD>(KD, [&](int c) { kept[c] = typical[8 * c + team.row]; });
  float products[KM * KD][4] = {}, sums[KD] = {};
  const int teams = plan.teams();
  for (int64_t group = int64_t(job.block) * teams + team.index; group * 8 < p.pixels(); group += plan.blocks * teams) {
    PixelColumns<S> columns(p, team, group * 8);
    const auto deviation = [&](int c) {
      Pack<2, float> two{};
      if (!S::is_whole && c >= p.tiles) return two;
      const float middle = S::is_whole ? kept[S::is_whole ? c : 0] : typical[8 * c + team.row];
      const Pack<2, float> a1 = columns.activate(c);
      SAN_UNROLL
      for (int n = 0; n < 2; ++n) two.data[n] = columns.pixels[n].exists ? a1.data[n] - middle : 0;
      return two;
    };
    for (Offset offset(team, p); offset.position < p.positions(); offset.advance(team.warps, p.kernel_size)) {
      columns.move(team, offset);
      F right[KD];
      SAN_UNROLL
      for (int c = 0; c < KD; ++c) {
        const Pack<2, float> two = deviation(job.chunk * KD + c);
        right[c] = F(two.data[0], two.data[1]);
        sums[c] += two.data[0] + two.data[1];
      }
      const auto left = [&](int c) {
        if constexpr (S::is_whole) return c < KD ? right[c < KD ? c : 0] : F(0, 0);
        const Pack<2, float> two = deviation(c);
        return F(two.data[0], two.data[1]);
      };
      SAN_UNROLL
      for (int m = 0; m < KM; ++m) {
        const F upper = left(2 * (job.strip * KM + m)), lower = left(2 * (job.strip * KM + m) + 1);
        SAN_UNROLL
        for (int c = 0; c < KD; ++c) multiply(products[m * KD + c], upper, lower, right[c]);
      }
    }
  }
  sum_over_team(Team(kWarps), shared, products), sum_over_team(Team(kWarps), shared, sums);
  if (threadIdx.x >= kWarp) return;
  const int pitch = plan.chunks * 8 * KD, rows = plan.strips * 16 * KM;
  float* out = partial + int64_t(job.block) * (rows + 1) * pitch + job.chunk * 8 * KD;
  store_sums<KD>(team, products, out + int64_t(job.strip) * 16 * KM * pitch, pitch);
  if (job.strip > 0) return;
  SAN_UNROLL
  for (int c = 0; c < KD; ++c) store_row_sums(team, sums[c], out + int64_t(rows) * pitch + 8 * c);
}

struct PlaceTotal {
  double* out;

  __device__ __forceinline__ void operator()(int64_t column, const double* sum) const { out[column] = *sum; }
};

// Computes mean [d] and covariance [d, d] from the sums of products [rows, pitch] and of deviations [pitch].
//
// Predicted for an H100: moves 10 KB; 0.003 ms, for the launch.
__global__ void covariance_kernel(Pairs p, const double* products, const double* sums, int pitch, float* mean,
                                  float* covariance) {
  SAN_FOR_EACH(index, int64_t(p.d) * p.d) {
    const int i = static_cast<int>(index / p.d), j = static_cast<int>(index % p.d);
    const double product = (products[int64_t(i) * pitch + j] + products[int64_t(j) * pitch + i]) / 2;
    covariance[index] = static_cast<float>(product / p.count() - sums[i] / p.count() * (sums[j] / p.count()));
    if (j == 0) mean[i] = static_cast<float>(typical_a1(p, i) + sums[i] / p.count());
  }
}

template <class F, class S>
void covariance_of(PairWork& work, const Tensor& mean, const Tensor& covariance) {
  constexpr int KM = kRowTiles<S>, KD = S::relation;
  const Pairs& p = work.pairs;
  prepare(work.stream(), work.center, work.around);
  const Plan plan = Plan::for_sums(p, (p.tiles + 2 * KM - 1) / (2 * KM), (p.tiles + KD - 1) / KD);
  const int rows = plan.strips * 16 * KM, pitch = plan.chunks * 8 * KD, size = (rows + 1) * pitch;
  float* partial = work.take(int64_t(plan.blocks) * size);
  SAN_LAUNCH_SHARED((gram_kernel<F, S>), plan.grid(), kTeamThreads,
                    bytes_of_team_sums(4 * KM * KD) + p.pitch() * sizeof(float), work.stream(), p, plan, partial);
  double* total = work.take<double>(size);
  sum_rows(PartialSums<float>{partial, size}, plan.blocks, size, PlaceTotal{total}, work.stream());
  SAN_LAUNCH(covariance_kernel, blocks_for(int64_t(p.d) * p.d), kThreads, work.stream(), p, total,
             total + int64_t(rows) * pitch, pitch, mean.mutable_data_ptr<float>(),
             covariance.mutable_data_ptr<float>());
}

}  // namespace

void pair_covariance(const Tensor& center, const Tensor& around, const Tensor& norm, const Footprint& f, bool tf32,
                     const Tensor& mean, const Tensor& covariance) {
  with_stage(ScalarType::Float, tf32, center.size(3), 0, 0, [&]<class F, class S>(F, S) {
    PairWork work(center, around, norm, f, relation_tiles<S>(center));
    covariance_of<F, S>(work, mean, covariance);
  });
}

}  // namespace san::cuda
