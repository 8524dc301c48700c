// Fused patchwise attention, forward and backward. Definition: san/nn/attention.py; the tiles: simd/patchwise.cpp.
//
// A patch has K + 1 pieces of R channels: psi at each position of the footprint and, last, phi of the pixel itself.
// BatchNorm has statistics of its own for each channel of each piece. The hidden map u is small (E channels a pixel)
// and kept; patches and weights, which have K times more, are not.
#include <array>
#include <cmath>

#include "fused.h"
#include "maps.h"

namespace san::cpu {
namespace {

struct Inputs {
  const Tensor &center, &around, &beta, &gain1, &bias1, &weight1, &gain2, &bias2, &weight2, &bias3;
};

template <class T>
__attribute__((always_inline)) inline void add_square(const T* SAN_RESTRICT x, int64_t channels,
                                                      double* SAN_RESTRICT to) {
  for (int64_t c = 0; c < channels; ++c) {
    const double value = x[c];
    to[c] += value, to[channels + c] += value * value;
  }
}

// Adds to sums [K, 2, channels] those of x and x^2 over what each position of the footprint shows of a map [H, W,
// channels]. Columns inside are shown once by each offset, so they are summed once for all. `row` has room for [2, 2,
// channels].
template <class T>
SAN_VECTOR void shifted_sums(const T* SAN_RESTRICT map, const Footprint& f, int64_t channels, double* SAN_RESTRICT row,
                             double* SAN_RESTRICT sums) {
  const int64_t k = f.kernel_size, reach = f.reach(), width = f.width;
  double *inside = row, *seen = row + 2 * channels;
  for (int64_t h = 0; h < f.height; ++h, map += width * channels) {
    std::fill(inside, inside + 2 * channels, 0.0);
    for (int64_t w = reach + 1; is_inside(w, width, reach); ++w) add_square(map + w * channels, channels, inside);
    for (int64_t x = 0; x < k; ++x) {
      std::copy_n(inside, 2 * channels, seen);
      for (int64_t w = 0; w < width; ++w) {
        const int64_t shown = reflect(w + x - reach, width);
        if (is_inside(shown, width, reach))
          w = width - 2 - x;  // the last that shows a column inside
        else
          add_square(map + shown * channels, channels, seen);
      }
      for_each_view(h, f.height, k, [&](int64_t y) {
        double* sum = sums + (y * k + x) * 2 * channels;
        for (int64_t c = 0; c < 2 * channels; ++c) sum[c] += seen[c];
      });
    }
  }
}

// The BatchNorm between u and a2, which has a value per pixel and hidden channel: a2 = relu(scale * u + shift).
template <class T>
struct HiddenNorm {
  std::vector<T> mean, deviation, scale, shift;  // [E]; 1 / deviation is the standard deviation

  HiddenNorm(const Tensor& gain, const Tensor& bias, const T* mean, const T* var, int64_t E, double eps)
      : mean(mean, mean + E), deviation(E), scale(E), shift(E) {
    for (int64_t e = 0; e < E; ++e) {
      const double r = 1 / std::sqrt(var[e] + eps), slope = r * values<T>(gain)[e];
      deviation[e] = static_cast<T>(r), scale[e] = static_cast<T>(slope);
      shift[e] = static_cast<T>(values<T>(bias)[e] - slope * mean[e]);
    }
  }

  // a2 [N * P, pitch] of u [N * P, E].
  std::vector<T> activated(const T* u, int64_t N, int64_t P, int64_t pitch) const {
    const int64_t E = scale.size();
    std::vector<T> a2(N * P * pitch);
    for_each_task<T>(N, 0, [&](int64_t n, T*) {
      activate(u + n * P * E, P, E, scale.data(), shift.data(), a2.data() + n * P * pitch, pitch);
    });
    return a2;
  }
};

// Sets g to 0 where a2 is, and adds g and g * (u - mean) to the sums [E].
template <class T>
SAN_VECTOR void sum_hidden(T* SAN_RESTRICT g, const T* SAN_RESTRICT a2, int64_t pitch, const T* SAN_RESTRICT u,
                           const T* SAN_RESTRICT mean, const Footprint& f, int64_t E, T* SAN_RESTRICT row,
                           double* SAN_RESTRICT sum, double* SAN_RESTRICT product) {
  for (int64_t h = 0; h < f.height; ++h) {
    std::fill(row, row + 2 * E, T(0));
    for (int64_t w = 0; w < f.width; ++w, g += pitch, a2 += pitch, u += E)
      for (int64_t e = 0; e < E; ++e) {
        g[e] = a2[e] > T(0) ? g[e] : T(0);
        row[e] += g[e], row[E + e] += g[e] * (u[e] - mean[e]);
      }
    for (int64_t e = 0; e < E; ++e) sum[e] += row[e], product[e] += row[E + e];
  }
}

// g = scale * (g - offset - (u - mean) * tilt).
template <class T>
SAN_VECTOR void finish_hidden(T* SAN_RESTRICT g, int64_t pitch, const T* SAN_RESTRICT u, const T* SAN_RESTRICT mean,
                              int64_t pixels, int64_t E, const T* SAN_RESTRICT scale, const T* SAN_RESTRICT offset,
                              const T* SAN_RESTRICT tilt) {
  for (int64_t i = 0; i < pixels; ++i, g += pitch, u += E)
    for (int64_t e = 0; e < E; ++e) g[e] = scale[e] * (g[e] - offset[e] - (u[e] - mean[e]) * tilt[e]);
}

// What forward and backward both start from. `piece * R + c` counts the channels of a patch; those of module and
// parameters are ordered otherwise (`channel_of`).
template <class T>
class Problem {
 public:
  Problem(const Inputs& in, int64_t kernel_size, double eps, const T* given_mean, bool training)
      : f(footprint_of(in.around.size(1), in.around.size(2), kernel_size)),
        N(in.around.size(0)),
        P(f.pixels()),
        K(f.positions()),
        R(in.around.size(3)),
        C(in.center.size(3)),
        E(in.weight1.size(0)),
        G(in.weight2.size(0) / f.positions()),
        M(in.beta.size(3)),
        pieces(K + (C > 0 ? 1 : 0)),
        pixels(double(N) * P),
        eps(eps),
        tile(patchwise_tiles<T>(in.weight1.size(0), in.around.size(2))),
        mean(given_mean, given_mean + pieces * R) {
    const int64_t repeated = repeated_weights(G, tile.lanes);
    p.footprint = f, p.relation = R, p.center = C;
    p.pitch = round_up(R, tile.lanes), p.hidden = round_up(E, tile.lanes);
    p.weights = repeated, p.values = round_up(M, repeated);
    for (const Band& band : bands_of(N, f, f.kernel_size)) p.band_rows = std::max(p.band_rows, band.last - band.first);
    center_c = centred(in.center, C, K, center_middle, training);
    around_c = centred(in.around, R, K / 2, around_middle, training);
  }

  // Where a piece's channel stands among the parameters: the center first, then each channel's K positions.
  int64_t channel_of(int64_t piece, int64_t c) const { return piece == K ? c : C + c * K + piece; }

  // Less what `centred` took off.
  double middle(int64_t piece, int64_t c) const { return piece == K ? center_middle[c] : around_middle[c]; }

  void patch_statistics(std::vector<T>& mean_out, std::vector<T>& var_out) {
    std::vector<double> sums(N * pieces * 2 * p.pitch);
    for_each_task<double>(N, 4 * p.pitch, [&](int64_t n, double* row) {
      double* sum = sums.data() + n * pieces * 2 * p.pitch;
      shifted_sums(around_c.data() + n * P * p.pitch, f, p.pitch, row, sum);
      if (C > 0)
        shifted_sums(center_c.data() + n * P * p.pitch, Footprint{1, f.height, f.width}, p.pitch, row,
                     sum + K * 2 * p.pitch);
    });
    const std::vector<double> sum = sum_over_tasks(sums, pieces * 2 * p.pitch);
    for (int64_t piece = 0; piece < pieces; ++piece)
      for (int64_t c = 0; c < R; ++c) {
        const double* s = sum.data() + piece * 2 * p.pitch + c;
        const double first = s[0] / pixels, second = s[p.pitch] / pixels;
        mean[channel_of(piece, c)] = first + middle(piece, c);
        mean_out[channel_of(piece, c)] = static_cast<T>(mean[channel_of(piece, c)]);
        var_out[channel_of(piece, c)] = static_cast<T>(std::max(second - first * first, 0.0));
      }
  }

  // The first BatchNorm as scale and shift of centred maps, in the order of pieces.
  void fold(const Inputs& in, const T* var) {
    scale.assign((K + 1) * p.pitch, 0), shift.assign((K + 1) * p.pitch, 0), deviation.assign(pieces * R, 0);
    const T *gain1 = values<T>(in.gain1), *bias1 = values<T>(in.bias1);
    for (int64_t piece = 0; piece < pieces; ++piece)
      for (int64_t c = 0; c < R; ++c) {
        const int64_t at = channel_of(piece, c);
        deviation[piece * R + c] = 1 / std::sqrt(var[at] + eps);
        const double slope = gain1[at] * deviation[piece * R + c];
        scale[piece * p.pitch + c] = static_cast<T>(slope);
        shift[piece * p.pitch + c] = static_cast<T>(bias1[at] - slope * (mean[at] - middle(piece, c)));
      }
    p.scale = scale.data(), p.shift = shift.data();
  }

  // The Linear layers in the order that tiles read them, forwards or `back`. At few pixels they are most of the memory,
  // so they are there only for the passes that need them. Vectors over pixels read a matrix in either direction.
  void fold_relation(const Inputs& in, bool back) {
    const bool transposed = back && tile.lanes > 1;
    w1.assign(pieces * (transposed ? p.hidden * p.pitch : R * p.hidden), 0);
    const T* weight1 = values<T>(in.weight1);
    for (int64_t piece = 0; piece < pieces; ++piece)
      for (int64_t c = 0; c < R; ++c)
        for (int64_t e = 0; e < E; ++e)
          w1[transposed ? (piece * p.hidden + e) * p.pitch + c : (piece * R + c) * p.hidden + e] =
              weight1[e * (C + R * K) + channel_of(piece, c)];
    p.w1 = transposed ? nullptr : w1.data(), p.w1_back = transposed ? w1.data() : nullptr;
  }
  void fold_mapping(const Inputs& in, bool back) {
    const bool transposed = back && tile.lanes > 1;
    w2.assign(K * p.hidden * p.weights, 0), w2_back.assign(transposed ? w2.size() : 0, 0), bias3.resize(K * p.weights);
    const T *weight2 = values<T>(in.weight2), *last = values<T>(in.bias3);
    for (int64_t o = 0; o < K; ++o)
      for (int64_t l = 0; l < p.weights; ++l) {
        const int64_t row = l % G * K + o;
        bias3[o * p.weights + l] = last[row];
        for (int64_t e = 0; e < E; ++e) {
          w2[(o * p.hidden + e) * p.weights + l] = weight2[row * E + e];
          if (transposed) w2_back[(o * p.weights + l) * p.hidden + e] = weight2[row * E + e];
        }
      }
    p.w2 = w2.data(), p.w2_back = w2_back.data(), p.bias3 = bias3.data();
  }

  // In how many groups a pass of backward takes so many channels, of two vectors at least, which products use well; and
  // the channels of one of them.
  int64_t groups_of(int64_t channels) const {
    constexpr int64_t kMost = 8;
    return tile.lanes > 1 ? std::clamp<int64_t>(channels / tile.lanes / 2, 1, kMost) : 1;
  }
  std::pair<int64_t, int64_t> group(int64_t at, int64_t groups, int64_t channels) const {
    const int64_t vectors = channels / tile.lanes;
    return {at * vectors / groups * tile.lanes, (at + 1) * vectors / groups * tile.lanes};
  }

  Patches<T> patches(int64_t n, const T* beta, const T* grad_y, T* hidden, T* y,
                     std::pair<int64_t, int64_t> channels = {}) const {
    const int64_t at = n * P;
    return {C > 0 ? center_c.data() + at * p.pitch : nullptr,
            around_c.data() + at * p.pitch,
            beta == nullptr ? nullptr : beta + at * p.values,
            grad_y == nullptr ? nullptr : grad_y + at * p.values,
            hidden + at * p.hidden,
            y == nullptr ? nullptr : y + at * p.values,
            channels.first,
            channels.second};
  }

  Footprint f;
  int64_t N, P, K, R, C, E, G, M, pieces;
  double pixels, eps;
  const PatchwiseTiles<T>& tile;
  std::vector<double> deviation, mean;
  std::vector<T> center_middle, around_middle, center_c, around_c, scale, shift, w1, w2, w2_back, bias3;
  Patchwise<T> p{};

 private:
  // [N * P, pitch], less each channel's mean, so that neither squares of large means cancel nor what BatchNorm takes
  // off them. In evaluation that is the running mean of a piece, for an image must not depend on others.
  std::vector<T> centred(const Tensor& map, int64_t channels, int64_t piece, std::vector<T>& middle, bool training) {
    middle.assign(channels, 0);
    if (channels == 0) return {};
    const Tensor held = as<T>(map);
    const T* x = values<T>(held);
    for (int64_t c = 0; c < channels; ++c) middle[c] = static_cast<T>(mean[channel_of(piece, c)]);
    if (training && N > 0) {
      std::vector<double> sums(N * channels);
      for_each_task<double>(N, f.width * channels, [&](int64_t n, double* row) {
        sum_pixels<T>(x + n * P * channels, f, 0, f.height, channels, nullptr, nullptr, row,
                      sums.data() + n * channels);
      });
      const std::vector<double> sum = sum_over_tasks(sums, channels);
      for (int64_t c = 0; c < channels; ++c) middle[c] = static_cast<T>(sum[c] / pixels);
    }
    const std::vector<T> none(channels), one(channels, 1);
    std::vector<T> out(N * P * p.pitch);
    for_each_task<T>(N, 0, [&](int64_t n, T*) {
      affine(x + n * P * channels, P, channels, middle.data(), one.data(), none.data(), out.data() + n * P * p.pitch,
             p.pitch);
    });
    return out;
  }
};

void check_inputs(const Inputs& in, const Contiguous& x, int64_t kernel_size) {
  check_map(in.center, "center"), check_map(in.around, "around"), check_map(in.beta, "beta");
  footprint_of(in.around.size(1), in.around.size(2), kernel_size);
  const int64_t C = in.center.size(3), R = in.around.size(3), K = kernel_size * kernel_size, rows = in.weight2.size(0);
  for (int axis = 0; axis < 3; ++axis)
    STD_TORCH_CHECK(in.beta.size(axis) == in.around.size(axis) && in.center.size(axis) == in.around.size(axis),
                    "center, around and beta must be maps of one size");
  STD_TORCH_CHECK(R > 0 && (C == 0 || C == R), "center must have around's ", R, " channels or none");
  STD_TORCH_CHECK(rows > 0 && rows % K == 0 && in.beta.size(3) > 0 && in.beta.size(3) % (rows / K) == 0,
                  "beta's channels must be a positive multiple of the weight channels");
  const int64_t E = in.weight1.size(0), channels = C + R * K;
  STD_TORCH_CHECK(in.weight1.dim() == 2 && in.weight1.size(1) == channels && in.weight2.dim() == 2 &&
                      in.weight2.size(1) == E && E > 0 && in.bias3.size(0) == rows,
                  "weight1 must be [E, ", channels, "], weight2 [G * K, E] and bias3 [G * K]");
  for (const Tensor* t : {&in.gain1, &in.bias1, &x[7], &x[8]})
    STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == channels, "the first BatchNorm must have ", channels, " channels");
  for (const Tensor* t : {&in.gain2, &in.bias2, &x[9], &x[10]})
    STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == E, "the second BatchNorm must have ", E, " channels");
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class T>
Forward forward(const Inputs& in, const Contiguous& x, int64_t kernel_size, bool training, double eps) {
  Problem<T> problem(in, kernel_size, eps, values<T>(x[7]), training);
  const auto [N, P, E, M] = std::tuple(problem.N, problem.P, problem.E, problem.M);
  const Patchwise<T>& p = problem.p;
  const int64_t H = problem.f.height, W = problem.f.width, channels = x[7].size(0);
  std::vector<T> mean1(values<T>(x[7]), values<T>(x[7]) + channels), var1(values<T>(x[8]), values<T>(x[8]) + channels);
  std::vector<T> mean2(values<T>(x[9]), values<T>(x[9]) + E), var2(values<T>(x[10]), values<T>(x[10]) + E);
  const bool counts = training && N > 0;
  if (counts) problem.patch_statistics(mean1, var1);
  problem.fold(in, var1.data());

  // Each pixel by itself: bands may follow from the number of threads.
  const int64_t rows = N * H / torch::stable::get_num_threads();
  const std::vector<Band> bands = bands_of(N, problem.f, std::clamp<int64_t>(rows, 1, problem.f.kernel_size));
  PaddedResult<T> wide(in.beta, {N, H, W, E}, p.hidden, false);
  T* wide_data = wide.data();
  problem.fold_relation(in, false);
  for_each_task<T>(bands.size(), problem.tile.scratch(p), [&](int64_t task, T* scratch) {
    const Band& band = bands[task];
    const Patches<T> patches = problem.patches(band.image, nullptr, nullptr, wide_data, nullptr);
    problem.tile.map(p, patches, band.first, band.last, scratch);
  });
  release(problem.w1);
  const Tensor hidden = wide.take();
  const T* u = values<T>(hidden);
  if (counts) {
    std::vector<double> sums(N * E), squares(N * 2 * E);
    for_each_task<double>(N, W * E, [&](int64_t n, double* row) {
      sum_pixels<T>(u + n * P * E, problem.f, 0, H, E, nullptr, nullptr, row, sums.data() + n * E);
    });
    // Of distances from the mean, so that squares do not cancel, whatever single pixels hold.
    std::vector<T> middle(E);
    const std::vector<double> total = sum_over_tasks(sums, E);
    for (int64_t e = 0; e < E; ++e) middle[e] = static_cast<T>(total[e] / problem.pixels);
    const std::vector<T> one(E, 1), none(E);
    for_each_task<T>(N, (P + 2) * E, [&](int64_t n, T* scratch) {
      T* row = scratch + P * E;
      double* sum = squares.data() + n * 2 * E;
      affine(u + n * P * E, P, E, middle.data(), one.data(), none.data(), scratch, E);
      sum_products(scratch, E, scratch, problem.f, E, row, sum, sum + E);
    });
    const std::vector<double> sum = sum_over_tasks(squares, 2 * E);
    for (int64_t e = 0; e < E; ++e) {
      const double mean = sum[e] / problem.pixels;
      mean2[e] = static_cast<T>(middle[e] + mean);
      var2[e] = static_cast<T>(std::max(sum[E + e] / problem.pixels - mean * mean, 0.0));
    }
  }
  std::vector<T> a2 = HiddenNorm<T>(in.gain2, in.bias2, mean2.data(), var2.data(), E, eps).activated(u, N, P, p.hidden);

  const PaddedMap<T> beta(in.beta, p.values);
  PaddedResult<T> y(in.beta, {N, H, W, M}, p.values, false);
  T* y_data = y.data();
  problem.fold_mapping(in, false);
  for_each_task<T>(bands.size(), problem.tile.scratch(p), [&](int64_t task, T* scratch) {
    const Band& band = bands[task];
    const Patches<T> patches = problem.patches(band.image, beta.data(), nullptr, a2.data(), y_data);
    problem.tile.forward(p, patches, band.first, band.last, scratch);
  });
  return {y.take(in.beta.scalar_type()),
          hidden,
          tensor_of<T>(mean1, in.beta, {channels}),
          tensor_of<T>(var1, in.beta, {channels}),
          tensor_of<T>(mean2, in.beta, {E}),
          tensor_of<T>(var2, in.beta, {E})};
}

// Sums over pixels, in slots that are summed at once: a copy of the parameters each, of which groups of channels have
// parts of their own. So there is work for many threads, in an order that does not depend on their number: it follows
// from the sizes alone.
template <class T, size_t kParts>
class Slots {
 public:
  // There are two slots at least, and more for so many tasks as long as all take no more memory than y and beta and
  // their gradients, of `values` elements each.
  Slots(int64_t bands, int64_t groups, int64_t values, const std::array<int64_t, kParts>& sizes) : sizes_(sizes) {
    constexpr int64_t kTasks = 32;
    const int64_t most = 4 * values / std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
    count_ = std::min({bands, std::max<int64_t>(1, kTasks / groups), std::max<int64_t>(2, most)});
    for (size_t part = 0; part < kParts; ++part) parts_[part].resize(count_ * sizes[part]);
  }
  int64_t count() const { return count_; }
  T* of(int64_t slot, size_t part) { return parts_[part].data() + slot * sizes_[part]; }
  // The sum over slots of one of a part's elements.
  double operator()(size_t part, int64_t at) const {
    double sum = 0;
    for (int64_t slot = 0; slot < count_; ++slot) sum += parts_[part][slot * sizes_[part] + at];
    return sum;
  }

 private:
  int64_t count_;
  std::array<int64_t, kParts> sizes_;
  std::array<std::vector<T>, kParts> parts_;
};

template <class T>
Backward backward(const Tensor& grad_y, const Inputs& in, const Contiguous& x, const Tensor& hidden,
                  int64_t kernel_size, bool training, double eps) {
  Problem<T> problem(in, kernel_size, eps, values<T>(x[7]), training);
  const auto [N, P, K, R, C, E, G, M] =
      std::tuple(problem.N, problem.P, problem.K, problem.R, problem.C, problem.E, problem.G, problem.M);
  const Patchwise<T>& p = problem.p;
  const Footprint& f = problem.f;
  problem.fold(in, values<T>(x[8]));
  const HiddenNorm<T> norm(in.gain2, in.bias2, values<T>(x[9]), values<T>(x[10]), E, eps);
  const T* u = values<T>(hidden);
  const int64_t weight_groups = problem.groups_of(p.weights), relation_groups = problem.groups_of(p.pitch);
  // The gradient of a2, from each group of weights.
  std::vector<T> a2 = norm.activated(u, N, P, p.hidden), grad_hidden(weight_groups * N * P * p.hidden);
  PaddedResult<T> grad_beta(in.beta, {N, f.height, f.width, M}, p.values, true);
  T* grad_beta_data = grad_beta.data();

  const std::vector<Band> even = every_other_band(N, f, 0, f.kernel_size),
                          odd = every_other_band(N, f, 1, f.kernel_size);
  // Even ones first: those of one parity share no pixel, and groups no channel.
  const auto for_each_band = [&](int64_t slots, int64_t groups, const auto& work) {
    for (const std::vector<Band>& bands : {even, odd})
      for_each_task<T>(slots * groups, problem.tile.scratch(p), [&](int64_t task, T* scratch) {
        const int64_t slot = task / groups, group = task % groups;
        for (size_t at = slot; at < bands.size(); at += slots) work(slot, group, bands[at], scratch);
      });
  };
  Tensor to_weight2 = new_tensor<T>(in.beta, {G * K, E}), to_bias3 = new_tensor<T>(in.beta, {G * K});
  {
    const PaddedMap<T> beta(in.beta, p.values), gradient(grad_y, p.values);
    problem.fold_mapping(in, true);
    Slots<T, 2> slots(even.size(), weight_groups, N * P * p.values, {K * p.hidden * p.weights, K * p.weights});
    for_each_band(slots.count(), weight_groups, [&](int64_t slot, int64_t group, const Band& band, T* scratch) {
      const int64_t n = band.image;
      const Patches<T> patches = problem.patches(n, beta.data(), gradient.data(), a2.data(), nullptr,
                                                 problem.group(group, weight_groups, p.weights));
      problem.tile.backward_mapping(p, patches, band.first, band.last, scratch, {slots.of(slot, 0), slots.of(slot, 1)},
                                    grad_hidden.data() + (group * N + n) * P * p.hidden,
                                    grad_beta_data + n * P * p.values);
    });
    T *weight2 = to_weight2.template mutable_data_ptr<T>(), *bias3 = to_bias3.template mutable_data_ptr<T>();
    const auto over_repeated = [&](int64_t g, const auto& value) {
      double sum = 0;
      for (int64_t l = g; l < p.weights; l += G) sum += value(l);
      return static_cast<T>(sum);
    };
    for (int64_t row = 0; row < G * K; ++row) {
      const int64_t g = row / K, o = row % K;
      bias3[row] = over_repeated(g, [&](int64_t l) { return slots(1, o * p.weights + l); });
      for (int64_t e = 0; e < E; ++e)
        weight2[row * E + e] =
            over_repeated(g, [&](int64_t l) { return slots(0, (o * p.hidden + e) * p.weights + l); });
    }
    release(problem.w2), release(problem.w2_back);
  }

  std::vector<double> hidden_sums(N * 2 * E);
  for_each_task<T>(N, 2 * E, [&](int64_t n, T* row) {
    double* sum = hidden_sums.data() + n * 2 * E;
    for (int64_t group = 1; group < weight_groups; ++group)
      add(grad_hidden.data() + (group * N + n) * P * p.hidden, P * p.hidden, grad_hidden.data() + n * P * p.hidden);
    sum_hidden(grad_hidden.data() + n * P * p.hidden, a2.data() + n * P * p.hidden, p.hidden, u + n * P * E,
               norm.mean.data(), f, E, row, sum, sum + E);
  });
  const std::vector<double> sum2 = sum_over_tasks(hidden_sums, 2 * E);
  std::vector<double> to_gain2(E);
  std::vector<T> offset(E), tilt(E);
  for (int64_t e = 0; e < E; ++e) {
    to_gain2[e] = norm.deviation[e] * sum2[E + e];
    if (!training) continue;
    offset[e] = static_cast<T>(sum2[e] / problem.pixels);
    tilt[e] = static_cast<T>(norm.deviation[e] * to_gain2[e] / problem.pixels);
  }
  for_each_task<T>(N, 0, [&](int64_t n, T*) {
    finish_hidden(grad_hidden.data() + n * P * p.hidden, p.hidden, u + n * P * E, norm.mean.data(), P, E,
                  norm.scale.data(), offset.data(), tilt.data());
  });

  release(a2);

  PaddedResult<T> grad_center(in.center, {N, f.height, f.width, C}, C > 0 ? p.pitch : 0, false);
  PaddedResult<T> grad_around(in.around, {N, f.height, f.width, R}, p.pitch, true);
  T *to_center = grad_center.data(), *to_around = grad_around.data();
  problem.fold_relation(in, true);
  const int64_t rows = K + 1;
  Slots<T, 3> slots(even.size(), relation_groups, N * P * p.values,
                    {rows * R * p.hidden, rows * p.pitch, rows * p.pitch});
  for_each_band(slots.count(), relation_groups, [&](int64_t slot, int64_t group, const Band& band, T* scratch) {
    const int64_t n = band.image;
    const Patches<T> patches = problem.patches(n, nullptr, nullptr, grad_hidden.data(), nullptr,
                                               problem.group(group, relation_groups, p.pitch));
    problem.tile.backward_relation(p, patches, band.first, band.last, scratch,
                                   {slots.of(slot, 0), slots.of(slot, 1), slots.of(slot, 2)},
                                   C > 0 ? to_center + n * P * p.pitch : nullptr, to_around + n * P * p.pitch);
  });
  release(problem.w1);

  const int64_t channels = x[7].size(0);
  std::vector<double> to_gain1(channels), to_bias1(channels);
  Tensor to_weight1 = new_tensor<T>(in.beta, {E, channels});
  T* weight1 = to_weight1.template mutable_data_ptr<T>();
  // Of a piece's correction by the first BatchNorm: constant + slope * x, per channel.
  std::vector<T> constant(problem.pieces * R), slope(problem.pieces * R);
  const T* gain1 = values<T>(in.gain1);
  for (int64_t piece = 0; piece < problem.pieces; ++piece)
    for (int64_t c = 0; c < R; ++c) {
      const int64_t at = problem.channel_of(piece, c), pitched = piece * p.pitch + c, row = piece * R + c;
      const double mean = problem.mean[at] - problem.middle(piece, c), deviation = problem.deviation[row];
      const double sum = slots(1, pitched), product = deviation * (slots(2, pitched) - mean * sum);
      const double scale = deviation * gain1[at];
      to_gain1[at] = product, to_bias1[at] = sum;
      if (training) {
        constant[row] = static_cast<T>(scale * (sum - mean * deviation * product) / problem.pixels);
        slope[row] = static_cast<T>(scale * deviation * product / problem.pixels);
      }
      for (int64_t e = 0; e < E; ++e) weight1[e * channels + at] = static_cast<T>(slots(0, row * p.hidden + e));
    }

  const T *own_scale = problem.scale.data() + K * p.pitch, *own_constant = constant.data() + (C > 0 ? K * R : 0);
  const T* own_slope = slope.data() + (C > 0 ? K * R : 0);
  for_each_task<T>(C > 0 ? N : 0, 0, [&](int64_t n, T*) {
    for (int64_t i = n * P; i < (n + 1) * P; ++i) {
      T* SAN_RESTRICT g = to_center + i * p.pitch;
      const T* SAN_RESTRICT x = problem.center_c.data() + i * p.pitch;
      for (int64_t c = 0; c < R; ++c) g[c] = own_scale[c] * g[c] - own_constant[c] - own_slope[c] * x[c];
    }
  });
  // A pixel's correction is the sum of those of all positions that see it, which is the same for all images, and for
  // all columns inside a row.
  for_each_task<T>(training ? f.height : 0, (f.kernel_size + 1) * 2 * R, [&](int64_t h, T* scratch) {
    T *of_column = scratch, *total = scratch + f.kernel_size * 2 * R;
    std::fill(of_column, total, T(0));
    for_each_view(h, f.height, f.kernel_size, [&](int64_t y) {
      for (int64_t at = 0; at < f.kernel_size; ++at)
        for (int64_t c = 0, o = y * f.kernel_size + at; c < R; ++c) {
          of_column[at * 2 * R + c] += constant[o * R + c];
          of_column[(at * 2 + 1) * R + c] += slope[o * R + c];
        }
    });
    for (int64_t w = 0; w < f.width; ++w) {
      if (!is_inside(w, f.width, f.reach()) || !is_inside(w - 1, f.width, f.reach())) {
        std::fill(total, total + 2 * R, T(0));
        for_each_view(w, f.width, f.kernel_size, [&](int64_t at) {
          for (int64_t c = 0; c < 2 * R; ++c) total[c] += of_column[at * 2 * R + c];
        });
      }
      for (int64_t n = 0; n < N; ++n) {
        const int64_t i = n * P + h * f.width + w;
        T* SAN_RESTRICT g = to_around + i * p.pitch;
        const T* SAN_RESTRICT x = problem.around_c.data() + i * p.pitch;
        for (int64_t c = 0; c < R; ++c) g[c] -= total[c] + total[R + c] * x[c];
      }
    }
  });
  return {grad_center.take(in.around.scalar_type()),
          grad_around.take(in.around.scalar_type()),
          grad_beta.take(in.beta.scalar_type()),
          tensor_of<T>(to_gain1, in.beta, {channels}),
          tensor_of<T>(to_bias1, in.beta, {channels}),
          to_weight1,
          tensor_of<T>(to_gain2, in.beta, {E}),
          tensor_of<T>(sum2, in.beta, {E}),
          to_weight2,
          to_bias3};
}

Forward patchwise(const Tensor& center, const Tensor& around, const Tensor& beta, const Tensor& gain1,
                  const Tensor& bias1, const Tensor& weight1, const Tensor& gain2, const Tensor& bias2,
                  const Tensor& weight2, const Tensor& bias3, const Tensor& mean1, const Tensor& var1,
                  const Tensor& mean2, const Tensor& var2, int64_t kernel_size, bool training, double eps, bool tf32) {
  const bool is_double = beta.scalar_type() == ScalarType::Double;
  const Contiguous x({&gain1, &bias1, &weight1, &gain2, &bias2, &weight2, &bias3, &mean1, &var1, &mean2, &var2},
                     is_double);
  const Inputs in{center, around, beta, x[0], x[1], x[2], x[3], x[4], x[5], x[6]};
  check_inputs(in, x, kernel_size);
  return is_double ? forward<double>(in, x, kernel_size, training, eps)
                   : forward<float>(in, x, kernel_size, training, eps);
}

Backward patchwise_backward(const Tensor& grad_y, const Tensor& center, const Tensor& around, const Tensor& beta,
                            const Tensor& gain1, const Tensor& bias1, const Tensor& weight1, const Tensor& gain2,
                            const Tensor& bias2, const Tensor& weight2, const Tensor& bias3, const Tensor& mean1,
                            const Tensor& var1, const Tensor& mean2, const Tensor& var2, const Tensor& hidden,
                            int64_t kernel_size, bool training, double eps, bool tf32) {
  const bool is_double = beta.scalar_type() == ScalarType::Double;
  const Contiguous x(
      {&gain1, &bias1, &weight1, &gain2, &bias2, &weight2, &bias3, &mean1, &var1, &mean2, &var2, &hidden}, is_double);
  const Inputs in{center, around, beta, x[0], x[1], x[2], x[3], x[4], x[5], x[6]};
  check_inputs(in, x, kernel_size);
  STD_TORCH_CHECK(grad_y.sizes().vec() == beta.sizes().vec(), "grad_y and beta must have the same shape");
  STD_TORCH_CHECK(hidden.numel() == beta.numel() / beta.size(3) * weight1.size(0), "hidden must be [N, H, W, E]");
  if (is_double) return backward<double>(grad_y, in, x, x[11], kernel_size, training, eps);
  return backward<float>(grad_y, in, x, x[11], kernel_size, training, eps);
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("patchwise", TORCH_BOX(&san::cpu::patchwise));
  m.impl("patchwise_backward", TORCH_BOX(&san::cpu::patchwise_backward));
}
