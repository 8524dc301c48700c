// How the warps of a block divide work and add up their sums.
#pragma once
#include <algorithm>

#include "mma.cuh"

namespace san::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;  // of each block
constexpr int64_t kWantedWarps = 4096;    // per launch; enough to fill an H100

// A team: `split` warps of a block that share the same pixels and divide the footprint positions among them.
struct Team {
  int lane, row, pair;  // the lane's row and column pair in a product's sum: g and 2t of mma.cuh
  int team, member, split;

  __device__ __forceinline__ explicit Team(int split)
      : lane(threadIdx.x % kWarp), row(lane / 4), pair(lane % 4 * 2), split(split) {
    const int warp = threadIdx.x / kWarp;
    team = warp / split, member = warp - team * split;
  }
};

// Number of warps in a team: large if there are few pixels, or if the coefficients of a pixel take much shared memory.
inline int split_for(int64_t groups, int positions, int tiles = 0) {
  int split = 1;
  while (split < kWarps &&
         (tiles * (kWarps / split) > 32 || (groups * split < kWantedWarps && 2 * split <= positions))) {
    split *= 2;
  }
  return split;
}

inline int blocks_of_teams(int64_t teams, int split) { return static_cast<int>((teams * split + kWarps - 1) / kWarps); }

// Bytes of shared memory that sum_over_team needs for N values.
template <class T>
size_t bytes_of_team_sums(int N) {
  return size_t(kWarps / 2) * N * kWarp * sizeof(T);
}

// Sums N values over the warps of each team, in a fixed order; the first warp of a team gets the sums.
template <int N, class T>
__device__ __forceinline__ void sum_over_team(const Team& mine, T* shared, T (&values)[N]) {
  for (int half = mine.split / 2; half > 0; half /= 2) {
    __syncthreads();
    T* slot = shared + (mine.team * half + mine.member % half) * N * kWarp + mine.lane;
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      if (mine.member >= half && mine.member < 2 * half) slot[n * kWarp] = values[n];
    }
    __syncthreads();
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      if (mine.member < half) values[n] += slot[n * kWarp];
    }
  }
  __syncthreads();
}

}  // namespace
}  // namespace san::cuda
