// What pairwise and patchwise attention share on the CPU: work in bands of rows, widths padded to whole vectors, and
// the repetition of weight channels.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <numeric>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../check.h"
#include "../footprint.h"
#include "simd/tiles.h"

namespace san::cpu {
namespace {

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Calls work(task, scratch) for every task, each thread with scratch of its own. Threads take the next task that is
// left; results must not depend on which thread takes which.
template <class T, class Work>
void for_each_task(int64_t tasks, int64_t scratch_size, const Work& work) {
  std::atomic<int64_t> next = 0;
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tasks);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      std::vector<T> scratch(scratch_size);
      for (int64_t task = next++; task < tasks; task = next++) work(task, scratch.data());
    }
  });
}

// Rows [first, last) of an image: what a task computes. Even and odd bands lie apart by more than the footprint reaches
// over, so all bands of one parity can add to their neighbours' pixels at once, in an order that threads do not change.
struct Band {
  int64_t image, first, last;
};

// The even or the odd bands, of at least so many rows.
inline std::vector<Band> every_other_band(int64_t images, const Footprint& f, int parity, int64_t least_rows) {
  constexpr int64_t kTasks = 64;  // enough for as many cores
  const int64_t least = std::max<int64_t>(least_rows, (images * f.height + kTasks - 1) / kTasks);
  const int64_t count = std::max<int64_t>(1, f.height / least);
  std::vector<Band> bands;
  for (int64_t n = 0; n < images; ++n)
    for (int64_t b = parity; b < count; b += 2) bands.push_back({n, b * f.height / count, (b + 1) * f.height / count});
  return bands;
}

// All bands, even ones first. With a footprint's rows at least, those of one parity lie apart; those that only write
// to their own rows need not.
inline std::vector<Band> bands_of(int64_t images, const Footprint& f, int64_t least_rows) {
  std::vector<Band> bands = every_other_band(images, f, 0, least_rows);
  for (const Band& band : every_other_band(images, f, 1, least_rows)) bands.push_back(band);
  return bands;
}

// Gives a vector's memory back, which clear() keeps.
template <class T>
void release(std::vector<T>& x) {
  std::vector<T>().swap(x);
}

// The mean of some pixels from all over a map [pixels, channels]: one alone could be far from the others.
template <class acc_t, class scalar_t>
void about_the_mean(const scalar_t* x, int64_t pixels, int64_t channels, acc_t* mean) {
  const int64_t some = std::min<int64_t>(pixels, 64);
  std::fill(mean, mean + channels, acc_t(0));
  for (int64_t k = 0; k < some; ++k) {
    const scalar_t* from = x + (2 * k + 1) * pixels / (2 * some) * channels;
    for (int64_t c = 0; c < channels; ++c) mean[c] += static_cast<acc_t>(from[c]) / some;
  }
}

// A tensor of any floating type as values of T that lie in a row.
template <class T>
Tensor as(const Tensor& x) {
  const ScalarType type = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
  return torch::stable::contiguous(x.scalar_type() == type ? x : torch::stable::to(x, type));
}

template <class T>
const T* values(const Tensor& x) {
  return x.const_data_ptr<T>();
}

// Parameters and statistics as values that lie in a row; sums are kept in their type.
class Contiguous {
 public:
  Contiguous(std::initializer_list<const Tensor*> tensors, bool is_double) {
    for (const Tensor* x : tensors) {
      STD_TORCH_CHECK(x->scalar_type() == (is_double ? ScalarType::Double : ScalarType::Float),
                      "gamma's parameters and statistics must be float64 for float64 maps and float32 for others");
      tensors_.push_back(torch::stable::contiguous(*x));
    }
  }
  const Tensor& operator[](size_t at) const { return tensors_[at]; }

 private:
  std::vector<Tensor> tensors_;
};

// [rows, columns] with the columns padded by zeros.
template <class T>
std::vector<T> padded(const T* from, int64_t rows, int64_t columns, int64_t pitch) {
  std::vector<T> to(rows * pitch);
  for (int64_t i = 0; i < rows; ++i) std::copy(from + i * columns, from + (i + 1) * columns, to.data() + i * pitch);
  return to;
}

// A map [P, channels] whose rows have whole vectors: the tensor's own memory where they do already.
template <class T>
class PaddedMap {
 public:
  PaddedMap(const Tensor& map, int64_t pitch) : map_(as<T>(map)) {
    const int64_t channels = map.size(-1);
    if (channels != pitch) copy_ = padded(map_.template const_data_ptr<T>(), map.numel() / channels, channels, pitch);
  }
  const T* data() const { return copy_.empty() ? map_.template const_data_ptr<T>() : copy_.data(); }

 private:
  Tensor map_;
  std::vector<T> copy_;
};

// Weight channels are repeated until a value channel's weight lies in the same lane for all of its vector: channel l of
// the repeated ones is channel l % G.
inline int64_t repeated_weights(int64_t weights, int64_t lanes) { return std::lcm(weights, lanes); }

template <class T>
Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& sizes) {
  const ScalarType type = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
  return torch::stable::new_empty(like, sizes, type);
}

// A result [N, H, W, channels] that is written as rows of whole vectors, first `zero`ed where it is added to.
template <class T>
class PaddedResult {
 public:
  PaddedResult(const Tensor& like, std::vector<int64_t> sizes, int64_t pitch, bool zero)
      : pitch_(pitch), out_(new_tensor<T>(like, sizes)) {
    if (sizes.back() != pitch)
      copy_.resize(out_.numel() / sizes.back() * pitch);
    else if (zero)
      torch::stable::zero_(out_);
  }
  T* data() { return copy_.empty() ? out_.template mutable_data_ptr<T>() : copy_.data(); }
  // The tensor; the padded rows are gone then.
  Tensor take() {
    const int64_t channels = out_.size(-1);
    T* to = out_.template mutable_data_ptr<T>();
    for (size_t i = 0; i * pitch_ < copy_.size(); ++i)
      std::copy_n(copy_.data() + i * pitch_, channels, to + i * channels);
    release(copy_);
    return out_;
  }
  // The same, of type `type`.
  Tensor take(ScalarType type) {
    const Tensor out = take();
    return out.scalar_type() == type ? out : torch::stable::to(out, type);
  }

 private:
  int64_t pitch_;
  Tensor out_;
  std::vector<T> copy_;
};

// The sum over tasks of what each has written, in the order of tasks: [size].
template <class T>
std::vector<double> sum_over_tasks(const std::vector<T>& partial, int64_t size) {
  std::vector<double> sum(size);
  for (auto from = partial.begin(); from != partial.end(); from += size)
    for (int64_t at = 0; at < size; ++at) sum[at] += from[at];
  return sum;
}

template <class T, class From>
Tensor tensor_of(const std::vector<From>& from, const Tensor& like, std::vector<int64_t> sizes) {
  Tensor out = new_tensor<T>(like, sizes);
  T* to = out.template mutable_data_ptr<T>();
  for (int64_t i = 0; i < out.numel(); ++i) to[i] = static_cast<T>(from[i]);
  return out;
}

// How often each coordinate is seen along one axis: once from each place within reach, and again from each mirror
// image.
template <class T>
std::vector<T> counts_of(int64_t size, int64_t reach) {
  std::vector<T> counts(size);
  for (int64_t i = 0; i < size; ++i)
    for (int64_t o = -reach; o <= reach; ++o) counts[reflect(i + o, size)] += 1;
  return counts;
}

// Along one axis: calls visit(o) for each offset o of a footprint, once for every pixel that sees `coordinate` there.
template <class Visit>
void for_each_view(int64_t coordinate, int64_t size, int64_t kernel_size, const Visit& visit) {
  const int64_t reach = kernel_size / 2;
  for_each_image(coordinate, size, reach, [&](int64_t padded) {
    for (int64_t o = 0; o < kernel_size; ++o) {
      const int64_t from = padded - o + reach;
      if (from >= 0 && from < size) visit(o);
    }
  });
}

// Whether all pixels that see `coordinate` do so directly, one at each offset.
inline bool is_inside(int64_t coordinate, int64_t size, int64_t reach) {
  return coordinate > reach && coordinate < size - 1 - reach;
}

}  // namespace

// What the sources in simd/ offer, as compiled for each instruction set.
#define SAN_TILES(isa)                                         \
  namespace isa {                                              \
  extern const PairwiseTiles<float> pairwise_float;            \
  extern const PairwiseTiles<double> pairwise_double;          \
  extern const PairwiseTiles<float> pairwise_planar_float;     \
  extern const PairwiseTiles<double> pairwise_planar_double;   \
  extern const PatchwiseTiles<float> patchwise_float;          \
  extern const PatchwiseTiles<double> patchwise_double;        \
  extern const PatchwiseTiles<float> patchwise_planar_float;   \
  extern const PatchwiseTiles<double> patchwise_planar_double; \
  }
SAN_TILES(baseline)
#if defined(__x86_64__)
SAN_TILES(v3)
SAN_TILES(v4)
#define SAN_COMPILED(tiles) {baseline::tiles, v3::tiles, v4::tiles}
#else
#define SAN_COMPILED(tiles) {baseline::tiles}
#endif

namespace {

template <class Tiles>
struct Compiled {
  const Tiles& baseline;
#if defined(__x86_64__)
  const Tiles &v3, &v4;

  // The best that this machine can run; the environment's SAN_CPU (baseline, v3, v4) chooses a lesser one, for tests.
  const Tiles& chosen() const {
    const char* wish = std::getenv("SAN_CPU");
    const std::string name = wish == nullptr ? "" : wish;
    STD_TORCH_CHECK(name.empty() || name == "baseline" || name == "v3" || name == "v4",
                    "SAN_CPU must be baseline, v3 or v4, not ", name);
    const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_v4 = has_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_v4 && (name.empty() || name == "v4")) return v4;
    return has_v3 && name != "baseline" ? v3 : baseline;
  }
#else
  const Tiles& chosen() const { return baseline; }
#endif
};

// Vectors run over hidden channels, or over the pixels of a row where those are too few and fill less of a vector.
template <class Tiles>
const Tiles& better_filled(const Tiles& channels, const Tiles& planar, int64_t hidden, int64_t width) {
  const auto filled = [&](int64_t size) { return double(size) / round_up(size, channels.lanes); };
  return hidden < channels.lanes && filled(hidden) < filled(width) ? planar : channels;
}

template <class T>
const PairwiseTiles<T>& pairwise_tiles(int64_t hidden, int64_t width) {
  using Tiles = Compiled<PairwiseTiles<T>>;
  if constexpr (std::is_same_v<T, double>)
    return better_filled(Tiles SAN_COMPILED(pairwise_double).chosen(),
                         Tiles SAN_COMPILED(pairwise_planar_double).chosen(), hidden, width);
  else
    return better_filled(Tiles SAN_COMPILED(pairwise_float).chosen(),
                         Tiles SAN_COMPILED(pairwise_planar_float).chosen(), hidden, width);
}

template <class T>
const PatchwiseTiles<T>& patchwise_tiles(int64_t hidden, int64_t width) {
  using Tiles = Compiled<PatchwiseTiles<T>>;
  if constexpr (std::is_same_v<T, double>)
    return better_filled(Tiles SAN_COMPILED(patchwise_double).chosen(),
                         Tiles SAN_COMPILED(patchwise_planar_double).chosen(), hidden, width);
  else
    return better_filled(Tiles SAN_COMPILED(patchwise_float).chosen(),
                         Tiles SAN_COMPILED(patchwise_planar_float).chosen(), hidden, width);
}

}  // namespace
}  // namespace san::cpu
