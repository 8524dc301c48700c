// What norm.cu needs beside mma.cuh.
#pragma once
#include "mma.cuh"

namespace san::cuda {

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

}  // namespace san::cuda
