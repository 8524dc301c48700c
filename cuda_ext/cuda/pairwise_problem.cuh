// The host side that forward and backward of fused pairwise attention share: checks, contiguous inputs of one type,
// padded weights, and how much of a map a block takes.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <vector>

#include "pairwise_sums.cuh"
#include "pairwise_tile.cuh"

namespace san::cuda {
namespace {

struct PairwiseInputs {
  const Tensor &center, &around, &beta, &gain1, &bias1, &weight1, &gain2, &bias2, &weight2;
  const Tensor &mean1, &var1, &mean2, &var2;
};

inline void check_pairwise(const PairwiseInputs& in) {
  check_map(in.center, "center"), check_map(in.around, "around"), check_map(in.beta, "beta");
  STD_TORCH_CHECK(in.center.sizes().vec() == in.around.sizes().vec(), "center and around must have one shape");
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(in.beta.size(axis) == in.center.size(axis), "beta and center must be maps of one size");
  }
  STD_TORCH_CHECK(in.weight1.dim() == 2 && in.weight2.dim() == 2, "weight1 and weight2 must be matrices");
  const int64_t d = in.center.size(3), E = in.weight1.size(0), G = in.weight2.size(0), M = in.beta.size(3);
  STD_TORCH_CHECK(d > 0 && E > 0 && G > 0 && M > 0 && M % G == 0, "beta's ", M,
                  " channels must be a positive multiple of the ", G, " weight channels");
  STD_TORCH_CHECK(in.weight1.size(1) == d && in.weight2.size(1) == E, "weight1 must be [E, d] and weight2 [G, E]");
  for (const Tensor* x : {&in.gain1, &in.bias1, &in.mean1, &in.var1}) {
    STD_TORCH_CHECK(x->numel() == d, "the first BatchNorm must have ", d, " channels");
  }
  for (const Tensor* x : {&in.gain2, &in.bias2, &in.mean2, &in.var2}) {
    STD_TORCH_CHECK(x->numel() == E, "the second BatchNorm must have ", E, " channels");
  }
  for (const Tensor* x : {&in.around, &in.beta, &in.gain1, &in.bias1, &in.weight1, &in.gain2, &in.bias2, &in.weight2,
                          &in.mean1, &in.var1, &in.mean2, &in.var2}) {
    STD_TORCH_CHECK(x->device() == in.center.device(), "all tensors must be on one device");
  }
}

inline Tensor contiguous_of(const Tensor& x, ScalarType type) {
  return torch::stable::contiguous(x.scalar_type() == type ? x : torch::stable::to(x, type));
}

// The type that kernels read maps in: theirs, or float where they differ.
inline ScalarType map_type(const PairwiseInputs& in) {
  const ScalarType type = in.beta.scalar_type();
  const bool same = in.center.scalar_type() == type && in.around.scalar_type() == type;
  return same || type == ScalarType::Double ? type : ScalarType::Float;
}

// The type of parameters, statistics and sums.
inline ScalarType sum_type(ScalarType maps) { return maps == ScalarType::Double ? maps : ScalarType::Float; }

// weight [rows, columns] with zeros around it, [padded(rows), pitch].
template <class T>
__global__ void pad_kernel(const T* weight, int rows, int columns, int pitch, int64_t elements, T* out) {
  SAN_FOR_EACH(index, elements) {
    const int row = static_cast<int>(index / pitch), column = static_cast<int>(index % pitch);
    out[index] = row < rows && column < columns ? weight[row * columns + column] : T(0);
  }
}

// out [pixels, padded(d)] = gain1 / sqrt(var1 + eps) * (map - mean1) + bias1, or without mean and bias.
template <class scalar_t, class T = accumulate_t<scalar_t>>
__global__ void scale_kernel(Pairwise<T> p, const scalar_t* map, bool is_center, int64_t elements, T* out) {
  SAN_FOR_EACH(index, elements) {
    const int64_t pixel = index / padded(p.d), c = index - pixel * padded(p.d);
    T value = 0;
    if (c < p.d) {
      const T scale = p.gain1[c] / std::sqrt(p.var1[c] + p.eps), x = static_cast<T>(map[pixel * p.d + c]);
      value = is_center ? scale * (x - p.mean1[c]) + p.bias1[c] : scale * x;
    }
    out[index] = value;
  }
}

// Inputs as kernels take them, which must live as long as they run on.
template <class scalar_t>
class Problem {
 public:
  using T = accumulate_t<scalar_t>;

  Problem(const PairwiseInputs& in, int64_t kernel_size, double eps)
      : maps_(map_type(in)),
        center_(contiguous_of(in.center, maps_)),
        around_(contiguous_of(in.around, maps_)),
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
    sizes.weight1 = pad(keep(in.weight1), sizes.E, sizes.d), sizes.weight2 = pad(keep(in.weight2), sizes.G, sizes.E);
  }

  // Sets sizes.center and sizes.around from the statistics of the first BatchNorm.
  void scale_maps() { sizes.center = scale(center(), true), sizes.around = scale(around(), false); }

  // Whether kWide elements can be read at once; a view may begin anywhere.
  static bool is_aligned(const scalar_t* data) {
    return reinterpret_cast<uintptr_t>(data) % (kWide * sizeof(scalar_t)) == 0;
  }

  const scalar_t* center() const { return center_.template const_data_ptr<scalar_t>(); }
  const scalar_t* around() const { return around_.template const_data_ptr<scalar_t>(); }
  const scalar_t* beta() const { return beta_.template const_data_ptr<scalar_t>(); }

  Tensor new_maps(int64_t channels) const {
    const std::vector<int64_t> shape{sizes.images, sizes.f.height, sizes.f.width, channels};
    return torch::stable::new_empty(center_, shape);
  }
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

  Pairwise<T> sizes{};

 private:
  const T* scale(const scalar_t* map, bool is_center) {
    kept_.push_back(new_sums({pixels(), padded(sizes.d)}));
    Tensor& out = kept_.back();
    if (pixels() > 0) {
      SAN_LAUNCH(scale_kernel<scalar_t>, blocks_for(out.numel()), kThreads, stream(), sizes, map, is_center,
                 out.numel(), out.template mutable_data_ptr<T>());
    }
    return out.template const_data_ptr<T>();
  }
  const T* keep(const Tensor& x) {
    kept_.push_back(contiguous_of(x, sum_type(maps_)));
    return kept_.back().template const_data_ptr<T>();
  }
  const T* pad(const T* weight, int rows, int columns) {
    kept_.push_back(new_sums({padded(rows), pitch_of(columns)}));
    Tensor& out = kept_.back();
    SAN_LAUNCH(pad_kernel<T>, blocks_for(out.numel()), kThreads, stream(), weight, rows, columns, pitch_of(columns),
               out.numel(), out.template mutable_data_ptr<T>());
    return out.template const_data_ptr<T>();
  }

  ScalarType maps_;
  Tensor center_, around_, beta_;
  std::vector<Tensor> kept_;
};

// Cuts a pass into blocks: sets tile, rows and stages, and returns the bytes of `Shared` so. Preferred is what leaves
// room for two blocks on a multiprocessor, then large tiles, whose halos overlap less, then many rows.
template <class Shared, class T>
size_t plan(Pairwise<T>& p, int most_pixels) {
  constexpr int kSides[][2] = {{8, 8}, {4, 8}, {4, 4}, {2, 4}, {2, 2}, {1, 2}, {1, 1}};
  const size_t limit = shared_memory_limit();
  struct Wish {
    bool stages;
    int least_rows, least_pixels;
    size_t bytes;
  };
  const Wish wishes[] = {
      {true, 32, 8, limit / 2 - 1024}, {true, 32, 8, limit}, {false, 32, 8, limit}, {false, 16, 1, limit}};
  for (const Wish& wish : wishes) {
    for (const auto& [height, width] : kSides) {
      if (height * width > most_pixels || height * width < wish.least_pixels) continue;
      p.tile_height = static_cast<int>(std::min<int64_t>(height, p.f.height));
      p.tile_width = static_cast<int>(std::min<int64_t>(width, p.f.width));
      p.stages = wish.stages;
      for (p.rows = 128; p.rows >= wish.least_rows; p.rows /= 2) {
        const size_t bytes = Shared(p, nullptr).bytes;
        if (bytes <= wish.bytes) return bytes;
      }
    }
  }
  STD_TORCH_CHECK(false, "pairwise attention over ", p.d, " relation, ", p.E, " hidden, ", p.G, " weight and ", p.M,
                  " value channels does not fit into the ", limit, " bytes of shared memory of a block");
}

// Pixels of a tile: a step of 128 rows should be filled at small footprints too.
inline int pixels_of_tile(const Footprint& f) { return f.kernel_size <= 3 ? 64 : 16; }

// One block per tile, or fewer that sum over several.
template <class T>
int blocks_of(const Pairwise<T>& p, int64_t most = kMaxBlocks) {
  return static_cast<int>(std::min<int64_t>(p.tiles(), most));
}

}  // namespace
}  // namespace san::cuda
