// pair_covariance: mean and covariance of a1 over all pairs, forward and backward. Definition: tests/ops/oracle.py.
//
// Forward sums a1 - origin and its products in float32, with an origin near the mean so that nothing cancels, over the
// pairs of one block, and over blocks in double. Backward is one product of a1 and a [d, d] matrix for each pair.
#include <tuple>

#include "pair_gradients.cuh"

namespace san::cuda {
namespace {

// A value near the mean of each channel of a1: the middle one of three means of some pairs each, so that no single
// pixel moves it far. One thread per channel.
template <class T>
__global__ void origin_kernel(Pairs<T> p, T* origin) {
  constexpr int kSamples = 16;
  SAN_FOR_EACH(channel, p.pitch()) {
    T means[3] = {};
    for (int n = 0; n < 3 * kSamples && p.pixels() > 0; ++n) {
      const Pixel<T, false> pixel(p, p.pixels() * n / (3 * kSamples));
      Offset offset;
      offset.advance(n * 7 % p.positions(), p.kernel_size);
      T scale, bias;
      bool is_pair;
      pixel.coefficients(p, static_cast<int>(channel), scale, bias);
      const T partner = p.around[int64_t(pixel.partner(p, offset, is_pair)) * p.pitch() + channel];
      means[n % 3] += rectified(scale * partner + bias) / kSamples;
    }
    const T low = means[0] < means[1] ? means[0] : means[1], high = means[0] < means[1] ? means[1] : means[0];
    origin[channel] = means[2] < low ? low : means[2] < high ? means[2] : high;
  }
}

// Sums over pairs of (a1 - origin) (a1 - origin)^T and of a1 - origin. Each block leaves partial
// [strips * 16 KM, chunks * 8 KD] and [chunks * 8 KD]; it works on one strip of the rows and one chunk of the columns.
// With kWhole there is one of each, and the left factor is made of the right one's tiles.
//
// SAN's second stage at batch 32, 4.9 million pairs, TF32: 6 mma and 100 instructions for 8 pairs, 14 KB of shared
// memory; reads 20 MB. Predicted for an H100, at half of its issue rate: 135 us.
template <class F, int KM, int KD, bool kWhole, class T = typename F::Value>
__global__ void __launch_bounds__(kPairThreads, 1)
    gram_kernel(Pairs<T> p, const T* origin, int split, int strips, int chunks, T* partial) {
  T* shared = reinterpret_cast<T*>(shared_memory_base());
  const int jobs = strips * chunks, block = blockIdx.x / jobs, job = blockIdx.x - block * jobs;
  const int strip = kWhole ? 0 : job / chunks, chunk = kWhole ? 0 : job - strip * chunks, blocks = gridDim.x / jobs;
  const Team mine(split);
  T sums[(4 * KM + 1) * KD] = {};  // of products [KM, KD, 4] and of deviations [KD]
  T middles[kWhole ? KD : 1];
  if constexpr (kWhole) for_each_tile<KD>(KD, [&](int c) { middles[c] = origin[8 * c + mine.row]; });
  const int teams = kWarps / split;
  for (int64_t first = int64_t(block) * teams; first * 8 < p.pixels(); first += int64_t(blocks) * teams) {
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
    for (; offset.position < p.positions(); offset.advance(split, p.kernel_size)) {
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
  const int pitch = chunks * 8 * KD, rows = strips * 16 * KM;
  T* out = partial + int64_t(block) * (rows + 1) * pitch + chunk * 8 * KD;
  store_sums<KM, KD>(mine, sums, 0, out + int64_t(strip) * 16 * KM * pitch, pitch);
  if (strip > 0) return;
  SAN_UNROLL
  for (int c = 0; c < KD; ++c) store_row_sums(mine, sums[4 * KM * KD + c], out + int64_t(rows) * pitch + 8 * c);
}

// gram [rows, pitch] and sums [pitch] over all pairs -> mean [d] and covariance [d, d].
template <class T>
__global__ void covariance_kernel(const double* gram, const double* sums, const T* origin, int pitch, int d,
                                  double pairs, T* mean, T* covariance) {
  SAN_FOR_EACH(index, int64_t(d) * d) {
    const int i = static_cast<int>(index / d), j = static_cast<int>(index % d);
    const double product = (gram[int64_t(i) * pitch + j] + gram[int64_t(j) * pitch + i]) / 2;
    covariance[index] = static_cast<T>(product / pairs - sums[i] / pairs * (sums[j] / pairs));
    if (j == 0) mean[i] = static_cast<T>(origin[i] + sums[i] / pairs);
  }
}

template <class F, int KM, int KD, bool kWhole, class T>
void forward(PairWork<T>& work, Tensor& mean, Tensor& covariance) {
  const Pairs<T>& p = work.pairs;
  T* origin = work.template take<T>(p.pitch());
  SAN_LAUNCH(origin_kernel<T>, blocks_for(p.pitch()), kThreads, work.stream(), p, origin);
  const int strips = (p.tiles + 2 * KM - 1) / (2 * KM), chunks = (p.tiles + KD - 1) / KD, jobs = strips * chunks;
  const int64_t groups = (p.pixels() + 7) / 8;
  const int split = split_for(groups * jobs, p.positions(), p.tiles);
  const int64_t needed = (groups * split + kWarps - 1) / kWarps, most = std::max<int64_t>(1, kSumBlocks / jobs);
  const int blocks = static_cast<int>(std::clamp<int64_t>(needed, 1, most));
  const int rows = strips * 16 * KM, pitch = chunks * 8 * KD;
  const size_t sums = size_t(kWarps / 2) * (4 * KM + 1) * KD * kWarp;
  const size_t bytes = std::max(size_t(kWarps / split) * p.tiles * Columns<T>::kCoefficients, sums) * sizeof(T);
  check_shared_memory(bytes, p.d);
  T* partial = work.template take<T>(int64_t(blocks) * (rows + 1) * pitch);
  SAN_LAUNCH_SHARED((gram_kernel<F, KM, KD, kWhole>), blocks * jobs, kPairThreads, bytes, work.stream(), p, origin,
                    split, strips, chunks, partial);
  double* total = work.template take<double>(int64_t(rows + 1) * pitch);
  Parts<double> parts{};
  parts.parts[0] = {total, rows + 1, pitch, pitch, 0, int64_t(rows + 1) * pitch};
  work.total(partial, blocks, parts);
  SAN_LAUNCH(covariance_kernel<T>, blocks_for(int64_t(p.d) * p.d), kThreads, work.stream(), total,
             total + int64_t(rows) * pitch, origin, pitch, p.d, static_cast<double>(p.pixels() * p.positions()),
             mean.mutable_data_ptr<T>(), covariance.mutable_data_ptr<T>());
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

template <class F, int KD, bool kWhole, bool kProducts, class T>
void backward(PairWork<T>& work, const Footprint& f, const Tensor& grad_mean, const Tensor& grad_covariance,
              const Tensor& mean, PairGradients& out) {
  const Pairs<T>& p = work.pairs;
  const double pairs = static_cast<double>(p.pixels() * p.positions());
  const int elements = (p.tiles + KD - 1) / KD * 8 * KD;
  T* constant = work.template take<T>(elements);
  const T* grads = grad_covariance.const_data_ptr<T>();
  SAN_LAUNCH(constant_kernel<T>, blocks_for(elements), kThreads, work.stream(), grad_mean.const_data_ptr<T>(), grads,
             mean.const_data_ptr<T>(), p.d, pairs, elements, constant);
  const Matrix<T> matrix{grads, p.d, p.d, p.d, 1, 1 / pairs, true};
  const CovarianceSource<F, KD> source{constant, work.template pack<F>(matrix, KD, p.tiles)};
  pair_gradients<F, KD, kWhole, kProducts>(work, f, source, out);
}

std::tuple<Tensor, Tensor> pair_covariance(const Tensor& center, const Tensor& around, const Tensor& shift,
                                           int64_t kernel_size, int64_t products, bool tf32) {
  const Footprint f = check_pairs(center, around, shift, kernel_size, products);
  const OperatorGuard guard("pair_covariance", center);
  const int64_t d = center.size(3);
  Tensor mean = torch::stable::new_empty(shift, {d}), covariance = torch::stable::new_empty(shift, {d, d});
  with_pair_type(center, [&](auto zero) {
    using T = decltype(zero);
    PairWork<T> work(center, around, shift, f, products);
    with_operand<T>(tf32, [&](auto operand) {
      using F = decltype(operand);
      if constexpr (std::is_same_v<T, double>) {
        forward<F, 1, 3, false>(work, mean, covariance);
      } else {
        switch (work.pairs.tiles) {
          case 1:
            return forward<F, 1, 1, true>(work, mean, covariance);
          case 3:
            return forward<F, 2, 3, true>(work, mean, covariance);
          case 5:
            return forward<F, 3, 5, true>(work, mean, covariance);
          default:
            return forward<F, 1, 9, false>(work, mean, covariance);
        }
      }
    });
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
  const Tensor to_mean = torch::stable::contiguous(grad_mean),
               to_covariance = torch::stable::contiguous(grad_covariance);
  const Tensor middle = torch::stable::contiguous(mean);
  with_pair_type(center, [&](auto zero) {
    using T = decltype(zero);
    PairWork<T> work(center, around, shift, f, products);
    with_operand<T>(tf32, [&](auto operand) {
      using F = decltype(operand);
      if constexpr (std::is_same_v<T, double>) {
        backward<F, 3, false, true>(work, f, to_mean, to_covariance, middle, out);
      } else {
        if (products > 0) return backward<F, 5, false, true>(work, f, to_mean, to_covariance, middle, out);
        switch (work.pairs.tiles) {
          case 1:
            return backward<F, 1, true, false>(work, f, to_mean, to_covariance, middle, out);
          case 3:
            return backward<F, 3, true, false>(work, f, to_mean, to_covariance, middle, out);
          case 5:
            return backward<F, 5, true, false>(work, f, to_mean, to_covariance, middle, out);
          default:
            return backward<F, 9, false, false>(work, f, to_mean, to_covariance, middle, out);
        }
      }
    });
  });
  return {out.center, out.around, out.shift};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("pair_covariance", TORCH_BOX(&san::cuda::pair_covariance));
  m.impl("pair_covariance_backward", TORCH_BOX(&san::cuda::pair_covariance_backward));
}
