// What every CUDA file needs around its kernels: launching one thread per output element, or blocks that share memory,
// on the current stream.
//
// With SAN_SHIM the same file is compiled by g++ and its kernels run on the CPU (shim/cuda_shim.h), so that tests cover
// kernels and host code without a GPU; the operators are then registered in the library `san_shim` for CPU tensors.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch.h>

#include <cstdlib>
#include <cstring>

#include "../check.h"

#ifdef SAN_SHIM
#include "../shim/cuda_shim.h"
#else
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#define SAN_LIBRARY san
#define SAN_DEVICE CUDA
#define SAN_UNROLL _Pragma("unroll")
#define SAN_START(kernel, blocks, threads, stream, ...) kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)
#define SAN_START_SHARED(kernel, blocks, threads, bytes, stream, ...) \
  do {                                                                \
    san::cuda::allow_shared_memory(kernel, bytes);                    \
    kernel<<<blocks, threads, bytes, stream>>>(__VA_ARGS__);          \
  } while (false)

namespace san::cuda {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// The error of a launch or, if `waits`, of the finished kernel; null if there was none. Waiting is not possible while a
// CUDA graph captures the stream.
inline const char* launch_error(const char* kernel, cudaStream_t stream, bool waits) {
  cudaError_t status = cudaGetLastError();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (status == cudaSuccess && waits) status = cudaStreamIsCapturing(stream, &capture);
  if (status == cudaSuccess && waits && capture == cudaStreamCaptureStatusNone) status = cudaStreamSynchronize(stream);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

// The dynamic shared memory that a block of the current device can have.
inline size_t shared_memory_limit() {
  int device = 0, bytes = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess;
  return known ? static_cast<size_t>(bytes) : size_t(48) << 10;
}

// Bytes that one pass may take for what its blocks hand to the next; larger batches go through in parts.
inline int64_t workspace_limit() { return int64_t(256) << 20; }

// A kernel must ask for more than 48 KB.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, size_t bytes) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  STD_TORCH_CHECK(status == cudaSuccess, bytes, " bytes of shared memory: ", cudaGetErrorString(status));
}

#ifdef __CUDACC__
// Start of the block's dynamic shared memory.
__device__ __forceinline__ char* shared_memory_base() {
  extern __shared__ __align__(32) char dynamic_shared_memory[];
  return dynamic_shared_memory;
}
#endif

}  // namespace san::cuda
#endif

namespace san::cuda {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = int64_t(1) << 20;  // larger outputs loop; all indices are int64

// The operator that runs in this thread, which errors name, on the device of its maps.
inline thread_local const char* running_operator = "";
struct OperatorGuard {
  OperatorGuard(const char* name, const Tensor& map) : device(map.get_device()) { running_operator = name; }

  DeviceGuard device;
};

// Names the kernel that failed. A fault while a kernel runs shows at a later call, unless SAN_CUDA_SYNC=1 makes every
// launch wait.
template <class Stream>
void check_launch(const char* kernel, Stream stream) {
  static const char* asked = std::getenv("SAN_CUDA_SYNC");
  const bool waits = asked != nullptr && std::strcmp(asked, "1") == 0;
  const char* error = launch_error(kernel, stream, waits);
  STD_TORCH_CHECK(error == nullptr, "san::", running_operator, ": kernel ", kernel, " failed: ", error,
                  waits ? "" : "; an earlier kernel may be the cause, set SAN_CUDA_SYNC=1 to find it");
}

inline int blocks_for(int64_t elements) {
  const int64_t blocks = (elements + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

}  // namespace san::cuda

#define SAN_LAUNCH(kernel, blocks, threads, stream, ...)        \
  do {                                                          \
    const auto on_stream = stream;                              \
    SAN_START(kernel, blocks, threads, on_stream, __VA_ARGS__); \
    san::cuda::check_launch(#kernel, on_stream);                \
  } while (false)
// For kernels whose threads wait for each other, with `bytes` of dynamic shared memory.
#define SAN_LAUNCH_SHARED(kernel, blocks, threads, bytes, stream, ...)        \
  do {                                                                        \
    const auto on_stream = stream;                                            \
    SAN_START_SHARED(kernel, blocks, threads, bytes, on_stream, __VA_ARGS__); \
    san::cuda::check_launch(#kernel, on_stream);                              \
  } while (false)

// A grid-stride loop over `elements`.
#define SAN_FOR_EACH(index, elements)                                                      \
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < (elements); \
       index += int64_t(gridDim.x) * blockDim.x)
