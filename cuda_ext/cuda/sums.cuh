// Sums over blocks, in double and in a fixed order: the same inputs always give the same bits.
#pragma once
#include "launch.h"

namespace san::cuda {

constexpr int kSumColumns = 8, kMostSumSlices = 128;

// Where the sums of consecutive columns go.
template <class T>
struct Totals {
  T* data[2];
  int64_t size[2];

  __device__ __forceinline__ void operator()(int64_t column, const double* sum) const {
    const int output = column < size[0] ? 0 : 1;
    data[output][column - (output == 0 ? 0 : size[0])] = static_cast<T>(*sum);
  }
};

// Calls place(column, sum) for a pointer to the sum of each column of partial [rows, columns]; those of an even and the
// next column lie beside each other. A thread takes every slices-th row of one column.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100: reads up to 528 rows of 3 KB, 528 000 additions in float64, 8
// KB of shared memory; 0.003 ms, of the launch.
template <class T, class Place>
__global__ void __launch_bounds__(kSumColumns* kMostSumSlices)
    sum_kernel(const T* partial, int64_t rows, int64_t columns, Place place) {
  double* sums = reinterpret_cast<double*>(shared_memory_base());  // one of each thread
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

// The one in the middle of value(1), value(2) and value(3).
template <class Value>
__device__ __forceinline__ auto middle_of_three(const Value& value) {
  const auto a = value(1), b = value(2), c = value(3);
  const auto lower = a < b ? a : b, upper = a < b ? b : a;
  return c < lower ? lower : c < upper ? c : upper;
}

// Count, mean and sum of squared deviations of some values; those of parts give those of the whole (Chan, Golub,
// LeVeque 1983).
struct Moments {
  double count = 0, mean = 0, square = 0;

  SAN_HOST_DEVICE void add(const Moments& other) {
    if (other.count == 0) return;
    const double gap = other.mean - mean, whole = count + other.count;
    mean += gap * other.count / whole;
    square += other.square + gap * gap * count * other.count / whole;
    count = whole;
  }
};

// Merges the moments [blocks, channels] into mean and biased variance; one block per channel.
template <class T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const Moments* moments, int64_t blocks, T* mean, T* var) {
  Moments* parts = reinterpret_cast<Moments*>(shared_memory_base());  // [kThreads]
  const int thread = threadIdx.x, channel = blockIdx.x, channels = gridDim.x;
  Moments mine;
  for (int64_t block = thread; block < blocks; block += kThreads) mine.add(moments[block * channels + channel]);
  parts[thread] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) parts[thread].add(parts[thread + half]);
  }
  if (thread > 0) return;
  mean[channel] = static_cast<T>(parts[0].mean);
  var[channel] = static_cast<T>(parts[0].square / parts[0].count);
}

template <class T, class Stream>
void merge_moments(const Moments* moments, int64_t blocks, int channels, T* mean, T* var, Stream stream) {
  SAN_LAUNCH_SHARED(merge_kernel<T>, channels, kThreads, kThreads * sizeof(Moments), stream, moments, blocks, mean,
                    var);
}

// Sums of values and of their squares, which `parts` threads per channel kept around a shift: [parts, 2, channels].
template <class T>
__device__ __forceinline__ Moments moments_of(const T* sums, int parts, int channels, int c, double count, T shift) {
  double sum = 0, square = 0;
  for (int part = 0; part < parts; ++part) {
    sum += sums[part * 2 * channels + c], square += sums[(part * 2 + 1) * channels + c];
  }
  Moments moments;
  moments.count = count, moments.mean = shift + sum / count, moments.square = square - sum * sum / count;
  return moments;
}

// A value near most of value(first) .. value(last - 1).
template <class Value>
__device__ __forceinline__ auto typical(int64_t first, int64_t last, const Value& value) {
  return middle_of_three([&](int quarter) { return value(first + (last - first) * quarter / 4); });
}

// How many threads of a block can share the work on one channel.
SAN_HOST_DEVICE int parts_for(int threads, int channels) { return channels < threads ? threads / channels : 1; }

}  // namespace san::cuda
