// The host side that forward and backward of fused pairwise attention share: checks, contiguous inputs of one type,
// padded weights, and how much of a map a block takes.
#pragma once
#include <algorithm>
#include <vector>

#include "maps.h"
#include "pairwise_shared.cuh"

namespace san::cuda {
namespace {

struct PairwiseInputs {
  const Tensor &center, &around, &beta, &gain1, &bias1, &weight1, &gain2, &bias2, &weight2;
  const Tensor &mean1, &var1, &mean2, &var2;
};

inline void check_inputs(const PairwiseInputs& in) {
  check_pairwise(in.center, in.around, in.beta, {&in.gain1, &in.bias1, &in.mean1, &in.var1}, in.weight1,
                 {&in.gain2, &in.bias2, &in.mean2, &in.var2}, in.weight2);
  check_devices(in.center, {&in.around, &in.beta, &in.gain1, &in.bias1, &in.weight1, &in.gain2, &in.bias2, &in.weight2,
                            &in.mean1, &in.var1, &in.mean2, &in.var2});
}

// weight [rows, columns] as factors with zeros around them, [padded(rows), pitch].
template <class T, class F>
__global__ void pad_kernel(const T* weight, int rows, int columns, int pitch, int64_t elements, F* out) {
  SAN_FOR_EACH(index, elements) {
    const int row = static_cast<int>(index / pitch), column = static_cast<int>(index % pitch);
    out[index] = static_cast<F>(row < rows && column < columns ? weight[row * columns + column] : T(0));
  }
}

// Of each image and channel, [images, 3, d]: a value near those of around, that value and mean1, near those of center,
// and what their sum lost to rounding. What is left of the maps without them has exact differences, whatever their
// means.
template <class T>
__global__ void origins_kernel(Pairwise<T> p, const T* around, int64_t elements, T* origins) {
  constexpr int64_t kSome = 16;  // pixels from all over the image: one alone could be far from the others
  const int64_t pixels = p.f.pixels(), some = pixels < kSome ? pixels : kSome;
  SAN_FOR_EACH(index, elements) {
    const int64_t n = index / p.d, c = index - n * p.d;
    T mean = 0;
    for (int64_t k = 0; k < some; ++k) {
      mean += around[(n * pixels + (2 * k + 1) * pixels / (2 * some)) * p.d + c] / static_cast<T>(some);
    }
    if (!(mean - mean == 0)) mean = 0;  // what is not finite belongs to single pixels
    const double wanted = double(mean) + double(p.mean1[c]);
    const T center = static_cast<T>(wanted);
    T* out = origins + n * 3 * p.d + c;
    out[0] = mean, out[p.d] = center, out[2 * p.d] = center - center == 0 ? static_cast<T>(center - wanted) : T(0);
  }
}

// out [pixels, padded(d)]: BatchNorm1 is the difference of center's and around's.
template <class T>
__global__ void scale_kernel(Pairwise<T> p, const T* map, bool is_center, int64_t elements, T* out) {
  SAN_FOR_EACH(index, elements) {
    const int64_t pixel = index / padded(p.d), c = index - pixel * padded(p.d);
    T value = 0;
    if (c < p.d) {
      const T* origin = p.origins + pixel / p.f.pixels() * 3 * p.d + c;
      const T scale = p.gain1[c] / std::sqrt(p.var1[c] + p.eps), x = map[pixel * p.d + c];
      value = is_center ? scale * (x - origin[p.d]) + (p.bias1[c] + scale * origin[2 * p.d]) : scale * (x - origin[0]);
    }
    out[index] = value;
  }
}

constexpr int kLeastRows = 8;  // of a step: half of what a warp multiplies at once

// Cuts a pass into blocks: sets tile, rows, stages and spills, and returns the bytes of `Shared` so. Preferred is what
// leaves room for two blocks on a multiprocessor, then large tiles, whose halos overlap less, then many rows.
template <class Shared, class Sizes>
size_t plan(Sizes& p, int most_pixels) {
  constexpr int kSides[][2] = {{8, 8}, {4, 8}, {4, 4}, {2, 4}, {2, 2}, {1, 2}, {1, 1}};
  const size_t limit = shared_memory_limit();
  struct Wish {
    bool stages, spills;
    int least_rows, least_pixels;
    size_t bytes;
  };
  const Wish wishes[] = {{true, false, 32, 8, limit / 2 - 1024},
                         {true, false, 32, 8, limit},
                         {false, false, 32, 8, limit},
                         {false, false, 16, 1, limit},
                         {false, true, kLeastRows, 1, limit}};
  for (const Wish& wish : wishes) {
    for (const auto& [height, width] : kSides) {
      if (height * width > most_pixels || height * width < wish.least_pixels) continue;
      p.tile_height = static_cast<int>(std::min<int64_t>(height, p.f.height));
      p.tile_width = static_cast<int>(std::min<int64_t>(width, p.f.width));
      p.stages = wish.stages, p.spills = wish.spills;
      for (p.rows = 128; p.rows >= wish.least_rows; p.rows /= 2) {
        const size_t bytes = Shared(p, nullptr).bytes;
        if (bytes <= wish.bytes) return bytes;
      }
    }
  }
  STD_TORCH_CHECK(false, "a pass does not fit into shared memory, although check_fits has passed");
}

// Bytes of a pass in the last of the ways that `plan` tries.
template <class Shared, class Sizes>
size_t least_bytes(Sizes p) {
  p.tile_height = p.tile_width = 1, p.rows = kLeastRows, p.stages = false, p.spills = true;
  return Shared(p, nullptr).bytes;
}

// Forward and backward take the same sizes: those that all of their passes have room for.
template <class scalar_t>
void check_fits(const WeightedPairwise<scalar_t>& p) {
  const size_t bytes = std::max({least_bytes<HiddenShared<scalar_t>>(p), least_bytes<ForwardShared<scalar_t>>(p),
                                 least_bytes<ValuesShared<scalar_t>>(p), least_bytes<MappingShared<scalar_t>>(p),
                                 least_bytes<RelationShared<scalar_t>>(p)});
  STD_TORCH_CHECK(bytes <= shared_memory_limit(), "pairwise attention over ", p.d, " relation, ", p.E, " hidden, ", p.G,
                  " weight and ", p.M, " value channels needs too much shared memory: ", bytes,
                  " bytes; a block of this GPU has ", shared_memory_limit(),
                  "; use fewer channels or san.ops.backend(\"unfused\")");
}

// Inputs as kernels take them, which must live as long as they run on. `scalar_t` is that of beta. The maps of the
// relation are taken in the type of sums: they are small, position features make them float anyway, and half types
// would lose what a difference leaves.
template <class scalar_t>
class Problem {
 public:
  using T = accumulate_t<scalar_t>;
  using F = factor_t<scalar_t>;

  Problem(const PairwiseInputs& in, int64_t kernel_size, double eps)
      : maps_(in.beta.scalar_type()),
        center_(contiguous_of(in.center, sum_type(maps_))),
        around_(contiguous_of(in.around, sum_type(maps_))),
        beta_(contiguous_of(in.beta, maps_)) {
    sizes.f = footprint_of(in.center.size(1), in.center.size(2), kernel_size);
    sizes.images = in.center.size(0);
    sizes.d = static_cast<int>(in.center.size(3)), sizes.M = static_cast<int>(in.beta.size(3));
    sizes.E = static_cast<int>(in.weight1.size(0)), sizes.G = static_cast<int>(in.weight2.size(0));
    sizes.eps = static_cast<T>(eps);
    sizes.is_wide = sizes.G % kWide == 0 && is_aligned(beta());
    sizes.gain1 = keep(in.gain1), sizes.bias1 = keep(in.bias1), sizes.gain2 = keep(in.gain2),
    sizes.bias2 = keep(in.bias2);
    sizes.mean1 = keep(in.mean1), sizes.var1 = keep(in.var1), sizes.mean2 = keep(in.mean2), sizes.var2 = keep(in.var2);
    check_fits(sizes);
    sizes.weight1 = pad(keep(in.weight1), sizes.E, sizes.d), sizes.weight2 = pad(keep(in.weight2), sizes.G, sizes.E);
  }

  // Sets sizes.center and sizes.around from the statistics of the first BatchNorm.
  void scale_maps() {
    kept_.push_back(new_sums({sizes.images, 3, sizes.d}));
    T* origins = kept_.back().template mutable_data_ptr<T>();
    const int64_t elements = sizes.images * sizes.d;
    if (elements > 0) {
      SAN_LAUNCH(origins_kernel<T>, blocks_for(elements), kThreads, stream(), sizes, around(), elements, origins);
    }
    sizes.origins = origins;
    sizes.center = scale(center(), true), sizes.around = scale(around(), false);
  }

  // Whether kWide elements can be read at once; a view may begin anywhere.
  static bool is_aligned(const scalar_t* data) {
    return reinterpret_cast<uintptr_t>(data) % (kWide * sizeof(scalar_t)) == 0;
  }

  const T* center() const { return center_.template const_data_ptr<T>(); }
  const T* around() const { return around_.template const_data_ptr<T>(); }
  const scalar_t* beta() const { return beta_.template const_data_ptr<scalar_t>(); }

  Tensor new_maps() const { return torch::stable::empty_like(beta_); }
  Tensor new_sums(const std::vector<int64_t>& shape) const {
    return torch::stable::new_empty(center_, shape, sum_type(maps_));
  }
  Tensor new_moments(int64_t blocks, int64_t channels) const {
    const std::vector<int64_t> shape{blocks, channels, int64_t(sizeof(Moments) / sizeof(double))};
    return torch::stable::new_empty(center_, shape, ScalarType::Double);
  }
  int64_t pixels() const { return sizes.images * sizes.f.pixels(); }
  int64_t pairs() const { return pixels() * sizes.f.positions(); }
  auto stream() const { return current_stream(center_); }

  WeightedPairwise<scalar_t> sizes{};

 private:
  const T* scale(const T* map, bool is_center) {
    kept_.push_back(new_sums({pixels(), padded(sizes.d)}));
    Tensor& out = kept_.back();
    if (pixels() > 0) {
      SAN_LAUNCH((scale_kernel<T>), blocks_for(out.numel()), kThreads, stream(), sizes, map, is_center, out.numel(),
                 out.template mutable_data_ptr<T>());
    }
    return out.template const_data_ptr<T>();
  }
  const T* keep(const Tensor& x) {
    kept_.push_back(contiguous_of(x, sum_type(maps_)));
    return kept_.back().template const_data_ptr<T>();
  }
  const F* pad(const T* weight, int rows, int columns) {
    const std::vector<int64_t> shape{padded(rows), pitch_of<F>(columns)};
    kept_.push_back(torch::stable::new_empty(center_, shape, std::is_same_v<F, T> ? sum_type(maps_) : maps_));
    Tensor& out = kept_.back();
    SAN_LAUNCH((pad_kernel<T, F>), blocks_for(out.numel()), kThreads, stream(), weight, rows, columns,
               pitch_of<F>(columns), out.numel(), out.template mutable_data_ptr<F>());
    return out.template const_data_ptr<F>();
  }

  ScalarType maps_;
  Tensor center_, around_, beta_;
  std::vector<Tensor> kept_;
};

// Pixels of a tile: a step of 128 rows should be filled at small footprints too.
inline int pixels_of_tile(const Footprint& f) { return f.kernel_size <= 3 ? 64 : 16; }

// One block per tile, or fewer that sum over several.
template <class T>
int blocks_of(const Pairwise<T>& p, int64_t most = kMaxBlocks) {
  return static_cast<int>(std::min<int64_t>(p.tiles(), most));
}

}  // namespace
}  // namespace san::cuda
