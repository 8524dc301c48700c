// Fused patchwise attention, backward. Definition: san/ops/fused.py; how a tile is worked on: patchwise_tile.cuh.
//
// The gradient of a weight of pixel i at position j, gz = sum of grad_y_i * beta_j over its value channels, is computed
// where it is needed, as is a piece of a patch. From grad_y to the maps:
//   mapping    gradient of a2, [pixels, E]; after the second BatchNorm's backward that of u
//   weight2    gradients of weight2 and bias3; a warp owns one position and walks over tiles
//   weight1    the same for weight1 and the first BatchNorm: of each piece only two products with the gradient of u are
//              summed, g_u^T [v1 > 0] and g_u^T ([v1 > 0] * normalised). They are linear in gradients that would have
//              to be multiplied with weight1 before they are summed, so gain1 and bias1 follow from the sums.
//   relation   gradients of the maps, with the first BatchNorm's backward applied pair by pair
// and aggregate_kernel for beta. Where gradients come from several pixels each pixel gathers its own (for_each_way).
#include <optional>
#include <tuple>

#include "patchwise_aggregate.cuh"

namespace san::cuda {
namespace {

constexpr int kHiddenColumns = 8;  // tiles of 8 hidden channels that a warp of mapping_kernel takes at once
constexpr int kGroup = 8;          // pieces, or positions, of a block that sums over tiles: one for each warp
constexpr int kSumRows = 4;        // tiles of 16 hidden channels that a warp of weight2_kernel takes at once

// Parts of the gradient of a2: the sums over a split's blocks of 8 weight channels, [splits, pixels, E].
template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T>)
    mapping_kernel(Patchwise<T> p, int splits, const scalar_t* grad_y, const scalar_t* beta, T* partial) {
  const Lane lane;
  const int strips = (padded(p.E) / 8 + kHiddenColumns - 1) / kHiddenColumns;
  const int h = 2 * lane.warp, w = lane.g;
  const int64_t tasks = p.tiles() * strips * splits;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const PatchTile tile = p.tile(task / splits / strips);
    const int strip = static_cast<int>(task / splits % strips), split = static_cast<int>(task % splits);
    const int left = strip * kHiddenColumns * 8, wide = padded(p.E) / 8 - strip * kHiddenColumns;
    const Places own = tile.own(h, w);
    T sums[kHiddenColumns][4] = {};
    for (int g = split * 8; g < p.G && tile.top + h < tile.height; g += splits * 8) {
      const int column = g + 2 * lane.t;
      for (int share = 0; share < p.share(); share += kShares) {
        const int shares = p.share() - share < kShares ? p.share() - share : kShares;
        const int64_t offset = tile.image * p.M + share * p.G + column;
        const scalar_t *values = beta + offset, *gradients = grad_y + offset;
        Pack<2, T> upper_gradients[kShares] = {}, lower_gradients[kShares] = {};
        SAN_UNROLL
        for (int s = 0; s < kShares; ++s) {
          if (s >= shares) break;
          if (own.upper >= 0) upper_gradients[s] = load_two(p, gradients + int64_t(own.upper) * p.M + s * p.G, column);
          if (own.lower >= 0) lower_gradients[s] = load_two(p, gradients + int64_t(own.lower) * p.M + s * p.G, column);
        }
        for (int position = 0; position < p.positions(); ++position) {
          const Places seen = tile.seen(own, h, w, position, p.kernel_size());
          Pack<2, T> upper_sum{}, lower_sum{};
          SAN_UNROLL
          for (int s = 0; s < kShares; ++s) {
            if (s >= shares) break;
            const auto add = [&](int place, const Pack<2, T>& gradients, Pack<2, T>& sum) {
              if (place < 0) return;
              const Pack<2, T> two = load_two(p, values + int64_t(place) * p.M + s * p.G, column);
              SAN_UNROLL
              for (int n = 0; n < 2; ++n) sum.data[n] += gradients.data[n] * two.data[n];
            };
            add(seen.upper, upper_gradients[s], upper_sum), add(seen.lower, lower_gradients[s], lower_sum);
          }
          const Left<kAccurate, T> gz(upper_sum, lower_sum);
          const T* weight2 = p.weight2 + (position * padded(p.G) + column) * padded(p.E) + left + lane.g;
          SAN_UNROLL
          for (int n = 0; n < kHiddenColumns; ++n) {
            if (n >= wide) break;
            gz.add_product({weight2[n * 8], weight2[n * 8 + padded(p.E)]}, sums[n]);
          }
        }
      }
    }
    T* out = partial + split * p.pixels() * p.E;
    SAN_UNROLL
    for (int k = 0; k < kHiddenColumns * 4; ++k) {
      const int e = left + k / 4 * 8 + 2 * lane.t + k % 2;
      const int place = k / 2 % 2 == 0 ? own.upper : own.lower;
      if (k / 4 < wide && e < p.E && place >= 0) out[(tile.image + place) * p.E + e] = sums[k / 4][k % 4];
    }
  }
}

// The gradient of a2 from its parts, where relu passed it, and its sums over a block's pixels: of it and of it times
// the normalised u, [blocks, 2, E].
template <class T>
__global__ void __launch_bounds__(kThreads)
    hidden_gradient_kernel(Patchwise<T> p, int splits, const T* partial, const T* hidden, T* gradient, T* block_sums) {
  T* sums = reinterpret_cast<T*>(shared_memory_base());  // [parts, 2, E]
  const int64_t pixels = p.pixels(), first = int64_t(blockIdx.x) * kHiddenPixels;
  const int64_t last = first + kHiddenPixels < pixels ? first + kHiddenPixels : pixels;
  const int parts = parts_for(kThreads, p.E);
  for_each_cell(parts, p.E, [&](int part, int e) {
    const auto norm = Pack<4, T>::load(p.norm2 + 4 * e);
    T sum = 0, product = 0;
    for (int64_t pixel = first + part; pixel < last; pixel += parts) {
      const T u = hidden[pixel * p.E + e];
      const bool passes = activate(p, u, e) > 0;
      const T value = passes ? sum_parts(partial, splits, pixels * p.E, pixel * p.E + e) : T(0);
      gradient[pixel * p.E + e] = value;
      sum += value, product += value * ((u - norm.data[0]) * norm.data[3]);
    }
    sums[part * 2 * p.E + e] = sum, sums[(part * 2 + 1) * p.E + e] = product;
  });
  __syncthreads();
  for (int k = threadIdx.x; k < 2 * p.E; k += kThreads) {
    block_sums[int64_t(blockIdx.x) * 2 * p.E + k] = sum_parts(sums, parts, 2 * p.E, k);
  }
}

// The second BatchNorm's backward, in place: from the gradient of its output to that of u. The sums [E] are null in
// evaluation, where statistics do not depend on u.
template <class T>
__global__ void norm2_backward_kernel(Patchwise<T> p, const T* hidden, const T* grad_bias2, const T* grad_gain2,
                                      int64_t elements, T* gradient) {
  const T count = static_cast<T>(p.pixels());
  SAN_FOR_EACH(index, elements) {
    const int e = static_cast<int>(index % p.E);
    const auto norm = Pack<4, T>::load(p.norm2 + 4 * e);
    T value = gradient[index];
    if (grad_bias2 != nullptr) {
      const T normalised = (hidden[index] - norm.data[0]) * norm.data[3];
      value -= grad_bias2[e] / count + normalised * (grad_gain2[e] / count);
    }
    gradient[index] = norm.data[1] * value;
  }
}

// Gradients of weight2 [G * K, E] and bias3 [G * K] over the tiles split, split + splits, ..: [splits, G * K * (E +
// 1)].
template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kGroup* kWarp, kTileBlocks<T> / 2 + kTileBlocks<T> % 2)
    weight2_kernel(Patchwise<T> p, int splits, const T* hidden, const scalar_t* grad_y, const scalar_t* beta,
                   T* partial) {
  T* active = reinterpret_cast<T*>(shared_memory_base());  // [kTilePixels, pitch_of(depth)]
  const Lane lane;
  const int strips = (padded(p.E) + kSumRows * 16 - 1) / (kSumRows * 16), blocks = padded(p.G) / 8;
  const int split = blockIdx.x % splits, strip = blockIdx.x / splits % strips;
  const int g = blockIdx.x / splits / strips % blocks * 8;
  const int position = blockIdx.x / splits / strips / blocks * kGroup + lane.warp;
  const int left = strip * kSumRows * 16,
            depth = padded(p.E) - left < kSumRows * 16 ? padded(p.E) - left : kSumRows * 16;
  const int pitch = pitch_of(depth), column = g + lane.g, K = p.positions();
  const int down = divide(position, p.kernel_size()) - p.reach(), right = position % p.kernel_size() - p.reach();
  T sums[kSumRows][4] = {}, bias = 0;
  for (int64_t index = split; index < p.tiles(); index += splits) {
    const PatchTile tile = p.tile(index);
    __syncthreads();
    load_hidden(p, hidden, tile, 0, left, depth, active, [&](T u, int e) { return activate(p, u, e); });
    __syncthreads();
    for (int h = 0; h < tile.rows() && position < K; ++h) {
      Pack<2, T> gz{};
      SAN_UNROLL
      for (int n = 0; n < 2; ++n) {
        const int y = tile.top + h, x = tile.left + lane.t + 4 * n;
        if (x >= tile.width || column >= p.G) continue;
        const scalar_t* gradients = grad_y + (tile.image + tile.place(y, x)) * p.M + column;
        const scalar_t* values = beta + (tile.image + tile.reflected(y + down, x + right, p.reach())) * p.M + column;
        for (int c = 0; c < p.M; c += p.G) gz.data[n] += static_cast<T>(gradients[c]) * static_cast<T>(values[c]);
      }
      bias += gz.data[0] + gz.data[1];
      const T *near = active + (h * kSide + lane.t) * pitch + lane.g, *far = near + 4 * pitch;
      SAN_UNROLL
      for (int m = 0; m < kSumRows; ++m) {
        if (m * 16 >= depth) break;
        const bool has_lower = m * 16 + 8 < depth;
        const Pack<2, T> lower = has_lower ? Pack<2, T>{near[m * 16 + 8], far[m * 16 + 8]} : Pack<2, T>{};
        Left<kAccurate, T>({near[m * 16], far[m * 16]}, lower).add_product(gz, sums[m]);
      }
    }
  }
  bias += __shfl_xor_sync(~0u, bias, 1);
  bias += __shfl_xor_sync(~0u, bias, 2);
  if (position >= K) return;
  T* out = partial + split * (int64_t(p.G) * K * (p.E + 1));
  SAN_UNROLL
  for (int k = 0; k < kSumRows * 4; ++k) {
    const int e = left + k / 4 * 16 + k / 2 % 2 * 8 + lane.g, weight = g + 2 * lane.t + k % 2;
    if (e < p.E && weight < p.G) out[(int64_t(weight) * K + position) * p.E + e] = sums[k / 4][k % 4];
  }
  if (strip == 0 && lane.t == 0 && column < p.G) out[(int64_t(p.G) * p.E + column) * K + position] = bias;
}

// Sums over the tiles split, split + splits, .. of [v1 > 0] times the gradient of u, and of that times the normalised
// patch: [splits, 2, pieces, padded(R), padded(E)].
template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kGroup* kWarp, kTileBlocks<T> / 2 + kTileBlocks<T> % 2)
    weight1_kernel(Patchwise<T> p, int splits, const T* normal, const scalar_t* center, const scalar_t* around,
                   const T* grad_hidden, T* partial) {
  T* patch = reinterpret_cast<T*>(shared_memory_base());  // [patch_cells, kPitch]
  T* gradient = patch + p.patch_cells() * kPitch;         // [kTilePixels, pitch_of(depth)]
  const Lane lane;
  const int R = padded(p.R), E = padded(p.E), strips = (E / 8 + kColumns - 1) / kColumns;
  const int split = blockIdx.x % splits, strip = blockIdx.x / splits % strips;
  const int first = blockIdx.x / splits / strips % p.chunks() * kDepth;
  const int piece = blockIdx.x / splits / strips / p.chunks() * kGroup + lane.warp;
  const int left = strip * kColumns * 8, depth = E - left < kColumns * 8 ? E - left : kColumns * 8;
  const int pitch = pitch_of(depth);
  const bool is_real = piece < p.pieces();
  const View view = p.view(is_real ? piece : 0);
  Pack<2, T> activations[2] = {}, normals[2] = {};  // of the lane's two channels
  SAN_UNROLL
  for (int n = 0; n < 2; ++n) {
    const int r = first + 8 * n + lane.g;
    if (!is_real || r >= R) continue;
    activations[n] = Pack<2, T>::load(p.activation + 2 * (piece * R + r));
    normals[n] = Pack<2, T>::load(normal + 2 * (piece * R + r));
  }
  T passed[kColumns][4] = {}, products[kColumns][4] = {};
  for (int64_t index = split; index < p.tiles(); index += splits) {
    const PatchTile tile = p.tile(index);
    __syncthreads();
    load_patch(p, center, around, tile, first, patch);
    load_hidden(p, grad_hidden, tile, 0, left, depth, gradient, [](T value, int) { return value; });
    __syncthreads();
    for (int h = 0; h < tile.rows() && is_real; ++h) {
      const T* near = patch + view.cell(h, lane.t) * kPitch + lane.g;
      Pack<2, T> masks[2], normalised[2];
      SAN_UNROLL
      for (int n = 0; n < 2; ++n) {
        SAN_UNROLL
        for (int k = 0; k < 2; ++k) {
          const T x = near[k * 4 * kPitch + n * 8];
          const bool passes = activations[n].data[0] * x + activations[n].data[1] > 0;
          masks[n].data[k] = passes ? T(1) : T(0);
          normalised[n].data[k] = passes ? (x - normals[n].data[0]) * normals[n].data[1] : T(0);
        }
      }
      const Left<kAccurate, T> mask(masks[0], masks[1]), product(normalised[0], normalised[1]);
      const T* gradients = gradient + (h * kSide + lane.t) * pitch + lane.g;
      SAN_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        if (n * 8 >= depth) break;
        const Pack<2, T> right{gradients[n * 8], gradients[4 * pitch + n * 8]};
        mask.add_product(right, passed[n]), product.add_product(right, products[n]);
      }
    }
  }
  if (!is_real) return;
  const int64_t size = int64_t(p.pieces()) * R * E;
  SAN_UNROLL
  for (int k = 0; k < kColumns * 2; ++k) {
    const int n = k / 2, r = first + k % 2 * 8 + lane.g;
    if (n * 8 >= depth || r >= R) continue;
    T* out = partial + split * 2 * size + (int64_t(piece) * R + r) * E + left + n * 8 + 2 * lane.t;
    Pack<2, T>{passed[n][k % 2 * 2], passed[n][k % 2 * 2 + 1]}.store(out);
    Pack<2, T>{products[n][k % 2 * 2], products[n][k % 2 * 2 + 1]}.store(out + size);
  }
}

// Gradients of the first BatchNorm's and Linear layer's parameters from the sums [2, pieces, padded(R), padded(E)], and
// what the former's backward takes off a gradient, per piece and channel: correction [pieces, padded(R), 2], constant
// and slope, which is nothing in evaluation.
template <class T>
struct RelationGradients {
  T *gain1, *bias1, *weight1, *correction;
};

template <class T>
__global__ void relation_parameters_kernel(Patchwise<T> p, const T* gain1, const T* bias1, const T* normal,
                                           const T* sums, bool training, RelationGradients<T> out) {
  const int R = padded(p.R), E = padded(p.E);
  const int64_t size = int64_t(p.pieces()) * R * E;
  SAN_FOR_EACH(at, p.channels()) {
    const bool is_center = at < p.C;
    const int piece = static_cast<int>(is_center ? p.positions() : (at - p.C) % p.positions());
    const int64_t row = int64_t(piece) * R + (is_center ? at : (at - p.C) / p.positions());
    const T *weight1 = p.weight1 + int64_t(piece) * E * R + (row - int64_t(piece) * R), *passed = sums + row * E;
    T bias = 0, gain = 0;
    for (int e = 0; e < p.E; ++e) {
      bias += weight1[e * R] * passed[e], gain += weight1[e * R] * passed[size + e];
      out.weight1[int64_t(e) * p.channels() + at] = gain1[at] * passed[size + e] + bias1[at] * passed[e];
    }
    out.bias1[at] = bias, out.gain1[at] = gain;
    const T scale = p.activation[2 * row], count = static_cast<T>(p.pixels());
    const T slope = gain / count * normal[2 * row + 1], constant = bias / count - slope * normal[2 * row];
    const Pack<2, T> taken{scale * constant, scale * slope};
    (training ? taken : Pack<2, T>{}).store(out.correction + 2 * row);
  }
}

// The gradient of around, or of center. A block takes a tile and `columns` tiles of 8 of the map's channels; `depth` of
// the E hidden channels lie in shared memory at once.
template <bool kCenter, bool kAccurate, class scalar_t, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T>)
    relation_kernel(Patchwise<T> p, Cut cut, int depth, const scalar_t* map, const T* grad_hidden, const T* correction,
                    scalar_t* grad_map) {
  T* gradient = reinterpret_cast<T*>(shared_memory_base());  // [cells, pitch_of(depth)]
  const Lane lane;
  const int R = padded(p.R), reach = kCenter ? 0 : p.reach(), side = kSide + 2 * reach, pitch = pitch_of(depth);
  const int h = 2 * lane.warp, w = lane.g;
  const int64_t tasks = p.tiles() * cut.strips;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const PatchTile tile = p.tile(task / cut.strips);
    const int strip = static_cast<int>(task % cut.strips), left = strip * cut.columns * 8;
    const int wide = R / 8 - strip * cut.columns, columns = wide < cut.columns ? wide : cut.columns;
    const Places own = tile.own(h, w);
    const int64_t image = tile.image * p.R + left + 2 * lane.t;
    T x[kColumns][4], sums[kColumns][4] = {};
    SAN_UNROLL
    for (int k = 0; k < kColumns * 4; ++k) {
      const int r = k / 4 * 8 + k % 2, place = k / 2 % 2 == 0 ? own.upper : own.lower;
      const bool is_real = k / 4 < columns && left + 2 * lane.t + r < p.R && place >= 0;
      const T* shift = p.shift + (kCenter ? R : 0) + left + 2 * lane.t;
      x[k / 4][k % 4] = is_real ? static_cast<T>(map[image + int64_t(place) * p.R + r]) - shift[r] : T(0);
    }
    for (int first = 0; first < p.E; first += depth) {
      __syncthreads();
      load_hidden(p, grad_hidden, tile, reach, first, depth, gradient, [](T value, int) { return value; });
      __syncthreads();
      // Adds the gradients that a piece gets from the pixels in two cells, if they see it.
      const auto add = [&](int piece, int upper_cell, int lower_cell, bool has_upper, bool has_lower) {
        T products[kColumns][4] = {};
        const T* weight1 = p.weight1 + (int64_t(piece) * padded(p.E) + first + 2 * lane.t) * R + left + lane.g;
        const int used = padded(p.E) - first < depth ? padded(p.E) - first : depth;
        add_product<kAccurate>(
            gradient + upper_cell * pitch + 2 * lane.t, gradient + lower_cell * pitch + 2 * lane.t, used, columns,
            [&](int n, int k) { return Pack<2, T>{weight1[k * R + n * 8], weight1[(k + 1) * R + n * 8]}; }, products);
        SAN_UNROLL
        for (int n = 0; n < kColumns; ++n) {
          if (n >= columns) break;
          const int at = 2 * (piece * R + left + n * 8 + 2 * lane.t);
          const auto active = Pack<4, T>::load(p.activation + at), taken = Pack<4, T>::load(correction + at);
          SAN_UNROLL
          for (int k = 0; k < 4; ++k) {
            const int c = k % 2 * 2;
            const T scale = active.data[c], value = x[n][k];
            T sum = scale * value + active.data[c + 1] > 0 ? scale * products[n][k] : T(0);
            if (first == 0) sum -= taken.data[c] + taken.data[c + 1] * value;
            if (k < 2 ? has_upper : has_lower) sums[n][k] += sum;
          }
        }
      };
      if constexpr (kCenter) {
        add(p.positions(), h * side + w, (h + 1) * side + w, true, true);
      } else {
        for_each_way(p, tile, tile.top + h, [&](int position, const Line& rows, const Line& line) {
          const int q = tile.top + h, from_w = line.at(tile.left + w) - tile.left + reach;
          const bool sees = line.has(tile.left + w), sees_upper = sees && rows.has(q);
          const bool sees_lower = sees && rows.has(q + 1);
          const auto cell = [&](int from_h) { return (from_h - tile.top + reach) * side + from_w; };
          add(position, sees_upper ? cell(rows.at(q)) : 0, sees_lower ? cell(rows.at(q + 1)) : 0, sees_upper,
              sees_lower);
        });
      }
    }
    SAN_UNROLL
    for (int k = 0; k < kColumns * 4; ++k) {
      const int r = k / 4 * 8 + k % 2, place = k / 2 % 2 == 0 ? own.upper : own.lower;
      const bool is_real = k / 4 < columns && left + 2 * lane.t + r < p.R && place >= 0;
      if (is_real) grad_map[image + int64_t(place) * p.R + r] = static_cast<scalar_t>(sums[k / 4][k % 4]);
    }
  }
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Gradients, and the passes that fill them in.
template <class scalar_t, bool kAccurate>
class Gradients {
 public:
  using T = accumulate_t<scalar_t>;

  Gradients(PatchProblem<scalar_t>& problem, const scalar_t* grad_y, const T* hidden, bool training)
      : problem_(problem), p_(problem.sizes), training_(training), grad_y_(grad_y), hidden_(hidden) {
    const Workspace<scalar_t>& space = problem.space;
    const int64_t N = p_.images, H = p_.f.height, W = p_.f.width, rows = int64_t(p_.G) * p_.positions();
    center = space.new_maps({N, H, W, p_.C}), around = space.new_maps({N, H, W, p_.R});
    beta = space.new_maps({N, H, W, p_.M});
    gain1 = space.new_sums({p_.channels()}), bias1 = space.new_sums({p_.channels()});
    weight1 = space.new_sums({p_.E, p_.channels()});
    gain2 = space.new_sums({p_.E}), bias2 = space.new_sums({p_.E});
    weight2 = space.new_sums({rows, p_.E}), bias3 = space.new_sums({rows});
  }

  void zero() {
    for (Tensor* x : {&gain1, &bias1, &weight1, &gain2, &bias2, &weight2, &bias3}) torch::stable::zero_(*x);
  }

  void values() { aggregate<false, kAccurate>(problem_, hidden_, grad_y_, data<scalar_t>(beta)); }

  // Also leaves the gradient of u for `relation`.
  void mapping() {
    const int64_t tasks = p_.tiles() * ((padded(p_.E) / 8 + kHiddenColumns - 1) / kHiddenColumns);
    const int splits = splits_for(tasks, padded(p_.G) / 8);
    T* partial = problem_.space.take(splits * p_.pixels() * p_.E);
    SAN_LAUNCH_SHARED((mapping_kernel<scalar_t, kAccurate>), grid_of(tasks * splits), kTileThreads, 0,
                      problem_.stream(), p_, splits, grad_y_, problem_.beta, partial);

    grad_hidden_ = problem_.space.take(p_.pixels() * p_.E);
    const int blocks = static_cast<int>((p_.pixels() + kHiddenPixels - 1) / kHiddenPixels);
    T* sums = problem_.space.take(int64_t(blocks) * 2 * p_.E);
    SAN_LAUNCH_SHARED(hidden_gradient_kernel<T>, blocks, kThreads, parts_for(kThreads, p_.E) * 2 * p_.E * sizeof(T),
                      problem_.stream(), p_, splits, partial, hidden_, grad_hidden_, sums);
    sum_blocks<T>(sums, blocks, 2 * p_.E, {{data<T>(bias2), data<T>(gain2)}, {p_.E, p_.E}}, problem_.stream());
    SAN_LAUNCH(norm2_backward_kernel<T>, blocks_for(p_.pixels() * p_.E), kThreads, problem_.stream(), p_, hidden_,
               training_ ? data<T>(bias2) : nullptr, data<T>(gain2), p_.pixels() * p_.E, grad_hidden_);
  }

  void mapping_parameters() {
    const int depth = std::min(padded(p_.E), kSumRows * 16), strips = (padded(p_.E) + depth - 1) / depth;
    const int tasks = (p_.positions() + kGroup - 1) / kGroup * strips * (padded(p_.G) / 8);
    const int splits = splits_for(tasks, p_.tiles());
    const int64_t size = weight2.numel() + bias3.numel();
    T* partial = problem_.space.take(splits * size);
    SAN_LAUNCH_SHARED((weight2_kernel<scalar_t, kAccurate>), tasks * splits, kGroup * kWarp,
                      problem_.shared_bytes(kTilePixels, pitch_of(depth)), problem_.stream(), p_, splits, hidden_,
                      grad_y_, problem_.beta, partial);
    sum_blocks<T>(partial, splits, size, {{data<T>(weight2), data<T>(bias3)}, {weight2.numel(), bias3.numel()}},
                  problem_.stream());
  }

  void relation_parameters() {
    const int depth = std::min(padded(p_.E), kColumns * 8), strips = (padded(p_.E) + depth - 1) / depth;
    const int tasks = (p_.pieces() + kGroup - 1) / kGroup * strips * p_.chunks();
    const int splits = splits_for(tasks, p_.tiles());
    const int64_t channels = int64_t(p_.pieces()) * padded(p_.R), size = 2 * channels * padded(p_.E);
    T *partial = problem_.space.take(splits * size), *sums = problem_.space.take(size);
    SAN_LAUNCH_SHARED((weight1_kernel<scalar_t, kAccurate>), tasks * splits, kGroup * kWarp,
                      problem_.shared_bytes(p_.patch_cells(), kPitch, kTilePixels * pitch_of(depth) * sizeof(T)),
                      problem_.stream(), p_, splits, problem_.normal1, problem_.center, problem_.around, grad_hidden_,
                      partial);
    sum_blocks<T>(partial, splits, size, {{sums}, {size}}, problem_.stream());
    correction_ = problem_.space.take(2 * channels);
    SAN_LAUNCH(relation_parameters_kernel<T>, blocks_for(p_.channels()), kThreads, problem_.stream(), p_,
               problem_.gain1, problem_.bias1, problem_.normal1, sums, training_,
               RelationGradients<T>{data<T>(gain1), data<T>(bias1), data<T>(weight1), correction_});
  }

  void relation() {
    gather<false>(problem_.around, around);
    if (p_.C > 0) gather<true>(problem_.center, center);
  }

  Tensor center, around, beta, gain1, bias1, weight1, gain2, bias2, weight2, bias3;

 private:
  template <class element_t>
  static element_t* data(Tensor& x) {
    return x.template mutable_data_ptr<element_t>();
  }
  // Gradients of maps are gathered by the pixels that they belong to.
  template <bool kCenter>
  void gather(const scalar_t* map, Tensor& gradient) {
    const Cut cut(p_.tiles(), padded(p_.R) / 8, 1);
    const int cells = kCenter ? kTilePixels : p_.halo_cells(), depth = problem_.depth_for(cells);
    SAN_LAUNCH_SHARED((relation_kernel<kCenter, kAccurate, scalar_t>), grid_of(p_.tiles() * cut.strips), kTileThreads,
                      problem_.shared_bytes(cells, pitch_of(depth)), problem_.stream(), p_, cut, depth, map,
                      grad_hidden_, correction_, data<scalar_t>(gradient));
  }

  PatchProblem<scalar_t>& problem_;
  const Patchwise<T>& p_;
  bool training_;
  const scalar_t* grad_y_;
  const T* hidden_;
  T *grad_hidden_ = nullptr, *correction_ = nullptr;
};

template <class scalar_t, bool kAccurate>
Backward backward(const Tensor& grad_y, const PatchwiseInputs& in, const Tensor& hidden, int64_t kernel_size,
                  bool training, double eps) {
  PatchProblem<scalar_t> problem(in, kernel_size, training, eps);
  Gradients<scalar_t, kAccurate> grads(problem, problem.space.keep_map(grad_y), problem.space.keep(hidden), training);
  if (problem.sizes.pixels() > 0) {
    problem.set_norm1(in.mean1, in.var1), problem.set_norm2(in.mean2, in.var2);
    grads.values();
    grads.mapping();
    grads.mapping_parameters();
    grads.relation_parameters();
    grads.relation();
  } else {
    grads.zero();
  }
  const auto as = [](const Tensor& x, const Tensor& like) { return contiguous_of(x, like.scalar_type()); };
  return {as(grads.center, in.center),
          as(grads.around, in.around),
          as(grads.beta, in.beta),
          grads.gain1,
          grads.bias1,
          grads.weight1,
          grads.gain2,
          grads.bias2,
          grads.weight2,
          grads.bias3};
}

Backward patchwise_backward(const Tensor& grad_y, const Tensor& center, const Tensor& around, const Tensor& beta,
                            const Tensor& gain1, const Tensor& bias1, const Tensor& weight1, const Tensor& gain2,
                            const Tensor& bias2, const Tensor& weight2, const Tensor& bias3, const Tensor& mean1,
                            const Tensor& var1, const Tensor& mean2, const Tensor& var2, const Tensor& hidden,
                            int64_t kernel_size, bool training, double eps, bool tf32) {
  const PatchwiseInputs in{center, around,  beta,  gain1, bias1, weight1, gain2,
                           bias2,  weight2, bias3, mean1, var1,  mean2,   var2};
  check_patchwise(in, kernel_size);
  check_devices(beta, {&grad_y, &hidden});
  STD_TORCH_CHECK(grad_y.sizes().vec() == beta.sizes().vec(), "grad_y and beta must have the same shape");
  STD_TORCH_CHECK(hidden.numel() == beta.numel() / beta.size(3) * weight1.size(0), "hidden must be [N, H, W, E]");
  const OperatorGuard guard("patchwise_backward", beta);
  std::optional<Backward> result;
  SAN_DISPATCH(map_type(center, around, beta), "patchwise_backward", [&] {
    result = with_precision<scalar_t>(tf32, [&](auto accurate) {
      return backward<scalar_t, accurate>(grad_y, in, hidden, kernel_size, training, eps);
    });
  });
  return *result;
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("patchwise_backward", TORCH_BOX(&san::cuda::patchwise_backward));
}
