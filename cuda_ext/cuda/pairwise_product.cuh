// Matrix products by one thread block, of operands that lie in shared or global memory.
//
// float runs on tensor cores in TF32. With kAccurate each factor is split into two TF32 numbers, x = big + small, and
// big * big + big * small + small * big is summed, whose error is that of float arithmetic, some 1e-7 (3xTF32). double
// takes plain multiply-adds.
#pragma once
#include "launch.h"

namespace san::cuda {

#ifndef SAN_SHIM
// c [16, 8] += a [16, 8] b [8, 8] in TF32, by one warp. Lane 4 * g + t holds c(g, 2t), c(g, 2t + 1), c(g + 8, 2t),
// c(g + 8, 2t + 1); a(g, t), a(g + 8, t), a(g, t + 4), a(g + 8, t + 4); b(t, g), b(t + 4, g).
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

constexpr int kWarp = 32;

// x / n for 0 <= x < 2^20 and n > 0, in a fourth of the instructions of an integer division: half a unit is more than
// the error of the float quotient.
__device__ __forceinline__ int divide(int x, int n) {
#ifdef SAN_SHIM
  return x / n;
#else
  return static_cast<int>(__fdividef(static_cast<float>(x) + 0.5f, static_cast<float>(n)));
#endif
}

// N neighbouring elements, read and written at once.
template <int N, class T>
struct alignas(N * sizeof(T)) Pack {
  T data[N];

  static __device__ __forceinline__ Pack load(const T* from) { return *reinterpret_cast<const Pack*>(from); }
  __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<Pack*>(to) = *this; }
};

// One factor of a product: vectors over the depth k, rows of the left one or columns of the right one. With kAlong each
// lies in one row of memory, else element k of all of them does.
template <class T, bool kAlong>
struct Factor {
  const T* data;
  int pitch;

  __device__ __forceinline__ T at(int vector, int k) const {
    return data[kAlong ? vector * pitch + k : k * pitch + vector];
  }
  // Elements k + first and k + second. With pitch_of, banks do not conflict where lane t reads 2t and 2t + 1 along a
  // row, or t and t + 4 across rows.
  __device__ __forceinline__ Pack<2, T> pair(int vector, int k, int first, int second) const {
    if constexpr (kAlong) {
      if (second == first + 1) return Pack<2, T>::load(data + vector * pitch + k + first);
    }
    return {at(vector, k + first), at(vector, k + second)};
  }
};
template <class T>
using Along = Factor<T, true>;
template <class T>
using Across = Factor<T, false>;

// x = big + small. TF32 keeps 10 bits of the mantissa and tensor cores ignore the others, so big is x without them and
// small loses two bits at most; without kAccurate they do all there is to do.
template <bool kAccurate>
__device__ __forceinline__ void split(float x, uint32_t& big, uint32_t& small) {
  big = __float_as_uint(x);
  if constexpr (kAccurate) {
    big &= 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(big));
  }
}

// Widths of products are whole tiles of 8. Between rows lies an odd number of tiles, so that a warp's reads are in
// different banks.
SAN_HOST_DEVICE int padded(int64_t width) { return static_cast<int>((width + 7) / 8 * 8); }
SAN_HOST_DEVICE int pitch_of(int64_t width) { return padded(width) + (padded(width) % 16 == 0 ? 8 : 0); }

// Sizes of a product: `rows`, `columns` and `depth` are multiples of 8. `slices` warps, or groups of them, take every
// slices-th part of the depth, so that a small product over a great depth has work for all.
struct ProductSize {
  int rows, columns, depth, slices = 1;
};

// Calls visit(i, j, values, slice) for elements (i, j) and (i, j + 1) of the product, once for each; values [2] are the
// slice's parts of their sums.
template <bool kAccurate, bool kLeftAlong, bool kRightAlong, class Visit>
__device__ __forceinline__ void multiply(const Factor<float, kLeftAlong>& a, const Factor<float, kRightAlong>& b,
                                         const ProductSize& size, const Visit& visit) {
  constexpr int kTiles = 4;  // tiles of 8 columns that one warp computes at most from one a
  const int warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  // A sum may be taken in any order, so a lane chooses the two of 8 along the depth that it can read best.
  const int k_first = kLeftAlong ? 2 * t : t, k_second = kLeftAlong ? 2 * t + 1 : t + 4;
  const int tiles = size.columns / 8, bands = (size.rows + 15) / 16;
  int wide = kTiles;  // fewer tiles where warps had no work else
  while (wide > 1 && bands * ((tiles + wide - 1) / wide) * size.slices < warps) wide /= 2;
  const int strips = (tiles + wide - 1) / wide;
  for (int task = threadIdx.x / kWarp; task < bands * strips * size.slices; task += warps) {
    const int tile = divide(task, size.slices), slice = task - tile * size.slices;
    const int band = divide(tile, strips), top = band * 16, first = (tile - band * strips) * wide, left = first * 8;
    const int mine = tiles - first < wide ? tiles - first : wide;
    const bool has_lower = top + 8 < size.rows;
    float sum[kTiles][4] = {};
    for (int k = slice * 8; k < size.depth; k += size.slices * 8) {
      const Pack<2, float> upper = a.pair(top + g, k, k_first, k_second);
      const Pack<2, float> lower = has_lower ? a.pair(top + g + 8, k, k_first, k_second) : Pack<2, float>{};
      uint32_t a_big[4], a_small[4];
      split<kAccurate>(upper.data[0], a_big[0], a_small[0]), split<kAccurate>(lower.data[0], a_big[1], a_small[1]);
      split<kAccurate>(upper.data[1], a_big[2], a_small[2]), split<kAccurate>(lower.data[1], a_big[3], a_small[3]);
      SAN_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        if (n >= mine) break;
        const Pack<2, float> right = b.pair(left + 8 * n + g, k, k_first, k_second);
        uint32_t b_big[2], b_small[2];
        split<kAccurate>(right.data[0], b_big[0], b_small[0]), split<kAccurate>(right.data[1], b_big[1], b_small[1]);
        if constexpr (kAccurate) {
          mma_m16n8k8_tf32(sum[n], a_small, b_big);
          mma_m16n8k8_tf32(sum[n], a_big, b_small);
        }
        mma_m16n8k8_tf32(sum[n], a_big, b_big);
      }
    }
    SAN_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      const int j = left + 8 * n + 2 * t;
      if (n >= mine) break;
      visit(top + g, j, Pack<2, float>{sum[n][0], sum[n][1]}, slice);
      if (has_lower) visit(top + g + 8, j, Pack<2, float>{sum[n][2], sum[n][3]}, slice);
    }
  }
}

template <bool kAccurate, bool kLeftAlong, bool kRightAlong, class Visit>
__device__ __forceinline__ void multiply(const Factor<double, kLeftAlong>& a, const Factor<double, kRightAlong>& b,
                                         const ProductSize& size, const Visit& visit) {
  const int columns = size.columns / 2, tasks = size.rows * columns * size.slices;
  for (int task = threadIdx.x; task < tasks; task += blockDim.x) {
    const int i = task / columns % size.rows, j = task % columns * 2, slice = task / columns / size.rows;
    Pack<2, double> sums{};
    for (int k = slice * 8; k < size.depth; k += size.slices * 8) {
      for (int step = k; step < k + 8; ++step) {
        sums.data[0] += a.at(i, step) * b.at(j, step), sums.data[1] += a.at(i, step) * b.at(j + 1, step);
      }
    }
    visit(i, j, sums, slice);
  }
}

// How many slices keep all warps of a block busy.
SAN_HOST_DEVICE int slices_for(int rows, int columns, int threads) {
  const int tiles = (rows + 15) / 16 * ((columns + 31) / 32), warps = threads / kWarp;
  return tiles < warps ? warps / tiles : 1;
}

// Calls visit(i, j) for each cell of a grid, consecutive threads along a row.
template <class Visit>
__device__ __forceinline__ void for_each_cell(int rows, int columns, const Visit& visit) {
  const int threads = blockDim.x, thread = threadIdx.x;
  const int down = divide(threads, columns), right = threads - down * columns;
  int i = divide(thread, columns), j = thread - i * columns;
  while (i < rows) {
    visit(i, j);
    i += down, j += right;
    if (j >= columns) j -= columns, ++i;
  }
}

}  // namespace san::cuda
