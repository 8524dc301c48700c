// Matrix products by one thread block, of operands that lie in shared or global memory.
//
// float runs on tensor cores in TF32. With kAccurate each factor is split into two TF32 numbers, x = big + small, and
// big * big + big * small + small * big is summed, whose error is that of float arithmetic, some 1e-7 (3xTF32). Two
// factors in bfloat16 are multiplied as such, one beside a float as TF32, which holds it without error; sums are float.
// double takes plain multiply-adds.
#pragma once
#include "launch.h"

namespace san::cuda {

using torch::headeronly::BFloat16;

#ifndef SAN_SHIM
// c [16, 8] += a [16, 8] b [8, 8] in TF32, by one warp. Lane 4 * g + t holds c(g, 2t), c(g, 2t + 1), c(g + 8, 2t),
// c(g + 8, 2t + 1); a(g, t), a(g + 8, t), a(g, t + 4), a(g + 8, t + 4); b(t, g), b(t + 4, g).
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c [16, 8] += a [16, 16] b [16, 8] in bfloat16, whose registers hold two neighbours along the depth. Lane 4 * g + t
// holds c as above; a(g, 2t), a(g + 8, 2t), a(g, 2t + 8), a(g + 8, 2t + 8); b(2t, g), b(2t + 8, g).
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

constexpr int kWarp = 32;

template <class T>
__device__ __forceinline__ T relu(T x) {
  return x < 0 ? T(0) : x;  // NaN stays
}

// x / n for 0 <= x < 2^20 and n > 0, in a fourth of the instructions of an integer division: half a unit is more than
// the error of the float quotient.
__device__ __forceinline__ int divide(int x, int n) {
#ifdef SAN_SHIM
  return x / n;
#else
  return static_cast<int>(__fdividef(static_cast<float>(x) + 0.5f, static_cast<float>(n)));
#endif
}

constexpr int kWide = 4;  // neighbouring channels that a thread loads at once, where their number allows

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

// Widths of products are whole tiles of 8; along the depth of bfloat16 factors, of 16. Between rows lies an odd number
// of tiles, so that a warp's reads are in different banks.
template <class factor_t>
constexpr int kDepthTile = sizeof(factor_t) == 2 ? 16 : 8;
template <class factor_t>
SAN_HOST_DEVICE int padded(int64_t width) {
  constexpr int kTile = kDepthTile<factor_t>;
  return static_cast<int>((width + kTile - 1) / kTile * kTile);
}
template <class factor_t>
SAN_HOST_DEVICE int pitch_of(int64_t width) {
  constexpr int kTile = kDepthTile<factor_t>;
  return padded<factor_t>(width) + (padded<factor_t>(width) % (2 * kTile) == 0 ? kTile : 0);
}
SAN_HOST_DEVICE int padded(int64_t width) { return padded<float>(width); }
SAN_HOST_DEVICE int pitch_of(int64_t width) { return pitch_of<float>(width); }

// Sizes of a product: `rows`, `columns` and `depth` are multiples of tiles. `slices` warps, or groups of them, take
// every slices-th part of the depth, so that a small product over a great depth has work for all.
struct ProductSize {
  int rows, columns, depth, slices = 1;
};

// How a warp multiplies a [16, kDepth] by b [kDepth, 8]: `load_left` and `load_right` bring in what its lanes hold of
// row `top` or column `left` on and depth k on, `add` multiplies. A sum may be taken in any order, so a lane chooses
// those along the depth that it can read best; kNeighbours: they lie beside each other.
template <bool kAccurate, bool kNeighbours>
struct Tf32 {
  static constexpr int kDepth = 8;
  struct Left {
    uint32_t big[4], small[4];
  };
  struct Right {
    uint32_t big[2], small[2];
  };

  template <class A>
  static __device__ __forceinline__ void load_left(const A& a, int top, bool has_lower, int k, Left& left) {
    const int row = top + threadIdx.x % kWarp / 4;
    const Pack<2, float> upper = pair(a, row, k), lower = has_lower ? pair(a, row + 8, k) : Pack<2, float>{};
    split<kAccurate>(upper.data[0], left.big[0], left.small[0]);
    split<kAccurate>(lower.data[0], left.big[1], left.small[1]);
    split<kAccurate>(upper.data[1], left.big[2], left.small[2]);
    split<kAccurate>(lower.data[1], left.big[3], left.small[3]);
  }
  template <class B>
  static __device__ __forceinline__ void load_right(const B& b, int left, int k, Right& right) {
    const Pack<2, float> both = pair(b, left + threadIdx.x % kWarp / 4, k);
    split<kAccurate>(both.data[0], right.big[0], right.small[0]);
    split<kAccurate>(both.data[1], right.big[1], right.small[1]);
  }
  static __device__ __forceinline__ void add(float (&sum)[4], const Left& left, const Right& right) {
    if constexpr (kAccurate) {
      mma_m16n8k8_tf32(sum, left.small, right.big);
      mma_m16n8k8_tf32(sum, left.big, right.small);
    }
    mma_m16n8k8_tf32(sum, left.big, right.big);
  }

 private:
  template <class F>
  static __device__ __forceinline__ Pack<2, float> pair(const F& factor, int vector, int k) {
    const int t = threadIdx.x % 4;
    const auto two = factor.pair(vector, k, kNeighbours ? 2 * t : t, kNeighbours ? 2 * t + 1 : t + 4);
    return {static_cast<float>(two.data[0]), static_cast<float>(two.data[1])};
  }
};

// The same in bfloat16, of factors whose vectors lie along rows.
struct Bfloat16 {
  static constexpr int kDepth = 16;
  struct Left {
    uint32_t data[4];
  };
  struct Right {
    uint32_t data[2];
  };
  using Rows = Along<BFloat16>;

  static __device__ __forceinline__ void load_left(const Rows& a, int top, bool has_lower, int k, Left& left) {
    const int row = top + threadIdx.x % kWarp / 4;
    const Pack<2, uint32_t> upper = four(a, row, k), lower = has_lower ? four(a, row + 8, k) : Pack<2, uint32_t>{};
    left.data[0] = upper.data[0], left.data[1] = lower.data[0];
    left.data[2] = upper.data[1], left.data[3] = lower.data[1];
  }
  static __device__ __forceinline__ void load_right(const Rows& b, int left, int k, Right& right) {
    const Pack<2, uint32_t> both = four(b, left + threadIdx.x % kWarp / 4, k);
    right.data[0] = both.data[0], right.data[1] = both.data[1];
  }
  static __device__ __forceinline__ void add(float (&sum)[4], const Left& left, const Right& right) {
    mma_m16n8k16_bf16(sum, left.data, right.data);
  }

 private:
  // Four neighbours, two in each word.
  static __device__ __forceinline__ Pack<2, uint32_t> four(const Rows& factor, int vector, int k) {
    return Pack<2, uint32_t>::load(
        reinterpret_cast<const uint32_t*>(factor.data + vector * factor.pitch + k + threadIdx.x % 4 * 4));
  }
};

template <class Core, class A, class B, class Visit>
__device__ __forceinline__ void multiply_by_warps(const A& a, const B& b, const ProductSize& size, const Visit& visit) {
  constexpr int kTiles = 4;  // tiles of 8 columns that one warp computes at most from one a
  const int warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
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
    for (int k = slice * Core::kDepth; k < size.depth; k += size.slices * Core::kDepth) {
      typename Core::Left rows;
      Core::load_left(a, top, has_lower, k, rows);
      SAN_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        if (n >= mine) break;
        typename Core::Right columns;
        Core::load_right(b, left + 8 * n, k, columns);
        Core::add(sum[n], rows, columns);
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

// Calls visit(i, j, values, slice) for elements (i, j) and (i, j + 1) of the product, once for each; values [2] are the
// slice's parts of their sums.
template <bool kAccurate, class A, class B, bool kLeftAlong, bool kRightAlong, class Visit>
__device__ __forceinline__ void multiply(const Factor<A, kLeftAlong>& a, const Factor<B, kRightAlong>& b,
                                         const ProductSize& size, const Visit& visit) {
  if constexpr (std::is_same_v<A, BFloat16> && std::is_same_v<B, BFloat16>) {
    multiply_by_warps<Bfloat16>(a, b, size, visit);
  } else {
    multiply_by_warps<Tf32<kAccurate, kLeftAlong>>(a, b, size, visit);
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
