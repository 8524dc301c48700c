// Sums over blocks, in double and in a fixed order: the same inputs always give the same bits.
#pragma once
#include "launch.h"

namespace san::cuda {

constexpr int kSumColumns = 8, kMostSumSlices = 128;

// Calls place(column, sum) with a pointer to the sum of each column of partial [rows, columns]. The sums of an even
// column and the next one are adjacent. A block has `slices` threads for each column, and each adds every slices-th
// row.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100: reads up to 528 rows of 3 KB, 528,000 additions in float64, 8
// KB of shared memory; 0.003 ms, for the launch.
template <class T, class Place>
__global__ void __launch_bounds__(kSumColumns* kMostSumSlices)
    sum_kernel(const T* partial, int64_t rows, int64_t columns, Place place) {
  double* sums = reinterpret_cast<double*>(shared_memory_base());  // one for each thread
  const int thread = threadIdx.x, slices = blockDim.x / kSumColumns;
  const int64_t column = int64_t(blockIdx.x) * kSumColumns + thread % kSumColumns;
  double sum = 0;
  for (int64_t row = thread / kSumColumns; column < columns && row < rows; row += slices) {
    sum += partial[row * columns + column];
  }
  sums[thread] = sum;
  for (int half = blockDim.x / 2; half >= kSumColumns; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  __syncthreads();
  if (thread < kSumColumns && column < columns) place(column, sums + thread);
}

template <class T, class Place, class Stream>
void sum_blocks(const T* partial, int64_t rows, int64_t columns, const Place& place, Stream stream) {
  int slices = 4;
  while (slices < rows && slices < kMostSumSlices) slices *= 2;
  const int grid = static_cast<int>((columns + kSumColumns - 1) / kSumColumns), threads = kSumColumns * slices;
  SAN_LAUNCH_SHARED((sum_kernel<T, Place>), grid, threads, threads * sizeof(double), stream, partial, rows, columns,
                    place);
}

// The median of value(1), value(2) and value(3).
template <class Value>
__device__ __forceinline__ auto middle_of_three(const Value& value) {
  const auto a = value(1), b = value(2), c = value(3);
  const auto lower = a < b ? a : b, upper = a < b ? b : a;
  return c < lower ? lower : c < upper ? c : upper;
}

}  // namespace san::cuda
