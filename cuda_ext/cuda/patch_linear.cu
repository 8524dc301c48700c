// patch_linear, forward and backward: a Linear layer of patches after the affine form of a norm and ReLU. Patches are
// never unfolded. Definition: san/ops/fused_reference.py, patch_linear.
//
// All three products are implicit: a warp loads fragments [16, 8] from the maps, transforms them in registers and
// multiplies them. A patch is a row of `pieces`: the channels of `around` at each position of the footprint and, last,
// the pixel's own `center`. Warps of a block share pixels or weights, so most loads of maps and weights hit the L1
// cache. No atomics are used, and the order of sums depends only on the sizes.
#include <tuple>

#include "maps.cuh"

namespace san::cuda {
namespace {

// Number of blocks per multiprocessor for which the compiler does not spill registers.
constexpr int resident_blocks_of_patches(int tiles) { return (tiles == 1 ? 24 : 16) / kWarps; }

// Sizes, maps and parameters for the kernels. Channels are padded with zeros to whole tiles.
template <class F>
struct Patches : Grid {
  int C, R, E;           // C is 0 or R
  int r_tiles, e_tiles;  // of `tiles_of` R and E channels
  // [images, height, width, channels()], `around` with reflected borders; means are subtracted, see NormJob
  const float *center, *around;
  const float *scale, *shift;  // [pieces, channels()]
  // Right factors [pieces][r_tiles][e_tiles], whose rows are hidden channels; in backward [pieces][e_tiles][r_tiles],
  // whose rows are channels.
  const F* weight;

  SAN_HOST_DEVICE int pieces() const { return positions() + (C > 0 ? 1 : 0); }
  SAN_HOST_DEVICE int columns() const { return C + R * positions(); }
  SAN_HOST_DEVICE int channels() const { return r_tiles * 8; }
  SAN_HOST_DEVICE int hidden() const { return e_tiles * 8; }
  SAN_HOST_DEVICE int row_bytes() const { return channels() * static_cast<int>(sizeof(float)); }
  // The column of a piece's channel in scale, shift and weight.
  SAN_HOST_DEVICE int column(int piece, int c) const { return piece == positions() ? c : C + c * positions() + piece; }
};

// Number of tiles, rounded up to 1, 2 or a multiple of 4 so that a warp has no partial strips.
inline int tiles_of(int64_t channels) {
  const int tiles = static_cast<int>((channels + 7) / 8);
  return tiles <= 2 ? tiles : (tiles + 3) / 4 * 4;
}

__device__ __forceinline__ Pack<2, float> load_if(bool exists, const float* from) {
  return exists ? Pack<2, float>::load(from) : Pack<2, float>{};
}

// sums += products. Tensor cores round sums towards zero, so long sums are split into parts, which are added here.
template <int kTiles>
__device__ __forceinline__ void add_to(float (&sums)[kTiles][4], const float (&products)[kTiles][4]) {
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) sums[i / 4][i % 4] += products[i / 4][i % 4];
}

// out [pixels, E] = sum over pieces of relu(scale * x + shift) weight^T. A team of warps computes 16 pixels and kTiles
// tiles of hidden channels; each warp sums over some of the pieces.
//
// Predicted for SAN10's stage 2 at batch 32 (R = 16, E = 8, k = 7, 56x56) on an H100, accurate float32: reads 13 MB,
// writes 3 MB; 0.66 G products; no shared memory, or 1 KB for each tile where several warps share pixels; 0.05 ms,
// limited by instruction issue. Measured on an H200: 0.08 ms.
template <class F, int kTiles>
__global__ void __launch_bounds__(kTeamThreads, resident_blocks_of_patches(kTiles))
    patch_linear_kernel(Patches<F> p, int strips, int warps, float* out) {
  const Team team(warps);
  const int task = blockIdx.x * (kWarps / warps) + team.index, tile = task / strips;
  const int first = (task - tile * strips) * kTiles, depth = p.r_tiles;
  const Pixel<false> pixels[2] = {{p, int64_t(tile) * 16 + team.row}, {p, int64_t(tile) * 16 + team.row + 8}};
  float sums[kTiles][4] = {};
  Offset offset(team, p);
  for (int piece = team.member; piece < p.pieces(); piece += warps, offset.advance(warps, p.kernel_size)) {
    const bool is_center = piece == p.positions();
    const float *map = (is_center ? p.center : p.around) + team.column, *rows[2];
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      bool is_pair;
      const int partner = pixels[i].partner(p, offset, is_pair);
      rows[i] = row_at(map, is_center ? pixels[i].index : partner, p.row_bytes());
    }
    const float *scale_at = p.scale + piece * p.channels() + team.column, *shift_at = p.shift + (scale_at - p.scale);
    const F* weight = p.weight + (int64_t(piece) * depth * p.e_tiles + first) * kWarp + team.lane;
    float products[kTiles][4] = {};
    SAN_ROLLED
    for (int k = 0; k < depth; ++k, weight += p.e_tiles * kWarp) {
      const auto above = Pack<2, float>::load(rows[0] + 8 * k), below = Pack<2, float>::load(rows[1] + 8 * k);
      const auto scale = Pack<2, float>::load(scale_at + 8 * k), shift = Pack<2, float>::load(shift_at + 8 * k);
      const auto activated = [&](const Pack<2, float>& x, int n) {
        return rectified(scale.data[n] * x.data[n] + shift.data[n]);
      };
      const F upper = F::of_rectified(activated(above, 0), activated(above, 1));
      const F lower = F::of_rectified(activated(below, 0), activated(below, 1));
      multiply_all(products, upper, lower, weight);
    }
    add_to(sums, products);
  }
  if (warps > 1) sum_over_team(team, reinterpret_cast<float*>(shared_memory_base()), sums);
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) {
    const Pixel<false>& pixel = pixels[i % 4 / 2];
    const int e = (first + i / 4) * 8 + team.column + i % 2;
    if (team.member == 0 && pixel.exists && e < p.E) out[int64_t(pixel.index) * p.E + e] = sums[i / 4][i % 4];
  }
}

// The gradient of `around` on the padded grid, [padded pixels, R]. Each position of the footprint pairs a padded pixel
// with at most one pixel of the map. The product with a piece's weights is masked by the piece's ReLU before it is
// added. `grad` [pixels + 1, hidden()] is rounded for F and ends in zeros, for padded pixels whose partner is outside
// the map.
//
// Predicted as above: reads 10 MB, writes 8 MB; 0.8 G products; no shared memory; 0.05 ms, limited by instruction
// issue. Measured on an H200: 0.04 ms.
template <class F, int kTiles>
__global__ void __launch_bounds__(kTeamThreads, resident_blocks_of_patches(kTiles))
    map_gradient_kernel(Patches<F> p, const float* grad, int strips, float* out) {
  const Team team(1);
  const int task = blockIdx.x * kWarps + team.index, tile = task / strips, first = (task - tile * strips) * kTiles;
  const Pixel<true> pixels[2] = {{p, int64_t(tile) * 16 + team.row}, {p, int64_t(tile) * 16 + team.row + 8}};
  Pack<2, float> x[kTiles][2];
  SAN_UNROLL
  for (int i = 0; i < kTiles * 2; ++i) {
    x[i / 2][i % 2] =
        Pack<2, float>::load(row_at(p.around + (first + i / 2) * 8 + team.column, pixels[i % 2].index, p.row_bytes()));
  }
  const int grad_bytes = p.hidden() * static_cast<int>(sizeof(float)), zeros = static_cast<int>(p.pixels());
  const float *scale_at = p.scale + first * 8 + team.column, *shift_at = p.shift + first * 8 + team.column;
  const F* weight = p.weight + first * kWarp + team.lane;
  float sums[kTiles][4] = {};
  for (Offset offset; offset.position < p.positions(); offset.advance(1, p.kernel_size)) {
    const float* rows[2];
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      bool is_pair;
      const int partner = pixels[i].partner(p, offset, is_pair);
      rows[i] = row_at(grad + team.column, is_pair ? partner : zeros, grad_bytes);
    }
    float products[kTiles][4] = {};
    SAN_ROLLED
    for (int k = 0; k < p.e_tiles; ++k, weight += p.r_tiles * kWarp) {
      const auto above = Pack<2, float>::load(rows[0] + 8 * k), below = Pack<2, float>::load(rows[1] + 8 * k);
      multiply_all(products, F::of_rounded(above.data[0], above.data[1]), F::of_rounded(below.data[0], below.data[1]),
                   weight);
    }
    SAN_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      const auto scale = Pack<2, float>::load(scale_at + 8 * n), shift = Pack<2, float>::load(shift_at + 8 * n);
      SAN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float activated = scale.data[i % 2] * x[n][i / 2].data[i % 2] + shift.data[i % 2];
        if (!(activated <= 0)) sums[n][i] += scale.data[i % 2] * products[n][i];
      }
    }
    scale_at += p.channels(), shift_at += p.channels();
  }
  SAN_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) {
    const Pixel<true>& pixel = pixels[i % 4 / 2];
    const int c = (first + i / 4) * 8 + team.column + i % 2;
    if (pixel.exists && c < p.R) out[int64_t(pixel.index) * p.R + c] = sums[i / 4][i % 4];
  }
}

// The sums of a warp for the gradients of 16 channels of a piece and kTiles tiles of hidden channels. Its left factors
// have channels as rows. A lane obtains weight^T grad^T for the same pixels whose values it contributes to relu(..)^T
// grad.
template <class F, int kTiles>
class ParameterSums {
 public:
  __device__ __forceinline__ ParameterSums(const Patches<F>& p, const Team& team, int piece, int band, int first_tile)
      : team_(team), width_(p.width), pitch_(p.channels()), hidden_(p.hidden()), hidden_at_(first_tile * 8) {
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int c = band * 16 + team.row + 8 * i;
      exists_[i] = c < pitch_, value_at_[i] = exists_[i] ? c : 0;
      scale_[i] = p.scale[piece * pitch_ + value_at_[i]], shift_[i] = p.shift[piece * pitch_ + value_at_[i]];
      SAN_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        const int tile = (piece * p.e_tiles + first_tile + n) * p.r_tiles + value_at_[i] / 8;
        weight_[n][i] = p.weight[tile * kWarp + team.lane];
      }
    }
  }

  // Adds 8 pixels of a row of `grads`, from `begin` on, whose footprint position is the row `values`. Pixels after the
  // end of the row have no gradient, and `store` omits the sums of channels that do not exist.
  __device__ __forceinline__ void add_pixels(const float* values, const float* grads, int begin) {
    float x[4], activated[4], products[4] = {};  // of the channels and pixels [2, 2]
    const int pair = begin + team_.column, last = width_ - 1;
    SAN_UNROLL
    for (int i = 0; i < 4; ++i) {
      x[i] = values[std::min(pair + i % 2, last) * pitch_ + value_at_[i / 2]];
      activated[i] = scale_[i / 2] * x[i] + shift_[i / 2];
    }
    const F upper = F::of_rectified(rectified(activated[0]), rectified(activated[1]));
    const F lower = F::of_rectified(rectified(activated[2]), rectified(activated[3]));
    const bool is_along = begin + team_.row <= last, is_pair[2] = {pair <= last, pair < last};
    const float* along = grads + (begin + team_.row) * hidden_ + hidden_at_ + team_.column;
    const float* across = grads + pair * hidden_ + hidden_at_ + team_.row;
    SAN_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      const auto two = load_if(is_along, along + n * 8);
      multiply(products, weight_[n][0], weight_[n][1], F::of_rounded(two.data[0], two.data[1]));
      const F right = F::of_rounded(is_pair[0] ? across[n * 8] : 0, is_pair[1] ? across[hidden_ + n * 8] : 0);
      multiply(sums_[n], upper, lower, right);
    }
    SAN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float passed = activated[i] <= 0 ? 0 : products[i];
      affine_[i / 2].data[0] += passed * x[i], affine_[i / 2].data[1] += passed;
    }
  }

  // Stores the sums in [channels(), hidden()] and [channels(), 2]. The sums of a channel are spread over four lanes.
  __device__ __forceinline__ void store(float* weight, float* affine) const {
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      Pack<2, float> total = affine_[i];
      SAN_UNROLL
      for (int bits = 1; bits < 4; bits *= 2) {
        total.data[0] += __shfl_xor_sync(~0u, total.data[0], bits);
        total.data[1] += __shfl_xor_sync(~0u, total.data[1], bits);
      }
      if (!exists_[i]) continue;
      if (team_.column == 0) total.store(affine + 2 * value_at_[i]);
      SAN_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        const Pack<2, float> sums{sums_[n][2 * i], sums_[n][2 * i + 1]};
        sums.store(weight + value_at_[i] * hidden_ + hidden_at_ + n * 8 + team_.column);
      }
    }
  }

 private:
  const Team team_;
  const int width_, pitch_, hidden_, hidden_at_;
  bool exists_[2];
  int value_at_[2];
  float scale_[2], shift_[2], sums_[kTiles][4] = {};
  Pack<2, float> affine_[2] = {};
  F weight_[kTiles][2];
};

// Partial sums over slices of rows for the gradients of weight, [slices, pieces, channels(), hidden()], and of scale
// and shift, [slices, strips, pieces, channels(), 2].
//
// Predicted as above: reads 16 MB, writes 2 MB; 1.3 G products; no shared memory; 0.09 ms, limited by instruction
// issue. Measured on an H200: 0.15 ms.
template <class F, int kTiles>
__global__ void __launch_bounds__(kTeamThreads, resident_blocks_of_patches(kTiles))
    parameter_gradient_kernel(Patches<F> p, const float* grad, int strips, int tasks, int rows_per_slice,
                              float* weights, float* affine) {
  const Team team(1);
  const int blocks = (tasks + kWarps - 1) / kWarps, slice = blockIdx.x / blocks;
  const int task = (blockIdx.x - slice * blocks) * kWarps + team.index, strip = task % strips;
  const int bands = (p.r_tiles + 1) / 2, piece = task / strips / bands, band = task / strips - piece * bands;
  if (task >= tasks) return;
  ParameterSums<F, kTiles> sums(p, team, piece, band, strip * kTiles);
  const bool is_center = piece == p.positions();
  const float* map = is_center ? p.center : p.around;
  const int border = is_center ? 0 : p.kernel_size - 1;
  Offset offset;
  if (!is_center) offset.advance(piece, p.kernel_size);
  const int end = std::min((slice + 1) * rows_per_slice, static_cast<int>(p.images) * p.height);
  for (int row = slice * rows_per_slice; row < end; ++row) {
    const int64_t seen = row + row / p.height * border + offset.down;  // a row of the padded map
    const float* values = map + (seen * (p.width + border) + offset.right) * p.channels();
    const float* grads = grad + int64_t(row) * p.width * p.hidden();
    for (int begin = 0; begin < p.width; begin += 8) sums.add_pixels(values, grads, begin);
  }
  const int64_t channels = int64_t(p.pieces()) * p.channels();
  const int64_t channel = int64_t(piece) * p.channels();
  sums.store(weights + (slice * channels + channel) * p.hidden(),
             affine + ((int64_t(slice) * strips + strip) * channels + channel) * 2);
}

// Copies sums [pieces, channels(), hidden()] to the gradient of weight.
template <class F>
struct PlaceWeight {
  Patches<F> p;
  Floats weight;

  __device__ __forceinline__ void operator()(int64_t index, const double* sum) const {
    const int channel = static_cast<int>(index / p.hidden()), piece = channel / p.channels();
    const int e = static_cast<int>(index - int64_t(channel) * p.hidden()), c = channel - piece * p.channels();
    if (c < p.R && e < p.E) weight.set(int64_t(e) * p.columns() + p.column(piece, c), *sum);
  }
};

// The mean that PaddedMap subtracts from a channel: that of `center`, or of `around` at the middle of the footprint.
template <class F>
__device__ __forceinline__ double origin_of(const Patches<F>& p, const float* norm, int piece, int c) {
  return norm[p.column(piece < p.positions() ? p.positions() / 2 : piece, c)];
}

// Writes scale and shift [pieces, channels()] for maps whose means are subtracted: (x - mean) * scale + shift = (x -
// origin) * scale + (shift - (mean - origin) * scale).
template <class F>
struct NormJob {
  Patches<F> p;
  const float* norm;
  int64_t elements;
  float *scale, *shift;

  __device__ __forceinline__ void write(int64_t index) const {
    const int channel = static_cast<int>(index), piece = channel / p.channels(), c = channel - piece * p.channels();
    scale[index] = shift[index] = 0;
    if (c >= p.R) return;
    const int column = p.column(piece, c);
    const double distance = norm[column] - origin_of(p, norm, piece, c);
    scale[index] = norm[p.columns() + column];
    shift[index] = static_cast<float>(norm[2 * p.columns() + column] - distance * scale[index]);
  }
};

// Rearranges the weights of all pieces into the factors of Patches.
template <class F>
struct PackedPieces {
  Patches<F> p;
  Floats weight;
  bool is_backward;
  int64_t elements;
  F* to;

  __device__ __forceinline__ void write(int64_t index) const {
    pack(index, is_backward ? p.r_tiles : p.e_tiles, is_backward ? p.e_tiles : p.r_tiles, to,
         [&](int piece, int row, int column) {
           const int e = is_backward ? column : row, c = is_backward ? row : column;
           if (e >= p.E || c >= p.R) return 0.0f;
           return static_cast<float>(weight.get(int64_t(e) * p.columns() + p.column(piece, c)));
         });
  }
};

// Writes the gradient of norm [3, columns] from sums [pieces, channels(), 2] for scale and shift.
template <class F>
struct PlaceNorm {
  Patches<F> p;
  const float* norm;
  float* out;

  __device__ __forceinline__ void operator()(int64_t index, const double* sums) const {
    const int channel = static_cast<int>(index / 2), piece = channel / p.channels(), c = channel - piece * p.channels();
    if (c >= p.R || index % 2 == 1) return;
    const int column = p.column(piece, c);
    const double distance = norm[column] - origin_of(p, norm, piece, c);
    out[column] = static_cast<float>(-norm[p.columns() + column] * sums[1]);
    out[p.columns() + column] = static_cast<float>(sums[0] - distance * sums[1]);
    out[2 * p.columns() + column] = static_cast<float>(sums[1]);
  }
};

// Calls run with the number of tiles of 8 channels that a warp computes at once.
template <class Run>
void with_tiles_at_once(int tiles, const Run& run) {
  with_constant<1, 2, 4>(tiles, run);
}

struct PatchTensors {
  Tensor center, around, norm, weight;
};

// One call: the inputs, and the jobs that prepare them.
template <class F>
class PatchWork : public Workspace {
 public:
  const Footprint f;
  const float* norm;
  Patches<F> p{};
  PaddedMap<> center, around;
  NormJob<F> norm_job;
  PackedPieces<F> weight;

  PatchWork(const PatchTensors& x, const Footprint& f, bool is_backward)
      : Workspace(x.around), f(f), norm(keep_float(x.norm)) {
    // Indices of the padded weights must fit into 32 bits.
    const int64_t weights = (f.positions() + 1) * (x.around.size(3) + 32) * (x.weight.size(0) + 32);
    STD_TORCH_CHECK(weights < int64_t(1) << 30, "a weight of [", x.weight.size(0), ", ", x.weight.size(1),
                    "] is too large; fewer than 2^30 elements are supported");
    static_cast<Grid&>(p) = grid_of(x.around, f);
    p.C = static_cast<int>(x.center.size(3)), p.R = static_cast<int>(x.around.size(3));
    p.E = static_cast<int>(x.weight.size(0)), p.r_tiles = tiles_of(p.R), p.e_tiles = tiles_of(p.E);
    const int K = p.positions();
    around = map(keep_float(x.around), p.images, f, p.R, p.r_tiles, {nullptr, norm + p.C + K / 2, nullptr, nullptr, K});
    center = map(keep_float(x.center), p.C > 0 ? p.images : 0, {1, f.height, f.width}, p.R, p.r_tiles, {nullptr, norm});
    p.around = around.to, p.center = center.to;
    const int64_t channels = int64_t(p.pieces()) * p.channels();
    norm_job = {p, norm, channels, take(channels), take(channels)};
    p.scale = norm_job.scale, p.shift = norm_job.shift;
    const int64_t weight_size = p.pieces() * piece_size();
    weight = {p, keep(x.weight), is_backward, weight_size, take<F>(weight_size)};
    p.weight = weight.to;
  }

  int64_t piece_size() const { return int64_t(p.r_tiles) * p.e_tiles * kWarp; }
};

// [N, H, W, E]
template <class F>
Tensor forward(PatchWork<F>& work) {
  const Patches<F>& p = work.p;
  Tensor out = work.empty({p.images, p.height, p.width, p.E});
  if (out.numel() == 0) return out;
  prepare(work.stream(), work.center, work.around, work.norm_job, work.weight);
  with_tiles_at_once(p.e_tiles, [&]<int kTiles>(Int<kTiles>) {
    const int strips = p.e_tiles / kTiles;
    const int64_t tasks = (p.pixels() + 15) / 16 * strips;
    const int warps = warps_per_team(tasks, p.pieces());
    SAN_LAUNCH_SHARED((patch_linear_kernel<F, kTiles>), blocks_of_teams(tasks, warps), kTeamThreads,
                      warps > 1 ? bytes_of_team_sums(kTiles * 4) : 0, work.stream(), p, strips, warps,
                      out.mutable_data_ptr<float>());
  });
  return out;
}

template <class F>
void map_gradient(PatchWork<F>& work, const Patches<F>& p, const float* grads, float* out) {
  with_tiles_at_once(p.r_tiles, [&]<int kTiles>(Int<kTiles>) {
    const int strips = p.r_tiles / kTiles;
    SAN_LAUNCH_SHARED((map_gradient_kernel<F, kTiles>), blocks_of_teams((p.padded_pixels() + 15) / 16 * strips, 1),
                      kTeamThreads, 0, work.stream(), p, grads, strips, out);
  });
}

template <class F>
void parameter_gradients(PatchWork<F>& work, const float* grads, PatchTensors& out) {
  const Patches<F>& p = work.p;
  with_tiles_at_once(p.e_tiles, [&]<int kTiles>(Int<kTiles>) {
    const int strips = p.e_tiles / kTiles, rows = static_cast<int>(p.images) * p.height;
    const int tasks = p.pieces() * ((p.r_tiles + 1) / 2) * strips;
    const int64_t channels = int64_t(p.pieces()) * p.channels(), part = channels * (p.hidden() + 2 * strips);
    const int64_t fitting = std::max<int64_t>(1, workspace_limit() / 4 / static_cast<int64_t>(part * sizeof(float)));
    const int64_t steps = int64_t(rows) * ((p.width + 7) / 8);
    const int64_t wanted = std::max(wanted_sum_blocks() * kWarps / tasks, steps / kLongestSum) + 1;
    const int64_t most = std::min<int64_t>({wanted, fitting, rows});
    const int rows_per_slice = static_cast<int>((rows + most - 1) / most);
    const int slices = (rows + rows_per_slice - 1) / rows_per_slice;
    float *weights = work.take(slices * channels * p.hidden()), *affine = work.take(slices * strips * channels * 2);
    SAN_LAUNCH_SHARED((parameter_gradient_kernel<F, kTiles>), slices * ((tasks + kWarps - 1) / kWarps), kTeamThreads, 0,
                      work.stream(), p, grads, strips, tasks, rows_per_slice, weights, affine);
    const int64_t columns = channels * p.hidden();
    sum_rows(PartialSums<float>{weights, columns}, slices, columns, PlaceWeight<F>{p, Floats(out.weight)},
             work.stream());
    sum_rows(PartialSums<float>{affine, channels * 2}, slices * strips, channels * 2,
             PlaceNorm<F>{p, work.norm, out.norm.template mutable_data_ptr<float>()}, work.stream());
  });
}

// Gradients of all inputs for `grad` [N, H, W, E].
template <class F>
void backward(PatchWork<F>& work, const Tensor& grad, PatchTensors& out) {
  const Patches<F>& p = work.p;
  float* grads = work.take((p.pixels() + 1) * p.hidden());
  const PaddedMap<F> grad_map{
      work.keep_float(grad), {1, p.height, p.width}, p.E, p.e_tiles, p.pixels() * p.e_tiles, grads, {}};
  const PaddedVector zeros{nullptr, 0, p.hidden(), grads + p.pixels() * p.hidden()};
  prepare(work.stream(), work.center, work.around, work.norm_job, work.weight, grad_map, zeros);
  if (p.C > 0) {
    Patches<F> center = p;  // a map with a footprint of one pixel
    const int64_t behind = int64_t(p.positions()) * p.channels();
    center.kernel_size = 1, center.around = p.center, center.weight += p.positions() * work.piece_size();
    center.scale += behind, center.shift += behind;
    map_gradient(work, center, grads, out.center.template mutable_data_ptr<float>());
  }
  float* padded = work.take(p.padded_pixels() * p.R);
  map_gradient(work, p, grads, padded);
  fold_map(work.stream(), padded, work.f, p.R, out.around);
  parameter_gradients(work, grads, out);
}

Tensor patch_linear(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight,
                    int64_t kernel_size, bool tf32) {
  const Footprint f = check_patches(center, around, norm, weight, kernel_size);
  check_float32(around);
  const OperatorGuard guard("patch_linear", around);
  const Tensor out = with_operand(weight.scalar_type(), tf32, [&]<class F>(F) {
    PatchWork<F> work({center, around, norm, weight}, f, false);
    return forward(work);
  });
  return torch::stable::transpose(torch::stable::transpose(out, 1, 3), 2, 3);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> patch_linear_backward(const Tensor& grad, const Tensor& center,
                                                                 const Tensor& around, const Tensor& norm,
                                                                 const Tensor& weight, int64_t kernel_size, bool tf32) {
  const Footprint f = check_patches(center, around, norm, weight, kernel_size);
  check_patch_gradient(grad, around, weight);
  check_float32(around);
  const OperatorGuard guard("patch_linear_backward", around);
  const auto result = [&](const Tensor& x) { return result_like(x, around); };
  PatchTensors out{result(center), result(around), result(norm), result(weight)};
  if (around.numel() > 0) {
    const Tensor last = torch::stable::transpose(torch::stable::transpose(grad, 2, 3), 1, 3);  // [N, H, W, E]
    with_operand(weight.scalar_type(), tf32, [&]<class F>(F) {
      PatchWork<F> work({center, around, norm, weight}, f, true);
      backward(work, last, out);
    });
  }
  return {out.center, out.around, out.norm, out.weight};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("patch_linear", TORCH_BOX(&san::cuda::patch_linear));
  m.impl("patch_linear_backward", TORCH_BOX(&san::cuda::patch_linear_backward));
}
