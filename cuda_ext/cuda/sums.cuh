// Sums over blocks, in double and in a fixed order: the same inputs always give the same bits.
#pragma once
#include "launch.h"

namespace san::cuda {

constexpr int kSumColumns = 32, kSumParts = 8;

// Where the sums of consecutive columns go.
template <class T>
struct Totals {
  static constexpr int kOutputs = 3;
  T* data[kOutputs];
  int64_t size[kOutputs];
};

// Sums the rows of partial [blocks, columns]. A block takes 32 columns, a thread every 8th row of one of them.
template <class T>
__global__ void __launch_bounds__(kSumColumns* kSumParts)
    sum_kernel(const T* partial, int64_t blocks, int64_t columns, Totals<T> totals) {
  double* parts = reinterpret_cast<double*>(shared_memory_base());  // [kSumParts, kSumColumns]
  const int thread = threadIdx.x;
  int64_t column = int64_t(blockIdx.x) * kSumColumns + thread % kSumColumns;
  double sum = 0;
  for (int64_t block = thread / kSumColumns; column < columns && block < blocks; block += kSumParts) {
    sum += partial[block * columns + column];
  }
  parts[thread] = sum;
  __syncthreads();
  if (thread >= kSumColumns || column >= columns) return;
  for (int part = 1; part < kSumParts; ++part) sum += parts[part * kSumColumns + thread];
  for (int output = 0; output < Totals<T>::kOutputs; ++output) {
    if (column >= 0 && column < totals.size[output]) totals.data[output][column] = static_cast<T>(sum);
    column -= totals.size[output];
  }
}

template <class T, class Stream>
void sum_blocks(const T* partial, int64_t blocks, int64_t columns, const Totals<T>& totals, Stream stream) {
  const int grid = static_cast<int>((columns + kSumColumns - 1) / kSumColumns);
  SAN_LAUNCH_SHARED(sum_kernel<T>, grid, kSumColumns * kSumParts, kSumColumns * kSumParts * sizeof(double), stream,
                    partial, blocks, columns, totals);
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

// A value near most of value(first) .. value(last - 1), whose squares of distances from it do not cancel: the one in
// the middle of three, so that one that is unlike the others does no harm.
template <class Value>
__device__ __forceinline__ auto typical(int64_t first, int64_t last, const Value& value) {
  const auto at = [&](int quarter) { return value(first + (last - first) * quarter / 4); };
  const auto a = at(1), b = at(2), c = at(3);
  const auto lower = a < b ? a : b, upper = a < b ? b : a;
  return c < lower ? lower : c < upper ? c : upper;
}

// How many threads of a block can share the work on one channel.
SAN_HOST_DEVICE int parts_for(int threads, int channels) { return channels < threads ? threads / channels : 1; }

}  // namespace san::cuda
