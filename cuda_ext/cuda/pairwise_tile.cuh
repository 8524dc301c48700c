// What the passes of fused pairwise attention share. The maths: san/ops/fused.py and cpu/pairwise.cpp.
//
// The first BatchNorm is applied to the maps: BatchNorm1(center_i - around_j) is a difference of scaled maps. A block
// owns a tile of pixels and walks over their pairs (i, j), `rows` at a time; pair q of a tile is its pixel q % count at
// footprint position q / count. For these rows it computes, in shared memory,
//   relation = relu(BatchNorm1(center_i - around_j)) [rows, d], hidden = relation weight1^T [rows, E], its normalised
//   form, active = relu(gain2 * normalised + bias2) [rows, E], and the logits active weight2^T [rows, G].
// No tensor over pairs ever lies in global memory: every pass computes anew what it needs.
#pragma once
#include <cmath>

#include "product.cuh"
#include "sums.cuh"

namespace san::cuda {

constexpr int kPairThreads = 256;
// Blocks that registers must leave room for on a multiprocessor.
template <class T>
constexpr int kResident = sizeof(T) == sizeof(double) ? 1 : 3;
constexpr int kSumBlocks = 1024;  // of passes that sum over all pairs: so many partial sums are left
constexpr int kShare = 2;         // value channels of one weight that a thread works on at once

// What relation, active and weights are kept in, as factors of gamma's products. For bfloat16 maps they are rounded
// once, behind BatchNorm and ReLU, and take half the memory. float16 has not the range of the gradients that take
// relation's place in backward, so they stay float there, which products round to TF32.
template <class scalar_t>
using factor_t = std::conditional_t<std::is_same_v<scalar_t, BFloat16>, BFloat16, accumulate_t<scalar_t>>;

// Sizes and parameters.
template <class T>
struct Pairwise {
  Footprint f;
  int64_t images;
  int d, E, G, M;  // relation, hidden, weight and value channels
  T eps;
  const T *gain1, *bias1, *mean1, *var1, *gain2, *bias2, *mean2, *var2;
  const T *center,
      *around;       // [pixels, padded(d)] scaled so that BatchNorm1 is center_i - around_j; zeros behind channel d
  const T* origins;  // [images, 3, d], see origins_kernel
  bool is_wide;      // whether beta and grad_y can be read kWide channels of one pixel at once
  // How a pass is cut into blocks and steps.
  int tile_height, tile_width, rows;
  bool stages;  // whether weights and sums over pairs fit into shared memory
  bool spills;  // whether the softmax weights of a tile's pairs, which backward keeps, lie in global memory

  SAN_HOST_DEVICE int positions() const { return static_cast<int>(f.positions()); }
  SAN_HOST_DEVICE int tile_pixels() const { return tile_height * tile_width; }
  SAN_HOST_DEVICE int64_t tiles_high() const { return (f.height + tile_height - 1) / tile_height; }
  SAN_HOST_DEVICE int64_t tiles_wide() const { return (f.width + tile_width - 1) / tile_width; }
  SAN_HOST_DEVICE int64_t tiles() const { return images * tiles_high() * tiles_wide(); }
  SAN_HOST_DEVICE int64_t tile_weights() const { return int64_t(tile_pixels()) * positions() * G; }
  // The pixels of the padded map that a tile's footprints cover.
  SAN_HOST_DEVICE int halo_width() const { return tile_width + static_cast<int>(f.kernel_size) - 1; }
  SAN_HOST_DEVICE int halo_pixels() const { return halo_width() * (tile_height + static_cast<int>(f.kernel_size) - 1); }
  SAN_HOST_DEVICE int share() const { return M / G; }
  SAN_HOST_DEVICE int slices(int64_t rows_out, int64_t columns_out) const {
    return stages ? slices_for(padded(rows_out), padded(columns_out), kPairThreads) : 1;
  }
};

// With weights, padded by zeros: weight1 [padded(E), relation_pitch], weight2 [padded(G), hidden_pitch].
template <class scalar_t>
struct WeightedPairwise : Pairwise<accumulate_t<scalar_t>> {
  using F = factor_t<scalar_t>;
  const F *weight1, *weight2;

  // Of rows of d, and of E, factors.
  SAN_HOST_DEVICE int relation_pitch() const { return pitch_of<F>(this->d); }
  SAN_HOST_DEVICE int hidden_pitch() const { return pitch_of<F>(this->E); }
};

// A rectangle of pixels of one image, smaller than the others at the map's far borders.
struct Tile {
  int64_t first;  // its first pixel, counted over all images
  int top, left, height, width;

  __device__ __forceinline__ int count() const { return height * width; }
  __device__ __forceinline__ int64_t pixel(const Footprint& f, int index) const {
    const int row = divide(index, width);
    return first + row * f.width + index - row * width;
  }
};

template <class T>
__device__ __forceinline__ Tile tile_at(const Pairwise<T>& p, int64_t index) {
  const int64_t wide = p.tiles_wide(), high = p.tiles_high();
  const int64_t top = index / wide % high * p.tile_height, left = index % wide * p.tile_width;
  const int64_t height = p.f.height - top < p.tile_height ? p.f.height - top : p.tile_height;
  const int64_t width = p.f.width - left < p.tile_width ? p.f.width - left : p.tile_width;
  return {index / wide / high * p.f.pixels() + top * p.f.width + left, static_cast<int>(top), static_cast<int>(left),
          static_cast<int>(height), static_cast<int>(width)};
}

// Hands out parts of a block's shared memory; from a null base it only counts.
class Carver {
 public:
  SAN_HOST_DEVICE explicit Carver(char* base) : base_(base) {}

  template <class T>
  SAN_HOST_DEVICE T* take(int64_t count) {
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }
  SAN_HOST_DEVICE size_t used() const { return used_; }

 private:
  static constexpr size_t kAlignment = 32;  // of a Pack of doubles

  char* base_;
  size_t used_ = 0;
};

// Shared memory that every pass has.
template <class scalar_t>
struct Common {
  using T = accumulate_t<scalar_t>;
  using F = factor_t<scalar_t>;
  T *mean2, *deviation2, *gain2, *bias2;  // deviation2 = 1 / sqrt(var2 + eps)
  F *weight1, *weight2;                   // null if they stay in global memory
  int64_t *center, *around;               // [rows] pixels of a pair; any pixel behind the last pair
  int* cell;                              // [rows] where around lies in the tile's halo
  F *relation, *active;                   // [rows, relation_pitch], [rows, hidden_pitch]

  SAN_HOST_DEVICE Common(const WeightedPairwise<scalar_t>& p, Carver& carver) {
    const int E = padded(p.E);
    mean2 = carver.take<T>(E), deviation2 = carver.take<T>(E), gain2 = carver.take<T>(E), bias2 = carver.take<T>(E);
    weight1 = p.stages ? carver.take<F>(E * p.relation_pitch()) : nullptr;
    weight2 = p.stages ? carver.take<F>(padded(p.G) * p.hidden_pitch()) : nullptr;
    center = carver.take<int64_t>(p.rows), around = carver.take<int64_t>(p.rows);
    cell = carver.take<int>(p.rows);
    relation = carver.take<F>(p.rows * p.relation_pitch());
    active = carver.take<F>(p.rows * p.hidden_pitch());
  }
};

// The rows of one step: pairs [first, first + valid) of a tile.
struct Step {
  int first, valid, count;

  // The first of the rows of a pixel; the others follow at a distance of `count`.
  __device__ __forceinline__ int row_of(int pixel) const {
    const int row = pixel - (first - divide(first, count) * count);
    return row < 0 ? row + count : row;
  }
};

// e^x. The error of the fast one grows with |x| as e^x falls, which a softmax does not feel.
__device__ __forceinline__ double exponential(double x) { return std::exp(x); }
__device__ __forceinline__ float exponential(float x) {
#ifdef SAN_SHIM
  return std::exp(x);
#else
  return __expf(x);
#endif
}

// The maths of one block, products with the precision that `multiply` explains. Functions whose results other threads
// read must be followed by a barrier.
template <class scalar_t, bool kAccurate>
struct PairBlock {
  using T = accumulate_t<scalar_t>;
  using F = factor_t<scalar_t>;
  using Two = Pack<2, T>;

  const WeightedPairwise<scalar_t>& p;
  const Common<scalar_t>& shared;

  __device__ __forceinline__ const F* weight1() const { return p.stages ? shared.weight1 : p.weight1; }
  __device__ __forceinline__ const F* weight2() const { return p.stages ? shared.weight2 : p.weight2; }

  // Brings the parameters into shared memory; channels behind the last are zero and stay so in all products.
  __device__ void load(bool has_norm2) const {
    for (int e = threadIdx.x; has_norm2 && e < padded(p.E); e += blockDim.x) {
      const bool real = e < p.E;
      shared.mean2[e] = real ? p.mean2[e] : T(0);
      shared.deviation2[e] = real ? 1 / std::sqrt(p.var2[e] + p.eps) : T(0);
      shared.gain2[e] = real ? p.gain2[e] : T(0);
      shared.bias2[e] = real ? p.bias2[e] : T(0);
    }
    clear_tail(shared.relation, p.d), clear_tail(shared.active, p.E);
    if (!p.stages) return;
    const int size1 = padded(p.E) * p.relation_pitch(), size2 = padded(p.G) * p.hidden_pitch();
    for (int k = threadIdx.x; k < size1; k += blockDim.x) shared.weight1[k] = p.weight1[k];
    for (int k = threadIdx.x; k < size2; k += blockDim.x) shared.weight2[k] = p.weight2[k];
  }

  // Finds the pixels of the pairs from `first` on.
  __device__ Step begin(const Tile& tile, int first) const {
    const int count = tile.count(), pairs = count * p.positions(), left = pairs - first;
    const int kernel_size = static_cast<int>(p.f.kernel_size), reach = kernel_size / 2;
    for (int row = threadIdx.x; row < p.rows; row += blockDim.x) {
      const int pair = row < left ? first + row : 0;
      const int position = divide(pair, count), pixel = pair - position * count;
      const int h = divide(pixel, tile.width), w = pixel - h * tile.width;
      const int down = divide(position, kernel_size), right = position - down * kernel_size;
      const int64_t from_h = reflect(tile.top + h + down - reach, p.f.height);
      const int64_t from_w = reflect(tile.left + w + right - reach, p.f.width);
      shared.center[row] = tile.first + h * p.f.width + w;
      shared.around[row] = tile.first + (from_h - tile.top) * p.f.width + from_w - tile.left;
      shared.cell[row] = (h + down) * p.halo_width() + w + right;
    }
    return {first, left < p.rows ? left : p.rows, count};
  }

  // relation = relu(BatchNorm1(center_i - around_j))
  __device__ void relate() const {
    const int width = padded(p.d);
    for_each_cell(p.rows, width / kWide, [&](int row, int quad) {
      using Quad = Pack<kWide, T>;
      const Quad center = Quad::load(p.center + shared.center[row] * width + quad * kWide);
      const Quad around = Quad::load(p.around + shared.around[row] * width + quad * kWide);
      Pack<kWide, F> relation;
      SAN_UNROLL
      for (int c = 0; c < kWide; ++c) relation.data[c] = static_cast<F>(relu(center.data[c] - around.data[c]));
      relation.store(shared.relation + row * p.relation_pitch() + quad * kWide);
    });
  }

  // Calls visit(row, e, u, 0) with elements e and e + 1 of u = relation weight1^T.
  template <class Visit>
  __device__ __forceinline__ void map_to_hidden(const Visit& visit) const {
    multiply<kAccurate>(Along<F>{shared.relation, p.relation_pitch()}, Along<F>{weight1(), p.relation_pitch()},
                        {p.rows, padded(p.E), padded<F>(p.d)}, visit);
  }

  // active = relu(BatchNorm2(relation weight1^T)); without gain, bias and relu also `normalised`, unless that is null.
  __device__ void activate(T* normalised) const {
    map_to_hidden([&](int row, int e, Two u, int) {
      const Two mean = Two::load(shared.mean2 + e), deviation = Two::load(shared.deviation2 + e);
      const Two gain = Two::load(shared.gain2 + e), bias = Two::load(shared.bias2 + e);
      Pack<2, F> active;
      SAN_UNROLL
      for (int n = 0; n < 2; ++n) {
        u.data[n] = (u.data[n] - mean.data[n]) * deviation.data[n];
        active.data[n] = static_cast<F>(relu(gain.data[n] * u.data[n] + bias.data[n]));
      }
      active.store(shared.active + row * p.hidden_pitch() + e);
      if (normalised != nullptr) u.store(normalised + row * pitch_of(p.E) + e);
    });
  }

  // logits [rows, pitch_of(G)] = active weight2^T
  __device__ void map_to_logits(T* logits) const {
    multiply<kAccurate>(Along<F>{shared.active, p.hidden_pitch()}, Along<F>{weight2(), p.hidden_pitch()},
                        {p.rows, padded(p.G), padded<F>(p.E)},
                        [&](int row, int g, Two values, int) { values.store(logits + row * pitch_of(p.G) + g); });
  }

  // All of that for the pairs from `first` on; all threads may read the logits when it returns.
  __device__ __forceinline__ Step compute_logits(const Tile& tile, int first, T* normalised, T* logits) const {
    const Step step = begin(tile, first);
    __syncthreads();
    relate();
    __syncthreads();
    activate(normalised);
    __syncthreads();
    map_to_logits(logits);
    __syncthreads();
    return step;
  }

  // Calls visit(row, g, gradient) for the valid rows with the gradients of the weights: the sum over the value channels
  // of weight g of grad_y_i * beta_j.
  template <class Visit>
  __device__ __forceinline__ void weight_gradients(const scalar_t* grad_y, const scalar_t* beta, int valid,
                                                   const Visit& visit) const {
    if (p.is_wide) {
      weight_gradients_of<kWide>(grad_y, beta, valid, visit);
    } else {
      weight_gradients_of<1>(grad_y, beta, valid, visit);
    }
  }

 private:
  // Zeros behind the channels that `relate` and `activate` write, where products read more of them.
  __device__ __forceinline__ void clear_tail(F* factors, int channels) const {
    const int first = padded(channels), tail = padded<F>(channels) - first;
    if (tail == 0) return;
    for_each_cell(p.rows, tail,
                  [&](int row, int c) { factors[row * pitch_of<F>(channels) + first + c] = static_cast<F>(T(0)); });
  }

  template <int N, class Visit>
  __device__ __forceinline__ void weight_gradients_of(const scalar_t* grad_y, const scalar_t* beta, int valid,
                                                      const Visit& visit) const {
    for_each_cell(valid, p.G / N, [&](int row, int column) {
      const scalar_t* gradients = grad_y + shared.center[row] * p.M + column * N;
      const scalar_t* values = beta + shared.around[row] * p.M + column * N;
      T sums[N] = {};
      for (int c = 0; c < p.M; c += p.G) {
        const auto gradient = Pack<N, scalar_t>::load(gradients + c), value = Pack<N, scalar_t>::load(values + c);
        SAN_UNROLL
        for (int n = 0; n < N; ++n) sums[n] += static_cast<T>(gradient.data[n]) * static_cast<T>(value.data[n]);
      }
      SAN_UNROLL
      for (int n = 0; n < N; ++n) visit(row, column * N + n, sums[n]);
    });
  }
};

// A thread's part of the value channels: those of N neighbouring weight channels, kShare of each.
template <int N, class T>
struct Shares {
  int g, first, count, G;  // the first weight channel, the first value channel, how many values of each weight
  T sums[kShare][N] = {};

  __device__ __forceinline__ Shares(const Pairwise<T>& p, int column) : G(p.G) {
    const int block = divide(column, p.G / N);
    g = (column - block * (p.G / N)) * N, first = block * kShare * G + g;
    count = p.share() - block * kShare < kShare ? p.share() - block * kShare : kShare;
  }
  // sums += weights [N] * values of one pixel
  template <class scalar_t>
  __device__ __forceinline__ void add(const T* weights, const scalar_t* pixel) {
    const auto weight = Pack<N, T>::load(weights);
    SAN_UNROLL
    for (int s = 0; s < kShare; ++s) {
      if (s >= count) break;
      const auto value = Pack<N, scalar_t>::load(pixel + first + s * G);
      SAN_UNROLL
      for (int n = 0; n < N; ++n) sums[s][n] += weight.data[n] * static_cast<T>(value.data[n]);
    }
  }
  // Calls visit(channel, n, sum), where n tells the weight channels apart.
  template <class Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    SAN_UNROLL
    for (int s = 0; s < kShare; ++s) {
      if (s >= count) break;
      SAN_UNROLL
      for (int n = 0; n < N; ++n) visit(first + s * G + n, n, sums[s][n]);
    }
  }
};

// Calls visit(row, shares) for all rows and value channels, with Shares<kWide> or Shares<1>.
template <class T, class Visit>
__device__ __forceinline__ void for_each_share(const Pairwise<T>& p, int rows, const Visit& visit) {
  const int blocks = (p.share() + kShare - 1) / kShare;
  if (p.is_wide) {
    for_each_cell(rows, blocks * (p.G / kWide), [&](int row, int column) { visit(row, Shares<kWide, T>(p, column)); });
  } else {
    for_each_cell(rows, blocks * p.G, [&](int row, int column) { visit(row, Shares<1, T>(p, column)); });
  }
}

// Adds to sums [parts, 2, channels] what visit(row, c, one, other) adds to two sums of channel c over `rows`, which the
// parts share.
template <class T, class Visit>
__device__ __forceinline__ void add_sums(int rows, int channels, T* sums, const Visit& visit) {
  const int parts = parts_for(kPairThreads, channels);
  for_each_cell(parts, channels, [&](int part, int c) {
    T one = 0, other = 0;
    for (int row = part; row < rows; row += parts) visit(row, c, one, other);
    sums[part * 2 * channels + c] += one, sums[(part * 2 + 1) * channels + c] += other;
  });
}

// Calls visit(tile, index) for the tiles of a block.
template <class T, class Visit>
__device__ __forceinline__ void for_each_tile(const Pairwise<T>& p, const Visit& visit) {
  for (int64_t index = blockIdx.x; index < p.tiles(); index += gridDim.x) visit(tile_at(p, index), index);
}

}  // namespace san::cuda
