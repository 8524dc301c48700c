// patch_linear, forward and backward: a Linear layer of patches after a scale, a shift and ReLU. Patches are never
// unfolded. Definition: san/ops/definitions.py, patch_linear.
//
// All three products are implicit: a warp loads fragments [16, 8] from the maps, transforms them in registers and
// multiplies them. A patch is a row of `pieces`: the channels of `around` at each position of the footprint and, last,
// the pixel's own `center`. Warps of a block share pixels or weights, so most loads of maps and weights hit the L1
// cache. No atomics are used, and the order of sums depends only on the sizes.
#include <tuple>

#include "team.cuh"
#include "workspace.cuh"

namespace san::cuda {
namespace {

// Number of blocks per multiprocessor for which the compiler does not spill registers.
template <class F>
constexpr int resident_blocks(int tiles) {
  return sizeof(typename F::Value) == 8 ? 1 : tiles == 1 ? 3 : 2;
}

// Sizes, maps and parameters for the kernels. Channels are padded with zeros to whole tiles.
template <class F>
struct Patches : Grid {
  using T = typename F::Value;

  int C, R, E;               // C is 0 or R
  int r_tiles, e_tiles;      // of `tiles_of` R and E channels
  const T *center, *around;  // [images, height, width, channels()], `around` with reflected borders
  const T *scale, *shift;    // [pieces, channels()]
  // Right factors [pieces][r_tiles][e_tiles], whose rows are hidden channels; in backward [pieces][e_tiles][r_tiles],
  // whose rows are channels.
  const F* weight;

  SAN_HOST_DEVICE int pieces() const { return positions() + (C > 0 ? 1 : 0); }
  SAN_HOST_DEVICE int columns() const { return C + R * positions(); }
  SAN_HOST_DEVICE int channels() const { return r_tiles * 8; }
  SAN_HOST_DEVICE int hidden() const { return e_tiles * 8; }
  SAN_HOST_DEVICE int row_bytes() const { return channels() * static_cast<int>(sizeof(T)); }
  // The column of a piece's channel in scale, shift and weight.
  SAN_HOST_DEVICE int column(int piece, int c) const { return piece == positions() ? c : C + c * positions() + piece; }
};

// Number of tiles, rounded up to 1, 2 or a multiple of 4 so that a warp has no partial strips.
inline int tiles_of(int64_t channels) {
  const int tiles = static_cast<int>((channels + 7) / 8);
  return tiles <= 2 ? tiles : (tiles + 3) / 4 * 4;
}

template <class T>
__device__ __forceinline__ Pack<2, T> load_if(bool exists, const T* from) {
  return exists ? Pack<2, T>::load(from) : Pack<2, T>{};
}

// sums += products. Tensor cores round sums towards zero, so long sums are split into parts, which are added here.
template <int kTiles, class T>
__device__ __forceinline__ void add_to(T (&sums)[kTiles][4], const T (&products)[kTiles][4]) {
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) sums[i / 4][i % 4] += products[i / 4][i % 4];
}

// out [pixels, E] = sum over pieces of relu(scale * x + shift) weight^T. A team of warps computes 16 pixels and kTiles
// tiles of hidden channels; each warp sums over some of the pieces.
//
// Predicted for SAN10's stage 2 at batch 32 (R = 16, E = 8, k = 7, 56x56) on an H100, accurate float32: reads 13 MB,
// writes 3 MB; 0.66 G products; no shared memory, or 4 KB for each tile where several warps share pixels; 0.05 ms,
// limited by instruction issue.
template <class F, int kTiles, class T = typename F::Value>
__global__ void __launch_bounds__(kThreads, resident_blocks<F>(kTiles))
    patch_linear_kernel(Patches<F> p, int strips, int split, T* out) {
  const Team mine(split);
  const int task = blockIdx.x * (kWarps / split) + mine.team, tile = task / strips;
  const int first = (task - tile * strips) * kTiles, depth = p.r_tiles;
  const Pixel<false> pixels[2] = {{p, int64_t(tile) * 16 + mine.row}, {p, int64_t(tile) * 16 + mine.row + 8}};
  T sums[kTiles][4] = {};
  Offset offset;
  offset.advance(mine.member, p.kernel_size);
  for (int piece = mine.member; piece < p.pieces(); piece += split, offset.advance(split, p.kernel_size)) {
    const bool is_center = piece == p.positions();
    const T *map = (is_center ? p.center : p.around) + mine.pair, *rows[2];
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      bool is_pair;
      const int partner = pixels[i].partner(p, offset, is_pair);
      rows[i] = row_at(map, is_center ? pixels[i].index : partner, p.row_bytes());
    }
    const T *scale_at = p.scale + piece * p.channels() + mine.pair, *shift_at = p.shift + (scale_at - p.scale);
    const F* weight = p.weight + (int64_t(piece) * depth * p.e_tiles + first) * kWarp + mine.lane;
    T products[kTiles][4] = {};
    SAN_ROLLED
    for (int k = 0; k < depth; ++k, weight += p.e_tiles * kWarp) {
      const auto above = Pack<2, T>::load(rows[0] + 8 * k), below = Pack<2, T>::load(rows[1] + 8 * k);
      const auto scale = Pack<2, T>::load(scale_at + 8 * k), shift = Pack<2, T>::load(shift_at + 8 * k);
      const auto activated = [&](const Pack<2, T>& x, int n) {
        return rectified(scale.data[n] * x.data[n] + shift.data[n]);
      };
      const F upper(activated(above, 0), activated(above, 1)), lower(activated(below, 0), activated(below, 1));
      multiply_all(products, upper, lower, weight);
    }
    add_to(sums, products);
  }
  if (split > 1) {
    sum_over_team(mine, reinterpret_cast<T*>(shared_memory_base()), reinterpret_cast<T(&)[kTiles * 4]>(sums));
  }
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) {
    const Pixel<false>& pixel = pixels[i % 4 / 2];
    const int e = (first + i / 4) * 8 + mine.pair + i % 2;
    if (mine.member == 0 && pixel.exists && e < p.E) out[int64_t(pixel.index) * p.E + e] = sums[i / 4][i % 4];
  }
}

// The gradient of `around` on the padded grid, [padded pixels, R]. Each position of the footprint pairs a padded pixel
// with at most one pixel of the map. The product with a piece's weights is masked by the piece's ReLU before it is
// added. `grad` [pixels + 1, hidden()] ends in zeros, for padded pixels whose partner is outside the map.
//
// Predicted as above: reads 10 MB, writes 8 MB; 0.8 G products; no shared memory; 0.05 ms, limited by instruction
// issue.
template <class F, int kTiles, class T = typename F::Value>
__global__ void __launch_bounds__(kThreads, resident_blocks<F>(kTiles))
    map_gradient_kernel(Patches<F> p, const T* grad, int strips, T* out) {
  const Team mine(1);
  const int task = blockIdx.x * kWarps + mine.team, tile = task / strips, first = (task - tile * strips) * kTiles;
  const Pixel<true> pixels[2] = {{p, int64_t(tile) * 16 + mine.row}, {p, int64_t(tile) * 16 + mine.row + 8}};
  Pack<2, T> x[kTiles][2];
  SAN_UNROLL
  for (int i = 0; i < kTiles * 2; ++i) {
    x[i / 2][i % 2] =
        Pack<2, T>::load(row_at(p.around + (first + i / 2) * 8 + mine.pair, pixels[i % 2].index, p.row_bytes()));
  }
  const int grad_bytes = p.hidden() * static_cast<int>(sizeof(T)), zeros = static_cast<int>(p.pixels());
  const T *scale_at = p.scale + first * 8 + mine.pair, *shift_at = p.shift + first * 8 + mine.pair;
  const F* weight = p.weight + first * kWarp + mine.lane;
  T sums[kTiles][4] = {};
  for (Offset offset; offset.position < p.positions(); offset.advance(1, p.kernel_size)) {
    const T* rows[2];
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      bool is_pair;
      const int partner = pixels[i].partner(p, offset, is_pair);
      rows[i] = row_at(grad + mine.pair, is_pair ? partner : zeros, grad_bytes);
    }
    T products[kTiles][4] = {};
    SAN_ROLLED
    for (int k = 0; k < p.e_tiles; ++k, weight += p.r_tiles * kWarp) {
      const auto above = Pack<2, T>::load(rows[0] + 8 * k), below = Pack<2, T>::load(rows[1] + 8 * k);
      multiply_all(products, F(above.data[0], above.data[1]), F(below.data[0], below.data[1]), weight);
    }
    SAN_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      const auto scale = Pack<2, T>::load(scale_at + 8 * n), shift = Pack<2, T>::load(shift_at + 8 * n);
      SAN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const T activated = scale.data[i % 2] * x[n][i / 2].data[i % 2] + shift.data[i % 2];
        if (!(activated <= 0)) sums[n][i] += scale.data[i % 2] * products[n][i];
      }
    }
    scale_at += p.channels(), shift_at += p.channels();
  }
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) {
    const Pixel<true>& pixel = pixels[i % 4 / 2];
    const int c = (first + i / 4) * 8 + mine.pair + i % 2;
    if (pixel.exists && c < p.R) out[int64_t(pixel.index) * p.R + c] = sums[i / 4][i % 4];
  }
}

// The sums of a warp for the gradients of 16 channels of a piece and kTiles tiles of hidden channels. Its left factors
// have channels as rows. A lane obtains weight^T grad^T for the same pixels whose values it contributes to relu(..)^T
// grad.
template <class F, int kTiles>
class ParameterSums {
 public:
  using T = typename F::Value;

  __device__ __forceinline__ ParameterSums(const Patches<F>& p, const Team& mine, int piece, int band, int first_tile)
      : mine_(mine), width_(p.width), pitch_(p.channels()), hidden_(p.hidden()), hidden_at_(first_tile * 8) {
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int c = band * 16 + mine.row + 8 * i;
      exists_[i] = c < pitch_, value_at_[i] = exists_[i] ? c : 0;
      scale_[i] = p.scale[piece * pitch_ + value_at_[i]], shift_[i] = p.shift[piece * pitch_ + value_at_[i]];
      SAN_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        const int tile = (piece * p.e_tiles + first_tile + n) * p.r_tiles + value_at_[i] / 8;
        weight_[n][i] = p.weight[tile * kWarp + mine.lane];
      }
    }
  }

  // Adds 8 pixels of a row of `grads`, from `begin` on, whose footprint position is the row `values`. Pixels after the
  // end of the row have no gradient, and `store` omits the sums of channels that do not exist.
  __device__ __forceinline__ void add_pixels(const T* values, const T* grads, int begin) {
    T x[4], activated[4], products[4] = {};  // of the channels and pixels [2, 2]
    const int pair = begin + mine_.pair, last = width_ - 1;
    SAN_UNROLL
    for (int i = 0; i < 4; ++i) {
      x[i] = values[std::min(pair + i % 2, last) * pitch_ + value_at_[i / 2]];
      activated[i] = scale_[i / 2] * x[i] + shift_[i / 2];
    }
    const F upper(rectified(activated[0]), rectified(activated[1]));
    const F lower(rectified(activated[2]), rectified(activated[3]));
    const bool is_along = begin + mine_.row <= last, is_pair[2] = {pair <= last, pair < last};
    const T* along = grads + (begin + mine_.row) * hidden_ + hidden_at_ + mine_.pair;
    const T* across = grads + pair * hidden_ + hidden_at_ + mine_.row;
    SAN_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      const auto two = load_if(is_along, along + n * 8);
      multiply(products, weight_[n][0], weight_[n][1], F(two.data[0], two.data[1]));
      const F right(is_pair[0] ? across[n * 8] : T(0), is_pair[1] ? across[hidden_ + n * 8] : T(0));
      multiply(sums_[n], upper, lower, right);
    }
    SAN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const T passed = activated[i] <= 0 ? T(0) : products[i];
      affine_[i / 2].data[0] += passed * x[i], affine_[i / 2].data[1] += passed;
    }
  }

  // Stores the sums in [channels(), hidden()] and [channels(), 2]. The sums of a channel are spread over four lanes.
  __device__ __forceinline__ void store(T* weight, T* affine) const {
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      Pack<2, T> total = affine_[i];
      SAN_UNROLL
      for (int bits = 1; bits < 4; bits *= 2) {
        total.data[0] += __shfl_xor_sync(~0u, total.data[0], bits);
        total.data[1] += __shfl_xor_sync(~0u, total.data[1], bits);
      }
      if (!exists_[i]) continue;
      if (mine_.pair == 0) total.store(affine + 2 * value_at_[i]);
      SAN_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        const Pack<2, T> sums{sums_[n][2 * i], sums_[n][2 * i + 1]};
        sums.store(weight + value_at_[i] * hidden_ + hidden_at_ + n * 8 + mine_.pair);
      }
    }
  }

 private:
  const Team mine_;
  const int width_, pitch_, hidden_, hidden_at_;
  bool exists_[2];
  int value_at_[2];
  T scale_[2], shift_[2], sums_[kTiles][4] = {};
  Pack<2, T> affine_[2] = {};
  F weight_[kTiles][2];
};

// Partial sums over slices of rows for the gradients of weight, [slices, pieces, channels(), hidden()], and of scale
// and shift, [slices, strips, pieces, channels(), 2].
//
// Predicted as above: reads 16 MB, writes 2 MB; 1.3 G products; no shared memory; 0.09 ms, limited by instruction
// issue.
template <class F, int kTiles, class T = typename F::Value>
__global__ void __launch_bounds__(kThreads)
    parameter_gradient_kernel(Patches<F> p, const T* grad, int strips, int tasks, int rows_per_slice, T* weights,
                              T* affine) {
  const Team mine(1);
  const int blocks = (tasks + kWarps - 1) / kWarps, slice = blockIdx.x / blocks;
  const int task = (blockIdx.x - slice * blocks) * kWarps + mine.team, strip = task % strips;
  const int bands = (p.r_tiles + 1) / 2, piece = task / strips / bands, band = task / strips - piece * bands;
  if (task >= tasks) return;
  ParameterSums<F, kTiles> sums(p, mine, piece, band, strip * kTiles);
  const bool is_center = piece == p.positions();
  const T* map = is_center ? p.center : p.around;
  const int border = is_center ? 0 : p.kernel_size - 1;
  Offset offset;
  if (!is_center) offset.advance(piece, p.kernel_size);
  const int end = std::min((slice + 1) * rows_per_slice, static_cast<int>(p.images) * p.height);
  for (int row = slice * rows_per_slice; row < end; ++row) {
    const int64_t seen = row + row / p.height * border + offset.down;  // a row of the padded map
    const T* values = map + (seen * (p.width + border) + offset.right) * p.channels();
    const T* grads = grad + int64_t(row) * p.width * p.hidden();
    for (int begin = 0; begin < p.width; begin += 8) sums.add_pixels(values, grads, begin);
  }
  const int64_t channels = int64_t(p.pieces()) * p.channels();
  const int64_t channel = int64_t(piece) * p.channels();
  sums.store(weights + (slice * channels + channel) * p.hidden(),
             affine + ((int64_t(slice) * strips + strip) * channels + channel) * 2);
}

// Copies sums [pieces, channels(), hidden()] to the gradient of weight, or sums [pieces, channels(), 2] to those of
// scale and shift.
template <class F, bool kWeight>
struct PlaceGradients {
  using T = typename F::Value;

  Patches<F> p;
  T *weight, *scale, *shift;

  __device__ __forceinline__ void operator()(int64_t index, const double* sum) const {
    const int inner = kWeight ? p.hidden() : 2, channel = static_cast<int>(index / inner);
    const int e = static_cast<int>(index - int64_t(channel) * inner), piece = channel / p.channels();
    const int c = channel - piece * p.channels(), column = p.column(piece, c);
    if (c >= p.R || (kWeight && e >= p.E)) return;
    T* to = kWeight ? weight + int64_t(e) * p.columns() : e == 0 ? scale : shift;
    to[column] = static_cast<T>(*sum);
  }
};

// Calls run with the number of tiles of 8 channels that a warp computes at once.
template <class Run>
void with_tiles(int tiles, const Run& run) {
  if (tiles == 1) return run(std::integral_constant<int, 1>());
  if (tiles == 2) return run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 4>());
}

struct PatchTensors {
  Tensor center, around, scale, shift, weight;
};

// One call: converts the inputs for the kernels and launches them.
template <class F>
class PatchProblem {
 public:
  using T = typename F::Value;

  PatchProblem(const PatchTensors& x, const Footprint& f, bool backward) : f_(f), space_(x.around) {
    check_weight(x, f);
    static_cast<Grid&>(p_) = grid_of(x.around, f);
    p_.C = static_cast<int>(x.center.size(3)), p_.R = static_cast<int>(x.around.size(3));
    p_.E = static_cast<int>(x.weight.size(0)), p_.r_tiles = tiles_of(p_.R), p_.e_tiles = tiles_of(p_.E);
    p_.around = space_.pad(x.around, f, p_.r_tiles);
    p_.center = p_.C > 0 ? space_.pad(x.center, {1, f.height, f.width}, p_.r_tiles) : nullptr;
    p_.scale = add_affine(space_.keep(x.scale)), p_.shift = add_affine(space_.keep(x.shift));
    const T* weight = space_.keep(x.weight);
    F* packed = space_.template take<F>(int64_t(p_.pieces()) * piece_size());
    add_weight(weight + p_.C, p_.positions(), p_.positions(), backward, packed);
    if (p_.C > 0) add_weight(weight, 1, 1, backward, packed + p_.positions() * piece_size());
    p_.weight = packed;
  }

  // [N, H, W, E]
  Tensor forward() {
    Tensor out = space_.empty({p_.images, p_.height, p_.width, p_.E});
    if (out.numel() == 0) return out;
    space_.prepare();
    with_tiles(p_.e_tiles, [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      const int strips = p_.e_tiles / kTiles;
      const int64_t tasks = (p_.pixels() + 15) / 16 * strips;
      const int split = split_for(tasks, p_.pieces());
      const size_t bytes = split > 1 ? bytes_of_team_sums<T>(kTiles * 4) : 0;
      SAN_LAUNCH_SHARED((patch_linear_kernel<F, kTiles>), blocks_of_teams(tasks, split), kThreads, bytes,
                        space_.stream(), p_, strips, split, out.template mutable_data_ptr<T>());
    });
    return out;
  }

  // Gradients of all inputs for `grad` [N, H, W, E].
  PatchTensors backward(const Tensor& grad) {
    const auto map = [&](int channels) { return space_.empty({p_.images, p_.height, p_.width, channels}); };
    PatchTensors out{map(p_.C), map(p_.R), space_.empty({p_.columns()}), space_.empty({p_.columns()}),
                     space_.empty({p_.E, p_.columns()})};
    if (p_.images == 0) {
      for (Tensor* x : {&out.weight, &out.scale, &out.shift}) torch::stable::zero_(*x);
      return out;
    }
    T* grads = space_.take((p_.pixels() + 1) * p_.hidden());
    const Footprint one{1, f_.height, f_.width};
    space_.pad({space_.keep(grad), one, p_.E, p_.e_tiles, p_.pixels() * p_.e_tiles, grads, p_.E, 1});
    space_.pad({nullptr, {1, 1, 1}, 0, p_.e_tiles, p_.e_tiles, grads + p_.pixels() * p_.hidden(), 0, 1});
    space_.prepare();
    if (p_.C > 0) {
      Patches<F> center = p_;
      const int64_t behind = int64_t(p_.positions()) * p_.channels();
      center.kernel_size = 1, center.around = p_.center, center.weight += p_.positions() * piece_size();
      center.scale += behind, center.shift += behind;
      map_gradient(center, grads, out.center.template mutable_data_ptr<T>());
    }
    T* padded = space_.take(p_.padded_pixels() * p_.R);
    map_gradient(p_, grads, padded);
    SAN_LAUNCH(fold_kernel<T>, blocks_for(out.around.numel()), kThreads, space_.stream(), padded, f_, p_.R,
               out.around.numel(), out.around.template mutable_data_ptr<T>());
    parameter_gradients(grads, out);
    return out;
  }

 private:
  int64_t piece_size() const { return int64_t(p_.r_tiles) * p_.e_tiles * kWarp; }

  // Indices of the padded weights must fit into 32 bits.
  static void check_weight(const PatchTensors& x, const Footprint& f) {
    const int64_t weights = (f.positions() + 1) * (x.around.size(3) + 32) * (x.weight.size(0) + 32);
    STD_TORCH_CHECK(weights < int64_t(1) << 30, "a weight of [", x.weight.size(0), ", ", x.weight.size(1),
                    "] is too large; fewer than 2^30 elements are supported");
  }

  // Converts scale or shift to [pieces, channels()].
  const T* add_affine(const T* from) {
    T* to = space_.take(int64_t(p_.pieces()) * p_.channels());
    const auto add = [&](const T* values, int pieces, T* out) {
      space_.pad({values, {1, 1, pieces}, p_.R, p_.r_tiles, int64_t(pieces) * p_.r_tiles, out, 1, pieces});
    };
    add(from + p_.C, p_.positions(), to);
    if (p_.C > 0) add(from, 1, to + int64_t(p_.positions()) * p_.channels());
    return to;
  }

  // Packs the columns of `pieces` pieces whose channels are `stride` columns apart.
  void add_weight(const T* from, int pieces, int stride, bool backward, F* to) {
    const Matrix<T> rows{from, p_.E, p_.R, p_.columns(), stride, pieces};
    const Matrix<T> columns{from, p_.R, p_.E, stride, p_.columns(), pieces};
    backward ? space_.pack(columns, p_.r_tiles, p_.e_tiles, to) : space_.pack(rows, p_.e_tiles, p_.r_tiles, to);
  }

  void map_gradient(const Patches<F>& p, const T* grads, T* out) {
    with_tiles(p.r_tiles, [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      const int strips = p.r_tiles / kTiles;
      SAN_LAUNCH_SHARED((map_gradient_kernel<F, kTiles>), blocks_of_teams((p.padded_pixels() + 15) / 16 * strips, 1),
                        kThreads, 0, space_.stream(), p, grads, strips, out);
    });
  }

  void parameter_gradients(const T* grads, PatchTensors& out) {
    with_tiles(p_.e_tiles, [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      const int strips = p_.e_tiles / kTiles, rows = static_cast<int>(p_.images) * p_.height;
      const int tasks = p_.pieces() * ((p_.r_tiles + 1) / 2) * strips;
      const int64_t channels = int64_t(p_.pieces()) * p_.channels(), part = channels * (p_.hidden() + 2 * strips);
      const int64_t fitting = std::max<int64_t>(1, workspace_limit() / 4 / static_cast<int64_t>(part * sizeof(T)));
      const int64_t steps = int64_t(rows) * ((p_.width + 7) / 8);  // a sum has at most 256, see add_to
      const int64_t wanted =
          std::min<int64_t>({std::max<int64_t>(kWantedWarps / tasks, steps / 256) + 1, fitting, rows});
      const int rows_per_slice = static_cast<int>((rows + wanted - 1) / wanted);
      const int slices = (rows + rows_per_slice - 1) / rows_per_slice;
      T *weights = space_.take(slices * channels * p_.hidden()), *affine = space_.take(slices * strips * channels * 2);
      SAN_LAUNCH_SHARED((parameter_gradient_kernel<F, kTiles>), slices * ((tasks + kWarps - 1) / kWarps), kThreads, 0,
                        space_.stream(), p_, grads, strips, tasks, rows_per_slice, weights, affine);
      T *weight = out.weight.template mutable_data_ptr<T>(), *scale = out.scale.template mutable_data_ptr<T>();
      T* shift = out.shift.template mutable_data_ptr<T>();
      sum_blocks(weights, slices, channels * p_.hidden(), PlaceGradients<F, true>{p_, weight, scale, shift},
                 space_.stream());
      sum_blocks(affine, slices * strips, channels * 2, PlaceGradients<F, false>{p_, weight, scale, shift},
                 space_.stream());
    });
  }

  const Footprint f_;
  Workspace<F> space_;
  Patches<F> p_{};
};

}  // namespace

Tensor patch_linear(const Tensor& center, const Tensor& around, const Tensor& scale, const Tensor& shift,
                    const Tensor& weight, int64_t kernel_size, bool tf32) {
  const Footprint f = check_patches(center, around, scale, shift, weight, kernel_size);
  const OperatorGuard guard("patch_linear", around);
  const PatchTensors x{center, around, scale, shift, weight};
  const Tensor out = with_operand(around.scalar_type(), weight.scalar_type(), tf32,
                                  [&](auto operand) { return PatchProblem<decltype(operand)>(x, f, false).forward(); });
  return torch::stable::transpose(torch::stable::transpose(out, 1, 3), 2, 3);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> patch_linear_backward(const Tensor& grad, const Tensor& center,
                                                                         const Tensor& around, const Tensor& scale,
                                                                         const Tensor& shift, const Tensor& weight,
                                                                         int64_t kernel_size, bool tf32) {
  const Footprint f = check_patches(center, around, scale, shift, weight, kernel_size);
  check_same(grad, around, "grad and around");
  STD_TORCH_CHECK(grad.dim() == 4 && grad.size(0) == around.size(0) && grad.size(1) == weight.size(0) &&
                      grad.size(2) == f.height && grad.size(3) == f.width,
                  "grad must be [", around.size(0), ", ", weight.size(0), ", ", f.height, ", ", f.width, "]");
  const OperatorGuard guard("patch_linear_backward", around);
  const PatchTensors x{center, around, scale, shift, weight};
  const Tensor last = torch::stable::transpose(torch::stable::transpose(grad, 2, 3), 1, 3);  // [N, H, W, E]
  const PatchTensors out = with_operand(around.scalar_type(), weight.scalar_type(), tf32, [&](auto operand) {
    return PatchProblem<decltype(operand)>(x, f, true).backward(last);
  });
  const bool same = out.weight.scalar_type() == weight.scalar_type();
  return {out.center, out.around, out.scale, out.shift,
          same ? out.weight : torch::stable::to(out.weight, weight.scalar_type())};
}

}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("patch_linear", TORCH_BOX(&san::cuda::patch_linear));
  m.impl("patch_linear_backward", TORCH_BOX(&san::cuda::patch_linear_backward));
}
