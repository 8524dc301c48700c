// Fused pairwise attention, forward: statistics of both BatchNorms in training, then one pass with a softmax on line.
// Definition: san/ops/fused.py; how pairs are worked on: pairwise_tile.cuh.
#include <optional>
#include <tuple>

#include "pairwise_problem.cuh"
#include "sums.cuh"

namespace san::cuda {
namespace {

constexpr int kMomentPixels = 64;

// Moments of center_i - around_j per channel, over the pairs of 64 pixels.
template <class T>
__global__ void __launch_bounds__(kPairThreads, kResident<T>)
    relation_moments_kernel(Pairwise<T> p, const T* center, const T* around, Moments* moments) {
  T* sums = reinterpret_cast<T*>(shared_memory_base());  // [parts, 2, d]
  const int64_t pixels = p.images * p.f.pixels(), first = int64_t(blockIdx.x) * kMomentPixels;
  const int64_t last = first + kMomentPixels < pixels ? first + kMomentPixels : pixels;
  const int parts = parts_for(kPairThreads, p.d), reach = static_cast<int>(p.f.reach());
  const auto shift_of = [&](int c) {
    return typical(first, last, [&](int64_t i) { return center[i * p.d + c] - around[i * p.d + c]; });
  };
  for_each_cell(parts, p.d, [&](int part, int c) {
    const T shift = shift_of(c);
    T sum = 0, square = 0;
    for (int64_t i = first + part; i < last; i += parts) {
      const T value = center[i * p.d + c] - shift;
      const int64_t h = i % p.f.pixels() / p.f.width, w = i % p.f.width;
      const T* image = around + i / p.f.pixels() * p.f.pixels() * p.d + c;
      for (int down = -reach; down <= reach; ++down) {
        const T* row = image + reflect(h + down, p.f.height) * p.f.width * p.d;
        for (int right = -reach; right <= reach; ++right) {
          const T delta = value - row[reflect(w + right, p.f.width) * p.d];
          sum += delta, square += delta * delta;
        }
      }
    }
    sums[part * 2 * p.d + c] = sum, sums[(part * 2 + 1) * p.d + c] = square;
  });
  __syncthreads();
  for (int c = threadIdx.x; c < p.d; c += kPairThreads) {
    const double count = double(last - first) * p.positions();
    moments[int64_t(blockIdx.x) * p.d + c] = moments_of(sums, parts, p.d, c, count, shift_of(c));
  }
}

// Moments of relation weight1^T per channel, over the pairs of a block's tiles.
template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kPairThreads, kResident<T>)
    hidden_moments_kernel(WeightedPairwise<scalar_t> p, Moments* moments) {
  const HiddenShared<scalar_t> shared(p, shared_memory_base());
  const PairBlock<scalar_t, kAccurate> block{p, shared};
  const int parts = parts_for(kPairThreads, p.E);
  block.load(false);
  for_each_cell(parts * 2, p.E, [&](int row, int e) { shared.sums[row * p.E + e] = 0; });
  double count = 0;
  for_each_tile(p, [&](const Tile& tile, int64_t) {
    const int pairs = tile.count() * p.positions();
    for (int first = 0; first < pairs; first += p.rows) {
      const Step step = block.begin(tile, first);
      __syncthreads();
      block.relate();
      __syncthreads();
      block.map_to_hidden([&](int row, int e, Pack<2, T> u, int) { u.store(shared.hidden + row * pitch_of(p.E) + e); });
      __syncthreads();
      if (count == 0) {  // deviations from one of the values are small numbers, whose squares do not cancel
        for (int e = threadIdx.x; e < p.E; e += kPairThreads) {
          shared.shift[e] = typical(0, step.valid, [&](int64_t row) { return shared.hidden[row * pitch_of(p.E) + e]; });
        }
        __syncthreads();
      }
      add_sums(step.valid, p.E, shared.sums, [&](int row, int e, T& sum, T& square) {
        const T centred = shared.hidden[row * pitch_of(p.E) + e] - shared.shift[e];
        sum += centred, square += centred * centred;
      });
      count += step.valid;
    }
  });
  __syncthreads();
  for (int e = threadIdx.x; e < p.E; e += kPairThreads) {
    moments[int64_t(blockIdx.x) * p.E + e] = moments_of(shared.sums, parts, p.E, e, count, shared.shift[e]);
  }
}

// y_i = sum_j softmax_j(logits) beta_j. The softmax is on line: `factor` corrects what was summed with an earlier
// maximum.
template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kPairThreads, kResident<T>)
    forward_kernel(WeightedPairwise<scalar_t> p, const scalar_t* beta, scalar_t* y, T* logsumexp) {
  const ForwardShared<scalar_t> shared(p, shared_memory_base());
  const PairBlock<scalar_t, kAccurate> block{p, shared};
  block.load(true);
  for_each_tile(p, [&](const Tile& tile, int64_t) {
    const int count = tile.count(), pairs = count * p.positions();
    for_each_cell(count, p.G, [&](int pixel, int g) {
      shared.largest[pixel * p.G + g] = -INFINITY, shared.sum[pixel * p.G + g] = 0;
    });
    for (int k = threadIdx.x; k < count * p.M; k += kPairThreads) shared.y[k] = 0;
    for (int first = 0; first < pairs; first += p.rows) {
      const Step step = block.compute_logits(tile, first, nullptr, shared.logits);
      for_each_cell(count, p.G, [&](int pixel, int g) {
        T &largest = shared.largest[pixel * p.G + g], &sum = shared.sum[pixel * p.G + g];
        const int top = step.row_of(pixel);
        T next = largest;
        for (int row = top; row < step.valid; row += count)
          next = std::max(next, shared.logits[row * pitch_of(p.G) + g]);
        const T factor = top < step.valid ? exponential(largest - next) : T(1);
        T added = 0;
        for (int row = top; row < step.valid; row += count) {
          T& weight = shared.logits[row * pitch_of(p.G) + g];
          weight = exponential(weight - next);
          added += weight;
        }
        largest = next, sum = sum * factor + added, shared.factor[pixel * p.G + g] = factor;
      });
      __syncthreads();
      for_each_share(p, count, [&](int pixel, auto shares) {
        for (int row = step.row_of(pixel); row < step.valid; row += count) {
          shares.add(shared.logits + row * pitch_of(p.G) + shares.g, beta + shared.around[row] * p.M);
        }
        const T* factor = shared.factor + pixel * p.G + shares.g;
        T* out = shared.y + pixel * p.M;
        shares.for_each([&](int c, int n, T sum) { out[c] = out[c] * factor[n] + sum; });
      });
      __syncthreads();
    }
    for_each_cell(count, p.M, [&](int pixel, int c) {
      y[tile.pixel(p.f, pixel) * p.M + c] =
          static_cast<scalar_t>(shared.y[pixel * p.M + c] / shared.sum[pixel * p.G + c % p.G]);
    });
    for_each_cell(count, p.G, [&](int pixel, int g) {
      logsumexp[tile.pixel(p.f, pixel) * p.G + g] =
          shared.largest[pixel * p.G + g] + std::log(shared.sum[pixel * p.G + g]);
    });
    __syncthreads();
  });
}

template <class scalar_t, class T = accumulate_t<scalar_t>>
void relate_moments(const Problem<scalar_t>& problem, Tensor& mean, Tensor& var) {
  const Pairwise<T>& p = problem.sizes;
  const int blocks = static_cast<int>((problem.pixels() + kMomentPixels - 1) / kMomentPixels);
  Tensor moments = problem.new_moments(blocks, p.d);
  Moments* data = reinterpret_cast<Moments*>(moments.mutable_data_ptr<double>());
  SAN_LAUNCH_SHARED(relation_moments_kernel<T>, blocks, kPairThreads,
                    parts_for(kPairThreads, p.d) * 2 * p.d * sizeof(T), problem.stream(), p, problem.center(),
                    problem.around(), data);
  merge_moments(data, blocks, p.d, mean.mutable_data_ptr<T>(), var.mutable_data_ptr<T>(), problem.stream());
}

template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
void hidden_moments(const Problem<scalar_t>& problem, Tensor& mean, Tensor& var) {
  WeightedPairwise<scalar_t> p = problem.sizes;
  const size_t bytes = plan<HiddenShared<scalar_t>>(p, pixels_of_tile(p.f));
  const int blocks = blocks_of(p, kSumBlocks);
  Tensor moments = problem.new_moments(blocks, p.E);
  Moments* data = reinterpret_cast<Moments*>(moments.mutable_data_ptr<double>());
  SAN_LAUNCH_SHARED((hidden_moments_kernel<scalar_t, kAccurate>), blocks, kPairThreads, bytes, problem.stream(), p,
                    data);
  merge_moments(data, blocks, p.E, mean.mutable_data_ptr<T>(), var.mutable_data_ptr<T>(), problem.stream());
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class scalar_t, bool kAccurate>
Forward forward(const PairwiseInputs& in, int64_t kernel_size, bool training, double eps) {
  using T = accumulate_t<scalar_t>;
  Problem<scalar_t> problem(in, kernel_size, eps);
  WeightedPairwise<scalar_t>& p = problem.sizes;
  Tensor mean1 = problem.new_sums({p.d}), var1 = problem.new_sums({p.d});
  Tensor mean2 = problem.new_sums({p.E}), var2 = problem.new_sums({p.E});
  if (training && problem.pixels() > 0) {
    relate_moments(problem, mean1, var1);
    p.mean1 = mean1.const_data_ptr<T>(), p.var1 = var1.const_data_ptr<T>();
    problem.scale_maps();
    hidden_moments<scalar_t, kAccurate>(problem, mean2, var2);
    p.mean2 = mean2.const_data_ptr<T>(), p.var2 = var2.const_data_ptr<T>();
  } else {
    torch::stable::copy_(mean1, in.mean1), torch::stable::copy_(var1, in.var1);
    torch::stable::copy_(mean2, in.mean2), torch::stable::copy_(var2, in.var2);
    problem.scale_maps();
  }
  Tensor y = problem.new_maps();
  Tensor logsumexp = problem.new_sums({p.images, p.f.height, p.f.width, p.G});
  if (problem.pixels() > 0) {
    WeightedPairwise<scalar_t> pass = p;
    const size_t bytes = plan<ForwardShared<scalar_t>>(pass, pixels_of_tile(p.f));
    SAN_LAUNCH_SHARED((forward_kernel<scalar_t, kAccurate>), blocks_of(pass), kPairThreads, bytes, problem.stream(),
                      pass, problem.beta(), y.mutable_data_ptr<scalar_t>(), logsumexp.mutable_data_ptr<T>());
  }
  return {y, logsumexp, mean1, var1, mean2, var2};
}

Forward pairwise(const Tensor& center, const Tensor& around, const Tensor& beta, const Tensor& gain1,
                 const Tensor& bias1, const Tensor& weight1, const Tensor& gain2, const Tensor& bias2,
                 const Tensor& weight2, const Tensor& bias3, const Tensor& mean1, const Tensor& var1,
                 const Tensor& mean2, const Tensor& var2, int64_t kernel_size, bool training, double eps, bool tf32) {
  const PairwiseInputs in{center, around, beta, gain1, bias1, weight1, gain2, bias2, weight2, mean1, var1, mean2, var2};
  check_inputs(in);
  const OperatorGuard guard("pairwise", center);
  std::optional<Forward> result;
  SAN_DISPATCH(beta.scalar_type(), "pairwise", [&] {
    result = with_precision<scalar_t>(
        tf32, [&](auto accurate) { return forward<scalar_t, accurate>(in, kernel_size, training, eps); });
  });
  return *result;
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) { m.impl("pairwise", TORCH_BOX(&san::cuda::pairwise)); }
