// The sums over a footprint that the weights of fused patchwise attention enter: y, and the gradient of beta. Weights
// are computed for one position at a time and used up in registers.
#pragma once
#include "patchwise_problem.cuh"

namespace san::cuda {
namespace {

// Two neighbouring value channels of a pixel, whose weights are `column` and `column + 1`.
template <class scalar_t, class T>
__device__ __forceinline__ Pack<2, T> load_two(const Patchwise<T>& p, const scalar_t* values, int column) {
  if (column >= p.G) return {};
  if (p.G % 2 == 0) {
    const auto two = Pack<2, scalar_t>::load(values);
    return {static_cast<T>(two.data[0]), static_cast<T>(two.data[1])};
  }
  return {static_cast<T>(values[0]), column + 1 < p.G ? static_cast<T>(values[1]) : T(0)};
}

// Forward: y_i = sum_j w_ij beta_j, of `values` = beta. Else the gradient of beta_j = sum_i w_ij grad_y_i, of `values`
// = grad_y. A block takes a tile, 8 weight channels and kShares value channels of each; `depth` of the E hidden
// channels lie in shared memory at once.
template <bool kForward, bool kAccurate, class scalar_t, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T>)
    aggregate_kernel(Patchwise<T> p, int depth, const T* hidden, const scalar_t* values, scalar_t* out) {
  T* active = reinterpret_cast<T*>(shared_memory_base());  // [cells, pitch_of(depth)]
  const Lane lane;
  const int reach = kForward ? 0 : p.reach(), side = kSide + 2 * reach;
  const int blocks_of_weights = padded(p.G) / 8, blocks_of_shares = (p.share() + kShares - 1) / kShares;
  const int64_t tasks = p.tiles() * blocks_of_weights * blocks_of_shares;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const PatchTile tile = p.tile(task / blocks_of_shares / blocks_of_weights);
    const int g = static_cast<int>(task / blocks_of_shares % blocks_of_weights) * 8;
    const int share = static_cast<int>(task % blocks_of_shares) * kShares;
    const int shares = p.share() - share < kShares ? p.share() - share : kShares;
    const int h = 2 * lane.warp, w = lane.g, column = g + 2 * lane.t;
    const Places own = tile.own(h, w);
    const scalar_t* image = values + tile.image * p.M + share * p.G + column;
    T sums[kShares][4] = {};
    for (int first = 0; first < p.E; first += depth) {
      __syncthreads();
      load_hidden(p, hidden, tile, reach, first, depth, active, [&](T u, int e) { return activate(p, u, e); });
      __syncthreads();
      // Adds the products of the weights of the pixels in two cells and `values` at two places, unless that is -1.
      const auto add = [&](int position, const Places& cells, const Places& seen) {
        T weights[1][4] = {};
        if (first == 0) {
          const auto bias = Pack<2, T>::load(p.bias3 + position * padded(p.G) + column);
          weights[0][0] = weights[0][2] = bias.data[0], weights[0][1] = weights[0][3] = bias.data[1];
        }
        const T* weight2 = p.weight2 + (position * padded(p.G) + g + lane.g) * padded(p.E) + first + 2 * lane.t;
        const int pitch = pitch_of(depth), used = padded(p.E) - first < depth ? padded(p.E) - first : depth;
        add_product<kAccurate>(
            active + cells.upper * pitch + 2 * lane.t, active + cells.lower * pitch + 2 * lane.t, used, 1,
            [&](int, int k) { return Pack<2, T>::load(weight2 + k); }, weights);
        SAN_UNROLL
        for (int s = 0; s < kShares; ++s) {
          if (s >= shares) break;
          const scalar_t* channel = image + s * p.G;
          if (seen.upper >= 0) {
            const Pack<2, T> two = load_two(p, channel + int64_t(seen.upper) * p.M, column);
            sums[s][0] += weights[0][0] * two.data[0], sums[s][1] += weights[0][1] * two.data[1];
          }
          if (seen.lower >= 0) {
            const Pack<2, T> two = load_two(p, channel + int64_t(seen.lower) * p.M, column);
            sums[s][2] += weights[0][2] * two.data[0], sums[s][3] += weights[0][3] * two.data[1];
          }
        }
      };
      if constexpr (kForward) {
        for (int position = 0; position < p.positions() && tile.top + h < tile.height; ++position) {
          add(position, {h * side + w, (h + 1) * side + w}, tile.seen(own, h, w, position, p.kernel_size()));
        }
      } else {
        for_each_way(p, tile, tile.top + h, [&](int position, const Line& rows, const Line& columns) {
          const int q = tile.top + h, from_w = columns.at(tile.left + w);
          const bool sees = columns.has(tile.left + w), sees_upper = sees && rows.has(q);
          const bool sees_lower = sees && rows.has(q + 1);
          const auto cell = [&](int from_h) { return (from_h - tile.top + reach) * side + from_w - tile.left + reach; };
          add(position, {sees_upper ? cell(rows.at(q)) : 0, sees_lower ? cell(rows.at(q + 1)) : 0},
              {sees_upper ? tile.place(rows.at(q), from_w) : -1, sees_lower ? tile.place(rows.at(q + 1), from_w) : -1});
        });
      }
    }
    SAN_UNROLL
    for (int s = 0; s < kShares; ++s) {
      if (s >= shares) break;
      SAN_UNROLL
      for (int n = 0; n < 2; ++n) {
        if (column + n >= p.G) break;
        const int channel = (share + s) * p.G + column + n;
        if (own.upper >= 0) out[(tile.image + own.upper) * p.M + channel] = static_cast<scalar_t>(sums[s][n]);
        if (own.lower >= 0) out[(tile.image + own.lower) * p.M + channel] = static_cast<scalar_t>(sums[s][2 + n]);
      }
    }
  }
}

template <bool kForward, bool kAccurate, class scalar_t, class T = accumulate_t<scalar_t>>
void aggregate(const PatchProblem<scalar_t>& problem, const T* hidden, const scalar_t* values, scalar_t* out) {
  const Patchwise<T>& p = problem.sizes;
  const int cells = kForward ? kTilePixels : p.halo_cells(), depth = problem.depth_for(cells);
  const int64_t tasks = p.tiles() * (padded(p.G) / 8) * ((p.share() + kShares - 1) / kShares);
  SAN_LAUNCH_SHARED((aggregate_kernel<kForward, kAccurate, scalar_t>), grid_of(tasks), kTileThreads,
                    problem.shared_bytes(cells, pitch_of(depth)), problem.stream(), p, depth, hidden, values, out);
}

}  // namespace
}  // namespace san::cuda
