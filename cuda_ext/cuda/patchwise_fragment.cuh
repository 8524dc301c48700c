// Matrix products of one warp, of factors that each lane hands over in registers: what is multiplied need not lie in
// memory, and sums stay in registers over as many steps as one likes. Precision: product.cuh.
#pragma once
#include "product.cuh"

namespace san::cuda {

#ifndef SAN_SHIM
// c [8, 8] += a [8, 4] b [4, 8], by one warp. Lane 4 * g + t holds c(g, 2t), c(g, 2t + 1); a(g, t); b(t, g).
__device__ __forceinline__ void mma_m8n8k4_f64(double& c0, double& c1, double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(c0), "+d"(c1)
               : "d"(a), "d"(b));
}
#endif

// Place of a thread in its warp's fragments.
struct Lane {
  int warp, g, t;

  __device__ __forceinline__ Lane() : warp(threadIdx.x / kWarp), g(threadIdx.x % kWarp / 4), t(threadIdx.x % 4) {}
};

// The left factor [16, 8] of a product. Lane 4 * g + t gives two elements of row g, `upper`, and two of row g + 8,
// `lower`; of the right factor [8, 8] it gives two elements of column g. Which two of the 8 along the depth is free, as
// a sum has no order: each t takes its own, the same of both factors. Of the sum it holds columns 2t and 2t + 1 of row
// g, then of row g + 8.
template <bool kAccurate, class T>
class Left;

template <bool kAccurate>
class Left<kAccurate, float> {
 public:
  __device__ __forceinline__ Left(const Pack<2, float>& upper, const Pack<2, float>& lower) {
    SAN_UNROLL
    for (int k = 0; k < 2; ++k) {
      split<kAccurate>(upper.data[k], left_.big[2 * k], left_.small[2 * k]);
      split<kAccurate>(lower.data[k], left_.big[2 * k + 1], left_.small[2 * k + 1]);
    }
  }
  __device__ __forceinline__ void add_product(const Pack<2, float>& columns, float (&sum)[4]) const {
    typename Core::Right right;
    SAN_UNROLL
    for (int k = 0; k < 2; ++k) split<kAccurate>(columns.data[k], right.big[k], right.small[k]);
    Core::add(sum, left_, right);
  }

 private:
  using Core = Tf32<kAccurate, true>;

  typename Core::Left left_;
};

template <bool kAccurate>
class Left<kAccurate, double> {
 public:
  __device__ __forceinline__ Left(const Pack<2, double>& upper, const Pack<2, double>& lower)
      : upper_(upper), lower_(lower) {}
  __device__ __forceinline__ void add_product(const Pack<2, double>& columns, double (&sum)[4]) const {
    SAN_UNROLL
    for (int k = 0; k < 2; ++k) {
      mma_m8n8k4_f64(sum[0], sum[1], upper_.data[k], columns.data[k]);
      mma_m8n8k4_f64(sum[2], sum[3], lower_.data[k], columns.data[k]);
    }
  }

 private:
  Pack<2, double> upper_, lower_;
};

// sums [16, 8 * columns] += left [16, depth] right. A lane's elements 2t and 2t + 1 of its rows begin at `upper` and
// `lower`; right(n, k) gives elements k + 2t and k + 2t + 1 of its column in the n-th tile of 8.
template <bool kAccurate, class T, int N, class Right>
__device__ __forceinline__ void add_product(const T* upper, const T* lower, int depth, int columns, const Right& right,
                                            T (&sums)[N][4]) {
  for (int k = 0; k < depth; k += 8) {
    const Left<kAccurate, T> left(Pack<2, T>::load(upper + k), Pack<2, T>::load(lower + k));
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      if (n >= columns) break;
      left.add_product(right(n, k), sums[n]);
    }
  }
}

}  // namespace san::cuda
