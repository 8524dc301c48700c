// attend_patches, forward and backward: the last Linear layer of a patchwise mapping and the aggregation, whose weights
// are never stored; their gradients are, once. Definition: san/ops/fused_reference.py, attend_patches.
//
// A warp computes 16 pixels and 8 weight channels at a time. For each position of the footprint, one product for 8
// hidden channels gives the weights, in registers: a lane holds those of two pixels and two channels, and multiplies
// them with the values of all channels that share them. No atomics are used, and the order of sums depends only on the
// sizes.
#include <array>
#include <tuple>

#include "values.cuh"

namespace san::cuda {
namespace {

constexpr int kMostDepth = 8;  // tiles of hidden channels

// Sizes, maps and parameters for the kernels. Weight and hidden channels are padded with zeros to whole tiles of 8.
template <class F>
struct Attention : Grid, Values {
  int E, e_tiles;
  const float* hidden;  // [pixels + 1, e_tiles * 8], rounded for F; in backward, the last pixel is zeros
  // Right factors: in `weight` [positions][e_tiles][g_tiles], rows are weight channels, in `transposed`
  // [positions][g_tiles][e_tiles], hidden channels.
  const F *weight, *transposed;
  const float* bias;  // [positions, g_tiles * 8]
  const float *beta,
      *grad;  // values: beta with reflected borders, and the gradient of y, which ends in a pixel of zeros

  SAN_HOST_DEVICE int hidden_bytes() const { return e_tiles * 8 * static_cast<int>(sizeof(float)); }
  // The factors and biases of a lane, which lie `weight_step` and `bias_step` apart for adjacent positions.
  __device__ __forceinline__ const F* right_at(int position, int tile, int lane) const {
    return weight + (position * e_tiles * g_tiles + tile) * kWarp + lane;
  }
  __device__ __forceinline__ const float* bias_at(int position, int tile, int column) const {
    return bias + (position * g_tiles + tile) * 8 + column;
  }
  SAN_HOST_DEVICE int weight_step() const { return e_tiles * g_tiles * kWarp; }
  SAN_HOST_DEVICE int bias_step() const { return g_tiles * 8; }
};

// The hidden channels of a lane's two pixels, as left factors.
template <class F, int kDepth>
struct Hidden {
  F above[kDepth], below[kDepth];

  __device__ __forceinline__ Hidden(const Attention<F>& p, int upper, int lower, int column) {
    const float* first = row_at(p.hidden + column, upper, p.hidden_bytes());
    const float* second = row_at(p.hidden + column, lower, p.hidden_bytes());
    SAN_UNROLL
    for (int k = 0; k < kDepth; ++k) {
      const auto a = Pack<2, float>::load(first + 8 * k), b = Pack<2, float>::load(second + 8 * k);
      above[k] = F::of_rounded(a.data[0], a.data[1]), below[k] = F::of_rounded(b.data[0], b.data[1]);
    }
  }

  // The weights of the pixels for a tile of weight channels at a position of the footprint.
  __device__ __forceinline__ void weights(const Attention<F>& p, const F* right, const float* biases,
                                          float (&w)[1][4]) const {
    const auto bias = Pack<2, float>::load(biases);
    w[0][0] = w[0][2] = bias.data[0], w[0][1] = w[0][3] = bias.data[1];
    SAN_UNROLL
    for (int k = 0; k < kDepth; ++k) multiply_all(w, above[k], below[k], right + k * p.g_tiles * kWarp);
  }
};

// The values of the pixel's partner in row `down` of the footprint and in its first column; the next ones follow.
template <class F>
__device__ __forceinline__ const float* row_of(const Attention<F>& p, const float* values, const Pixel<false>& pixel,
                                               int down) {
  return row_at(values, pixel.partners + down * p.padded_width(), p.value_bytes());
}

// y. Each warp of a team sums over some of the positions.
//
// Predicted for SAN10's stage 2 at batch 32 (E = G = 8, 64 value channels, k = 7, 56x56) on an H100, TF32: reads 35 MB,
// writes 26 MB; 0.3 G products by tensor cores, 315 M others; no shared memory, or 8 KB where several warps share
// pixels; 0.02 ms, limited by instruction issue.
template <class F, int kDepth>
__global__ void __launch_bounds__(kTeamThreads, 1) attend_kernel(Attention<F> p, int warps, Floats out) {
  const Team team(warps);
  const int task = blockIdx.x * (kWarps / warps) + team.index, block = task / p.g_tiles,
            tile = task - block * p.g_tiles;
  const Pixel<false> pixels[2] = {{p, int64_t(block) * 16 + team.row}, {p, int64_t(block) * 16 + team.row + 8}};
  const Hidden<F, kDepth> hidden(p, pixels[0].index, pixels[1].index, team.column);
  const float* values = p.beta + p.value_at(tile, team.column);
  float sums[kShares][4] = {};
  for (int down = team.member; down < p.kernel_size; down += warps) {
    const float* rows[2] = {row_of(p, values, pixels[0], down), row_of(p, values, pixels[1], down)};
    const F* right = p.right_at(down * p.kernel_size, tile, team.lane);
    const float* bias = p.bias_at(down * p.kernel_size, tile, team.column);
    SAN_ROLLED
    for (int x = 0; x < p.kernel_size; ++x, right += p.weight_step(), bias += p.bias_step()) {
      float w[1][4];
      hidden.weights(p, right, bias, w);
      add_weighted(w[0], rows, sums);
      rows[0] += p.value_step(), rows[1] += p.value_step();
    }
  }
  if (warps > 1) sum_over_team(team, reinterpret_cast<float*>(shared_memory_base()), sums);
  if (team.member == 0) store_values(p, pixels, tile, team, sums, out);
}

// The gradient of beta on the padded grid, [padded pixels, values()]: each position of the footprint pairs a padded
// pixel with at most one pixel of the map.
//
// Predicted as above: reads 32 MB, writes 32 MB; 1.23 times the products; 0.05 ms, limited by instruction issue.
template <class F, int kDepth>
__global__ void __launch_bounds__(kTeamThreads, 1) attend_around_kernel(Attention<F> p, int warps, Floats out) {
  const Team team(warps);
  const int task = blockIdx.x * (kWarps / warps) + team.index, block = task / p.g_tiles,
            tile = task - block * p.g_tiles;
  const Pixel<true> pixels[2] = {{p, int64_t(block) * 16 + team.row}, {p, int64_t(block) * 16 + team.row + 8}};
  const float* grads = p.grad + p.value_at(tile, team.column);
  const int zeros = static_cast<int>(p.pixels());
  float sums[kShares][4] = {};
  for (int down = team.member; down < p.kernel_size; down += warps) {
    int partners[2], columns[2];  // in column 0 of the footprint; the next ones precede them
    SAN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = pixels[i].y - down;
      const bool is_inside = pixels[i].exists && static_cast<unsigned>(row) < static_cast<unsigned>(p.height);
      columns[i] = is_inside ? pixels[i].x : -1, partners[i] = pixels[i].partners + row * p.width + pixels[i].x;
    }
    const F* right = p.right_at(down * p.kernel_size, tile, team.lane);
    const float* bias = p.bias_at(down * p.kernel_size, tile, team.column);
    SAN_ROLLED
    for (int x = 0; x < p.kernel_size; ++x, right += p.weight_step(), bias += p.bias_step()) {
      bool is_pair[2];
      SAN_UNROLL
      for (int i = 0; i < 2; ++i) {
        is_pair[i] = static_cast<unsigned>(columns[i] - x) < static_cast<unsigned>(p.width);
      }
      if (!__any_sync(~0u, is_pair[0] || is_pair[1])) continue;
      float w[1][4];
      Hidden<F, kDepth>(p, is_pair[0] ? partners[0] - x : zeros, is_pair[1] ? partners[1] - x : zeros, team.column)
          .weights(p, right, bias, w);
      const float* const rows[2] = {row_at(grads, is_pair[0] ? partners[0] - x : zeros, p.value_bytes()),
                                    row_at(grads, is_pair[1] ? partners[1] - x : zeros, p.value_bytes())};
      add_weighted(w[0], rows, sums);
    }
  }
  if (warps > 1) sum_over_team(team, reinterpret_cast<float*>(shared_memory_base()), sums);
  if (team.member == 0) store_values(p, pixels, tile, team, sums, out);
}

// The gradients of the weights, [pixels, positions, G], and of the hidden channels, [pixels, E].
//
// Predicted as above: reads 61 MB, writes 160 MB; 0.3 G products by tensor cores, 315 M others; 0.05 ms, of memory
// bandwidth.
template <class F, int kDepth>
__global__ void __launch_bounds__(kTeamThreads, 1)
    attend_center_kernel(Attention<F> p, int warps, float* weights, float* out) {
  const Team team(warps);
  const int block = blockIdx.x * (kWarps / warps) + team.index;
  const Pixel<false> pixels[2] = {{p, int64_t(block) * 16 + team.row}, {p, int64_t(block) * 16 + team.row + 8}};
  float sums[kDepth][4] = {};
  SAN_ROLLED
  for (int tile = 0; tile < p.g_tiles; ++tile) {
    const int g = tile * 8 + team.column, at = p.value_at(tile, team.column);
    const PixelValues own[2] = {PixelValues(row_at(p.grad + at, pixels[0].index, p.value_bytes())),
                                PixelValues(row_at(p.grad + at, pixels[1].index, p.value_bytes()))};
    float products[kDepth][4] = {};
    for (int down = team.member; down < p.kernel_size; down += warps) {
      const int first = down * p.kernel_size;
      const float* rows[2] = {row_of(p, p.beta + at, pixels[0], down), row_of(p, p.beta + at, pixels[1], down)};
      const F* right = p.transposed + (first * p.g_tiles + tile) * kDepth * kWarp + team.lane;
      float* to[2] = {weights + (int64_t(pixels[0].index) * p.positions() + first) * p.G + g,
                      weights + (int64_t(pixels[1].index) * p.positions() + first) * p.G + g};
      SAN_ROLLED
      for (int x = 0; x < p.kernel_size; ++x, right += p.weight_step()) {
        Pack<2, float> w[2];
        SAN_UNROLL
        for (int i = 0; i < 2; ++i) {
          w[i] = own[i].times(rows[i]);
          if (pixels[i].exists && g < p.G) to[i][0] = w[i].data[0];
          if (pixels[i].exists && g + 1 < p.G) to[i][1] = w[i].data[1];
          rows[i] += p.value_step(), to[i] += p.G;
        }
        multiply_all(products, F(w[0].data[0], w[0].data[1]), F(w[1].data[0], w[1].data[1]), right);
      }
    }
    SAN_UNROLL
    for (int n = 0; n < kDepth * 4; ++n) sums[n / 4][n % 4] += products[n / 4][n % 4];
  }
  if (warps > 1) sum_over_team(team, reinterpret_cast<float*>(shared_memory_base()), sums);
  SAN_UNROLL
  for (int n = 0; n < kDepth * 4; ++n) {
    const Pixel<false>& pixel = pixels[n % 4 / 2];
    const int e = n / 4 * 8 + team.column + n % 2;
    if (team.member == 0 && pixel.exists && e < p.E) out[int64_t(pixel.index) * p.E + e] = sums[n / 4][n % 4];
  }
}

// The weights of the last layer, [G * positions, E], as the right factors of Attention.
template <class F>
struct PackedLayer {
  Attention<F> p;
  Floats weight;
  bool is_transposed;
  int64_t elements;
  F* to;

  __device__ __forceinline__ void write(int64_t index) const {
    pack(index, is_transposed ? p.e_tiles : p.g_tiles, is_transposed ? p.g_tiles : p.e_tiles, to,
         [&](int position, int row, int column) {
           const int g = is_transposed ? column : row, e = is_transposed ? row : column;
           if (g >= p.G || e >= p.E) return 0.0f;
           return static_cast<float>(weight.get((int64_t(g) * p.positions() + position) * p.E + e));
         });
  }
};

template <class F>
struct PackedBias {
  Attention<F> p;
  Floats bias;
  int64_t elements;
  float* to;

  __device__ __forceinline__ void write(int64_t index) const {
    const int position = static_cast<int>(index) / (p.g_tiles * 8),
              g = static_cast<int>(index) - position * p.g_tiles * 8;
    to[index] = g < p.G ? static_cast<float>(bias.get(int64_t(g) * p.positions() + position)) : 0;
  }
};

// The hidden channels [pixels, E] and a column of ones, [pixels, columns], padded with zeros: the product with the
// gradients of the weights gives those of weight and bias.
struct WithOnes {
  const float* from;
  int E, columns;
  int64_t elements;
  float* to;

  __device__ __forceinline__ void write(int64_t index) const {
    const int64_t pixel = index / columns;
    const int c = static_cast<int>(index - pixel * columns);
    to[index] = c < E ? from[pixel * E + c] : c == E ? 1 : 0;
  }
};

// Copies the gradients [positions, G, columns] to those of weight [G * positions, E] and bias.
__global__ void place_layer_kernel(const float* from, int positions, int G, int E, int columns, int64_t elements,
                                   float* weight, float* bias) {
  SAN_FOR_EACH(index, elements) {
    const int row = static_cast<int>(index / (E + 1)), e = static_cast<int>(index - int64_t(row) * (E + 1));
    const int g = row / positions, position = row - g * positions;
    const float value = from[(int64_t(position) * G + g) * columns + e];
    if (e < E) {
      weight[int64_t(row) * E + e] = value;
    } else {
      bias[row] = value;
    }
  }
}

// Calls run with the number of tiles of hidden channels.
template <class Run>
void with_depth(int e_tiles, const Run& run) {
  with_constant<1, 2, 4, kMostDepth>(e_tiles, run);
}

struct Inputs {
  Tensor hidden, weight, bias, beta;
};

// One call: the inputs, and the jobs that prepare them.
template <class F>
class AttentionWork : public Workspace {
 public:
  const Footprint f;
  Attention<F> p{};
  PaddedMap<F> hidden;
  PaddedVector zeros;  // behind them
  PackedLayer<F> weight, transposed;
  PackedBias<F> bias;
  ValueMap beta;

  AttentionWork(const Inputs& x, const Footprint& f, bool is_backward) : Workspace(x.hidden), f(f) {
    static_cast<Grid&>(p) = grid_of(x.beta, f);
    const int64_t G = x.weight.size(0) / f.positions();
    static_cast<Values&>(p) = values_of(x.beta, G, tiles_for(G));
    p.E = static_cast<int>(x.hidden.size(3)), p.e_tiles = 1;
    while (p.e_tiles * 8 < p.E) p.e_tiles *= 2;
    // Indices of the padded weights must fit into 32 bits.
    const int64_t tiles = int64_t(p.positions()) * p.e_tiles * p.g_tiles * kWarp;
    STD_TORCH_CHECK(tiles < int64_t(1) << 30, "a last layer of [", x.weight.size(0), ", ", p.E, "] is too large");
    const int64_t hidden_size = p.pixels() * p.e_tiles * 8;
    float* to_hidden = take(hidden_size + p.e_tiles * 8);
    hidden = {keep_float(x.hidden), {1, f.height, f.width}, p.E, p.e_tiles, p.pixels() * p.e_tiles, to_hidden, {}};
    zeros = {nullptr, 0, p.e_tiles * 8, to_hidden + hidden_size};
    p.hidden = to_hidden;
    weight = {p, keep(x.weight), false, tiles, take<F>(tiles)}, p.weight = weight.to;
    if (is_backward) {
      transposed = {p, keep(x.weight), true, tiles, take<F>(tiles)};
      p.transposed = transposed.to;
    }
    const int64_t biases = int64_t(p.positions()) * p.g_tiles * 8;
    bias = {p, keep(x.bias), biases, take(biases)}, p.bias = bias.to;
    beta = ValueMap(*this, x.beta, f, p, 0), p.beta = beta.to;
  }

  // Calls launch(warps, blocks, bytes of shared memory) for `tasks` teams that sum `sums` values per lane.
  template <class Launch>
  void with_teams(int64_t tasks, int sums, const Launch& launch) const {
    const int warps = warps_per_team(tasks, p.kernel_size);
    launch(warps, blocks_of_teams(tasks, warps), warps > 1 ? bytes_of_team_sums(sums) : 0);
  }
};

template <class F>
void forward(AttentionWork<F>& work, const Tensor& y) {
  const Attention<F>& p = work.p;
  prepare(work.stream(), work.hidden, work.weight, work.bias, work.beta);
  with_depth(p.e_tiles, [&]<int kDepth>(Int<kDepth>) {
    work.with_teams((p.pixels() + 15) / 16 * p.g_tiles, kShares * 4, [&](int warps, int blocks, size_t bytes) {
      SAN_LAUNCH_SHARED((attend_kernel<F, kDepth>), blocks, kTeamThreads, bytes, work.stream(), p, warps, Floats(y));
    });
  });
}

// out = a b. torch's matmul would compute in half types inside an autocast block; variants with `out` never do.
void matmul_to(const Tensor& a, const Tensor& b, const Tensor& out) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(a), from(b), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  (void)torch::stable::detail::to<Tensor>(stack[0]);  // owns a handle
}

template <class F>
void backward(AttentionWork<F>& work, const Tensor& grad, Inputs& out) {
  Attention<F>& p = work.p;
  const ValueMap grads(work, grad, {1, work.f.height, work.f.width}, p, 1);
  p.grad = grads.to;
  const int columns = p.e_tiles * 8 + 8, rows = p.positions() * p.G;
  Tensor ones = work.empty({p.pixels(), columns}), weights = work.empty({p.pixels(), rows});
  const WithOnes with_ones{work.hidden.from, p.E, columns, p.pixels() * columns, ones.mutable_data_ptr<float>()};
  prepare(work.stream(), work.hidden, work.weight, work.bias, work.beta);
  prepare(work.stream(), work.transposed, work.zeros, grads, with_ones);
  float* padded = work.take(p.padded_pixels() * p.values());
  with_depth(p.e_tiles, [&]<int kDepth>(Int<kDepth>) {
    work.with_teams((p.padded_pixels() + 15) / 16 * p.g_tiles, kShares * 4, [&](int warps, int blocks, size_t bytes) {
      SAN_LAUNCH_SHARED((attend_around_kernel<F, kDepth>), blocks, kTeamThreads, bytes, work.stream(), p, warps,
                        Floats(padded));
    });
    work.with_teams((p.pixels() + 15) / 16, kDepth * 4, [&](int warps, int blocks, size_t bytes) {
      SAN_LAUNCH_SHARED((attend_center_kernel<F, kDepth>), blocks, kTeamThreads, bytes, work.stream(), p, warps,
                        weights.mutable_data_ptr<float>(), out.hidden.mutable_data_ptr<float>());
    });
  });
  fold_map(work.stream(), padded, work.f, p.values(), out.beta);
  const Tensor layer = work.empty({rows, columns});
  matmul_to(torch::stable::transpose(weights, 0, 1), ones, layer);
  const int64_t elements = int64_t(rows) * (p.E + 1);
  SAN_LAUNCH(place_layer_kernel, blocks_for(elements), kThreads, work.stream(), layer.const_data_ptr<float>(),
             p.positions(), p.G, p.E, columns, elements, out.weight.mutable_data_ptr<float>(),
             out.bias.mutable_data_ptr<float>());
}

Footprint check_inputs(const Inputs& x, int64_t kernel_size) {
  const Footprint f = check_last_layer(x.hidden, x.weight, x.bias, kernel_size);
  check_float32(x.hidden);
  STD_TORCH_CHECK(x.hidden.size(3) <= 8 * kMostDepth, "on GPUs, attend_patches needs at most ", 8 * kMostDepth,
                  " hidden channels, not ", x.hidden.size(3));
  return f;
}

Tensor attend_patches(const Tensor& hidden, const Tensor& weight, const Tensor& bias, const Tensor& beta,
                      int64_t kernel_size, bool tf32) {
  const Footprint f = check_inputs({hidden, weight, bias, beta}, kernel_size);
  check_values({&beta}, hidden, weight.size(0) / f.positions());
  const OperatorGuard guard("attend_patches", hidden);
  Tensor y = torch::stable::new_empty(beta, beta.sizes());
  if (y.numel() == 0) return y;
  with_operand(beta.scalar_type(), tf32, [&]<class F>(F) {
    AttentionWork<F> work({hidden, weight, bias, beta}, f, false);
    forward(work, y);
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attend_patches_backward(const Tensor& grad, const Tensor& hidden,
                                                                   const Tensor& weight, const Tensor& bias,
                                                                   const Tensor& beta, int64_t kernel_size, bool tf32) {
  const Footprint f = check_inputs({hidden, weight, bias, beta}, kernel_size);
  check_values({&beta, &grad}, hidden, weight.size(0) / f.positions());
  const OperatorGuard guard("attend_patches_backward", hidden);
  const auto result = [&](const Tensor& x) { return result_like(x, beta); };
  Inputs out{result(hidden), result(weight), result(bias), result(beta)};
  if (beta.numel() > 0) {
    with_operand(beta.scalar_type(), tf32, [&]<class F>(F) {
      AttentionWork<F> work({hidden, weight, bias, beta}, f, true);
      backward(work, grad, out);
    });
  }
  return {out.hidden, out.weight, out.bias, out.beta};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("attend_patches", TORCH_BOX(&san::cuda::attend_patches));
  m.impl("attend_patches_backward", TORCH_BOX(&san::cuda::attend_patches_backward));
}
