// Launches of kernels on the current stream, with one thread per output element or with blocks that have shared memory.
// Predicted times in the comments of kernels assume the full rates of an H100: 927 billion warp instructions and 3.0 TB
// per second. Measured ones are of TF32.
//
// With SAN_SHIM, g++ compiles the same files, and the kernels run on the CPU (shim/cuda_shim.h). So tests cover kernels
// and host code without a GPU. The operators are then registered in the library `san_shim` for CPU tensors.
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

#ifndef SAN_LIBRARY
#define SAN_LIBRARY san
#endif
#define SAN_DEVICE CUDA
#define SAN_UNROLL _Pragma("unroll")
#define SAN_ROLLED _Pragma("unroll 1")  // where unrolling would only take registers
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

// The error of a launch or, if `waits`, of the finished kernel; null if there was none. It does not wait while a CUDA
// graph captures the stream, which CUDA forbids.
inline const char* launch_error(const char* kernel, cudaStream_t stream, bool waits) {
  cudaError_t status = cudaGetLastError();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (status == cudaSuccess && waits) status = cudaStreamIsCapturing(stream, &capture);
  if (status == cudaSuccess && waits && capture == cudaStreamCaptureStatusNone) status = cudaStreamSynchronize(stream);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

// Limit in bytes for the partial sums of one launch.
inline int64_t workspace_limit() { return int64_t(256) << 20; }
// Blocks that fill an H100, in launches that write partial sums.
inline int64_t wanted_sum_blocks() { return 528; }

// CUDA requires this call before a kernel may use more than 48 KB. A call with less could meet the launch of another
// thread that needs more.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, size_t bytes) {
  if (bytes <= size_t(48) << 10) return;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status != cudaSuccess) cudaGetLastError();  // else the next launch would report it
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
constexpr int64_t kMaxBlocks = int64_t(1) << 20;  // for larger outputs, threads loop

// Name of the operator that runs in this thread, for error messages. The guard also makes the device of its maps the
// current device.
inline thread_local const char* running_operator = "";
struct OperatorGuard {
  OperatorGuard(const char* name, const Tensor& map) : device(map.get_device()) { running_operator = name; }

  DeviceGuard device;
};

// Throws an error that names the kernel if its launch failed. CUDA reports a fault inside a kernel only at a later
// call, unless SAN_CUDA_SYNC=1 makes every launch wait.
template <class Stream>
void check_launch(const char* kernel, Stream stream) {
  static const char* asked = std::getenv("SAN_CUDA_SYNC");
  const bool waits = asked != nullptr && std::strcmp(asked, "1") == 0;
  const char* error = launch_error(kernel, stream, waits);
  STD_TORCH_CHECK(error == nullptr, "san::", running_operator, ": kernel ", kernel, " failed: ", error,
                  waits ? "" : "; an earlier kernel may be the cause, set SAN_CUDA_SYNC=1 to find it");
}

// Fused operators run the common cases on GPUs; Python code chooses unfused operators for the others.
inline void check_float32(const Tensor& map) {
  STD_TORCH_CHECK(map.scalar_type() == ScalarType::Float,
                  "on GPUs, fused operators need float32 maps; use san.ops.backend(\"unfused\")");
}
inline void check_supported(const Tensor& map, int64_t products, bool has_hidden_layer = true) {
  check_float32(map);
  STD_TORCH_CHECK(products == 0 && has_hidden_layer,
                  "on GPUs, fused operators need differences only (products = 0) and a hidden layer; use "
                  "san.ops.backend(\"unfused\")");
}

// A result with the shape of x. Kernels fill it, so it needs no zeros, except for an empty map, where no kernel runs.
inline Tensor result_like(const Tensor& x, const Tensor& map) {
  return map.numel() > 0 ? torch::stable::new_empty(x, x.sizes()) : torch::stable::new_zeros(x, x.sizes());
}

inline int blocks_for(int64_t elements) {
  const int64_t blocks = (elements + kThreads - 1) / kThreads;
  return static_cast<int>(blocks < 1 ? 1 : blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

// Contiguous floating-point values, whose type is only known at run time.
struct Floats {
  void* data = nullptr;
  ScalarType type = ScalarType::Float;

  Floats() = default;
  explicit Floats(const Tensor& x) : data(const_cast<void*>(x.const_data_ptr())), type(x.scalar_type()) {}

  explicit Floats(float* x) : data(x) {}

  SAN_HOST_DEVICE double get(int64_t i) const {
    if (type == ScalarType::Float) return static_cast<const float*>(data)[i];
    if (type == ScalarType::Double) return static_cast<const double*>(data)[i];
    if (type == ScalarType::Half) return static_cast<const torch::headeronly::Half*>(data)[i];
    return static_cast<const torch::headeronly::BFloat16*>(data)[i];
  }
  SAN_HOST_DEVICE void set(int64_t i, float x) const {
    if (type == ScalarType::Float) static_cast<float*>(data)[i] = x;
    if (type == ScalarType::Double) static_cast<double*>(data)[i] = x;
    if (type == ScalarType::Half) static_cast<torch::headeronly::Half*>(data)[i] = x;
    if (type == ScalarType::BFloat16) static_cast<torch::headeronly::BFloat16*>(data)[i] = x;
  }
  SAN_HOST_DEVICE void set(int64_t i, double x) const {
    if (type == ScalarType::Double) {
      static_cast<double*>(data)[i] = x;
    } else {
      set(i, static_cast<float>(x));
    }
  }
};

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
