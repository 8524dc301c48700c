// Runs __global__ functions on the CPU, one block after the other. SAN_SHIM_REVERSE reverses the order of blocks and
// threads, to find kernels that depend on it, for example because a barrier is missing.
//
// SAN_LAUNCH runs one thread after the other. Kernels with barriers, shuffles, shared memory or mma need
// SAN_LAUNCH_SHARED, which runs threads as fibers. The shim cannot find races within a warp between two barriers or
// misaligned vector loads, and says nothing about speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "fibers.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SAN_DEVICE CPU
#define SAN_UNROLL
#define SAN_ROLLED

struct ShimIndex {
  unsigned x = 0;
};
inline thread_local ShimIndex threadIdx, blockIdx, blockDim, gridDim;

#define SAN_START(kernel, blocks, threads, stream, ...) \
  san::cuda::run_all(blocks, threads, [&] { kernel(__VA_ARGS__); })
#define SAN_START_SHARED(kernel, blocks, threads, bytes, stream, ...) \
  san::cuda::run_fibers(blocks, threads, bytes, [&] { kernel(__VA_ARGS__); })

namespace san::cuda {

struct DeviceGuard {
  explicit DeviceGuard(int) {}
};
inline int current_stream(const Tensor&) { return 0; }
// Those kernels fail whose names hold SAN_SHIM_FAIL.
inline const char* launch_error(const char* kernel, int, bool) {
  const char* failing = std::getenv("SAN_SHIM_FAIL");
  return failing != nullptr && std::strstr(kernel, failing) != nullptr ? "as the test asked" : nullptr;
}
// Small, so that small tests meet them.
inline int64_t workspace_limit() { return int64_t(16) << 10; }
inline int64_t wanted_sum_blocks() { return 2; }

inline bool runs_in_reverse() { return std::getenv("SAN_SHIM_REVERSE") != nullptr; }

template <class Body>
void run_all(int blocks, int threads, const Body& body) {
  const bool reverse = runs_in_reverse();
  gridDim.x = blocks, blockDim.x = threads;
  for (int block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < threads; ++thread) {
      blockIdx.x = reverse ? blocks - 1 - block : block;
      threadIdx.x = reverse ? threads - 1 - thread : thread;
      body();
    }
  }
}

constexpr uintptr_t kSharedAlignment = 32;
inline thread_local char* shared_memory = nullptr;

template <class Body>
void run_fibers(int blocks, int threads, size_t bytes, const Body& body) {
  const bool reverse = runs_in_reverse();
  shim::Scheduler scheduler(threads, reverse);
  std::unique_ptr<char[]> memory(new char[bytes + kSharedAlignment]);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.get()) + kSharedAlignment - 1;
  shared_memory = reinterpret_cast<char*>(address / kSharedAlignment * kSharedAlignment);
  gridDim.x = blocks, blockDim.x = threads;
  for (int block = 0; block < blocks; ++block) {
    blockIdx.x = reverse ? blocks - 1 - block : block;
    // NaN in every type: what is read before it is written shows.
    std::fill_n(reinterpret_cast<uint16_t*>(shared_memory), (bytes + 1) / 2, uint16_t(0x7ff8));
    scheduler.run_block(body, [](int thread) { threadIdx.x = thread; });
  }
}

// Start of the block's dynamic shared memory.
inline char* shared_memory_base() { return shared_memory; }

inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

}  // namespace san::cuda

inline void __syncthreads() { san::shim::Scheduler::running().wait(san::shim::State::kAtBlockBarrier); }
inline void __syncwarp(unsigned = ~0u) { san::shim::Scheduler::running().wait(san::shim::State::kAtWarpBarrier); }

namespace san::shim {

// Shows `value` to the warp; each lane then calls read(lane) for what another one showed.
template <class Value, class Visit>
void with_warp(const Value& value, const Visit& visit) {
  static_assert(sizeof(Value) <= sizeof(Fiber::exchanged));
  Scheduler& scheduler = Scheduler::running();
  std::memcpy(scheduler.self().exchanged, &value, sizeof(Value));
  scheduler.wait(State::kAtWarpBarrier);
  visit([&](int lane) {
    Value shown;
    std::memcpy(&shown, scheduler.neighbour(lane).exchanged, sizeof(Value));
    return shown;
  });
  scheduler.wait(State::kAtWarpBarrier);
}

}  // namespace san::shim

template <class T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  const int lane = san::shim::Scheduler::running().lane() ^ bits;
  san::shim::with_warp(value, [&](const auto& read) { value = read(lane); });
  return value;
}

// Whether any lane of the warp passes true.
inline bool __any_sync(unsigned mask, bool value) {
  int any = value;
  for (int bits = san::shim::kWarp / 2; bits > 0; bits /= 2) any |= __shfl_xor_sync(mask, any, bits);
  return any != 0;
}

inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

#include "mma.h"
