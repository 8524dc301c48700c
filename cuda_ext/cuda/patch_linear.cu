// patch_linear, forward and backward: a Linear layer of patches after BatchNorm and ReLU, which are never unfolded.
// Definition: tests/ops/oracle.py, patch_linear.
//
// All three products are implicit: a warp multiplies fragments [16, 8] of what it loads from the maps and transforms in
// registers. A patch is a row of `pieces`: for each position of the footprint the channels of `around` there, and last
// the pixel's own `center`. Maps and weights come from global memory, whose reads the L1 cache serves: warps of a block
// share pixels or weights. No atomics; the order of sums depends on the sizes alone.
#include <tuple>

#include "fragment.cuh"
#include "maps.h"
#include "window.cuh"

namespace san::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
template <class T>
constexpr int kResident = sizeof(T) == 4 ? 3 : 1;  // blocks per SM that suffice: for more the compiler would spill
constexpr int kTile = 8, kRows = 16;               // sides of fragments

// Sizes, and maps and parameters as kernels read them. What is beyond a size is 0 up to whole tiles.
template <class T>
struct Patches {
  Window f;
  int images = 0, C = 0, R = 0, E = 0;           // C is 0 or R
  int r_tiles = 0, e_tiles = 0;                  // of `tiles_of` R and E channels
  int pitch = 0;                                 // elements from one pixel of the maps to the next, even
  const T *center = nullptr, *around = nullptr;  // [pixels, pitch]
  const T* affine = nullptr;                     // scale and shift [pieces, channels(), 2]
  // weight in tiles [8, 8] as the right factor of a product, each a pair of elements for each lane: of rows that are
  // channels and columns that are hidden channels [pieces, r_tiles, e_tiles, 64], or the reverse [pieces, e_tiles,
  // r_tiles, 64].
  const T* weight = nullptr;

  // Of position / kernel_size as a product, which is exact below 2^32 / kernel_size.
  uint64_t inverse = (uint64_t(1) << 32) / f.kernel_size + 1;

  SAN_HOST_DEVICE int pixels() const { return images * f.pixels(); }
  // How far down and to the right of a pixel a position of its footprint is.
  SAN_HOST_DEVICE int down(int position) const {
    return static_cast<int>(static_cast<unsigned>(position) * inverse >> 32) - f.reach();
  }
  SAN_HOST_DEVICE int right(int position) const {
    return position - (down(position) + f.reach()) * f.kernel_size - f.reach();
  }
  SAN_HOST_DEVICE int pieces() const { return f.positions() + (C > 0 ? 1 : 0); }
  SAN_HOST_DEVICE int columns() const { return C + R * f.positions(); }
  SAN_HOST_DEVICE int channels() const { return r_tiles * kTile; }
  SAN_HOST_DEVICE int hidden() const { return e_tiles * kTile; }
  // The column of a piece's channel in scale, shift and weight.
  SAN_HOST_DEVICE int column(int piece, int c) const {
    return piece == f.positions() ? c : C + c * f.positions() + piece;
  }
};

// Tiles of so many channels: 1, 2 or a multiple of 4, so that all strips that a warp takes are whole.
inline int tiles_of(int64_t channels) {
  const int tiles = static_cast<int>((channels + kTile - 1) / kTile);
  return tiles <= 2 ? tiles : (tiles + 3) / 4 * 4;
}

// Place of a thread in its warp's fragments.
struct Lane {
  int index, g, t;

  __device__ __forceinline__ Lane() : index(threadIdx.x % kWarp), g(index / 4), t(index % 4) {}
};

template <class T>
__device__ __forceinline__ Pack<2, T> load_if(bool exists, const T* from) {
  return exists ? Pack<2, T>::load(from) : Pack<2, T>{};
}

// `affine` and `weight` of Patches from scale, shift and weight [E, columns]; kBackward: hidden channels are rows.
//
// Predicted as above: moves 0.1 MB, 0.003 ms, of the launch.
template <bool kBackward, class T>
__global__ void arrange_kernel(Patches<T> p, const T* scale, const T* shift, const T* weight, T* affine, T* tiles) {
  const int down = kBackward ? p.e_tiles : p.r_tiles, across = kBackward ? p.r_tiles : p.e_tiles;
  SAN_FOR_EACH(index, int64_t(p.pieces()) * down * across * 64) {
    const int tile = static_cast<int>(index / 64), lane = static_cast<int>(index % 64 / 2);
    const int row = tile / across % down * kTile + 2 * (lane % 4) + index % 2, piece = tile / across / down;
    const int column = tile % across * kTile + lane / 4, c = kBackward ? column : row, e = kBackward ? row : column;
    const int at = p.column(piece, c);
    tiles[index] = c < p.R && e < p.E ? weight[int64_t(e) * p.columns() + at] : T(0);
    if (e > 0) continue;
    const Pack<2, T> both{c < p.R ? scale[at] : T(0), c < p.R ? shift[at] : T(0)};
    both.store(affine + 2 * (piece * p.channels() + c));
  }
}

// A pixel of a map whose border is `reach` wider than the window's.
struct Spot {
  int image, h, w;

  __device__ __forceinline__ Spot(int index, const Window& f, int reach) {
    const unsigned width = f.width + 2 * reach, area = width * (f.height + 2 * reach), at = index;
    image = at / area;
    const unsigned rest = at - image * area, row = rest / width;
    h = static_cast<int>(row) - reach, w = static_cast<int>(rest - row * width) - reach;
  }

  // The pixel that is seen so far down and to the right.
  __device__ __forceinline__ int neighbour(const Window& f, int down, int right) const {
    return (image * f.height + reflect_int(h + down, f.height)) * f.width + reflect_int(w + right, f.width);
  }
};

// sums += products. Tensor cores round each sum towards zero, so long sums are cut into parts that are added here.
template <int kTiles, class T>
__device__ __forceinline__ void add_to(T (&sums)[kTiles][4], const T (&products)[kTiles][4]) {
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) sums[i / 4][i % 4] += products[i / 4][i % 4];
}

// Adds the sums of the warps that share a tile to those of the first, in a fixed order.
template <int kTiles, class T>
__device__ __forceinline__ void add_slices(int slices, int slice, T (&sums)[kTiles][4]) {
  T* shared = reinterpret_cast<T*>(shared_memory_base());  // [4 * kTiles, kThreads]
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) shared[i * kThreads + threadIdx.x] = sums[i / 4][i % 4];
  __syncthreads();
  for (int other = 1; slice == 0 && other < slices; ++other) {
    SAN_UNROLL
    for (int i = 0; i < kTiles * 4; ++i) sums[i / 4][i % 4] += shared[i * kThreads + threadIdx.x + other * kWarp];
  }
}

// out [pixels, E] = sum over pieces of relu(scale * x + shift) weight^T. A warp has 16 pixels, kTiles tiles of hidden
// channels and every slices-th piece; the warps of one tile add their sums in shared memory.
//
// Predicted for SAN10's stage 2 at batch 32 (R = 16, E = 8, k = 7, 56x56) on an H100, accurate float32: reads 13 MB,
// writes 3 MB; 0.66 G products; no shared memory, or 4 KB for each tile where slices are added; 0.07 ms, of instruction
// issue.
template <bool kAccurate, int kTiles, class T>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    patch_linear_kernel(Patches<T> p, int strips, int slices, T* out) {
  const Lane lane;
  const int warp = threadIdx.x / kWarp, slice = warp % slices, tiles = (p.pixels() + kRows - 1) / kRows;
  const int task = blockIdx.x * (kWarps / slices) + warp / slices, tile = task / strips;
  const int first = (task - tile * strips) * kTiles, last = p.pixels() - 1, pixel = tile * kRows + lane.g;
  const Spot upper(std::min(pixel, last), p.f, 0), lower(std::min(pixel + 8, last), p.f, 0);
  const int positions = p.f.positions(), depth = p.r_tiles, step = p.e_tiles * 64, pitch = p.pitch;
  const T *affine = p.affine + 4 * lane.t, *weight = p.weight + first * 64 + 2 * lane.index;
  T sums[kTiles][4] = {};
  for (int piece = slice; piece < p.pieces(); piece += slices) {
    const bool is_center = piece == positions;
    const T* map = (is_center ? p.center : p.around) + 2 * lane.t;
    const int down = is_center ? 0 : p.down(piece), right = is_center ? 0 : p.right(piece);
    const T* upper_at = map + int64_t(upper.neighbour(p.f, down, right)) * pitch;
    const T* lower_at = map + int64_t(lower.neighbour(p.f, down, right)) * pitch;
    const T *affine_at = affine + piece * depth * 2 * kTile, *weight_at = weight + piece * depth * step;
    T products[kTiles][4] = {};
    for (int k = 0; k < depth; ++k, upper_at += kTile, lower_at += kTile, affine_at += 2 * kTile, weight_at += step) {
      const bool exists = k * kTile + 2 * lane.t < pitch;
      const auto above = load_if(exists, upper_at), below = load_if(exists, lower_at);
      const auto both = Pack<4, T>::load(affine_at);
      const T left[4] = {fast_relu(both.data[0] * above.data[0] + both.data[1]),
                         fast_relu(both.data[0] * below.data[0] + both.data[1]),
                         fast_relu(both.data[2] * above.data[1] + both.data[3]),
                         fast_relu(both.data[2] * below.data[1] + both.data[3])};
      SAN_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        add_product<kAccurate>(left, Pack<2, T>::load(weight_at + n * 64).data, products[n]);
      }
    }
    add_to(sums, products);
  }
  if (slices > 1) add_slices(slices, slice, sums);
  if (slice > 0 || tile >= tiles) return;
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) {
    const int row = pixel + i % 4 / 2 * 8, e = (first + i / 4) * kTile + 2 * lane.t + i % 2;
    if (row <= last && e < p.E) out[int64_t(row) * p.E + e] = sums[i / 4][i % 4];
  }
}

// The gradient of `map`, which is shown in the pieces from `piece` on, on the padded grid [images, height + 2 * reach,
// width + 2 * reach, R], where a position of the footprint is a bijection between pixels that see and pixels that are
// seen. Each product with a piece's weights passes the mask of that piece's ReLU on its way into the sum.
//
// Predicted as above: reads 10 MB, writes 8 MB; 0.8 G products; no shared memory; 0.06 ms, of instruction issue.
template <bool kAccurate, int kTiles, class T>
__global__ void __launch_bounds__(kThreads)
    map_gradient_kernel(Patches<T> p, const T* map, const T* grad, int first_piece, int strips, T* out) {
  const Lane lane;
  const int reach = p.f.reach(), task = blockIdx.x * kWarps + threadIdx.x / kWarp, tile = task / strips;
  const int first = (task - tile * strips) * kTiles, pixel = tile * kRows + lane.g;
  const int last = p.images * (p.f.height + 2 * reach) * (p.f.width + 2 * reach) - 1;
  const Spot spots[2] = {Spot(std::min(pixel, last), p.f, reach), Spot(std::min(pixel + 8, last), p.f, reach)};
  Pack<2, T> x[kTiles][2];
  SAN_UNROLL
  for (int i = 0; i < kTiles * 2; ++i) {
    const int c = (first + i / 2) * kTile + 2 * lane.t;
    x[i / 2][i % 2] = load_if(c < p.pitch, map + int64_t(spots[i % 2].neighbour(p.f, 0, 0)) * p.pitch + c);
  }
  const int depth = p.e_tiles, step = p.r_tiles * 64, hidden = p.hidden();
  const T* affine = p.affine + first_piece * 2 * p.channels() + 2 * kTile * first + 4 * lane.t;
  const T* weight = p.weight + first_piece * depth * step + first * 64 + 2 * lane.index;
  T sums[kTiles][4] = {};
  for (int position = 0; position < p.f.positions(); ++position, affine += 2 * p.channels()) {
    const int down = p.down(position), right = p.right(position);
    const T* grads[2];
    bool sees[2];
    SAN_UNROLL
    for (int row = 0; row < 2; ++row) {
      const int h = spots[row].h - down, w = spots[row].w - right;
      sees[row] = static_cast<unsigned>(h) < static_cast<unsigned>(p.f.height) &&
                  static_cast<unsigned>(w) < static_cast<unsigned>(p.f.width);
      grads[row] = grad + int64_t((spots[row].image * p.f.height + h) * p.f.width + w) * hidden + 2 * lane.t;
    }
    T products[kTiles][4] = {};
    for (int k = 0; k < depth; ++k, weight += step) {
      const auto above = load_if(sees[0], grads[0] + k * kTile), below = load_if(sees[1], grads[1] + k * kTile);
      const T left[4] = {above.data[0], below.data[0], above.data[1], below.data[1]};
      SAN_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        add_product<kAccurate>(left, Pack<2, T>::load(weight + n * 64).data, products[n]);
      }
    }
    SAN_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      const auto both = Pack<4, T>::load(affine + n * 2 * kTile);
      SAN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const T scale = both.data[i % 2 * 2], activated = scale * x[n][i / 2].data[i % 2] + both.data[i % 2 * 2 + 1];
        if (!(activated <= 0)) sums[n][i] += scale * products[n][i];
      }
    }
  }
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) {
    const int row = pixel + i % 4 / 2 * 8, c = (first + i / 4) * kTile + 2 * lane.t + i % 2;
    if (row <= last && c < p.R) out[int64_t(row) * p.R + c] = sums[i / 4][i % 4];
  }
}

// The gradient of a map [pixels, R] from that of the padded grid: each pixel's own and those of its mirror images.
//
// Predicted as above: reads 8 MB, writes 6 MB; no products, no shared memory; 0.005 ms, of memory bandwidth.
template <class T>
__global__ void __launch_bounds__(kThreads) fold_kernel(Patches<T> p, const T* padded, int64_t elements, T* out) {
  const int width = p.f.width + 2 * p.f.reach(), height = p.f.height + 2 * p.f.reach();
  SAN_FOR_EACH(index, elements) {
    const int pixel = static_cast<int>(index / p.R), c = static_cast<int>(index - int64_t(pixel) * p.R);
    const Spot spot(pixel, p.f, 0);
    T sum = 0;
    for_each_image(spot.h, p.f.height, p.f.reach(), [&](int64_t h) {
      for_each_image(spot.w, p.f.width, p.f.reach(), [&](int64_t w) {
        const int64_t row = int64_t(spot.image) * height + h + p.f.reach();
        sum += padded[(row * width + w + p.f.reach()) * p.R + c];
      });
    });
    out[index] = sum;
  }
}

// What a warp sums for the gradients of 16 channels of a piece and kTiles tiles of hidden channels. Channels are the
// rows of its left factors, and a lane receives weight^T grad^T of the pixels whose values it gives to relu(..)^T grad.
template <bool kAccurate, int kTiles, class T>
class ParameterSums {
 public:
  __device__ __forceinline__ ParameterSums(const Patches<T>& p, int piece, int band, int first_tile)
      : width_(p.f.width), pitch_(p.pitch), hidden_(p.hidden()), hidden_at_(first_tile * kTile) {
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int c = band * kRows + lane_.g + 8 * i;
      exists_[i] = c < p.channels(), channel_[i] = piece * p.channels() + c, value_at_[i] = std::min(c, p.R - 1);
      affine_[i] = load_if(exists_[i], p.affine + 2 * channel_[i]);
    }
    SAN_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      const int tile = (piece * p.e_tiles + first_tile + n) * p.r_tiles + 2 * band;
      const T* from = p.weight + tile * 64 + 2 * lane_.index;
      const auto upper = Pack<2, T>::load(from), lower = load_if(exists_[1], from + 64);
      weight_[n][0] = upper.data[0], weight_[n][1] = lower.data[0];
      weight_[n][2] = upper.data[1], weight_[n][3] = lower.data[1];
    }
  }

  // Takes a row of `grads`, whose pixels see the row `values` shifted by `right`.
  __device__ __forceinline__ void add_row(const T* values, const T* grads, int right) {
    for (int begin = 0; begin < width_; begin += kTile) add_pixels(values, grads, begin, right);
  }

  // To [pieces, channels(), hidden()] and [pieces, channels(), 2]; four lanes have summed the pixels of a channel.
  __device__ __forceinline__ void store(T* weight, T* affine) const {
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      Pack<2, T> total = affine_sums_[i];
      SAN_UNROLL
      for (int bits = 1; bits < 4; bits *= 2) {
        total.data[0] += __shfl_xor_sync(~0u, total.data[0], bits);
        total.data[1] += __shfl_xor_sync(~0u, total.data[1], bits);
      }
      if (!exists_[i]) continue;
      if (lane_.t == 0) total.store(affine + 2 * channel_[i]);
      SAN_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        const Pack<2, T> sums{sums_[n][2 * i], sums_[n][2 * i + 1]};
        sums.store(weight + int64_t(channel_[i]) * hidden_ + hidden_at_ + n * kTile + 2 * lane_.t);
      }
    }
  }

 private:
  // Takes 8 pixels of a row from `begin` on. What is beyond the row has no gradient, and what is beyond the channels is
  // a sum that `store` leaves out.
  __device__ __forceinline__ void add_pixels(const T* values, const T* grads, int begin, int right) {
    T x[4], activated[4], left[4], products[4] = {};  // of the channels and pixels [2, 2]
    const int pair = begin + 2 * lane_.t;
    SAN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int seen = reflect_int(std::min(pair + i % 2, width_ - 1) + right, width_);
      x[i] = values[seen * pitch_ + value_at_[i / 2]];
      activated[i] = affine_[i / 2].data[0] * x[i] + affine_[i / 2].data[1];
      left[i / 2 + i % 2 * 2] = fast_relu(activated[i]);
    }
    const bool is_along = begin + lane_.g < width_, is_pair[2] = {pair < width_, pair + 1 < width_};
    const T* along = grads + (begin + lane_.g) * hidden_ + hidden_at_ + 2 * lane_.t;
    const T* across = grads + pair * hidden_ + hidden_at_ + lane_.g;
    SAN_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      add_product<kAccurate>(weight_[n], load_if(is_along, along + n * kTile).data, products);
      const T two[2] = {is_pair[0] ? across[n * kTile] : T(0), is_pair[1] ? across[hidden_ + n * kTile] : T(0)};
      add_product<kAccurate>(left, two, sums_[n]);
    }
    SAN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const T passed = activated[i] <= 0 ? T(0) : products[i];
      affine_sums_[i / 2].data[0] += passed * x[i], affine_sums_[i / 2].data[1] += passed;
    }
  }

  const Lane lane_;
  const int width_, pitch_, hidden_, hidden_at_;
  bool exists_[2];
  int channel_[2], value_at_[2];
  Pack<2, T> affine_[2], affine_sums_[2] = {};
  T weight_[kTiles][4], sums_[kTiles][4] = {};
};

// Each slice of rows' part of the gradients of weight, [pieces, channels(), hidden()], and of scale and shift, [strips,
// pieces, channels(), 2]: [slices, part_size].
//
// Predicted as above: reads 16 MB, writes 2 MB; 1.3 G products; no shared memory; 0.1 ms, of instruction issue.
template <bool kAccurate, int kTiles, class T>
__global__ void __launch_bounds__(kThreads)
    parameter_gradient_kernel(Patches<T> p, const T* grad, int strips, int tasks, int rows_per_slice, T* parts,
                              int64_t part_size) {
  const int blocks = (tasks + kWarps - 1) / kWarps, slice = blockIdx.x / blocks;
  const int task = (blockIdx.x - slice * blocks) * kWarps + threadIdx.x / kWarp, strip = task % strips;
  const int bands = (p.r_tiles + 1) / 2, piece = task / strips / bands, band = task / strips - piece * bands;
  if (task >= tasks) return;
  ParameterSums<kAccurate, kTiles, T> sums(p, piece, band, strip * kTiles);
  const bool is_center = piece == p.f.positions();
  const int down = is_center ? 0 : p.down(piece), right = is_center ? 0 : p.right(piece);
  const int end = std::min((slice + 1) * rows_per_slice, p.images * p.f.height);
  for (int row = slice * rows_per_slice; row < end; ++row) {
    const int image = row / p.f.height, seen = reflect_int(row - image * p.f.height + down, p.f.height);
    const T* values = is_center ? p.center : p.around;
    values += (int64_t(image) * p.f.height + seen) * p.f.width * p.pitch;
    const T* grads = grad + int64_t(row) * p.f.width * p.hidden();
    sums.add_row(values, grads, right);
  }
  T *weight = parts + slice * part_size, *affine = weight + int64_t(p.pieces()) * p.channels() * p.hidden();
  sums.store(weight, affine + int64_t(strip) * p.pieces() * p.channels() * 2);
}

// The gradients of weight, scale and shift in the order of their columns, from the sum of all parts.
//
// Predicted as above: moves 0.1 MB, 0.003 ms, of the launch.
template <class T>
__global__ void place_gradients_kernel(Patches<T> p, const T* sums, int strips, T* weight, T* scale, T* shift) {
  const int64_t channels = int64_t(p.pieces()) * p.channels();
  SAN_FOR_EACH(index, int64_t(p.E) * p.columns()) {
    const int e = static_cast<int>(index / p.columns()), column = static_cast<int>(index - int64_t(e) * p.columns());
    const int around = column - p.C, c = around < 0 ? column : around / p.f.positions();
    const int64_t piece = around < 0 ? p.f.positions() : around % p.f.positions(), channel = piece * p.channels() + c;
    weight[index] = sums[channel * p.hidden() + e];
    if (e > 0) continue;
    T total[2] = {};
    for (int strip = 0; strip < strips; ++strip) {
      const T* affine = sums + channels * p.hidden() + 2 * (strip * channels + channel);
      total[0] += affine[0], total[1] += affine[1];
    }
    scale[column] = total[0], shift[column] = total[1];
  }
}

// Calls run with the number of tiles of 8 that a warp has at once.
template <class Run>
void with_tiles(int tiles, const Run& run) {
  if (tiles == 1) return run(std::integral_constant<int, 1>());
  if (tiles == 2) return run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 4>());
}

// Inputs of one call as kernels take them.
template <class T, bool kAccurate>
class PatchProblem {
 public:
  PatchProblem(const Tensor& center, const Tensor& around, const Tensor& scale, const Tensor& shift,
               const Tensor& weight, const Footprint& f, bool backward)
      : space_(around, around.scalar_type()), p_{Window(f)} {
    check_sizes(around, weight, f);
    p_.images = static_cast<int>(around.size(0)), p_.E = static_cast<int>(weight.size(0));
    p_.C = static_cast<int>(center.size(3)), p_.R = static_cast<int>(around.size(3));
    p_.r_tiles = tiles_of(p_.R), p_.e_tiles = tiles_of(p_.E), p_.pitch = p_.R + p_.R % 2;
    if (around.size(0) == 0) return;
    p_.around = keep_padded(around, p_.pitch), p_.center = p_.C > 0 ? keep_padded(center, p_.pitch) : nullptr;
    const int64_t rows = int64_t(p_.pieces()) * p_.channels(), elements = rows * p_.hidden();
    T *affine = space_.take(2 * rows), *tiles = space_.take(elements);
    auto* arrange = backward ? &arrange_kernel<true, T> : &arrange_kernel<false, T>;
    SAN_LAUNCH(arrange, blocks_for(elements), kThreads, space_.stream(), p_, space_.keep(scale), space_.keep(shift),
               space_.keep(weight), affine, tiles);
    p_.affine = affine;
    p_.weight = tiles;
  }

  // [N, H, W, E]
  Tensor forward() {
    Tensor out = space_.new_maps({p_.images, p_.f.height, p_.f.width, p_.E});
    if (out.numel() == 0) return out;
    with_tiles(p_.e_tiles, [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      const int strips = p_.e_tiles / kTiles, tasks = (p_.pixels() + kRows - 1) / kRows * strips;
      int slices = 1;  // where tiles are few, more warps share one
      while (slices < kWarps && tasks * slices < kWantedWarps && slices < p_.pieces()) slices *= 2;
      const int grid = (tasks + kWarps / slices - 1) / (kWarps / slices);
      const size_t bytes = slices > 1 ? kTiles * 4 * kThreads * sizeof(T) : 0;
      SAN_LAUNCH_SHARED((patch_linear_kernel<kAccurate, kTiles, T>), grid, kThreads, bytes, space_.stream(), p_, strips,
                        slices, out.template mutable_data_ptr<T>());
    });
    return out;
  }

  // Gradients of center, around, scale, shift, weight for `grad` [N, H, W, E].
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad) {
    const std::vector<int64_t> map{p_.images, p_.f.height, p_.f.width, p_.R};
    Tensor center = p_.C > 0 ? space_.new_maps(map) : space_.new_maps({map[0], map[1], map[2], 0});
    Tensor around = space_.new_maps(map), weight = space_.new_sums({p_.E, p_.columns()});
    Tensor scale = space_.new_sums({p_.columns()}), shift = space_.new_sums({p_.columns()});
    if (p_.images == 0) {
      for (Tensor* x : {&weight, &scale, &shift}) torch::stable::zero_(*x);
      return {center, around, scale, shift, weight};
    }
    const T* grads = keep_padded(grad, p_.hidden());
    if (p_.C > 0) {
      Patches<T> pixel = p_;
      pixel.f.kernel_size = 1;  // of which `down` and `right` are only asked for the first position
      map_gradient(pixel, p_.center, grads, p_.f.positions(), center.template mutable_data_ptr<T>());
    }
    around_gradient(grads, around);
    parameter_gradients(grads, weight, scale, shift);
    return {center, around, scale, shift, weight};
  }

 private:
  // Warps that fill a large GPU some times over.
  static constexpr int kWantedWarps = 4096;

  // Pixels and weights are counted in 32 bits; the latter are padded to tiles.
  static void check_sizes(const Tensor& around, const Tensor& weight, const Footprint& f) {
    constexpr int64_t kMost = int64_t(1) << 30;
    const int64_t pixels = around.size(0) * f.padded_height() * f.padded_width();
    STD_TORCH_CHECK(pixels < kMost, around.size(0), " maps with their reflected borders have ", pixels,
                    " pixels; fewer than 2^30 are supported: split the batch");
    const int64_t weights = (f.positions() + 1) * (around.size(3) + 32) * (weight.size(0) + 32);
    STD_TORCH_CHECK(weights < kMost, "a weight of [", weight.size(0), ", ", weight.size(1),
                    "] is too large; fewer than 2^30 elements are supported");
  }

  // A map whose channels are padded with zeros to this number.
  const T* keep_padded(const Tensor& map, int channels) {
    return space_.keep_map(map.size(3) == channels ? map : torch::stable::pad(map, {0, channels - map.size(3)}));
  }

  void map_gradient(const Patches<T>& p, const T* map, const T* grads, int piece, T* out) {
    with_tiles(p.r_tiles, [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      const int strips = p.r_tiles / kTiles;
      const int pixels = p.images * (p.f.height + 2 * p.f.reach()) * (p.f.width + 2 * p.f.reach());
      const int64_t tasks = (int64_t(pixels) + kRows - 1) / kRows * strips;
      SAN_LAUNCH_SHARED((map_gradient_kernel<kAccurate, kTiles, T>), static_cast<int>((tasks + kWarps - 1) / kWarps),
                        kThreads, 0, space_.stream(), p, map, grads, piece, strips, out);
    });
  }

  void around_gradient(const T* grads, Tensor& around) {
    T* out = around.template mutable_data_ptr<T>();
    if (p_.f.reach() == 0) return map_gradient(p_, p_.around, grads, 0, out);
    const int64_t height = p_.f.height + 2 * p_.f.reach(), width = p_.f.width + 2 * p_.f.reach();
    T* padded = space_.take(p_.images * height * width * p_.R);
    map_gradient(p_, p_.around, grads, 0, padded);
    SAN_LAUNCH(fold_kernel<T>, blocks_for(around.numel()), kThreads, space_.stream(), p_, padded, around.numel(), out);
  }

  void parameter_gradients(const T* grads, Tensor& weight, Tensor& scale, Tensor& shift) {
    with_tiles(p_.e_tiles, [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      const int strips = p_.e_tiles / kTiles, rows = p_.images * p_.f.height;
      const int tasks = p_.pieces() * ((p_.r_tiles + 1) / 2) * strips;
      const int64_t part = int64_t(p_.pieces()) * p_.channels() * (p_.hidden() + 2 * strips);
      const int64_t fitting = std::max<int64_t>(1, workspace_limit() / 4 / static_cast<int64_t>(part * sizeof(T)));
      const int64_t steps = int64_t(rows) * ((p_.f.width + kTile - 1) / kTile);  // at most 256 in a sum, see add_to
      const int wanted = static_cast<int>(
          std::min<int64_t>({std::max<int64_t>(kWantedWarps / tasks, steps / 256) + 1, fitting, rows}));
      const int rows_per_slice = (rows + wanted - 1) / wanted, slices = (rows + rows_per_slice - 1) / rows_per_slice;
      T *parts = space_.take(slices * part), *sums = space_.take(part);
      SAN_LAUNCH_SHARED((parameter_gradient_kernel<kAccurate, kTiles, T>), slices * ((tasks + kWarps - 1) / kWarps),
                        kThreads, 0, space_.stream(), p_, grads, strips, tasks, rows_per_slice, parts, part);
      sum_blocks(parts, slices, part, Totals<T>{{sums}, {part}}, space_.stream());
      SAN_LAUNCH(place_gradients_kernel<T>, blocks_for(weight.numel()), kThreads, space_.stream(), p_, sums, strips,
                 weight.template mutable_data_ptr<T>(), scale.template mutable_data_ptr<T>(),
                 shift.template mutable_data_ptr<T>());
    });
  }

  Workspace<T> space_;
  Patches<T> p_;
};

// Calls run with the type of sums and whether products are accurate: those with a weight in a half type run as TF32,
// which holds it without error, as loads and not products take the time.
template <class Run>
auto with_types(const Tensor& around, const Tensor& weight, bool tf32, const Run& run) {
  if (around.scalar_type() == ScalarType::Double) return run(double(), std::true_type());
  const bool accurate = weight.scalar_type() == ScalarType::Float && !tf32;
  return accurate ? run(float(), std::true_type()) : run(float(), std::false_type());
}

}  // namespace

Tensor patch_linear(const Tensor& center, const Tensor& around, const Tensor& scale, const Tensor& shift,
                    const Tensor& weight, int64_t kernel_size, bool tf32) {
  const Footprint f = check_patches(center, around, scale, shift, weight, kernel_size);
  const OperatorGuard guard("patch_linear", around);
  const Tensor out = with_types(around, weight, tf32, [&](auto type, auto accurate) {
    return PatchProblem<decltype(type), decltype(accurate)::value>(center, around, scale, shift, weight, f, false)
        .forward();
  });
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
  const Tensor last = torch::stable::transpose(torch::stable::transpose(grad, 2, 3), 1, 3);  // [N, H, W, E]
  auto gradients = with_types(around, weight, tf32, [&](auto type, auto accurate) {
    return PatchProblem<decltype(type), decltype(accurate)::value>(center, around, scale, shift, weight, f, true)
        .backward(last);
  });
  Tensor& grad_weight = std::get<4>(gradients);
  grad_weight = contiguous_of(grad_weight, weight.scalar_type());
  return gradients;
}

}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("patch_linear", TORCH_BOX(&san::cuda::patch_linear));
  m.impl("patch_linear_backward", TORCH_BOX(&san::cuda::patch_linear_backward));
}
