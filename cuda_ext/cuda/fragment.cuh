// Products of one warp, [16, 8] times [8, 8], of factors that each lane hands over in registers: they need not lie in
// memory, and the sums stay in registers. Precision: product.cuh.
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

// sum += a b. Lane 4 * g + t gives elements 2t and 2t + 1 of row g of the left factor as a[0] and a[2], of row g + 8 as
// a[1] and a[3], and of column g of the right factor as b[0] and b[1]: which two of the 8 along the depth are a lane's
// is free, as the order of a sum is. It holds columns 2t and 2t + 1 of row g of the sum, then of row g + 8.
template <bool kAccurate>
__device__ __forceinline__ void add_product(const float (&a)[4], const float (&b)[2], float (&sum)[4]) {
  typename Tf32<kAccurate, true>::Left left;
  typename Tf32<kAccurate, true>::Right right;
  SAN_UNROLL
  for (int i = 0; i < 4; ++i) split<kAccurate>(a[i], left.big[i], left.small[i]);
  SAN_UNROLL
  for (int i = 0; i < 2; ++i) split<kAccurate>(b[i], right.big[i], right.small[i]);
  Tf32<kAccurate, true>::add(sum, left, right);
}
template <bool kAccurate>
__device__ __forceinline__ void add_product(const double (&a)[4], const double (&b)[2], double (&sum)[4]) {
  SAN_UNROLL
  for (int i = 0; i < 2; ++i) {
    mma_m8n8k4_f64(sum[0], sum[1], a[2 * i], b[i]);
    mma_m8n8k4_f64(sum[2], sum[3], a[2 * i + 1], b[i]);
  }
}

// relu in one instruction; NaN stays.
__device__ __forceinline__ double fast_relu(double x) { return relu(x); }
__device__ __forceinline__ float fast_relu(float x) {
#ifdef SAN_SHIM
  return relu(x);
#else
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
#endif
}

}  // namespace san::cuda
