// pair_covariance: mean and covariance of a1 over all pairs, forward and backward. Definition: san/ops/definitions.py.
//
// Forward sums a1 - origin and its products. The origin is near the mean, so the sums do not cancel. A block sums its
// pairs in float32, and blocks are summed in double. Backward multiplies a1 of each pair with a [d, d] matrix.
#include <tuple>

#include "pair_gradients.cuh"

namespace san::cuda {
namespace {

// Sums over pairs of (a1 - origin) (a1 - origin)^T and of a1 - origin. Each block computes one strip of the rows and
// one chunk of the columns, and writes its part of the partial sums [strips * 16 KM, chunks * 8 KD] and [chunks * 8
// KD]. With kWhole, there is one strip and one chunk, and the left factor reuses the tiles of the right one.
//
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32: 6 mma and 100 instructions for 8
// pairs, 14 KB of shared memory; reads 20 MB; 0.066 ms, limited by instruction issue.
template <class F, int KM, int KD, bool kWhole, class T = typename F::Value>
__global__ void __launch_bounds__(kThreads, 1) gram_kernel(Pairs<T> p, Plan plan, T* partial) {
  T* shared = reinterpret_cast<T*>(shared_memory_base());
  const Job<kWhole> job(plan);
  const int strip = job.strip, chunk = job.chunk;
  const Team mine(plan.split);
  T* origin = shared + plan.teams() * Columns<T>::bytes(p) / sizeof(T);  // [pitch]
  for (int channel = threadIdx.x; channel < p.pitch(); channel += kThreads) origin[channel] = p.origin(channel);
  __syncthreads();
  T sums[(4 * KM + 1) * KD] = {};  // of products [KM, KD, 4] and of deviations [KD]
  T middles[kWhole ? KD : 1];
  if constexpr (kWhole) for_each_tile<KD>(KD, [&](int c) { middles[c] = origin[8 * c + mine.row]; });
  const int teams = plan.teams();
  for (int64_t first = int64_t(job.block) * teams; first * 8 < p.pixels(); first += int64_t(plan.blocks) * teams) {
    Columns<T> columns(p, mine, first + mine.team, shared, origin);
    __syncthreads();
    const auto deviation = [&](int c) {
      if (!kWhole && c >= p.tiles) return Pack<2, T>{};
      const T middle = kWhole ? middles[c] : origin[8 * c + mine.row];
      const Pack<2, T> a1 = columns.activate(c);
      return Pack<2, T>{a1.data[0] - middle, a1.data[1] - middle};
    };
    Offset offset;
    offset.advance(mine.member, p.kernel_size);
    for (; offset.position < p.positions(); offset.advance(plan.split, p.kernel_size)) {
      columns.move(mine, offset);
      F right[KD];
      SAN_UNROLL
      for (int c = 0; c < KD; ++c) {
        const Pack<2, T> both = deviation(chunk * KD + c);
        right[c] = F(both.data[0], both.data[1]);
        sums[4 * KM * KD + c] += both.data[0] + both.data[1];
      }
      const auto left = [&](int c) {
        if constexpr (kWhole) return c < KD ? right[c < KD ? c : 0] : F(0, 0);
        const Pack<2, T> both = deviation(c);
        return F(both.data[0], both.data[1]);
      };
      SAN_UNROLL
      for (int m = 0; m < KM; ++m) {
        const F upper = left(2 * (strip * KM + m)), lower = left(2 * (strip * KM + m) + 1);
        SAN_UNROLL
        for (int c = 0; c < KD; ++c) {
          multiply(four_of(sums, 4 * (m * KD + c)), upper, lower, right[c]);
        }
      }
    }
    __syncthreads();
  }
  sum_over_team(Team(kWarps), shared, sums);
  if (threadIdx.x >= kWarp) return;
  const int pitch = plan.chunks * 8 * KD, rows = plan.strips * 16 * KM;
  T* out = partial + int64_t(job.block) * (rows + 1) * pitch + chunk * 8 * KD;
  store_sums<KM, KD>(mine, sums, 0, out + int64_t(strip) * 16 * KM * pitch, pitch);
  if (strip > 0) return;
  SAN_UNROLL
  for (int c = 0; c < KD; ++c) store_row_sums(mine, sums[4 * KM * KD + c], out + int64_t(rows) * pitch + 8 * c);
}

// Computes mean [d] and covariance [d, d] from gram [rows, pitch] and sums [pitch] over all pairs.
//
// Predicted for an H100: moves 10 KB; 0.003 ms, for the launch.
template <class T>
__global__ void covariance_kernel(Pairs<T> p, const double* gram, const double* sums, int pitch, T* mean,
                                  T* covariance) {
  const double pairs = static_cast<double>(p.pixels() * p.positions());
  SAN_FOR_EACH(index, int64_t(p.d) * p.d) {
    const int i = static_cast<int>(index / p.d), j = static_cast<int>(index % p.d);
    const double product = (gram[int64_t(i) * pitch + j] + gram[int64_t(j) * pitch + i]) / 2;
    covariance[index] = static_cast<T>(product / pairs - sums[i] / pairs * (sums[j] / pairs));
    if (j == 0) mean[i] = static_cast<T>(p.origin(i) + sums[i] / pairs);
  }
}

template <int KM, int KD, bool kWhole, class F>
void forward(PairWork<F>& work, Tensor& mean, Tensor& covariance) {
  using T = typename F::Value;
  const Pairs<T>& p = work.pairs;
  work.prepare();
  const Plan plan(p, (p.pixels() + 7) / 8, (p.tiles + 2 * KM - 1) / (2 * KM), (p.tiles + KD - 1) / KD, kSumBlocks);
  const size_t origins = p.pitch() * sizeof(T), coefficients = Columns<T>::bytes(p);
  const size_t bytes = work.shared_bytes(plan, coefficients, (4 * KM + 1) * KD) + origins;
  const int rows = plan.strips * 16 * KM, pitch = plan.chunks * 8 * KD, size = (rows + 1) * pitch;
  T* partial = work.take(int64_t(plan.blocks) * size);
  SAN_LAUNCH_SHARED((gram_kernel<F, KM, KD, kWhole>), plan.blocks * plan.jobs(), kThreads, bytes, work.stream(), p,
                    plan, partial);
  double* total = work.template take<double>(size);
  sum_blocks(partial, plan.blocks, size, Part<double>{total, 1, size, size, 0, size}, work.stream());
  SAN_LAUNCH(covariance_kernel<T>, blocks_for(int64_t(p.d) * p.d), kThreads, work.stream(), p, total,
             total + int64_t(rows) * pitch, pitch, mean.mutable_data_ptr<T>(), covariance.mutable_data_ptr<T>());
}

// The gradient of a1: constant + matrix a1.
template <class F, int KD>
struct CovarianceSource {
  using T = typename F::Value;

  const T* constant;  // [chunks * 8 KD]
  const F* matrix;    // [chunk][tile of a1][KD], an operand for each lane

  template <int kColumns, int KT, class Rows, class Activation>
  __device__ __forceinline__ void add(const Rows& rows, const Team& mine, const Offset&, int chunk,
                                      const Activation& activation, T (&g)[KD][4]) const {
    hidden_of<KD, KT>(activation, matrix + int64_t(chunk) * rows.p.tiles * KD * kWarp + mine.lane,
                      constant + chunk * 8 * KD + mine.pair, rows.p.tiles, g);
  }
};

// constant = (grad_mean - (G + G^T) mean) / pairs, padded with zeros.
//
// Predicted for an H100: moves 1 KB; 0.003 ms, for the launch.
template <class T>
__global__ void constant_kernel(const T* grad_mean, const T* grad_covariance, const T* mean, int d, double pairs,
                                int elements, T* constant) {
  SAN_FOR_EACH(i, elements) {
    double sum = i < d ? grad_mean[i] : 0;
    for (int64_t j = 0; i < d && j < d; ++j) {
      sum -= (double(grad_covariance[i * d + j]) + double(grad_covariance[j * d + i])) * mean[j];
    }
    constant[i] = static_cast<T>(sum / pairs);
  }
}

// The template arguments of a kernel: tiles in a chunk, whether they are all tiles, and whether some channels are
// products.
template <int KD, bool kWhole, bool kProducts>
struct Compiled {};

template <int KD, bool kWhole, bool kProducts, class F>
void backward(PairWork<F>& work, const Footprint& f, const Tensor& grad_mean, const Tensor& grad_covariance,
              const Tensor& mean, PairGradients& out) {
  using T = typename F::Value;
  const Pairs<T>& p = work.pairs;
  const double pairs = static_cast<double>(p.pixels() * p.positions());
  const int elements = (p.tiles + KD - 1) / KD * 8 * KD;
  T* constant = work.take(elements);
  const T* grads = work.keep(grad_covariance);
  const F* matrix = work.pack({grads, p.d, p.d, p.d, 1, 1, 1 / pairs, true}, KD, p.tiles);
  work.prepare();
  SAN_LAUNCH(constant_kernel<T>, blocks_for(elements), kThreads, work.stream(), work.keep(grad_mean), grads,
             work.keep(mean), p.d, pairs, elements, constant);
  pair_gradients<KD, kWhole, kProducts>(work, f, CovarianceSource<F, KD>{constant, matrix}, out);
}

std::tuple<Tensor, Tensor> pair_covariance(const Tensor& center, const Tensor& around, const Tensor& shift,
                                           int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, shift, kernel_size, products);
  const OperatorGuard guard("pair_covariance", center);
  const int64_t d = center.size(3);
  Tensor mean = torch::stable::new_empty(shift, {d}), covariance = torch::stable::new_empty(shift, {d, d});
  with_operand(center.scalar_type(), center.scalar_type(), tf32, [&](auto operand) {
    PairWork<decltype(operand)> work(center, around, shift, f, products);
    if constexpr (std::is_same_v<typename decltype(operand)::Value, double>) {
      forward<1, 3, false>(work, mean, covariance);
    } else {
      const int tiles = work.pairs.tiles;
      if (tiles == 1) return forward<1, 1, true>(work, mean, covariance);
      if (tiles == 3) return forward<2, 3, true>(work, mean, covariance);
      if (tiles == 5) return forward<3, 5, true>(work, mean, covariance);
      forward<1, 9, false>(work, mean, covariance);
    }
  });
  return {mean, covariance};
}

std::tuple<Tensor, Tensor, Tensor> pair_covariance_backward(const Tensor& grad_mean, const Tensor& grad_covariance,
                                                            const Tensor& center, const Tensor& around,
                                                            const Tensor& shift, const Tensor& mean,
                                                            int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, shift, kernel_size, products);
  const int64_t d = center.size(3);
  check_like_pairs(center, grad_mean, {d}, "grad_mean"), check_like_pairs(center, mean, {d}, "mean");
  check_like_pairs(center, grad_covariance, {d, d}, "grad_covariance");
  const OperatorGuard guard("pair_covariance_backward", center);
  PairGradients out(center, shift);
  if (center.numel() == 0) return {out.center, out.around, out.shift};
  with_operand(center.scalar_type(), center.scalar_type(), tf32, [&](auto operand) {
    PairWork<decltype(operand)> work(center, around, shift, f, products);
    const auto run = [&]<int KD, bool kWhole, bool kProducts>(Compiled<KD, kWhole, kProducts>) {
      backward<KD, kWhole, kProducts>(work, f, grad_mean, grad_covariance, mean, out);
    };
    if constexpr (std::is_same_v<typename decltype(operand)::Value, double>) {
      run(Compiled<3, false, true>());
    } else {
      const int tiles = work.pairs.tiles;
      if (products > 0) return run(Compiled<5, false, true>());
      if (tiles == 1) return run(Compiled<1, true, false>());
      if (tiles == 3) return run(Compiled<3, true, false>());
      if (tiles == 5) return run(Compiled<5, true, false>());
      run(Compiled<9, false, false>());
    }
  });
  return {out.center, out.around, out.shift};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("pair_covariance", TORCH_BOX(&san::cuda::pair_covariance));
  m.impl("pair_covariance_backward", TORCH_BOX(&san::cuda::pair_covariance_backward));
}
