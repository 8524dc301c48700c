// The host side that forward and backward of fused patchwise attention share: checks, parameters as kernels take them,
// and how a pass is cut into blocks.
#pragma once
#include <algorithm>

#include "maps.h"
#include "patchwise_tile.cuh"

namespace san::cuda {
namespace {

// Blocks that fill a large GPU some times over: 1024. Passes with fewer tiles or parameters are cut along what they
// sum, up to so many blocks, and each block leaves its part of the result: at most 16 KB where hidden channels are
// summed and 32 KB where the gradient of weight1 is, so no pass needs more than 32 MB beyond one copy of its result.
inline int64_t wanted_blocks() { return std::max<int64_t>(8, workspace_limit() >> 18); }

// In how many parts a pass of so many blocks is cut, of at most `most`.
inline int splits_for(int64_t blocks, int64_t most) {
  return static_cast<int>(std::clamp<int64_t>(wanted_blocks() / blocks, 1, most));
}

struct PatchwiseInputs {
  const Tensor &center, &around, &beta, &gain1, &bias1, &weight1, &gain2, &bias2, &weight2, &bias3;
  const Tensor &mean1, &var1, &mean2, &var2;
};

inline void check_patchwise(const PatchwiseInputs& in, int64_t kernel_size) {
  check_map(in.center, "center"), check_map(in.around, "around"), check_map(in.beta, "beta");
  footprint_of(in.around.size(1), in.around.size(2), kernel_size);
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(in.beta.size(axis) == in.around.size(axis) && in.center.size(axis) == in.around.size(axis),
                    "center, around and beta must be maps of one size");
  }
  const int64_t C = in.center.size(3), R = in.around.size(3), M = in.beta.size(3), K = kernel_size * kernel_size;
  const int64_t channels = C + R * K;
  STD_TORCH_CHECK(R > 0 && (C == 0 || C == R), "center must have around's ", R, " channels or none");
  STD_TORCH_CHECK(in.weight1.dim() == 2 && in.weight2.dim() == 2, "weight1 and weight2 must be matrices");
  const int64_t E = in.weight1.size(0), rows = in.weight2.size(0);
  STD_TORCH_CHECK(rows > 0 && rows % K == 0 && M > 0 && M % (rows / K) == 0,
                  "beta's channels must be a positive multiple of the weight channels");
  STD_TORCH_CHECK(E > 0 && in.weight1.size(1) == channels && in.weight2.size(1) == E && in.bias3.numel() == rows,
                  "weight1 must be [E, ", channels, "], weight2 [G * K, E] and bias3 [G * K]");
  for (const Tensor* x : {&in.gain1, &in.bias1, &in.mean1, &in.var1}) {
    STD_TORCH_CHECK(x->numel() == channels, "the first BatchNorm must have ", channels, " channels");
  }
  for (const Tensor* x : {&in.gain2, &in.bias2, &in.mean2, &in.var2}) {
    STD_TORCH_CHECK(x->numel() == E, "the second BatchNorm must have ", E, " channels");
  }
  check_devices(in.center, {&in.around, &in.beta, &in.gain1, &in.bias1, &in.weight1, &in.gain2, &in.bias2, &in.weight2,
                            &in.bias3, &in.mean1, &in.var1, &in.mean2, &in.var2});
}

// BatchNorm1 as kernels take it, per piece and channel. Maps are taken less `shift`.
template <class T>
struct Norm1 {
  const T *gain, *bias, *mean, *var;
  T eps;
};

// A block's part of the sums of each channel of a map [pixels, channels]: [blocks, channels].
template <class scalar_t, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kThreads)
    channel_sums_kernel(const scalar_t* map, int64_t pixels, int channels, T* partial) {
  T* sums = reinterpret_cast<T*>(shared_memory_base());  // [parts, channels]
  const int parts = parts_for(kThreads, channels);
  for_each_cell(parts, channels, [&](int part, int c) {
    T sum = 0;
    for (int64_t i = int64_t(blockIdx.x) * parts + part; i < pixels; i += int64_t(gridDim.x) * parts) {
      sum += static_cast<T>(map[i * channels + c]);
    }
    sums[part * channels + c] = sum;
  });
  __syncthreads();
  for (int c = threadIdx.x; c < channels; c += kThreads) {
    partial[int64_t(blockIdx.x) * channels + c] = sum_parts(sums, parts, channels, c);
  }
}

// shift of Patchwise from each channel's sum over all pixels, or where they are null from the first BatchNorm's `mean`.
template <class T>
__global__ void shift_kernel(Patchwise<T> p, const T* center_sums, const T* around_sums, const T* mean, T* shift) {
  const int width = padded(p.R);
  SAN_FOR_EACH(index, 2 * width) {
    const int r = static_cast<int>(index % width);
    const bool is_center = index >= width, is_real = r < p.R && (p.C > 0 || !is_center);
    const T* sums = is_center ? center_sums : around_sums;
    const int piece = is_center ? p.positions() : p.positions() / 2;
    shift[index] = !is_real ? T(0) : sums != nullptr ? sums[r] / static_cast<T>(p.pixels()) : mean[p.channel(piece, r)];
  }
}

// activation [pieces, padded(R), 2] and normal [pieces, padded(R), 2], the latter: mean less shift, and 1 / standard
// deviation.
template <class T>
__global__ void norm1_kernel(Patchwise<T> p, Norm1<T> norm, int64_t elements, T* activation, T* normal) {
  const int width = padded(p.R);
  SAN_FOR_EACH(index, elements) {
    const int piece = static_cast<int>(index / width), r = static_cast<int>(index % width);
    Pack<2, T> active{}, normalized{};
    if (r < p.R) {
      const int at = p.channel(piece, r);
      const T deviation = 1 / std::sqrt(norm.var[at] + norm.eps), scale = norm.gain[at] * deviation;
      const T mean = norm.mean[at] - p.shift[(piece == p.positions() ? width : 0) + r];
      active = {scale, norm.bias[at] - scale * mean}, normalized = {mean, deviation};
    }
    active.store(activation + 2 * index), normalized.store(normal + 2 * index);
  }
}

// norm2 of Patchwise.
template <class T>
__global__ void norm2_kernel(int E, const T* gain, const T* bias, const T* mean, const T* var, T eps, int64_t elements,
                             T* norm2) {
  SAN_FOR_EACH(e, elements) {
    Pack<4, T> norm{};
    if (e < E) {
      const T deviation = 1 / std::sqrt(var[e] + eps);
      norm = {mean[e], gain[e] * deviation, bias[e], deviation};
    }
    norm.store(norm2 + 4 * e);
  }
}

// weight1 [E, channels] by pieces.
template <class T>
__global__ void arrange_weight1_kernel(Patchwise<T> p, const T* weight1, int64_t elements, T* out) {
  const int rows = padded(p.E), columns = padded(p.R);
  SAN_FOR_EACH(index, elements) {
    const int r = static_cast<int>(index % columns), e = static_cast<int>(index / columns % rows);
    const int piece = static_cast<int>(index / columns / rows);
    out[index] = e < p.E && r < p.R ? weight1[int64_t(e) * p.channels() + p.channel(piece, r)] : T(0);
  }
}

// weight2 [G * K, E] and bias3 [G * K] by positions.
template <class T>
__global__ void arrange_weight2_kernel(Patchwise<T> p, const T* weight2, const T* bias3, int64_t elements, T* weights,
                                       T* biases) {
  const int rows = padded(p.G), columns = padded(p.E);
  SAN_FOR_EACH(index, elements) {
    const int e = static_cast<int>(index % columns), g = static_cast<int>(index / columns % rows);
    const int64_t position = index / columns / rows, row = g * int64_t(p.positions()) + position;
    weights[index] = e < p.E && g < p.G ? weight2[row * p.E + e] : T(0);
    if (e == 0) biases[position * rows + g] = g < p.G ? bias3[row] : T(0);
  }
}

inline int grid_of(int64_t tasks) { return static_cast<int>(std::min(tasks, kMaxBlocks)); }

// How a product of a tile's pixels is cut along its other sizes: blocks take `columns` of its tiles of 8 columns, of
// which there are `strips`, and one of `splits` parts of its depth.
struct Cut {
  int columns, strips, splits;

  // Of `wide` tiles of 8 columns and a depth of `deep` steps. Splits are better than narrow strips, for which a left
  // factor is made again.
  Cut(int64_t tiles, int wide, int deep) : columns(std::min(kColumns, wide)) {
    const auto strips_now = [&] { return (wide + columns - 1) / columns; };
    splits = splits_for(tiles * strips_now(), deep);
    while (columns > 1 && tiles * splits * strips_now() < wanted_blocks() / 4) columns /= 2;
    strips = strips_now();
  }
};

// Inputs as kernels take them.
template <class scalar_t>
class PatchProblem {
 public:
  using T = accumulate_t<scalar_t>;

  PatchProblem(const PatchwiseInputs& in, int64_t kernel_size, bool training, double eps)
      : space(in.beta, map_type(in.center, in.around, in.beta)),
        center(space.keep_map(in.center)),
        around(space.keep_map(in.around)),
        beta(space.keep_map(in.beta)),
        gain1(space.keep(in.gain1)),
        bias1(space.keep(in.bias1)),
        gain2_(space.keep(in.gain2)),
        bias2_(space.keep(in.bias2)),
        eps_(static_cast<T>(eps)) {
    sizes.f = footprint_of(in.around.size(1), in.around.size(2), kernel_size);
    sizes.images = in.around.size(0);
    sizes.C = static_cast<int>(in.center.size(3)), sizes.R = static_cast<int>(in.around.size(3));
    sizes.E = static_cast<int>(in.weight1.size(0)), sizes.M = static_cast<int>(in.beta.size(3));
    sizes.G = static_cast<int>(in.weight2.size(0) / sizes.positions());
    check_fits();
    if (sizes.pixels() == 0) return;
    // In evaluation no statistics are taken, and an image must not depend on others.
    const T *around_sums = training ? channel_sums(around) : nullptr,
            *center_sums = training && sizes.C > 0 ? channel_sums(center) : nullptr;
    T* shift = space.take(2 * padded(sizes.R));
    SAN_LAUNCH(shift_kernel<T>, blocks_for(2 * padded(sizes.R)), kThreads, stream(), sizes, center_sums, around_sums,
               space.keep(in.mean1), shift);
    sizes.shift = shift;
    arrange(in);
  }

  auto stream() const { return space.stream(); }

  void set_norm1(const Tensor& mean, const Tensor& var) {
    const int64_t elements = int64_t(sizes.pieces()) * padded(sizes.R);
    T *activation = space.take(2 * elements), *normal = space.take(2 * elements);
    const Norm1<T> norm{gain1, bias1, space.keep(mean), space.keep(var), eps_};
    SAN_LAUNCH(norm1_kernel<T>, blocks_for(elements), kThreads, stream(), sizes, norm, elements, activation, normal);
    sizes.activation = activation, normal1 = normal;
  }
  void set_norm2(const Tensor& mean, const Tensor& var) {
    T* norm2 = space.take(4 * padded(sizes.E));
    SAN_LAUNCH(norm2_kernel<T>, blocks_for(padded(sizes.E)), kThreads, stream(), sizes.E, gain2_, bias2_,
               space.keep(mean), space.keep(var), eps_, padded(sizes.E), norm2);
    sizes.norm2 = norm2;
  }

  // Bytes of shared memory for [cells, pitch] elements and others.
  size_t shared_bytes(int64_t cells, int pitch, size_t others = 0) const { return cells * pitch * sizeof(T) + others; }
  // How many hidden channels of so many cells are in shared memory at once: as many as fit, and no more than leave room
  // for several blocks at the footprints of SAN.
  int depth_for(int cells) const {
    int depth = std::min(padded(sizes.E), 64);
    while (depth > 8 && cells * pitch_of(depth) * sizeof(T) > shared_memory_limit()) depth -= 8;
    return depth;
  }

  Workspace<scalar_t> space;
  const scalar_t *center, *around, *beta;
  const T *gain1, *bias1;
  Patchwise<T> sizes{};
  const T* normal1 = nullptr;  // [pieces, padded(R), 2], see norm1_kernel

 private:
  // Forward and backward take the same sizes: those for which moments and the gradient of weight1 have room for a
  // patch. Other passes need less.
  void check_fits() const {
    const size_t moments = kMomentPieces * kDepth * 2 * sizeof(double);
    const size_t gradient = kTilePixels * pitch_of(std::min(padded(sizes.E), kColumns * 8)) * sizeof(T);
    const size_t bytes = shared_bytes(sizes.patch_cells(), kPitch, std::max(moments, gradient));
    STD_TORCH_CHECK(bytes <= shared_memory_limit(), "patchwise attention over a ", sizes.f.kernel_size, "x",
                    sizes.f.kernel_size, " footprint needs too much shared memory: ", bytes,
                    " bytes; a block of this GPU has ", shared_memory_limit(),
                    "; use a smaller footprint or san.ops.backend(\"unfused\")");
  }
  const T* channel_sums(const scalar_t* map) {
    const int64_t channels = sizes.R, parts = parts_for(kThreads, sizes.R);
    const int64_t blocks = std::min(wanted_blocks(), (sizes.pixels() + parts - 1) / parts);
    T *partial = space.take(blocks * channels), *sums = space.take(channels);
    SAN_LAUNCH_SHARED(channel_sums_kernel<scalar_t>, static_cast<int>(blocks), kThreads, parts * channels * sizeof(T),
                      stream(), map, sizes.pixels(), sizes.R, partial);
    sum_blocks(partial, blocks, channels, Totals<T>{{sums}, {channels}}, stream());
    return sums;
  }
  void arrange(const PatchwiseInputs& in) {
    const int R = padded(sizes.R), E = padded(sizes.E), G = padded(sizes.G), K = sizes.positions();
    const int64_t size1 = int64_t(sizes.pieces()) * E * R, size2 = int64_t(K) * G * E;
    T *weight1 = space.take(size1), *weight2 = space.take(size2), *bias3 = space.take(int64_t(K) * G);
    SAN_LAUNCH(arrange_weight1_kernel<T>, blocks_for(size1), kThreads, stream(), sizes, space.keep(in.weight1), size1,
               weight1);
    SAN_LAUNCH(arrange_weight2_kernel<T>, blocks_for(size2), kThreads, stream(), sizes, space.keep(in.weight2),
               space.keep(in.bias3), size2, weight2, bias3);
    sizes.weight1 = weight1, sizes.weight2 = weight2, sizes.bias3 = bias3;
  }

  const T *gain2_, *bias2_;
  T eps_;
};

}  // namespace
}  // namespace san::cuda
