// What the passes of fused patchwise attention share. The maths: san/ops/fused.py and cpu/patchwise.cpp.
//
// A patch has `pieces` of R channels: around at each position of the footprint and, if center has channels, center
// itself. Parameters are arranged by pieces, so that the first Linear layer is a sum over pieces of products
// a1 [pixels, R] weight1_piece^T [R, E], and the second gives the weights of one position at a time.
//
// A block owns a square tile of pixels, and each of its warps two rows of it: the 16 rows of a warp's products.
// Products are taken and used up in registers (patchwise_fragment.cuh): where a piece is a factor, BatchNorm and ReLU
// are applied as a lane reads an element, and where weights or gradients of a piece result, a lane uses its elements at
// once. So nothing of a patch's size is written anywhere, and warps wait for each other only when a block reads another
// tile.
#pragma once
#include <cmath>

#include "patchwise_fragment.cuh"
#include "sums.cuh"

namespace san::cuda {

constexpr int kSide = 8, kTilePixels = kSide * kSide;
constexpr int kTileThreads = kTilePixels / 16 * kWarp;
constexpr int kDepth = 16;          // channels of a patch in shared memory at once
constexpr int kPitch = kDepth + 8;  // between its cells: pitch_of(kDepth)
constexpr int kColumns = 4;         // tiles of 8 columns that a warp computes at most
constexpr int kHiddenPixels = 64;   // of a block that sums over a map [pixels, E]
constexpr int kMomentPieces = 64;   // of a block that takes moments of a patch
constexpr int kShares = 8;          // value channels of one weight that a lane works on at once

// Blocks that registers must leave room for on a multiprocessor.
template <class T>
constexpr int kTileBlocks = sizeof(T) == sizeof(double) ? 1 : 4;

// Of a lane's two pixels, which lie in rows g and g + 8 of its warp's products.
struct Places {
  int upper, lower;
};

// The square of pixels [top, top + kSide) x [left, left + kSide) of an image, which may reach over the map's far
// borders. A place is a pixel of the image, counted by rows; -1 stands for what is not in the map.
struct PatchTile {
  int64_t image;  // its first pixel, counted over all images
  int top, left, height, width;

  __device__ __forceinline__ int rows() const { return height - top < kSide ? height - top : kSide; }
  __device__ __forceinline__ int columns() const { return width - left < kSide ? width - left : kSide; }
  __device__ __forceinline__ int place(int h, int w) const {
    const bool inside = h >= 0 && w >= 0 && h < height && w < width;
    return inside ? h * width + w : -1;
  }
  // The place shown at a coordinate of the reflected map.
  __device__ __forceinline__ int reflected(int h, int w, int reach) const {
    if (h >= height + reach || w >= width + reach) return -1;
    return place(static_cast<int>(reflect(h, height)), static_cast<int>(reflect(w, width)));
  }
  // Pixels (h, w) and (h + 1, w) of the tile, and what a position of their footprints shows.
  __device__ __forceinline__ Places own(int h, int w) const {
    return {place(top + h, left + w), place(top + h + 1, left + w)};
  }
  __device__ __forceinline__ Places seen(const Places& own, int h, int w, int position, int kernel_size) const {
    const int reach = kernel_size / 2, down = divide(position, kernel_size), right = position - down * kernel_size;
    const int from_h = top + h + down - reach, from_w = left + w + right - reach;
    return {own.upper < 0 ? -1 : reflected(from_h, from_w, reach),
            own.lower < 0 ? -1 : reflected(from_h + 1, from_w, reach)};
  }
};

// Where pixel (h, w) of the tile finds a piece in a patch's shared memory: cell(h, w).
struct View {
  int origin, stride;

  __device__ __forceinline__ int cell(int h, int w) const { return origin + h * stride + w; }
};

// Sizes, and parameters padded with zeros.
template <class T>
struct Patchwise {
  Footprint f;
  int64_t images;
  int C, R, E, G, M;  // channels of center (R or 0) and around, hidden, weight and value channels
  const T*
      shift;  // [2, padded(R)]: means of around and of center, of the batch or running ones, which maps are taken less
  const T* activation;  // [pieces, padded(R), 2]: a1 = relu(scale * (x - shift) + offset)
  const T* norm2;       // [padded(E), 4]: mean, scale, bias, deviation; a2 = relu(scale * (u - mean) + bias)
  const T* weight1;     // [pieces, padded(E), padded(R)]
  const T* weight2;     // [K, padded(G), padded(E)]
  const T* bias3;       // [K, padded(G)]

  SAN_HOST_DEVICE int positions() const { return static_cast<int>(f.positions()); }
  SAN_HOST_DEVICE int pieces() const { return positions() + (C > 0 ? 1 : 0); }
  SAN_HOST_DEVICE int reach() const { return static_cast<int>(f.reach()); }
  SAN_HOST_DEVICE int kernel_size() const { return static_cast<int>(f.kernel_size); }
  SAN_HOST_DEVICE int height() const { return static_cast<int>(f.height); }
  SAN_HOST_DEVICE int width() const { return static_cast<int>(f.width); }
  SAN_HOST_DEVICE int share() const { return M / G; }
  SAN_HOST_DEVICE int64_t pixels() const { return images * f.pixels(); }
  // Channels of a patch, and the place of a piece's channel among them, as parameters are ordered outside.
  SAN_HOST_DEVICE int channels() const { return C + R * positions(); }
  SAN_HOST_DEVICE int channel(int piece, int r) const { return piece == positions() ? r : C + r * positions() + piece; }
  SAN_HOST_DEVICE int64_t tiles_high() const { return (f.height + kSide - 1) / kSide; }
  SAN_HOST_DEVICE int64_t tiles_wide() const { return (f.width + kSide - 1) / kSide; }
  SAN_HOST_DEVICE int64_t tiles() const { return images * tiles_high() * tiles_wide(); }
  // What footprints of a tile's pixels cover.
  SAN_HOST_DEVICE int halo_side() const { return kSide + 2 * reach(); }
  SAN_HOST_DEVICE int halo_cells() const { return halo_side() * halo_side(); }
  SAN_HOST_DEVICE int patch_cells() const { return halo_cells() + (C > 0 ? kTilePixels : 0); }
  SAN_HOST_DEVICE int chunks() const { return (R + kDepth - 1) / kDepth; }

  __device__ __forceinline__ PatchTile tile(int64_t index) const {
    const int64_t wide = tiles_wide(), high = tiles_high();
    return {index / wide / high * f.pixels(), static_cast<int>(index / wide % high) * kSide,
            static_cast<int>(index % wide) * kSide, height(), width()};
  }
  __device__ __forceinline__ View view(int piece) const {
    if (piece == positions()) return {halo_cells(), kSide};
    const int down = divide(piece, kernel_size());
    return {down * halo_side() + piece - down * kernel_size(), halo_side()};
  }
};

// The next, N channels at once.
template <int N, class scalar_t, class T>
__device__ __forceinline__ void load_patch_of(const Patchwise<T>& p, const scalar_t* center, const scalar_t* around,
                                              const PatchTile& tile, int first, T* shared) {
  const int side = p.halo_side(), halo = p.halo_cells(), reach = p.reach();
  for_each_cell(p.patch_cells(), kDepth / N, [&](int cell, int column) {
    const bool is_center = cell >= halo;
    const int index = is_center ? cell - halo : cell, row = divide(index, is_center ? kSide : side);
    const int h = tile.top + row, w = tile.left + index - row * (is_center ? kSide : side), r = first + column * N;
    const int place = is_center ? tile.place(h, w) : tile.reflected(h - reach, w - reach, reach);
    Pack<N, T> values{};
    if (place >= 0 && r < p.R) {
      const auto x = Pack<N, scalar_t>::load((is_center ? center : around) + (tile.image + place) * p.R + r);
      const auto shift = Pack<N, T>::load(p.shift + (is_center ? padded(p.R) : 0) + r);
      SAN_UNROLL
      for (int n = 0; n < N; ++n) values.data[n] = static_cast<T>(x.data[n]) - shift.data[n];
    }
    values.store(shared + cell * kPitch + column * N);
  });
}

// Brings kDepth channels of what the footprints of a tile cover into shared [patch_cells, kPitch]: around, then center.
template <class scalar_t, class T>
__device__ __forceinline__ void load_patch(const Patchwise<T>& p, const scalar_t* center, const scalar_t* around,
                                           const PatchTile& tile, int first, T* shared) {
  if (p.R % kWide == 0) {
    load_patch_of<kWide>(p, center, around, tile, first, shared);
  } else {
    load_patch_of<1>(p, center, around, tile, first, shared);
  }
}

// Brings channels [first, first + depth) of a map [pixels, E] into shared [cells, pitch_of(depth)], for the cells of a
// square that begins `reach` pixels above and left of the tile. value(x, e) is what to keep of an element.
template <class T, class Value>
__device__ __forceinline__ void load_hidden(const Patchwise<T>& p, const T* map, const PatchTile& tile, int reach,
                                            int first, int depth, T* shared, const Value& value) {
  const int side = kSide + 2 * reach;
  for_each_cell(side * side, depth, [&](int cell, int c) {
    const int row = divide(cell, side), e = first + c;
    const int place = tile.place(tile.top + row - reach, tile.left + cell - row * side - reach);
    shared[cell * pitch_of(depth) + c] = place >= 0 && e < p.E ? value(map[(tile.image + place) * p.E + e], e) : T(0);
  });
}

// An element of what `parts` blocks or threads left of a sum, [parts, size].
template <class T>
__device__ __forceinline__ T sum_parts(const T* partial, int parts, int64_t size, int64_t index) {
  T sum = 0;
  for (int part = 0; part < parts; ++part) sum += partial[part * size + index];
  return sum;
}

// a2 of an element of u.
template <class T>
__device__ __forceinline__ T activate(const Patchwise<T>& p, T u, int e) {
  const auto norm = Pack<4, T>::load(p.norm2 + e * 4);
  return relu(norm.data[1] * (u - norm.data[0]) + norm.data[2]);
}

// Along one axis, the pixels whose footprint shows q at offset d: base + sign * q if first <= q <= last.
struct Line {
  int base, sign, first, last;

  // Those that see q itself, or its mirror image behind the border.
  static __device__ __forceinline__ Line of(int d, int size, bool mirrored) {
    if (!mirrored) return {-d, 1, d > 0 ? d : 0, d < 0 ? size - 1 + d : size - 1};
    if (d < 0) return {-d, -1, 1, -d};
    return {2 * (size - 1) - d, -1, size - 1 - d, d > 0 ? size - 2 : -1};
  }
  __device__ __forceinline__ bool meets(int low, int high) const { return first <= high && low <= last; }
  __device__ __forceinline__ bool has(int q) const { return first <= q && q <= last; }
  __device__ __forceinline__ int at(int q) const { return base + sign * q; }
};

// Calls visit(position, rows, columns) for the ways in which pixels see those of a warp's two rows: as each pair is met
// once, gradients of neighbours are gathered where they are needed, without atomics or another pass.
template <class T, class Visit>
__device__ __forceinline__ void for_each_way(const Patchwise<T>& p, const PatchTile& tile, int top,
                                             const Visit& visit) {
  const int kernel_size = p.kernel_size();
  for (int down = 0; down < kernel_size; ++down) {
    for (int mirrored_h = 0; mirrored_h < 2; ++mirrored_h) {
      const Line rows = Line::of(down - p.reach(), tile.height, mirrored_h == 1);
      if (!rows.meets(top, top + 1)) continue;
      for (int right = 0; right < kernel_size; ++right) {
        for (int mirrored_w = 0; mirrored_w < 2; ++mirrored_w) {
          const Line columns = Line::of(right - p.reach(), tile.width, mirrored_w == 1);
          if (columns.meets(tile.left, tile.left + kSide - 1)) visit(down * kernel_size + right, rows, columns);
        }
      }
    }
  }
}

}  // namespace san::cuda
