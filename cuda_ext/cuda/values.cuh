// The values of attention without stored weights: how kernels read maps of them, and weighted sums in a warp's
// registers.
#pragma once
#include "maps.cuh"

namespace san::cuda {
namespace {

constexpr int kShares = 8;  // value channels that share a weight, as in SAN; missing ones are zeros

// Maps [pixels, G * shares], copied by weight channel: for each pixel [g_tiles, kShares / 2, 4, 2, 2], where the last
// two are two values of two adjacent weight channels, which a lane loads at once.
struct Values {
  int G, shares, g_tiles;

  SAN_HOST_DEVICE int values() const { return G * shares; }
  SAN_HOST_DEVICE int value_step() const { return g_tiles * kShares * 8; }
  SAN_HOST_DEVICE int value_bytes() const { return value_step() * static_cast<int>(sizeof(float)); }
  // The place of a pixel's first value for a tile of weight channels and the lane's columns.
  SAN_HOST_DEVICE int value_at(int tile, int column) const { return tile * kShares * 8 + 2 * column; }
};

// For weight channels in `g_tiles` tiles.
inline Values values_of(const Tensor& beta, int64_t G, int64_t g_tiles) {
  STD_TORCH_CHECK(beta.scalar_type() != ScalarType::Double, "on GPUs, beta must be float32 or a half type");
  const int64_t shares = beta.size(3) / G;
  STD_TORCH_CHECK(shares <= kShares, "on GPUs, at most ", kShares, " value channels may share a weight channel, not ",
                  shares);
  return {static_cast<int>(G), static_cast<int>(shares), static_cast<int>(g_tiles)};
}

// Copies a map [images, height, width, values()], with reflected borders. After it follow some pixels of zeros.
struct ValueMap {
  Floats from;
  int64_t pixel_stride;
  Footprint f;
  Values v;
  int64_t pixels, elements;  // of the copy without zeros; rows of 8 values with them, fewer than 2^32
  float* to;

  ValueMap() = default;
  // The map may be a slice of the channels of another one.
  ValueMap(Workspace& work, const Tensor& x, const Footprint& f, const Values& v, int64_t zeros) : f(f), v(v) {
    const int64_t W = x.size(2), pixel = x.stride(2);
    const bool is_slice = x.stride(3) == 1 && x.stride(1) == W * pixel && x.stride(0) == x.size(1) * W * pixel;
    from = is_slice ? Floats(x) : work.keep(x), pixel_stride = is_slice ? pixel : x.size(3);
    pixels = x.size(0) * f.padded_height() * f.padded_width(), elements = (pixels + zeros) * v.g_tiles * kShares;
    STD_TORCH_CHECK(elements < int64_t(1) << 32, "maps of ", elements * 8, " values with their borders are too large");
    to = work.take(8 * elements);
  }

  __device__ __forceinline__ void write(int64_t index) const {
    const unsigned rows = v.g_tiles * kShares;
    const int pixel = static_cast<int>(static_cast<uint32_t>(index) / rows);
    const int row = static_cast<int>(index - int64_t(pixel) * rows);
    const int height = static_cast<int>(f.padded_height()), width = static_cast<int>(f.padded_width());
    const int line = pixel / width, image = line / height;
    const int64_t h = reflect(line - image * height - f.reach(), f.height);
    const int64_t w = reflect(pixel - line * width - f.reach(), f.width);
    const int64_t at = ((image * f.height + h) * f.width + w) * pixel_stride;
    const int share = row % kShares / 2 * 2, channel = row / kShares * 8 + row % 2 * 4;
    SAN_ROLLED
    for (int half = 0; half < 2; ++half) {
      Pack<4, float> four;
      SAN_UNROLL
      for (int n = 0; n < 4; ++n) {
        const int s = share + n / 2, g = channel + 2 * half + n % 2;
        const bool exists = pixel < pixels && s < v.shares && g < v.G;
        four.data[n] = exists ? static_cast<float>(from.get(at + s * v.G + g)) : 0;
      }
      four.store(to + 8 * index + 4 * half);
    }
  }
};

// The values of a pixel for a lane's two weight channels.
struct PixelValues {
  Pack<4, float> data[kShares / 2];

  PixelValues() = default;
  __device__ __forceinline__ explicit PixelValues(const float* from) {
    SAN_UNROLL
    for (int n = 0; n < kShares / 2; ++n) data[n] = Pack<4, float>::load(from + 16 * n);
  }

  // For each of the two channels, the sum of the products with other values.
  __device__ __forceinline__ Pack<2, float> times(const float* other) const {
    const PixelValues values(other);
    Pack<2, float> sums{};
    SAN_UNROLL
    for (int n = 0; n < 2 * kShares; ++n) sums.data[n % 2] += data[n / 4].data[n % 4] * values.data[n / 4].data[n % 4];
    return sums;
  }
};

// sums += w * values, for two pixels and two weight channels of a lane.
__device__ __forceinline__ void add_weighted(const float (&w)[4], const float* const (&rows)[2],
                                             float (&sums)[kShares][4]) {
  SAN_UNROLL
  for (int i = 0; i < 2; ++i) {
    const PixelValues values(rows[i]);
    SAN_UNROLL
    for (int n = 0; n < 2 * kShares; ++n) {
      sums[n / 2][2 * i + n % 2] += w[2 * i + n % 2] * values.data[n / 4].data[n % 4];
    }
  }
}

// Stores the sums of a tile of weight channels in a map [pixels, values()].
template <class Place>
__device__ __forceinline__ void store_values(const Values& v, const Place (&pixels)[2], int tile, const Team& team,
                                             const float (&sums)[kShares][4], const Floats& out) {
  SAN_UNROLL
  for (int s = 0; s < kShares; ++s) {
    SAN_UNROLL
    for (int n = 0; n < 4; ++n) {
      const int g = tile * 8 + team.column + n % 2;
      if (pixels[n / 2].exists && s < v.shares && g < v.G) {
        out.set(int64_t(pixels[n / 2].index) * v.values() + s * v.G + g, sums[s][n]);
      }
    }
  }
}

}  // namespace
}  // namespace san::cuda
