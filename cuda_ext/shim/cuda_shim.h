// Runs __global__ code on the CPU: every block and thread in turn. Enough for kernels without shared memory, barriers
// and shuffles. SAN_SHIM_REVERSE runs the threads backwards, which shows a kernel that depends on their order.
#pragma once
#include <cstdlib>

#define __global__
#define SAN_DEVICE CPU

struct ShimIndex {
  unsigned x = 0;
};
inline thread_local ShimIndex threadIdx, blockIdx, blockDim, gridDim;

#define SAN_LAUNCH(kernel, blocks, threads, stream, ...) \
  san::cuda::run_all(blocks, threads, [&] { kernel(__VA_ARGS__); })

namespace san::cuda {

struct DeviceGuard {
  explicit DeviceGuard(int) {}
};
inline int current_stream(const Tensor&) { return 0; }
inline void check_launch(const char*) {}

template <class Body>
void run_all(int blocks, int threads, const Body& body) {
  const bool reverse = std::getenv("SAN_SHIM_REVERSE") != nullptr;
  gridDim.x = blocks, blockDim.x = threads;
  for (int block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < threads; ++thread) {
      blockIdx.x = reverse ? blocks - 1 - block : block;
      threadIdx.x = reverse ? threads - 1 - thread : thread;
      body();
    }
  }
}

}  // namespace san::cuda
