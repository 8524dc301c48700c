// pair_covariance: mean and covariance of a1 over all pairs, forward and backward.
// Definition: san/ops/fused_reference.py.
//
// Forward sums a1 - typical and its products, where `typical` is near the mean, so the sums do not cancel. A block sums
// its pairs in float32, and blocks are summed in double. Backward multiplies a1 of each pair with a [d, d] matrix.
#include <tuple>

#include "pair_gradients.cuh"

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
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32: 6 mma for 8 pairs, 4 KB of shared
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
void forward(PairWork& work, Tensor& mean, Tensor& covariance) {
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

// The gradient of a1: constant + matrix a1.
template <class F, class S>
struct CovarianceSource {
  const float* constant;  // [chunks * 8 KD]
  const F* matrix;        // [chunk][tile of a1][KD], an operand for each lane

  template <class Rows, class Activation, int KD>
  __device__ __forceinline__ void add(const Rows& rows, const Team& team, const Offset&, int chunk,
                                      const Activation& activation, float (&g)[KD][4]) const {
    first_layer<F, S>(rows.p, activation, Loaded<F>{matrix + team.lane}, chunk * rows.p.tiles * KD,
                      constant + chunk * 8 * KD + team.column, g);
  }
};

// constant = (grad_mean - (G + G^T) mean) / pairs, padded with zeros.
struct ConstantJob {
  const float *grad_mean, *grad_covariance, *mean;
  int d;
  double per_pair;
  int64_t elements;
  float* to;

  __device__ __forceinline__ void write(int64_t i) const {
    double sum = i < d ? grad_mean[i] : 0;
    for (int64_t j = 0; i < d && j < d; ++j) {
      sum -= (double(grad_covariance[i * d + j]) + double(grad_covariance[j * d + i])) * mean[j];
    }
    to[i] = static_cast<float>(sum * per_pair);
  }
};

template <class F, class S>
void backward(PairWork& work, const Tensor& grad_mean, const Tensor& grad_covariance, const Tensor& mean,
              PairGradients& out) {
  const Pairs& p = work.pairs;
  const int64_t elements = (p.tiles + S::relation - 1) / S::relation * 8 * S::relation;
  const Floats grads = work.keep(grad_covariance);
  const auto matrix = work.matrix<F>({grads, p.d, p.d, p.d, 1, 1 / p.count(), true}, S::relation, p.tiles);
  const ConstantJob constant{work.keep_float(grad_mean),
                             static_cast<const float*>(grads.data),
                             work.keep_float(mean),
                             p.d,
                             1 / p.count(),
                             elements,
                             work.take(elements)};
  prepare(work.stream(), work.center, work.around, matrix, constant);
  pair_gradients<F, S>(work, CovarianceSource<F, S>{constant.to, matrix.to}, out);
}

std::tuple<Tensor, Tensor> pair_covariance(const Tensor& center, const Tensor& around, const Tensor& norm,
                                           int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, norm, kernel_size, products);
  check_supported(center, products);
  const OperatorGuard guard("pair_covariance", center);
  const int64_t d = center.size(3);
  Tensor mean = torch::stable::new_empty(norm, {d}), covariance = torch::stable::new_empty(norm, {d, d});
  with_stage(ScalarType::Float, tf32, d, 0, 0, [&]<class F, class S>(F, S) {
    PairWork work(center, around, norm, f, relation_tiles<S>(center));
    forward<F, S>(work, mean, covariance);
  });
  return {mean, covariance};
}

std::tuple<Tensor, Tensor, Tensor> pair_covariance_backward(const Tensor& grad_mean, const Tensor& grad_covariance,
                                                            const Tensor& center, const Tensor& around,
                                                            const Tensor& norm, const Tensor& mean, int64_t kernel_size,
                                                            int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, norm, kernel_size, products);
  const int64_t d = center.size(3);
  check_statistics({&grad_mean, &mean}, center, {d}), check_statistics({&grad_covariance}, center, {d, d});
  check_supported(center, products);
  const OperatorGuard guard("pair_covariance_backward", center);
  PairGradients out(center, norm);
  if (center.numel() == 0) return {out.center, out.around, out.norm};
  with_stage(ScalarType::Float, tf32, d, 0, 0, [&]<class F, class S>(F, S) {
    PairWork work(center, around, norm, f, relation_tiles<S>(center));
    backward<F, S>(work, grad_mean, grad_covariance, mean, out);
  });
  return {out.center, out.around, out.norm};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("pair_covariance", TORCH_BOX(&san::cuda::pair_covariance));
  m.impl("pair_covariance_backward", TORCH_BOX(&san::cuda::pair_covariance_backward));
}
