// aggregation and dot, forward and backward. Definition: san/ops/reference.py.
//
// Each is the other's derivative, so both need the same two kernels. In `weighted_sum`, a thread computes one pixel and
// channel: it sums over the pixel's footprint or, for a gradient, over all pixels whose footprints contain it. In
// `correlate`, a thread computes the weights of one footprint row: it sums over the channels that share a weight. There
// are no atomics. Tensors may have any strides. If channels are contiguous, a thread computes 2 or 4 adjacent channels.
#include <tuple>

#include "mma.cuh"
#include "window.cuh"

namespace san::cuda {
namespace {

// Strides of a map [N, C, H, W] or of weights [N, G, K, P]. `with_pixel_stride` ensures that the pixels of a map have a
// single stride.
struct Strides {
  int64_t image;
  int channel, position, pixel;

  explicit Strides(const Tensor& x) : image(x.stride(0)) {
    int64_t span = 0;
    for (int axis = 1; axis < 4; ++axis) span += (x.size(axis) - 1) * x.stride(axis);
    STD_TORCH_CHECK(span < int64_t(1) << 31, "an image's tensor of shape [", x.size(1), ", ", x.size(2), ", ",
                    x.size(3), "] is too large: it must span fewer than 2^31 elements");
    const auto stride = [&](int axis) { return static_cast<int>(x.stride(axis)); };
    channel = stride(1), position = stride(2), pixel = stride(x.size(3) > 1 ? 3 : 2);
  }

  // Whether one load can read `width` aligned channels.
  template <class scalar_t>
  bool is_wide(int width, const scalar_t* data) const {
    return channel == 1 && reinterpret_cast<uintptr_t>(data) % (width * sizeof(scalar_t)) == 0 && image % width == 0 &&
           position % width == 0 && pixel % width == 0;
  }
};

constexpr int kResident = 2;  // blocks per SM; the compiler would spill registers for more

struct Sizes {
  Window f;
  int C, G;
};

// The image, the pixel and the first channel of a thread. Adjacent threads have adjacent channels if channels are
// contiguous, otherwise adjacent pixels.
struct Place {
  int64_t n;
  int i, h, w, c;

  __device__ __forceinline__ Place(const Window& f, unsigned thread, unsigned packs, bool channels_are_fastest) {
    const unsigned pixels = f.pixels(), image = thread / (pixels * packs), rest = thread - image * pixels * packs;
    const unsigned fast = channels_are_fastest ? packs : pixels, slow = rest / fast, within = rest - slow * fast;
    n = image, i = channels_are_fastest ? slow : within, c = channels_are_fastest ? within : slow;
    h = static_cast<unsigned>(i) / static_cast<unsigned>(f.width), w = i - h * f.width;
  }
};

template <int kWidth, class scalar_t, class T = accumulate_t<scalar_t>>
__device__ __forceinline__ void add_products(const Pack<kWidth, scalar_t>& a, const scalar_t* from, T (&sums)[kWidth]) {
  const auto b = Pack<kWidth, scalar_t>::load(from);
  SAN_UNROLL
  for (int v = 0; v < kWidth; ++v) sums[v] += static_cast<T>(a.data[v]) * static_cast<T>(b.data[v]);
}

template <int kWidth, class scalar_t, class T = accumulate_t<scalar_t>>
__device__ __forceinline__ void store_sums(const T (&sums)[kWidth], scalar_t* to) {
  Pack<kWidth, scalar_t> rounded;
  SAN_UNROLL
  for (int v = 0; v < kWidth; ++v) rounded.data[v] = static_cast<scalar_t>(sums[v]);
  rounded.store(to);
}

// out[c, i] = sum_o weight[c % G, o, i] * map[c, i + o], or, with kGather, for pixel j the sum of weight[c % G, o, i] *
// map[c, i] over all (o, i) for which position o of pixel i is j. A thread computes kWidth channels.
//
// Predicted for SAN10's stage 2 at batch 32 (64 channels, 8 weight channels, 56x56, k = 7, float32) on an H100: reads
// 26 MB of the map and 157 MB of weights, writes 26 MB; 315 M products; no shared memory; 0.07 ms, of memory bandwidth.
// A version with two groups of channels for a thread took 0.15 ms on an H200, and 0.24 ms with kGather; this one is
// not measured.
template <bool kGather, int kWidth, class scalar_t>
__global__ void __launch_bounds__(kThreads, kResident)
    weighted_sum_kernel(const scalar_t* map, Strides in, const scalar_t* weight, Strides at, Sizes sizes,
                        unsigned threads, scalar_t* out, Strides to) {
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= threads) return;
  const Place own(sizes.f, thread, sizes.C / kWidth, in.channel == 1);
  const int c = own.c * kWidth;
  const scalar_t* values = map + own.n * in.image + c * in.channel;
  const scalar_t* weights = weight + own.n * at.image + c % sizes.G * at.channel + (kGather ? 0 : own.i * at.pixel);
  accumulate_t<scalar_t> sums[kWidth] = {};
  const auto add = [&](int o, int other) {
    const auto factors = Pack<kWidth, scalar_t>::load(weights + o * at.position + (kGather ? other * at.pixel : 0));
    add_products(factors, values + other * in.pixel, sums);
  };
  if constexpr (kGather) {
    for_each_reader(sizes.f, own.h, own.w, add);
  } else {
    for_each_neighbour(sizes.f, own.h, own.w, add);
  }
  store_sums(sums, out + own.n * to.image + c * to.channel + own.i * to.pixel);
}

// out[g, o, i] = sum over the channels c of group g of center[c, i] * around[c, i + o].
//
// Predicted for SAN10's stage 2 as above: reads 26 MB of center and of around, writes 157 MB of weights; 315 M
// products; no shared memory; 0.07 ms, of memory bandwidth. A version with eight channels of center in registers took
// 0.19 ms on an H200; this one is not measured.
template <int kWidth, class scalar_t>
__global__ void __launch_bounds__(kThreads)
    correlate_kernel(const scalar_t* center, Strides from, const scalar_t* around, Strides in, Sizes sizes,
                     unsigned threads, scalar_t* out, Strides to) {
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= threads) return;
  const Window& f = sizes.f;
  const int packs = sizes.G / kWidth, shares = sizes.C / sizes.G;
  const Place own(f, thread, packs * f.kernel_size, to.channel == 1 && to.pixel != 1);
  // Place's channels are [rows of the footprint, packs of channels].
  const int dh = own.c / packs, g = (own.c - dh * packs) * kWidth;
  const scalar_t* centers = center + own.n * from.image + g * from.channel + own.i * from.pixel;
  const scalar_t* values = around + own.n * in.image + g * in.channel;
  const int from_step = sizes.G * from.channel, in_step = sizes.G * in.channel;
  const int row = reflect_int(own.h + dh - f.reach(), f.height) * f.width;
  scalar_t* result = out + own.n * to.image + g * to.channel + dh * f.kernel_size * to.position + own.i * to.pixel;
  for (int dw = -f.reach(); dw <= f.reach(); ++dw, result += to.position) {
    const scalar_t* seen = values + (row + reflect_int(own.w + dw, f.width)) * in.pixel;
    accumulate_t<scalar_t> sums[kWidth] = {};
    for (int s = 0; s < shares; ++s) {
      add_products(Pack<kWidth, scalar_t>::load(centers + s * from_step), seen + s * in_step, sums);
    }
    store_sums(sums, result);
  }
}

// Calls run with the largest number of adjacent channels that `fits` allows.
template <class Fits, class Run>
void with_width(const Fits& fits, const Run& run) {
  if (fits(4)) return run(Int<4>());
  if (fits(2)) return run(Int<2>());
  run(Int<1>());
}

Sizes sizes_of(const Tensor& map, const Footprint& f, int64_t groups) {
  constexpr int64_t kMost = int64_t(1) << 31;
  STD_TORCH_CHECK(map.size(1) < kMost, map.size(1), " channels are too many");
  return {Window(f), static_cast<int>(map.size(1)), static_cast<int>(groups)};
}

// x, or a copy in which all pixels of an image have a single stride.
Tensor with_pixel_stride(const Tensor& x) {
  const bool has_one = x.size(2) <= 1 || x.size(3) <= 1 || x.stride(2) == x.size(3) * x.stride(3);
  return has_one ? x : torch::stable::contiguous(x);
}

// An empty map that is channels-last if `like` is, otherwise contiguous; san/ops/library.py promises this to
// torch.compile.
Tensor empty_map(const Tensor& like) {
  const int64_t N = like.size(0), C = like.size(1), H = like.size(2), W = like.size(3);
  if (!is_channels_last(like)) return torch::stable::new_empty(like, {N, C, H, W});
  const Tensor x_NHWC = torch::stable::new_empty(like, {N, H, W, C});
  return torch::stable::transpose(torch::stable::transpose(x_NHWC, 2, 3), 1, 2);
}

// x in channels-last format if `like` has contiguous channels, otherwise contiguous.
Tensor in_format_of(const Tensor& like, const Tensor& x) {
  using torch::headeronly::MemoryFormat;
  return torch::stable::contiguous(x, like.stride(1) == 1 ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
}

// Writes the weighted sums of a map; see weighted_sum_kernel.
template <class scalar_t, bool kGather>
void launch_weighted_sum(const Tensor& map, const Tensor& weight, const Sizes& sizes, Tensor& out) {
  const Strides in(map), at(weight), to(out);
  const scalar_t *values = map.const_data_ptr<scalar_t>(), *weights = weight.const_data_ptr<scalar_t>();
  scalar_t* result = out.mutable_data_ptr<scalar_t>();
  const auto run = [&]<int kWidth>(Int<kWidth>) {
    const int64_t threads = map.size(0) * (sizes.C / kWidth) * sizes.f.pixels();
    SAN_LAUNCH((weighted_sum_kernel<kGather, kWidth, scalar_t>), grid_for(threads), kThreads, current_stream(map),
               values, in, weights, at, sizes, static_cast<unsigned>(threads), result, to);
  };
  const auto fits = [&](int width) {
    return sizes.G % width == 0 && in.is_wide(width, values) && at.is_wide(width, weights) && to.is_wide(width, result);
  };
  with_width(fits, run);
}

// Writes out [N, G, K, P]; see correlate_kernel.
template <class scalar_t>
void launch_correlation(const Tensor& center, const Tensor& around, const Sizes& sizes, Tensor& out) {
  const Strides from(center), in(around), to(out);
  const scalar_t *centers = center.const_data_ptr<scalar_t>(), *values = around.const_data_ptr<scalar_t>();
  scalar_t* result = out.mutable_data_ptr<scalar_t>();
  const auto run = [&]<int kWidth>(Int<kWidth>) {
    const int64_t threads = center.size(0) * (sizes.G / kWidth) * sizes.f.kernel_size * sizes.f.pixels();
    SAN_LAUNCH((correlate_kernel<kWidth, scalar_t>), grid_for(threads), kThreads, current_stream(center), centers, from,
               values, in, sizes, static_cast<unsigned>(threads), result, to);
  };
  const auto fits = [&](int width) {
    return sizes.G % width == 0 && from.is_wide(width, centers) && in.is_wide(width, values) &&
           to.is_wide(width, result);
  };
  with_width(fits, run);
}

}  // namespace

Tensor aggregation(const Tensor& beta, const Tensor& weight, int64_t kernel_size) {
  const Footprint f = check_aggregation(beta, weight, kernel_size);
  const OperatorGuard guard("aggregation", beta);
  const Tensor values = with_pixel_stride(beta);
  Tensor out = empty_map(beta);
  if (out.numel() == 0) return out;
  SAN_DISPATCH(beta.scalar_type(), "aggregation",
               [&] { launch_weighted_sum<scalar_t, false>(values, weight, sizes_of(values, f, weight.size(1)), out); });
  return out;
}

std::tuple<Tensor, Tensor> aggregation_backward(const Tensor& grad, const Tensor& beta, const Tensor& weight,
                                                int64_t kernel_size) {
  const Footprint f = check_aggregation(beta, weight, kernel_size);
  check_alike(grad, beta, "grad and beta");
  const OperatorGuard guard("aggregation_backward", beta);
  const Tensor values = with_pixel_stride(beta), grads = in_format_of(values, grad);
  Tensor grad_beta = empty_map(beta);
  Tensor grad_weight = torch::stable::empty_like(weight);
  if (grad_beta.numel() == 0) return {grad_beta, grad_weight};
  SAN_DISPATCH(beta.scalar_type(), "aggregation_backward", [&] {
    const Sizes sizes = sizes_of(values, f, weight.size(1));
    launch_correlation<scalar_t>(grads, values, sizes, grad_weight);
    launch_weighted_sum<scalar_t, true>(grads, weight, sizes, grad_beta);
  });
  return {grad_beta, grad_weight};
}

Tensor dot(const Tensor& phi, const Tensor& psi, int64_t kernel_size, int64_t groups) {
  const Footprint f = check_dot(phi, psi, kernel_size, groups);
  const OperatorGuard guard("dot", phi);
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  Tensor out = torch::stable::new_empty(phi, {phi.size(0), groups, f.positions(), f.pixels()});
  if (out.numel() == 0) return out;
  SAN_DISPATCH(phi.scalar_type(), "dot",
               [&] { launch_correlation<scalar_t>(left, right, sizes_of(left, f, groups), out); });
  return out;
}

std::tuple<Tensor, Tensor> dot_backward(const Tensor& grad, const Tensor& phi, const Tensor& psi, int64_t kernel_size) {
  const Footprint f = check_aggregation(psi, grad, kernel_size);
  check_dot(phi, psi, kernel_size, grad.size(1));
  const OperatorGuard guard("dot_backward", phi);
  const Tensor left = torch::stable::contiguous(phi), right = torch::stable::contiguous(psi);
  Tensor grad_phi = torch::stable::empty_like(left), grad_psi = torch::stable::empty_like(right);
  if (grad_phi.numel() == 0) return {grad_phi, grad_psi};
  SAN_DISPATCH(phi.scalar_type(), "dot_backward", [&] {
    const Sizes sizes = sizes_of(left, f, grad.size(1));
    launch_weighted_sum<scalar_t, false>(right, grad, sizes, grad_phi);
    launch_weighted_sum<scalar_t, true>(left, grad, sizes, grad_psi);
  });
  return {grad_phi, grad_psi};
}

}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("aggregation", TORCH_BOX(&san::cuda::aggregation));
  m.impl("aggregation_backward", TORCH_BOX(&san::cuda::aggregation_backward));
  m.impl("dot", TORCH_BOX(&san::cuda::dot));
  m.impl("dot_backward", TORCH_BOX(&san::cuda::dot_backward));
}
