// Shared code of the kernels over pairs (i, j) of a pixel and a position of its footprint: maps, work distribution, and
// a1 = relu(relation of i and j) in registers. Definitions: san/ops/definitions.py.
//
// A warp computes 16 pixels (or 8) in a loop over the footprint. a1 = relu(scale * partner + bias), where scale and
// bias depend only on the pixel and are stored in shared memory. Partners are read from a map with reflected borders,
// through the L1 cache. So the loop contains no index arithmetic for reflection, no tensor of pairs and no barrier.
#pragma once
#include "team.cuh"
#include "workspace.cuh"

namespace san::cuda {
namespace {

constexpr int64_t kSumBlocks = 528;  // limit for launches that write partial sums

// Channels are padded with zeros to tiles of 8, and so are all products.
template <class T>
struct Pairs : Grid {
  int d, tiles, products;  // relation channels, tiles of 8 of them, and how many are products
  const T* center;         // [images, height, width, pitch]
  const T* around;         // [images, padded_height, padded_width, pitch], with reflected borders
  const T* shift;          // [pitch]

  SAN_HOST_DEVICE int pitch() const { return 8 * tiles; }
  SAN_HOST_DEVICE int row_bytes() const { return pitch() * static_cast<int>(sizeof(T)); }

  // a1 = relu(scale * partner + bias) in a channel. A pixel that does not exist has a1 = 0, which stops its gradients.
  template <bool kAround>
  __device__ __forceinline__ void coefficients(const Pixel<kAround>& pixel, int channel, T& scale, T& bias) const {
    const T own = (kAround ? around : center)[int64_t(pixel.index) * pitch() + channel];
    const bool is_product = channel < products;
    scale = is_product ? own : T(kAround ? 1 : -1);
    bias = shift[channel] + (is_product ? T(0) : kAround ? -own : own);
    if (!pixel.exists) scale = bias = 0;
  }

  // A value near the mean of a channel of a1: the median of three means over some pairs each, so one outlier does no
  // harm.
  __device__ __forceinline__ T origin(int channel) const {
    constexpr int kSamples = 8;
    if (pixels() == 0) return 0;
    return middle_of_three([&](int quarter) {
      T mean = 0;
      SAN_ROLLED
      for (int n = 0; n < kSamples; ++n) {
        const Pixel<false> pixel(*this, pixels() * (quarter - 1 + 3 * n) / (3 * kSamples));
        T scale, bias;
        coefficients(pixel, channel, scale, bias);
        mean += rectified(scale * around[int64_t(pixel.partners) * pitch() + channel] + bias) / kSamples;
      }
      return mean;
    });
  }
};

// Work distribution of a launch. Each team of warps computes a group of pixels. Each of the `jobs` parts of a product
// (a strip of rows and a chunk of columns) has its own blocks.
struct Plan {
  int blocks, split, strips, chunks;  // `blocks` for each job

  template <class T>
  Plan(const Pairs<T>& p, int64_t groups, int strips, int chunks, int64_t most = kMaxBlocks)
      : split(split_for(groups * strips * chunks, p.positions(), p.tiles)), strips(strips), chunks(chunks) {
    const int64_t needed = blocks_of_teams(groups, split);
    blocks = static_cast<int>(std::max<int64_t>(1, std::min(needed, most / jobs())));
  }

  SAN_HOST_DEVICE int jobs() const { return strips * chunks; }
  SAN_HOST_DEVICE int teams() const { return kWarps / split; }
};

// The part of the work that a block computes. With kWhole, there is one job.
template <bool kWhole>
struct Job {
  int block, strip, chunk;

  __device__ __forceinline__ explicit Job(const Plan& plan) : block(blockIdx.x), strip(0), chunk(0) {
    if constexpr (kWhole) return;
    block = blockIdx.x / plan.jobs();
    const int job = blockIdx.x - block * plan.jobs();
    strip = job / plan.chunks, chunk = job - strip * plan.chunks;
  }
};

// Four consecutive values, as the sum of a product.
template <int N, class T>
__device__ __forceinline__ T (&four_of(T (&values)[N], int first))[4] {
  return reinterpret_cast<T(&)[4]>(values[first]);
}

// Stores the sums of products, [KM, KD, 4] from values[first] on, as a matrix [16 KM, 8 KD].
template <int KM, int KD, int N, class T>
__device__ __forceinline__ void store_sums(const Team& mine, const T (&values)[N], int first, T* out, int pitch) {
  SAN_UNROLL
  for (int n = 0; n < 2 * KM * KD; ++n) {
    const int row = n / (2 * KD) * 16 + n % 2 * 8 + mine.row, column = n / 2 % KD * 8 + mine.pair;
    Pack<2, T>{values[first + 2 * n], values[first + 2 * n + 1]}.store(out + int64_t(row) * pitch + column);
  }
}

// Sums over the lanes of one row of a product and stores the totals of 8 rows.
template <class T>
__device__ __forceinline__ void store_row_sums(const Team& mine, T sum, T* out) {
  for (int bits = 1; bits < 4; bits *= 2) sum += __shfl_xor_sync(~0u, sum, bits);
  if (mine.pair == 0) out[mine.row] = sum;
}

// Calls visit(0) .. visit(count - 1). If N > 0, count must be N; arrays indexed by visit then stay in registers.
template <int N, class Visit>
__device__ __forceinline__ void for_each_tile(int count, const Visit& visit) {
  if constexpr (N > 0) {
    SAN_UNROLL
    for (int n = 0; n < N; ++n) visit(n);
  } else {
    SAN_ROLLED
    for (int n = 0; n < count; ++n) visit(n);
  }
}

// a1 of 16 pixels at one footprint position, in the layout of a product's sum.
template <class T, bool kAround>
struct Rows {
  using Two = Pack<2, T>;
  using Four = Pack<4, T>;

  // Coefficients of one tile of channels of a team's pixels, and the bytes of all tiles.
  static constexpr int kCoefficients = 8 * kWarp;
  static SAN_HOST_DEVICE size_t bytes(const Pairs<T>& p) { return size_t(p.tiles) * kCoefficients * sizeof(T); }

  const Pairs<T>& p;
  Pixel<kAround> pixels[2];  // of rows g and g + 8
  T* coefficients;
  const T* partners[2];
  int partner[2];
  bool is_pair[2] = {true, true};

  __device__ __forceinline__ Rows(const Pairs<T>& p, const Team& mine, int64_t group, T* shared)
      : p(p), pixels{{p, group * 16 + mine.row}, {p, group * 16 + mine.row + 8}} {
    coefficients = shared + mine.team * p.tiles * kCoefficients + 4 * mine.lane;
    for (int c = mine.member; c < p.tiles; c += mine.split) {
      Four scale, bias;
      SAN_UNROLL
      for (int n = 0; n < 4; ++n) {
        p.coefficients(pixels[n / 2], 8 * c + mine.pair + n % 2, scale.data[n], bias.data[n]);
      }
      scale.store(coefficients + c * kCoefficients), bias.store(coefficients + c * kCoefficients + 4 * kWarp);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void move(const Team& mine, const Offset& offset) {
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) {
      partner[n] = pixels[n].partner(p, offset, is_pair[n]);
      partners[n] = row_at((kAround ? p.center : p.around) + mine.pair, partner[n], p.row_bytes());
    }
  }

  // Index of a pair's pixel of center.
  __device__ __forceinline__ int center(int n) const { return kAround ? partner[n] : pixels[n].index; }

  __device__ __forceinline__ void values(int c, T (&result)[4]) const {
    const Two upper = Two::load(partners[0] + 8 * c), lower = Two::load(partners[1] + 8 * c);
    result[0] = upper.data[0], result[1] = upper.data[1], result[2] = lower.data[0], result[3] = lower.data[1];
  }

  __device__ __forceinline__ void activate(int c, T (&a1)[4]) const {
    const Four scale = Four::load(coefficients + c * kCoefficients);
    const Four bias = Four::load(coefficients + c * kCoefficients + 4 * kWarp);
    values(c, a1);
    SAN_UNROLL
    for (int n = 0; n < 4; ++n) a1[n] = rectified(scale.data[n] * a1[n] + bias.data[n]);
  }
};

// a1 of 8 pixels as a right factor. Its depth runs over pairs: a lane has channel g of the pixels 2t and 2t + 1. With
// kFlipped, its depth runs over channels: a lane has the channels 2t and 2t + 1 of pixel g.
template <class T, bool kFlipped = false>
struct Columns {
  using Two = Pack<2, T>;
  static constexpr int kCoefficients = 4 * kWarp;  // of one tile of channels
  static SAN_HOST_DEVICE size_t bytes(const Pairs<T>& p) { return size_t(p.tiles) * kCoefficients * sizeof(T); }

  const Pairs<T>& p;
  Pixel<false> pixels[2];
  T* coefficients;
  const T* partners[2];

  // If `missing` is not null, it is a1 of pixels that do not exist, instead of 0. Its values must not be negative.
  __device__ __forceinline__ Columns(const Pairs<T>& p, const Team& mine, int64_t group, T* shared,
                                     const T* missing = nullptr)
      : p(p),
        pixels{{p, group * 8 + (kFlipped ? mine.row : mine.pair)},
               {p, group * 8 + (kFlipped ? mine.row : mine.pair + 1)}} {
    coefficients = shared + mine.team * p.tiles * kCoefficients + 4 * mine.lane;
    for (int c = mine.member; c < p.tiles; c += mine.split) {
      Pack<4, T> both;
      SAN_UNROLL
      for (int n = 0; n < 2; ++n) {
        const int channel = 8 * c + (kFlipped ? mine.pair + n : mine.row);
        p.coefficients(pixels[n], channel, both.data[n], both.data[2 + n]);
        if (missing != nullptr && !pixels[n].exists) both.data[2 + n] = missing[channel];
      }
      both.store(coefficients + c * kCoefficients);
    }
  }

  __device__ __forceinline__ void move(const Team& mine, const Offset& offset) {
    bool is_pair;
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) {
      const int partner = pixels[n].partner(p, offset, is_pair);
      partners[n] = row_at(p.around + (kFlipped ? mine.pair : mine.row), partner, p.row_bytes());
    }
  }

  __device__ __forceinline__ Two activate(int c) const {
    const auto both = Pack<4, T>::load(coefficients + c * kCoefficients);
    Two a1;
    if constexpr (kFlipped) {
      a1 = Two::load(partners[0] + 8 * c);
    } else {
      a1 = {partners[0][8 * c], partners[1][8 * c]};
    }
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) a1.data[n] = rectified(both.data[n] * a1.data[n] + both.data[2 + n]);
    return a1;
  }
};

// u = weight1 a1 + shift2 of 16 pairs in KE tiles of hidden channels. `weight1` and `shift2` point to the first operand
// and the first value of the lane. The depth is KT tiles, or `tiles` if KT is 0.
template <int KE, int KT, class F, class T, class Activation>
__device__ __forceinline__ void hidden_of(const Activation& activation, const F* weight1, const T* shift2, int tiles,
                                          T (&u)[KE][4]) {
  SAN_UNROLL
  for (int e = 0; e < KE; ++e) {
    const auto shift = Pack<2, T>::load(shift2 + 8 * e);
    u[e][0] = u[e][2] = shift.data[0], u[e][1] = u[e][3] = shift.data[1];
  }
  for_each_tile<KT>(tiles, [&](int c) {
    T a1[4];
    activation(c, a1);
    multiply_all(u, F(a1[0], a1[1]), F(a1[2], a1[3]), weight1 + c * KE * kWarp);
  });
}

// Copies a rectangle of a padded matrix, which starts at `first` in each row of the partial sums.
template <class T>
struct Part {
  T* out;  // [rows, columns]
  int rows, columns, pitch;
  int64_t first, size;

  __device__ __forceinline__ void operator()(int64_t column, const double* sum) const {
    const int64_t at = column - first, row = at / pitch, inside = at - row * pitch;
    if (at < 0 || at >= size || row >= rows || inside >= columns) return;
    out[row * columns + inside] = static_cast<T>(*sum);
  }
};

// Tiles of 8 relation channels. Kernels are compiled for 1, 3 and 5 tiles, the numbers of SAN's first stages.
inline int padded_tiles(int channels) {
  const int tiles = (channels + 7) / 8;
  return tiles <= 1 ? 1 : tiles <= 3 ? 3 : tiles <= 5 ? 5 : tiles;
}

// The host side of one call: maps ready for the kernels.
template <class F>
class PairWork : public Workspace<F> {
 public:
  using T = typename F::Value;
  Pairs<T> pairs;

  PairWork(const Tensor& center, const Tensor& around, const Tensor& shift, const Footprint& f, int64_t products)
      : Workspace<F>(center) {
    const int d = static_cast<int>(center.size(3)), tiles = padded_tiles(d);
    pairs = {grid_of(center, f),
             d,
             tiles,
             static_cast<int>(products),
             this->pad(center, {1, f.height, f.width}, tiles),
             this->pad(around, f, tiles),
             this->pad(shift, {1, 1, 1}, tiles)};
  }

  // Shared memory of `bytes_of_team` for each team, or for the sum of N values over a block's warps.
  size_t shared_bytes(const Plan& plan, size_t bytes_of_team, int N) const {
    const size_t bytes = std::max(plan.teams() * bytes_of_team, bytes_of_team_sums<T>(N));
    STD_TORCH_CHECK(bytes <= shared_memory_limit(), pairs.d, " relation channels need ", bytes,
                    " bytes of shared memory, and a block of this GPU has ", shared_memory_limit(),
                    "; use fewer channels");
    return bytes;
  }
};

}  // namespace
}  // namespace san::cuda
