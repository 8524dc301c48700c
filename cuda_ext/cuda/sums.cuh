// Sums over the warps of a team and over blocks, always in the same order: the same inputs always give the same bits.
#pragma once
#include "mma.cuh"
#include "tuning.h"

namespace san::cuda {
namespace {

constexpr int kTeamThreads = SAN_TEAM_THREADS, kWarps = kTeamThreads / kWarp;  // of each block

// Warps of a block that share the same pixels and divide the positions of the footprint among them.
struct Team {
  int lane, row, column;     // the lane's row and its first column in a product's sum: g and 2t of mma.cuh
  int index, member, warps;  // the team in its block, the warp in its team, and the team's number of warps

  __device__ __forceinline__ explicit Team(int warps)
      : lane(threadIdx.x % kWarp), row(lane / 4), column(lane % 4 * 2), warps(warps) {
    const int warp = threadIdx.x / kWarp;
    index = warp / warps, member = warp - index * warps;
  }
};

// The number of warps in a team: more than one if there are too few groups of pixels to fill an H100.
inline int warps_per_team(int64_t groups, int positions) {
  constexpr int64_t kWantedWarps = 4096;
  int warps = 1;
  while (warps < kWarps && groups * warps < kWantedWarps && 2 * warps <= positions) warps *= 2;
  return warps;
}

// The number of blocks for `teams` teams.
inline int blocks_of_teams(int64_t teams, int warps) {
  const int64_t blocks = (teams * warps + kWarps - 1) / kWarps;
  STD_TORCH_CHECK(blocks < int64_t(1) << 31, "the maps have too many pixels for one launch; use smaller batches");
  return static_cast<int>(blocks);
}

// Bytes of shared memory that sum_over_team needs for N values.
constexpr size_t bytes_of_team_sums(int N) { return size_t(kWarps / 2) * N * kWarp * sizeof(float); }

// Tensor cores round sums towards zero, so a long sum drifts. It is therefore split after about this many products with
// a depth of 8, and the parts are added in double.
constexpr int64_t kLongestSum = 256;

// Sums N values over the warps of each team; the first warp of a team gets the sums.
template <int N>
__device__ __forceinline__ void sum_over_team(const Team& team, float* shared, float (&values)[N]) {
  for (int half = team.warps / 2; half > 0; half /= 2) {
    __syncthreads();
    float* slot = shared + (team.index * half + team.member % half) * N * kWarp + team.lane;
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      if (team.member >= half && team.member < 2 * half) slot[n * kWarp] = values[n];
    }
    __syncthreads();
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      if (team.member < half) values[n] += slot[n * kWarp];
    }
  }
  __syncthreads();
}

template <int N>
__device__ __forceinline__ void sum_over_team(const Team& team, float* shared, float (&values)[N][4]) {
  sum_over_team(team, shared, reinterpret_cast<float (&)[4 * N]>(values));
}

// Stores the sums of N products, in rows of KD, as a matrix [16 N / KD, 8 KD].
template <int KD, int N>
__device__ __forceinline__ void store_sums(const Team& team, const float (&sums)[N][4], float* out, int pitch) {
  SAN_UNROLL
  for (int n = 0; n < 2 * N; ++n) {
    const int row = n / 2 / KD * 16 + n % 2 * 8 + team.row, column = n / 2 % KD * 8 + team.column;
    const float* two = sums[n / 2] + n % 2 * 2;
    Pack<2, float>{two[0], two[1]}.store(out + int64_t(row) * pitch + column);
  }
}

// Sums over the lanes of one row of a product and stores the totals of 8 rows.
__device__ __forceinline__ void store_row_sums(const Team& team, float sum, float* out) {
  for (int bits = 1; bits < 4; bits *= 2) sum += __shfl_xor_sync(~0u, sum, bits);
  if (team.column == 0) out[team.row] = sum;
}

constexpr int kSumColumns = 8, kMostSumThreads = 1024;

// Partial sums [rows, columns].
template <class T>
struct PartialSums {
  const T* data;
  int64_t columns;

  __device__ __forceinline__ double operator()(int64_t row, int64_t column) const {
    return data[row * columns + column];
  }
};

// Calls place(column, sum) with a pointer to the sum of values(row, column) for each column. The sums of an even column
// and the next one are adjacent. A block has several threads for each column, and each adds some of the rows.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100: reads up to 528 rows of 3 KB, 528,000 additions in float64, 8
// KB of shared memory; 0.003 ms, for the launch.
template <class Values, class Place>
__global__ void __launch_bounds__(kMostSumThreads)
    sum_kernel(Values values, int64_t rows, int64_t columns, Place place) {
  double* sums = reinterpret_cast<double*>(shared_memory_base());  // one for each thread
  const int thread = threadIdx.x, step = blockDim.x / kSumColumns;
  const int64_t column = int64_t(blockIdx.x) * kSumColumns + thread % kSumColumns;
  double sum = 0;
  for (int64_t row = thread / kSumColumns; column < columns && row < rows; row += step) sum += values(row, column);
  sums[thread] = sum;
  for (int half = blockDim.x / 2; half >= kSumColumns; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  __syncthreads();
  if (thread < kSumColumns && column < columns) place(column, sums + thread);
}

template <class Values, class Place, class Stream>
void sum_rows(const Values& values, int64_t rows, int64_t columns, const Place& place, Stream stream) {
  int threads = 4 * kSumColumns;
  while (threads < rows * kSumColumns && threads < kMostSumThreads) threads *= 2;
  const int blocks = static_cast<int>((columns + kSumColumns - 1) / kSumColumns);
  SAN_LAUNCH_SHARED((sum_kernel<Values, Place>), blocks, threads, threads * sizeof(double), stream, values, rows,
                    columns, place);
}

// The median of value(0), value(1) and value(2).
template <class Value>
__device__ __forceinline__ float middle_of_three(const Value& value) {
  const float a = value(0), b = value(1), c = value(2);
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}

}  // namespace
}  // namespace san::cuda
