// The relation of the kernels over pairs (i, j) of a pixel and a position of its footprint, how they divide their work,
// and the first layer. Definitions: san/ops/fused_reference.py.
//
// A warp computes 16 pixels (or 8) in a loop over the footprint. prepare_kernel has applied the norm to the maps, so a1
// = relu(center_i - around_j). The values of the warp's own pixels stay in registers, and those of their partners come
// through the L1 cache. The loop contains no index arithmetic for reflection, no tensor of pairs and no barrier.
#pragma once
#include "maps.cuh"

namespace san::cuda {
namespace {

// What the kernels are compiled for, in tiles of 8 channels. If it is whole, all channels are held at once, so loops
// over tiles are unrolled and values stay in registers; otherwise this many at a time.
template <int kRelation, int kHidden, int kWeights, bool kIsWhole = true>
struct Tiles {
  static constexpr int relation = kRelation, hidden = kHidden, weights = kWeights;
  static constexpr bool is_whole = kIsWhole;
};
struct Stage1 : Tiles<1, 1, 1> {};  // of SAN
struct Stage2 : Tiles<3, 2, 1> {};
struct Stage3 : Tiles<5, 4, 2> {};
struct Stage4 : Tiles<9, 8, 4> {};  // not for Operand<true>, which needs more registers than there are
struct AnySize : Tiles<9, 4, 4, false> {};
struct AnySizeAccurate : Tiles<9, 2, 4, false> {};  // for Operand<true>

// Calls run with the operand type of the products, and with the stage that suits the numbers of relation, hidden and
// weight channels.
template <class Run>
void with_stage(ScalarType weights, bool tf32, int64_t d, int64_t E, int64_t G, const Run& run) {
  const auto fits = [&]<class S>(S) {
    return tiles_for(d) <= S::relation && tiles_for(E) <= S::hidden && tiles_for(G) <= S::weights;
  };
  with_operand(weights, tf32, [&]<class F>(F operand) {
    if (fits(Stage1())) return run(operand, Stage1());
    if (fits(Stage2())) return run(operand, Stage2());
    if (fits(Stage3())) return run(operand, Stage3());
    if constexpr (std::is_same_v<F, Operand<true>>) {
      run(operand, AnySizeAccurate());
    } else {
      if (fits(Stage4())) return run(operand, Stage4());
      run(operand, AnySize());
    }
  });
}

// The prepared maps. Channels are padded with zeros to tiles of 8, and so are all products.
struct Pairs : Grid {
  int d, tiles;         // relation channels, and tiles of 8 of them
  const float* center;  // [images, height, width, pitch()]
  const float* around;  // [images, padded_height, padded_width, pitch()], with reflected borders

  SAN_HOST_DEVICE int pitch() const { return 8 * tiles; }
  SAN_HOST_DEVICE int row_bytes() const { return pitch() * static_cast<int>(sizeof(float)); }
  SAN_HOST_DEVICE double count() const { return static_cast<double>(pixels()) * positions(); }
};

// How a launch divides its work: each team of warps computes groups of pixels. Each of the jobs(), a strip of the rows
// and a chunk of the columns of a product, has blocks of its own.
struct Plan {
  int blocks;  // of each job
  int warps;   // of each team
  int strips, chunks;

  // One group for each team.
  static Plan for_groups(const Pairs& p, int64_t groups, int chunks) {
    const int warps = warps_per_team(groups * chunks, p.positions());
    blocks_of_teams(groups * chunks, warps);  // all blocks fit into one launch
    return {blocks_of_teams(groups, warps), warps, 1, chunks};
  }
  // For products whose depth runs over all pairs. Teams loop over groups of 8 pixels, so that there are few partial
  // sums.
  static Plan for_sums(const Pairs& p, int strips, int chunks) {
    const int64_t groups = (p.pixels() + 7) / 8, jobs = strips * chunks;
    const int warps = warps_per_team(groups * jobs, p.positions());
    const int64_t wanted = std::max(wanted_sum_blocks() / jobs, groups * p.positions() / (kLongestSum * kWarps));
    const int64_t blocks = std::min<int64_t>(blocks_of_teams(groups, warps), wanted);
    return {static_cast<int>(std::max<int64_t>(1, blocks)), warps, strips, chunks};
  }

  SAN_HOST_DEVICE int jobs() const { return strips * chunks; }
  SAN_HOST_DEVICE int teams() const { return kWarps / warps; }
  int grid() const { return blocks * jobs(); }
};

// The part of the work that a block computes. With kSingle there is one job, so indices of tiles are constants.
template <bool kSingle>
struct Job {
  int block, strip = 0, chunk = 0;

  __device__ __forceinline__ explicit Job(const Plan& plan) : block(blockIdx.x) {
    if constexpr (kSingle) return;
    block = blockIdx.x / plan.jobs();
    const int job = blockIdx.x - block * plan.jobs();
    strip = job / plan.chunks, chunk = job - strip * plan.chunks;
  }
};

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
// Calls visit for all tiles of relation channels.
template <class S, class Visit>
__device__ __forceinline__ void for_each_relation_tile(const Pairs& p, const Visit& visit) {
  for_each_tile<(S::is_whole ? S::relation : 0)>(p.tiles, visit);
}

// a1 of pixels with channels along the depth of a product: of 16 pixels as a left factor (N = 2) or of 8 pixels as a
// right factor (N = 1). The group starts at pixel `first`.
template <class S, bool kAround, int N>
struct PixelRows {
  using Two = Pack<2, float>;

  const Pairs& p;
  Pixel<kAround> pixels[N];  // of row g and, with N = 2, of row g + 8
  const float *own[N], *partners[N];
  Two kept[S::is_whole ? S::relation : 1][N];  // the pixels' own values
  int partner[N];
  bool is_pair[N];

  __device__ __forceinline__ PixelRows(const Pairs& p, const Team& team, int64_t first) : p(p) {
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      pixels[n] = Pixel<kAround>(p, first + team.row + 8 * n);
      own[n] = row_at((kAround ? p.around : p.center) + team.column, pixels[n].index, p.row_bytes());
      if constexpr (S::is_whole) {
        SAN_UNROLL
        for (int c = 0; c < S::relation; ++c) kept[c][n] = Two::load(own[n] + 8 * c);
      }
    }
  }

  __device__ __forceinline__ void move(const Team& team, const Offset& offset) {
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      partner[n] = pixels[n].partner(p, offset, is_pair[n]);
      partners[n] = row_at((kAround ? p.center : p.around) + team.column, partner[n], p.row_bytes());
    }
  }

  // Index of a pair's pixel of center.
  __device__ __forceinline__ int center(int n) const { return kAround ? partner[n] : pixels[n].index; }

  __device__ __forceinline__ void activate(int c, float (&a1)[2 * N]) const {
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      const Two other = Two::load(partners[n] + 8 * c);
      const Two value = S::is_whole ? kept[S::is_whole ? c : 0][n] : Two::load(own[n] + 8 * c);
      SAN_UNROLL
      for (int k = 0; k < 2; ++k) {
        a1[2 * n + k] = rectified(kAround ? other.data[k] - value.data[k] : value.data[k] - other.data[k]);
      }
    }
  }
};

// a1 of 8 pixels as a right factor with pixels along the depth: a lane has channel g of the pixels 2t and 2t + 1.
template <class S>
struct PixelColumns {
  const Pairs& p;
  Pixel<false> pixels[2];
  const float *own[2], *partners[2];
  float kept[S::is_whole ? S::relation : 1][2];  // the pixels' own values

  __device__ __forceinline__ PixelColumns(const Pairs& p, const Team& team, int64_t first) : p(p) {
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) {
      pixels[n] = Pixel<false>(p, first + team.column + n);
      own[n] = row_at(p.center + team.row, pixels[n].index, p.row_bytes());
      if constexpr (S::is_whole) {
        SAN_UNROLL
        for (int c = 0; c < S::relation; ++c) kept[c][n] = own[n][8 * c];
      }
    }
  }

  __device__ __forceinline__ void move(const Team& team, const Offset& offset) {
    bool is_pair;
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) {
      partners[n] = row_at(p.around + team.row, pixels[n].partner(p, offset, is_pair), p.row_bytes());
    }
  }

  __device__ __forceinline__ Pack<2, float> activate(int c) const {
    Pack<2, float> a1;
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) {
      const float value = S::is_whole ? kept[S::is_whole ? c : 0][n] : own[n][8 * c];
      a1.data[n] = rectified(value - partners[n][8 * c]);
    }
    return a1;
  }
};

// sum += matrix a1 of 16 pairs, in N tiles of channels. `matrix` are the lane's operands, from tile `first` on.
template <class F, class S, int N, class Activation, class Right>
__device__ __forceinline__ void add_first_layer(const Pairs& p, const Activation& activation, const Right& matrix,
                                                int first, float (&sum)[N][4]) {
  for_each_relation_tile<S>(p, [&](int c) {
    float a1[4];
    activation(c, a1);
    multiply_all(sum, F::of_rectified(a1[0], a1[1]), F::of_rectified(a1[2], a1[3]), matrix, first + c * N);
  });
}

// A typical value of each channel of each image, [images, channels], which is subtracted so that large means cost no
// precision: the median of three means of a few pixels each. One huge pixel thus has no influence, nor have values that
// are not finite.
//
// Predicted for an H100: moves 55 KB; 0.003 ms, for the launch. Measured on an H200: 0.004 ms.
__global__ void origin_kernel(const float* around, int64_t pixels, int channels, int64_t elements, float* origin) {
  constexpr int kSamples = 8;
  SAN_FOR_EACH(index, elements) {
    const int64_t image = index / channels, first = image * pixels * channels + index % channels;
    origin[index] = middle_of_three([&](int part) {
      const int64_t begin = pixels * part / 3, length = std::max<int64_t>(1, pixels * (part + 1) / 3 - begin);
      float sum = 0, count = 0;
      for (int n = 0; n < kSamples; ++n) {
        const float x = around[first + std::min(begin + length * n / kSamples, pixels - 1) * channels];
        if (std::abs(x) < std::numeric_limits<float>::infinity()) sum += x / kSamples, ++count;
      }
      return count > 0 ? sum * (kSamples / count) : 0;
    });
  }
}

// The host side of one call: checked inputs, and the jobs that prepare the maps.
class PairWork : public Workspace {
 public:
  const Footprint f;
  const float *raw_center, *raw_around, *norm, *origin;
  PaddedMap<> center, around;
  Pairs pairs;

  PairWork(const Tensor& center_map, const Tensor& around_map, const Tensor& norm_rows, const Footprint& f, int tiles)
      : Workspace(center_map),
        f(f),
        raw_center(keep_float(center_map)),
        raw_around(keep_float(around_map)),
        norm(keep_float(norm_rows)) {
    const int64_t images = center_map.size(0);
    const int d = static_cast<int>(center_map.size(3));
    float* origins = take(images * d);
    SAN_LAUNCH(origin_kernel, blocks_for(images * d), kThreads, stream(), raw_around, f.pixels(), d, images * d,
               origins);
    origin = origins;
    const float *scale = norm + d, *shift = norm + 2 * d;
    center = map(raw_center, images, {1, f.height, f.width}, d, tiles, {origin, norm, scale, shift});
    around = map(raw_around, images, f, d, tiles, {origin, nullptr, scale, nullptr});
    pairs = {grid_of(center_map, f), d, tiles, center.to, around.to};
  }
};

// The number of tiles that S holds, or those of d channels.
template <class S>
int relation_tiles(const Tensor& center) {
  return S::is_whole ? S::relation : tiles_for(center.size(3));
}

}  // namespace

// The mean [d] and biased covariance [d, d] of a1 over all pairs; in pair_covariance.cu.
void pair_covariance(const Tensor& center, const Tensor& around, const Tensor& norm, const Footprint& f, bool tf32,
                     const Tensor& mean, const Tensor& covariance);

}  // namespace san::cuda
