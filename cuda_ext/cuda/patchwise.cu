// Fused patchwise attention, forward: statistics of both BatchNorms in training, the hidden map u, then weights and
// aggregation in one. Definition: san/ops/fused.py; how a tile is worked on: patchwise_tile.cuh.
#include <optional>
#include <tuple>

#include "patchwise_aggregate.cuh"

namespace san::cuda {
namespace {

constexpr int kMomentThreads = 256;
// Moments of a patch's channels over the tiles split, split + splits, ..; a block takes kMomentPieces pieces.
template <class scalar_t, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kMomentThreads)
    patch_moments_kernel(Patchwise<T> p, int splits, const scalar_t* center, const scalar_t* around, Moments* moments) {
  double* sums = reinterpret_cast<double*>(shared_memory_base());  // [kMomentPieces, kDepth, 2]: values, their squares
  T* patch = reinterpret_cast<T*>(sums + kMomentPieces * kDepth * 2);
  const int split = blockIdx.x % splits, first = blockIdx.x / splits % p.chunks() * kDepth;
  const int first_piece = blockIdx.x / splits / p.chunks() * kMomentPieces, left = p.pieces() - first_piece;
  const int pieces = left < kMomentPieces ? left : kMomentPieces;
  for_each_cell(pieces, 2 * kDepth, [&](int row, int k) { sums[row * 2 * kDepth + k] = 0; });
  double count = 0;
  for (int64_t index = split; index < p.tiles(); index += splits) {
    const PatchTile tile = p.tile(index);
    __syncthreads();
    load_patch(p, center, around, tile, first, patch);
    __syncthreads();
    for_each_cell(pieces, kDepth, [&](int row, int c) {
      const View view = p.view(first_piece + row);
      // In double: a piece that never sees a bright border has a mean far from the shift, so squares cancel.
      double sum = 0, square = 0;
      for (int h = 0; h < tile.rows(); ++h) {
        for (int w = 0; w < tile.columns(); ++w) {
          const double value = patch[view.cell(h, w) * kPitch + c];
          sum += value, square += value * value;
        }
      }
      double* mine = sums + (row * kDepth + c) * 2;
      mine[0] += sum, mine[1] += square;
    });
    count += tile.rows() * tile.columns();
  }
  __syncthreads();
  for_each_cell(pieces, kDepth, [&](int row, int c) {
    const int r = first + c, piece = first_piece + row;
    if (r >= p.R) return;
    const double sum = sums[(row * kDepth + c) * 2], square = sums[(row * kDepth + c) * 2 + 1];
    Moments mine;
    mine.count = count, mine.mean = p.shift[(piece == p.positions() ? padded(p.R) : 0) + r] + sum / count;
    mine.square = square - sum * sum / count;
    moments[int64_t(split) * p.channels() + p.channel(piece, r)] = mine;
  });
}

// Parts of u = weight1 a1: the sums over a split's chunks of kDepth channels, [splits, pixels, E].
template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T>)
    map_kernel(Patchwise<T> p, Cut cut, const scalar_t* center, const scalar_t* around, T* partial) {
  T* patch = reinterpret_cast<T*>(shared_memory_base());  // [patch_cells, kPitch]
  const Lane lane;
  const int64_t tasks = p.tiles() * cut.strips * cut.splits;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const PatchTile tile = p.tile(task / cut.splits / cut.strips);
    const int strip = static_cast<int>(task / cut.splits % cut.strips), split = static_cast<int>(task % cut.splits);
    const int left = strip * cut.columns * 8, wide = padded(p.E) / 8 - strip * cut.columns;
    const int columns = wide < cut.columns ? wide : cut.columns, h = 2 * lane.warp;
    T sums[kColumns][4] = {};
    for (int chunk = split; chunk < p.chunks(); chunk += cut.splits) {
      const int first = chunk * kDepth, depth = padded(p.R) - first < kDepth ? padded(p.R) - first : kDepth;
      __syncthreads();
      load_patch(p, center, around, tile, first, patch);
      __syncthreads();
      for (int piece = 0; piece < p.pieces() && tile.top + h < tile.height; ++piece) {
        const View view = p.view(piece);
        const int channel = piece * padded(p.R) + first + 2 * lane.t;
        const T* upper = patch + view.cell(h, lane.g) * kPitch + 2 * lane.t;
        const T* lower = upper + view.stride * kPitch;
        const T* weight1 =
            p.weight1 + (int64_t(piece) * padded(p.E) + left + lane.g) * padded(p.R) + first + 2 * lane.t;
        SAN_UNROLL
        for (int k = 0; k < kDepth; k += 8) {
          if (k >= depth) break;
          const auto norm = Pack<4, T>::load(p.activation + 2 * (channel + k));
          const auto activated = [&](const T* row) {
            const auto x = Pack<2, T>::load(row + k);
            return Pack<2, T>{relu(norm.data[0] * x.data[0] + norm.data[1]),
                              relu(norm.data[2] * x.data[1] + norm.data[3])};
          };
          const Left<kAccurate, T> a1(activated(upper), activated(lower));
          SAN_UNROLL
          for (int n = 0; n < kColumns; ++n) {
            if (n >= columns) break;
            a1.add_product(Pack<2, T>::load(weight1 + n * 8 * padded(p.R) + k), sums[n]);
          }
        }
      }
    }
    T* out = partial + split * p.pixels() * p.E;
    const Places own = tile.own(h, lane.g);
    SAN_UNROLL
    for (int k = 0; k < kColumns * 4; ++k) {
      const int e = left + k / 4 * 8 + 2 * lane.t + k % 2, place = k / 2 % 2 == 0 ? own.upper : own.lower;
      if (k / 4 < columns && e < p.E && place >= 0) out[(tile.image + place) * p.E + e] = sums[k / 4][k % 4];
    }
  }
}

// hidden = the sum of its parts, and unless that is null the moments of a block's pixels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    hidden_kernel(Patchwise<T> p, int splits, const T* partial, T* hidden, Moments* moments) {
  T* shifts = reinterpret_cast<T*>(shared_memory_base());  // [E]
  T* sums = shifts + p.E;                                  // [parts, 2, E]
  const int64_t pixels = p.pixels(), first = int64_t(blockIdx.x) * kHiddenPixels;
  const int64_t last = first + kHiddenPixels < pixels ? first + kHiddenPixels : pixels;
  const int parts = parts_for(kThreads, p.E);
  const auto value = [&](int64_t pixel, int e) { return sum_parts(partial, splits, pixels * p.E, pixel * p.E + e); };
  for_each_cell(parts, p.E, [&](int part, int e) {
    const T shift = moments == nullptr ? T(0) : typical(first, last, [&](int64_t pixel) { return value(pixel, e); });
    if (part == 0) shifts[e] = shift;
    T sum = 0, square = 0;
    for (int64_t pixel = first + part; pixel < last; pixel += parts) {
      const T u = value(pixel, e), centred = u - shift;
      hidden[pixel * p.E + e] = u;
      sum += centred, square += centred * centred;
    }
    sums[part * 2 * p.E + e] = sum, sums[(part * 2 + 1) * p.E + e] = square;
  });
  if (moments == nullptr) return;
  __syncthreads();
  for (int e = threadIdx.x; e < p.E; e += kThreads) {
    const double count = static_cast<double>(last - first);
    moments[int64_t(blockIdx.x) * p.E + e] = moments_of(sums, parts, p.E, e, count, shifts[e]);
  }
}

template <class scalar_t, class T = accumulate_t<scalar_t>>
void patch_moments(PatchProblem<scalar_t>& problem, Tensor& mean, Tensor& var) {
  const Patchwise<T>& p = problem.sizes;
  const int shares = p.chunks() * ((p.pieces() + kMomentPieces - 1) / kMomentPieces);
  // Half as many blocks: their moments are 10 MB for SAN's stages.
  const int splits = splits_for(2 * shares, p.tiles());
  Moments* moments = problem.space.take_moments(splits, p.channels());
  const size_t bytes = problem.shared_bytes(p.patch_cells(), kPitch, kMomentPieces * kDepth * 2 * sizeof(double));
  SAN_LAUNCH_SHARED(patch_moments_kernel<scalar_t>, splits * shares, kMomentThreads, bytes, problem.stream(), p, splits,
                    problem.center, problem.around, moments);
  merge_moments(moments, splits, p.channels(), mean.mutable_data_ptr<T>(), var.mutable_data_ptr<T>(), problem.stream());
}

template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
void map(PatchProblem<scalar_t>& problem, T* hidden, Tensor* mean, Tensor* var) {
  const Patchwise<T>& p = problem.sizes;
  const Cut cut(p.tiles(), padded(p.E) / 8, p.chunks());
  T* partial = cut.splits > 1 ? problem.space.take(cut.splits * p.pixels() * p.E) : hidden;
  SAN_LAUNCH_SHARED((map_kernel<scalar_t, kAccurate>), grid_of(p.tiles() * cut.strips * cut.splits), kTileThreads,
                    problem.shared_bytes(p.patch_cells(), kPitch), problem.stream(), p, cut, problem.center,
                    problem.around, partial);
  if (cut.splits == 1 && mean == nullptr) return;
  const int blocks = static_cast<int>((p.pixels() + kHiddenPixels - 1) / kHiddenPixels);
  Moments* moments = mean == nullptr ? nullptr : problem.space.take_moments(blocks, p.E);
  SAN_LAUNCH_SHARED(hidden_kernel<T>, blocks, kThreads, (parts_for(kThreads, p.E) * 2 + 1) * p.E * sizeof(T),
                    problem.stream(), p, cut.splits, partial, hidden, moments);
  if (mean == nullptr) return;
  merge_moments(moments, blocks, p.E, mean->mutable_data_ptr<T>(), var->mutable_data_ptr<T>(), problem.stream());
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class scalar_t, bool kAccurate>
Forward forward(const PatchwiseInputs& in, int64_t kernel_size, bool training, double eps) {
  using T = accumulate_t<scalar_t>;
  PatchProblem<scalar_t> problem(in, kernel_size, training, eps);
  const Patchwise<T>& p = problem.sizes;
  const int64_t H = p.f.height, W = p.f.width;
  Tensor mean1 = problem.space.new_sums({p.channels()}), var1 = problem.space.new_sums({p.channels()});
  Tensor mean2 = problem.space.new_sums({p.E}), var2 = problem.space.new_sums({p.E});
  Tensor y = problem.space.new_maps({p.images, H, W, p.M}), hidden = problem.space.new_sums({p.images, H, W, p.E});
  const bool counts = training && p.pixels() > 0;
  if (!counts) {
    torch::stable::copy_(mean1, in.mean1), torch::stable::copy_(var1, in.var1);
    torch::stable::copy_(mean2, in.mean2), torch::stable::copy_(var2, in.var2);
  }
  if (p.pixels() > 0) {
    T* u = hidden.mutable_data_ptr<T>();
    if (counts) patch_moments(problem, mean1, var1);
    problem.set_norm1(mean1, var1);
    map<scalar_t, kAccurate>(problem, u, counts ? &mean2 : nullptr, &var2);
    problem.set_norm2(mean2, var2);
    aggregate<true, kAccurate>(problem, u, problem.beta, y.mutable_data_ptr<scalar_t>());
  }
  return {contiguous_of(y, in.beta.scalar_type()), hidden, mean1, var1, mean2, var2};
}

Forward patchwise(const Tensor& center, const Tensor& around, const Tensor& beta, const Tensor& gain1,
                  const Tensor& bias1, const Tensor& weight1, const Tensor& gain2, const Tensor& bias2,
                  const Tensor& weight2, const Tensor& bias3, const Tensor& mean1, const Tensor& var1,
                  const Tensor& mean2, const Tensor& var2, int64_t kernel_size, bool training, double eps, bool tf32) {
  const PatchwiseInputs in{center, around,  beta,  gain1, bias1, weight1, gain2,
                           bias2,  weight2, bias3, mean1, var1,  mean2,   var2};
  check_patchwise(in, kernel_size);
  const OperatorGuard guard("patchwise", beta);
  std::optional<Forward> result;
  SAN_DISPATCH(map_type(center, around, beta), "patchwise", [&] {
    result = with_precision<scalar_t>(
        tf32, [&](auto accurate) { return forward<scalar_t, accurate>(in, kernel_size, training, eps); });
  });
  return *result;
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) { m.impl("patchwise", TORCH_BOX(&san::cuda::patchwise)); }
