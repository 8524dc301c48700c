// Shared code of the CPU operators: it divides images into bands of rows, runs them on torch's threads, and chooses the
// instruction set.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../check.h"
#include "../footprint.h"
#include "simd/kernels.h"

namespace san::cpu {
namespace {

// The system zeroes each new page at its first write, which can take longer than the computation. Large pages are much
// cheaper.
inline void ask_for_large_pages(void* memory, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = uintptr_t(2) << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}
inline void ask_for_large_pages(const Tensor& x) { ask_for_large_pages(x.data_ptr(), x.numel() * x.element_size()); }

// The thread's scratch memory, one for each source file. The thread's next call reuses it, because writing to new
// memory is slow.
inline void* scratch_of_thread(size_t bytes) {
  constexpr size_t kPage = size_t(2) << 20;
  static thread_local std::unique_ptr<void, void (*)(void*)> memory(nullptr, std::free);
  static thread_local size_t size = 0;
  if (bytes > size) {
    const size_t wanted = (bytes + kPage - 1) / kPage * kPage;
    memory.reset(), size = 0;
    memory.reset(std::aligned_alloc(kPage, wanted));
    STD_TORCH_CHECK(memory != nullptr, "no memory for ", wanted, " bytes of scratch");
    size = wanted;
    ask_for_large_pages(memory.get(), size);
  }
  return memory.get();
}

// Calls work(task, scratch) for all tasks, in threads that each have their own scratch memory. Results must not depend
// on the assignment of tasks to threads.
template <class T, class Work>
void for_each_task(int64_t tasks, int64_t scratch_size, const Work& work) {
  std::atomic<int64_t> next = 0;
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tasks);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    T* scratch = static_cast<T*>(scratch_of_thread(scratch_size * sizeof(T)));
    for (; begin < end; ++begin)
      for (int64_t task = next++; task < tasks; task = next++) work(task, scratch);
  });
}

// The rows of an image that one task computes.
struct Band {
  int64_t image;
  Rows rows;
  bool is_odd;
};

// Divides the rows of each image evenly into bands of at least `wanted` rows, or into one band if it has fewer rows.
// The even bands of all images come first, then the odd ones.
inline std::vector<Band> bands_of(int64_t images, const Footprint& f, int64_t wanted) {
  const int64_t count = std::max<int64_t>(1, f.height / wanted);
  std::vector<Band> bands;
  for (int64_t parity = 0; parity < 2; ++parity)
    for (int64_t n = 0; n < images; ++n)
      for (int64_t b = parity; b < count; b += 2)
        bands.push_back({n, {b * f.height / count, (b + 1) * f.height / count}, parity == 1});
  return bands;
}

constexpr int64_t kBandRows = 14;  // more exceed the L2 cache; fewer read many rows twice

// Bands for sums over pixels, and for gradients that also change rows outside the band. A band has at least as many
// rows as the footprint.
inline std::vector<Band> bands_apart(int64_t images, const Footprint& f) {
  return bands_of(images, f, std::max(kBandRows, f.kernel_size));
}
// Bands for results that depend on no other band: about two for each thread, so that all threads have work.
inline std::vector<Band> bands_alone(int64_t images, const Footprint& f, int64_t most_rows = kBandRows) {
  const int64_t tasks = 2 * torch::stable::get_num_threads();
  return bands_of(images, f, std::clamp<int64_t>(images * f.height / tasks, 1, most_rows));
}

inline int64_t most_rows(const std::vector<Band>& bands) {
  int64_t most = 0;
  for (const Band& band : bands) most = std::max(most, band.rows.last - band.rows.first);
  return most;
}

// Calls work(task, band, scratch) for bands that also add to the pixels of neighboring bands: first for the even bands,
// then for the odd ones. Two even bands (or two odd ones) never add to the same pixel, so results do not depend on the
// number of threads.
template <class T, class Work>
void for_each_band_apart(const std::vector<Band>& bands, int64_t scratch_size, const Work& work) {
  const auto is_odd = [](const Band& band) { return band.is_odd; };
  const int64_t even = std::find_if(bands.begin(), bands.end(), is_odd) - bands.begin(), all = bands.size();
  for (const auto& [begin, end] : {std::pair(int64_t(0), even), std::pair(even, all)})
    for_each_task<T>(end - begin, scratch_size,
                     [&](int64_t task, T* scratch) { work(begin + task, bands[begin + task], scratch); });
}

// Sums the results [size] of all tasks, in task order.
template <class T>
std::vector<double> sum_over_tasks(const std::vector<T>& partial, int64_t size) {
  std::vector<double> sum(size);
  for (auto from = partial.begin(); from != partial.end(); from += size)
    for (int64_t at = 0; at < size; ++at) sum[at] += from[at];
  return sum;
}

template <class T>
constexpr ScalarType kType = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;

// Converts a tensor to contiguous values of T.
template <class T>
Tensor as(const Tensor& x) {
  return torch::stable::contiguous(x.scalar_type() == kType<T> ? x : torch::stable::to(x, kType<T>));
}
inline Tensor as_type(const Tensor& x, ScalarType type) {
  return x.scalar_type() == type ? x : torch::stable::to(x, type);
}
template <class T>
const T* values(const Tensor& x) {
  return x.const_data_ptr<T>();
}

// The rows of a norm's affine form, a contiguous [3, channels].
template <class T>
Norm<T> norm_of(const Tensor& x) {
  const T* mean = values<T>(x);
  return {mean, mean + x.size(1), mean + 2 * x.size(1)};
}

inline std::vector<double> doubles(const Tensor& x) {
  const Tensor copy = as<double>(x);
  return {values<double>(copy), values<double>(copy) + copy.numel()};
}

template <class T>
Tensor tensor_of(const double* from, const Tensor& like, std::vector<int64_t> sizes) {
  Tensor out = torch::stable::new_empty(like, sizes, kType<T>);
  T* to = out.template mutable_data_ptr<T>();
  for (int64_t i = 0; i < out.numel(); ++i) to[i] = static_cast<T>(from[i]);
  return out;
}

// Runs the body with T, the type of sums, bound to float or to double.
#define SAN_SUM_TYPE(MAP, ...)                     \
  if ((MAP).scalar_type() == ScalarType::Double) { \
    using T = double;                              \
    __VA_ARGS__                                    \
  } else {                                         \
    using T = float;                               \
    __VA_ARGS__                                    \
  }

// Chooses the functions of simd/ for the largest instruction set that this machine supports; SAN_CHOOSE_SHORT, for
// vectors of at most 32 bytes. Tests choose a smaller one with the environment variable SAN_CPU (baseline, v3 or v4).
#if defined(__x86_64__)
template <class Kernels>
const Kernels& choose(const Kernels& baseline, const Kernels& v3, const Kernels& v4) {
  const char* wish = std::getenv("SAN_CPU");
  const std::string name = wish == nullptr ? "" : wish;
  STD_TORCH_CHECK(name.empty() || name == "baseline" || name == "v3" || name == "v4",
                  "SAN_CPU must be baseline, v3 or v4, not ", name);
  const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool has_v4 = has_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_v4 && (name.empty() || name == "v4")) return v4;
  return has_v3 && name != "baseline" ? v3 : baseline;
}
#define SAN_CHOOSE(kernels) choose(baseline::kernels(), v3::kernels(), v4::kernels())
#define SAN_CHOOSE_SHORT(kernels) choose(baseline::kernels(), v3::kernels(), v3::kernels())
#else
#define SAN_CHOOSE(kernels) baseline::kernels()
#define SAN_CHOOSE_SHORT(kernels) baseline::kernels()
#endif

}  // namespace
}  // namespace san::cpu
