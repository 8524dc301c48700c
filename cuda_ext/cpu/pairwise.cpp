// Fused pairwise attention, forward and backward: no tensor has a footprint's size times a map's. Definition:
// san/nn/attention.py; the tiles, where the time goes: simd/pairwise.cpp.
//
// With K positions, M = N * P * K pairs, r = 1 / sqrt(var + eps):
//   v1_ij = gain1 * r1 * (center_i - around_j - mean1) + bias1, a1 = relu(v1), u = W1 a1, h = r2 * (u - mean2)
// mean1 and var1 are closed forms in box sums of the maps, because delta is a difference; mean2 and var2 need one pass
// over pairs, and so do forward and both halves of backward. Each recomputes what it needs from the maps.
#include <cmath>
#include <tuple>

#include "fused.h"
#include "maps.h"

namespace san::cpu {
namespace {

// out_i = sum of in_j over the reflected footprint of i, or with `adjoint` the sum over all i whose footprint holds j.
// Maps are [H, W, channels]; separable, so each axis takes k additions. `line` is room for a padded row,
// [W + k - 1, channels].
template <class T>
SAN_VECTOR void box_sums(const T* SAN_RESTRICT in, const Footprint& f, int64_t channels, bool adjoint,
                         T* SAN_RESTRICT line, T* SAN_RESTRICT out) {
  const int64_t reach = f.reach(), W = f.width, H = f.height, row = W * channels;
  std::fill(out, out + H * row, T(0));
  for (int64_t h = 0; h < H; ++h)
    for (int64_t o = -reach; o <= reach; ++o) {
      const int64_t here = h * row, there = reflect(h + o, H) * row;
      add(in + (adjoint ? here : there), row, out + (adjoint ? there : here));
    }
  T* inside = line + reach * channels;  // the row itself, between its reflections
  for (int64_t h = 0; h < H; ++h, out += row)
    if (adjoint) {
      std::fill(line, inside + row + reach * channels, T(0));
      for (int64_t o = -reach; o <= reach; ++o) add(out, row, inside + o * channels);
      std::copy_n(inside, row, out);
      for (int64_t w = 1; w <= reach; ++w) {
        add(inside - w * channels, channels, out + w * channels);
        add(inside + (W - 1 + w) * channels, channels, out + (W - 1 - w) * channels);
      }
    } else {
      std::copy_n(out, row, inside);
      for (int64_t w = 1; w <= reach; ++w) {
        std::copy_n(out + w * channels, channels, inside - w * channels);
        std::copy_n(out + (W - 1 - w) * channels, channels, inside + (W - 1 + w) * channels);
      }
      std::fill(out, out + row, T(0));
      for (int64_t o = -reach; o <= reach; ++o) add(inside + o * channels, row, out);
    }
}

// Adds to sum [channels] the squares of center_i - around_j - (x_mean - y_mean) over the pairs of rows first .. last -
// 1 of maps x and y [H, W, channels]: K x^2 + seen y^2 - 2 x box(y) of centred maps, where `seen` says how many pairs
// see a pixel. In double: where neighbours differ by little, as those of a slope do, large terms cancel. `scratch` has
// room for [7 W + k - 1, channels].
template <class T>
SAN_VECTOR void sum_squares(const T* SAN_RESTRICT x, const T* SAN_RESTRICT y, const Footprint& f, int64_t first,
                            int64_t last, int64_t channels, const double* SAN_RESTRICT x_mean,
                            const double* SAN_RESTRICT y_mean, const T* SAN_RESTRICT seen_h,
                            const T* SAN_RESTRICT seen_w, double* SAN_RESTRICT scratch, double* SAN_RESTRICT sum) {
  const int64_t reach = f.reach(), W = f.width, row = W * channels;
  const double k = static_cast<double>(f.kernel_size);
  // Rows, so that loops run over all of them: a padded one, its box sums, and sums over rows of what follows from them.
  double *inside = scratch + reach * channels, *box = inside + row + reach * channels, *columns = box + row;
  double *x_means = columns + row, *y_means = x_means + row, *seen = y_means + row;
  for (int64_t w = 0; w < W; ++w) {
    std::copy_n(x_mean, channels, x_means + w * channels), std::copy_n(y_mean, channels, y_means + w * channels);
    std::fill_n(seen + w * channels, channels, seen_w[w]);
  }
  std::fill(columns, columns + row, 0.0);
  for (int64_t h = first; h < last; ++h) {
    for (int64_t i = 0; i < row; ++i) inside[i] = -k * y_means[i];
    for (int64_t o = -reach; o <= reach; ++o) {
      const T* SAN_RESTRICT from = y + reflect(h + o, f.height) * row;
      for (int64_t i = 0; i < row; ++i) inside[i] += from[i];
    }
    for (int64_t w = 1; w <= reach; ++w) {
      std::copy_n(inside + w * channels, channels, inside - w * channels);
      std::copy_n(inside + (W - 1 - w) * channels, channels, inside + (W - 1 + w) * channels);
    }
    std::fill(box, box + row, 0.0);
    for (int64_t o = -reach; o <= reach; ++o) add(inside + o * channels, row, box);
    const T *SAN_RESTRICT x_h = x + h * row, *SAN_RESTRICT y_h = y + h * row;
    const double seen_here = seen_h[h];
    for (int64_t i = 0; i < row; ++i) {
      const double from = x_h[i] - x_means[i], to = y_h[i] - y_means[i];
      columns[i] += k * k * from * from + seen_here * seen[i] * to * to - 2 * from * box[i];
    }
  }
  for (int64_t w = 0; w < W; ++w)
    for (int64_t c = 0; c < channels; ++c) sum[c] += columns[w * channels + c];
}

// The first BatchNorm's part of the gradients of center and around: scale * (g - seen * mean - (seen * x - other) *
// tilt), where `other` are the box sums of the other map and `seen` says how many pairs see a pixel.
template <class T>
SAN_VECTOR void finish(const T* SAN_RESTRICT g, int64_t pitch, const T* SAN_RESTRICT x, const T* SAN_RESTRICT other,
                       const Footprint& f, int64_t channels, const T* SAN_RESTRICT seen_h, const T* SAN_RESTRICT seen_w,
                       const T* SAN_RESTRICT scale, const T* SAN_RESTRICT mean, const T* SAN_RESTRICT tilt,
                       T* SAN_RESTRICT out) {
  for (int64_t h = 0; h < f.height; ++h)
    for (int64_t w = 0; w < f.width; ++w, g += pitch, x += channels, other += channels, out += channels) {
      const T seen = seen_h == nullptr ? static_cast<T>(f.positions()) : seen_h[h] * seen_w[w];
      for (int64_t c = 0; c < channels; ++c)
        out[c] = scale[c] * (g[c] - seen * mean[c] - (seen * x[c] - other[c]) * tilt[c]);
    }
}

struct Inputs {
  const Tensor &center, &around, &beta, &gain1, &bias1, &weight1, &gain2, &bias2, &weight2;
};

// What forward and backward both start from: sizes, the maps normalised by the first BatchNorm, gamma's folded
// parameters.
template <class T>
class Problem {
 public:
  Problem(const Inputs& in, int64_t kernel_size, double eps)
      : f(footprint_of(in.center.size(1), in.center.size(2), kernel_size)),
        N(in.center.size(0)),
        P(f.pixels()),
        d(in.center.size(3)),
        E(in.weight1.size(0)),
        G(in.weight2.size(0)),
        M(in.beta.size(3)),
        pairs(double(N) * P * f.positions()),
        eps(eps),
        center(as<T>(in.center)),
        around(as<T>(in.around)),
        tile(pairwise_tiles<T>(E, f.width)),
        bands(bands_of(N, f, f.kernel_size)),
        rows(bands_of(N, f, 1)),
        seen_h(counts_of<T>(f.height, f.reach())),
        seen_w(counts_of<T>(f.width, f.reach())),
        scale(d) {
    const int64_t weights = repeated_weights(G, tile.lanes);
    p.footprint = f, p.relation = d, p.hidden_used = E;
    for (const Band& band : bands) p.band_rows = std::max(p.band_rows, band.last - band.first);
    p.pitch = round_up(d, tile.lanes), p.hidden = round_up(E, tile.lanes);
    p.weights = weights, p.values = round_up(M, weights);
  }

  // The means of the maps, as pairs see them: [2, d].
  std::vector<double> map_means() const {
    std::vector<double> sums(rows.size() * 2 * d);
    for_each_task<double>(rows.size(), f.width * d, [&](int64_t task, double* row) {
      const auto& [n, first, last] = rows[task];
      double* sum = sums.data() + task * 2 * d;
      sum_pixels<T>(values<T>(center) + n * P * d, f, first, last, d, nullptr, nullptr, row, sum);
      sum_pixels<T>(values<T>(around) + n * P * d, f, first, last, d, seen_h.data(), seen_w.data(), row, sum + d);
    });
    std::vector<double> means = sum_over_tasks(sums, 2 * d);
    for (int64_t c = 0; c < d; ++c) means[c] /= N * P, means[d + c] /= pairs;
    return means;
  }

  // Mean and variance of the relation from these.
  std::vector<double> relation_mean(std::vector<double> means) const {
    for (int64_t c = 0; c < d; ++c) means[c] -= means[d + c];
    means.resize(d);
    return means;
  }
  std::vector<double> relation_variance(const std::vector<double>& means) const {
    std::vector<double> squares(rows.size() * d);
    for_each_task<double>(rows.size(), (7 * f.width + f.kernel_size - 1) * d, [&](int64_t task, double* scratch) {
      const auto& [n, first, last] = rows[task];
      sum_squares(values<T>(center) + n * P * d, values<T>(around) + n * P * d, f, first, last, d, means.data(),
                  means.data() + d, seen_h.data(), seen_w.data(), scratch, squares.data() + task * d);
    });
    std::vector<double> variance = sum_over_tasks(squares, d);
    for (double& square : variance) square = std::max(square / pairs, 0.0);
    return variance;
  }

  // Of each image, values near those of around and, further off by the relation's mean, of center: differences of what
  // is left of the maps without them are exact, whatever the maps' means. `rest` is what the two lost to rounding.
  void take_origins(const std::vector<double>& mean) {
    around_origin.resize(N * d), center_origin.resize(N * d), rest.resize(N * d);
    for_each_task<T>(N, 0, [&](int64_t n, T*) {
      about_the_mean(values<T>(around) + n * P * d, P, d, around_origin.data() + n * d);
      for (int64_t at = n * d; at < (n + 1) * d; ++at) {
        if (!std::isfinite(around_origin[at])) around_origin[at] = 0;  // which only some pixels see
        const double wanted = around_origin[at] + mean[at - n * d];
        center_origin[at] = static_cast<T>(wanted);
        rest[at] = static_cast<T>(std::isfinite(center_origin[at]) ? center_origin[at] - wanted : 0);
      }
    });
  }

  // Normalises the maps, so that a1 = relu(center_i - around_j).
  void normalise(const T* gain, const T* bias, const T* var) {
    for (int64_t c = 0; c < d; ++c) scale[c] = static_cast<T>(gain[c] / std::sqrt(var[c] + eps));
    const T *x = values<T>(center), *y = values<T>(around);
    const std::vector<T> none(d);
    center_n.resize(N * P * p.pitch), around_n.resize(N * P * p.pitch);
    for_each_task<T>(rows.size(), d, [&](int64_t task, T* shift) {
      const auto& [n, first, last] = rows[task];
      const int64_t at = n * P + first * f.width, pixels = (last - first) * f.width;
      for (int64_t c = 0; c < d; ++c) shift[c] = bias[c] + scale[c] * rest[n * d + c];
      affine(x + at * d, pixels, d, center_origin.data() + n * d, scale.data(), shift, center_n.data() + at * p.pitch,
             p.pitch);
      affine(y + at * d, pixels, d, around_origin.data() + n * d, scale.data(), none.data(),
             around_n.data() + at * p.pitch, p.pitch);
    });
  }

  // W1 for the tiles; `deviation` and `mean` are those of the hidden map, or 1 and 0 while they are not known.
  void fold_hidden(const Inputs& in, const T* mean, const T* var) {
    const T *weight1 = values<T>(in.weight1), *weight2 = values<T>(in.weight2);
    w1.assign(d * p.hidden, 0), w1_back.assign(p.hidden * p.pitch, 0), bias1.assign(p.hidden, 0);
    w2.assign(p.hidden * p.weights, 0), w2_back.assign(p.weights * p.hidden, 0);
    gain2.assign(p.hidden, 0), bias2.assign(p.hidden, 0), deviation.assign(E, 1);
    slope.assign(p.hidden, 0), offset.assign(p.hidden, 0), tilt.assign(p.hidden, 0);
    for (int64_t e = 0; e < E; ++e) {
      if (var != nullptr)
        deviation[e] = 1 / std::sqrt(var[e] + eps), bias1[e] = static_cast<T>(-mean[e] * deviation[e]);
      for (int64_t c = 0; c < d; ++c) {
        const T weight = weight1[e * d + c];
        w1[c * p.hidden + e] = static_cast<T>(weight * deviation[e]);
        w1_back[e * p.pitch + c] = weight;
      }
      for (int64_t l = 0; l < p.weights; ++l)
        w2[e * p.weights + l] = w2_back[l * p.hidden + e] = weight2[l % G * E + e];
      gain2[e] = values<T>(in.gain2)[e], bias2[e] = values<T>(in.bias2)[e];
    }
    p.w1 = w1.data(), p.w1_back = w1_back.data(), p.w2 = w2.data(), p.w2_back = w2_back.data();
    p.bias1 = bias1.data(), p.gain2 = gain2.data(), p.bias2 = bias2.data();
    p.slope = slope.data(), p.offset = offset.data(), p.tilt = tilt.data();
  }

  void hidden_statistics(std::vector<T>& mean, std::vector<T>& var) {
    const int64_t size = p.hidden;
    std::vector<double> means(bands.size() * size), squares(bands.size() * size);
    for_each_task<T>(bands.size(), tile.scratch(p), [&](int64_t task, T* scratch) {
      const Band& band = bands[task];
      tile.moments(p, image(band.image), band.first, band.last, scratch, means.data() + task * size,
                   squares.data() + task * size);
    });
    std::vector<double> middle(E), square(E);
    double count = 0;
    for (size_t task = 0; task < bands.size(); ++task) {
      const double more = double(bands[task].last - bands[task].first) * f.width * f.positions();
      const Merge merge(count, more);
      for (int64_t e = 0; e < E; ++e) merge(means[task * size + e], squares[task * size + e], middle[e], square[e]);
      count += more;
    }
    for (int64_t e = 0; e < E; ++e)
      mean[e] = static_cast<T>(middle[e]), var[e] = static_cast<T>(std::max(square[e] / count, 0.0));
  }

  Image<T> image(int64_t n) const {
    return {center_n.data() + n * P * p.pitch, around_n.data() + n * P * p.pitch, nullptr, nullptr, nullptr, nullptr};
  }

  Footprint f;
  int64_t N, P, d, E, G, M;
  double pairs, eps;
  Tensor center, around;
  const PairwiseTiles<T>& tile;
  const std::vector<Band> bands, rows;  // of passes that add to neighbours, even ones first; of others
  std::vector<double> deviation;
  std::vector<T> seen_h, seen_w, scale;               // how many pairs see a row, a column; [d]
  std::vector<T> center_origin, around_origin, rest;  // [N, d]
  std::vector<T> center_n, around_n, w1, w1_back, w2, w2_back, bias1, gain2, bias2, slope, offset, tilt;
  Pairwise<T> p{};
};

void check_inputs(const Inputs& in, const Tensor& mean1, const Tensor& var1, const Tensor& mean2, const Tensor& var2) {
  check_pairwise(in.center, in.around, in.beta, {&in.gain1, &in.bias1, &mean1, &var1}, in.weight1,
                 {&in.gain2, &in.bias2, &mean2, &var2}, in.weight2);
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class T>
Forward forward(const Inputs& in, const Tensor& given_mean1, const Tensor& given_var1, const Tensor& given_mean2,
                const Tensor& given_var2, int64_t kernel_size, bool training, double eps) {
  Problem<T> problem(in, kernel_size, eps);
  const auto [N, P, d, E, G, M] = std::tuple(problem.N, problem.P, problem.d, problem.E, problem.G, problem.M);
  Pairwise<T>& p = problem.p;
  std::vector<T> mean1(values<T>(given_mean1), values<T>(given_mean1) + d);
  std::vector<T> var1(values<T>(given_var1), values<T>(given_var1) + d);
  std::vector<T> mean2(values<T>(given_mean2), values<T>(given_mean2) + E);
  std::vector<T> var2(values<T>(given_var2), values<T>(given_var2) + E);
  const bool counts = training && N > 0;
  std::vector<double> mean(mean1.begin(), mean1.end());
  if (counts) {
    const std::vector<double> means = problem.map_means(), var = problem.relation_variance(means);
    mean = problem.relation_mean(means);
    mean1.assign(mean.begin(), mean.end()), var1.assign(var.begin(), var.end());
  }
  problem.take_origins(mean);
  problem.normalise(values<T>(in.gain1), values<T>(in.bias1), var1.data());
  if (counts) {
    problem.fold_hidden(in, nullptr, nullptr);
    problem.hidden_statistics(mean2, var2);
  }
  problem.fold_hidden(in, mean2.data(), var2.data());

  const int64_t H = problem.f.height, W = problem.f.width;
  const PaddedMap<T> beta(in.beta, p.values);
  PaddedResult<T> y(in.beta, {N, H, W, M}, p.values, false), logsumexp(in.beta, {N, H, W, G}, p.weights, false);
  T *y_data = y.data(), *logsumexp_data = logsumexp.data();
  const std::vector<Band> bands = bands_of(N, problem.f, 1);
  for_each_task<T>(bands.size(), problem.tile.scratch(p), [&](int64_t task, T* scratch) {
    const auto& [n, first, last] = bands[task];
    Image<T> image = problem.image(n);
    image.beta = beta.data() + n * P * p.values;
    image.y = y_data + n * P * p.values;
    image.logsumexp = logsumexp_data + n * P * p.weights;
    problem.tile.forward(p, image, first, last, scratch);
  });
  return {y.take(in.beta.scalar_type()),     logsumexp.take(given_mean1.scalar_type()),
          tensor_of<T>(mean1, in.beta, {d}), tensor_of<T>(var1, in.beta, {d}),
          tensor_of<T>(mean2, in.beta, {E}), tensor_of<T>(var2, in.beta, {E})};
}

template <class T>
Backward backward(const Tensor& grad_y, const Inputs& in, const Tensor& mean1, const Tensor& var1, const Tensor& mean2,
                  const Tensor& var2, const Tensor& logsumexp, int64_t kernel_size, bool training, double eps) {
  Problem<T> problem(in, kernel_size, eps);
  const auto [N, P, d, E, G, M] = std::tuple(problem.N, problem.P, problem.d, problem.E, problem.G, problem.M);
  const Footprint& f = problem.f;
  Pairwise<T>& p = problem.p;
  const bool counts = training && N > 0;
  problem.take_origins(counts ? problem.relation_mean(problem.map_means())
                              : std::vector<double>(values<T>(mean1), values<T>(mean1) + d));
  problem.normalise(values<T>(in.gain1), values<T>(in.bias1), values<T>(var1));
  problem.fold_hidden(in, values<T>(mean2), values<T>(var2));

  const PaddedMap<T> beta(in.beta, p.values), gradient(grad_y, p.values);
  std::vector<T> repeated(N * P * p.weights);
  const T* logs = values<T>(logsumexp);
  for_each_task<T>(N, 0, [&](int64_t n, T*) {
    for (int64_t i = n * P; i < (n + 1) * P; ++i)
      for (int64_t l = 0; l < p.weights; l += G) std::copy_n(logs + i * G, G, repeated.data() + i * p.weights + l);
  });
  const auto image_of = [&](int64_t n) {
    Image<T> image = problem.image(n);
    image.beta = beta.data() + n * P * p.values;
    image.grad_y = gradient.data() + n * P * p.values;
    image.logsumexp = repeated.data() + n * P * p.weights;
    return image;
  };
  // First the even bands, then the odd ones: no two that are worked on at once add to one pixel.
  const std::vector<Band>& bands = problem.bands;
  const int64_t even = every_other_band(N, f, 0, f.kernel_size).size(), all = bands.size();
  const auto for_each_band = [&](const auto& work) {
    for (const auto& [begin, end] : {std::pair(int64_t(0), even), std::pair(even, all)})
      for_each_task<T>(end - begin, problem.tile.scratch(p),
                       [&](int64_t task, T* scratch) { work(begin + task, bands[begin + task], scratch); });
  };

  PaddedResult<T> grad_beta(in.beta, {N, f.height, f.width, M}, p.values, true);
  T* grad_beta_data = grad_beta.data();
  std::vector<T> grad_w2(all * p.hidden * p.weights), sums(all * 2 * p.hidden);
  for_each_band([&](int64_t task, const Band& band, T* scratch) {
    T* sum = sums.data() + task * 2 * p.hidden;
    problem.tile.backward_mapping(p, image_of(band.image), band.first, band.last, scratch,
                                  grad_w2.data() + task * p.hidden * p.weights, sum, sum + p.hidden,
                                  grad_beta_data + band.image * P * p.values);
  });
  const std::vector<double> by_repeated = sum_over_tasks(grad_w2, p.hidden * p.weights);
  const std::vector<double> sum2 = sum_over_tasks(sums, 2 * p.hidden);
  std::vector<double> to_weight2(G * E), to_weight1(E * d), sum1(d), product1(d);
  for (int64_t e = 0; e < E; ++e) {
    for (int64_t l = 0; l < p.weights; ++l) to_weight2[l % G * E + e] += by_repeated[e * p.weights + l];
    const double slope = problem.deviation[e] * problem.gain2[e];
    problem.slope[e] = static_cast<T>(slope);
    problem.offset[e] = static_cast<T>(training ? slope * sum2[e] / problem.pairs : 0);
    problem.tilt[e] = static_cast<T>(training ? slope * sum2[p.hidden + e] / problem.pairs : 0);
  }

  std::vector<T> grad_w1(all * d * p.hidden), to_center(N * P * p.pitch), to_around(N * P * p.pitch);
  for_each_band([&](int64_t task, const Band& band, T* scratch) {
    const int64_t at = band.image * P * p.pitch;
    problem.tile.backward_relation(p, image_of(band.image), band.first, band.last, scratch,
                                   grad_w1.data() + task * d * p.hidden, to_center.data() + at, to_around.data() + at);
  });
  release(problem.center_n), release(problem.around_n), release(repeated);
  const std::vector<double> by_relation = sum_over_tasks(grad_w1, d * p.hidden);
  for (int64_t e = 0; e < E; ++e)
    for (int64_t c = 0; c < d; ++c) to_weight1[e * d + c] = by_relation[c * p.hidden + e];

  // The first BatchNorm: what depends on pairs is a sum over them that the maps' box sums give.
  const T *center = values<T>(problem.center), *around = values<T>(problem.around);
  // Maps are taken less their origins, so that center - around is the relation less its mean, and less `rest`.
  const std::vector<T> none(d), one(d, 1);
  std::vector<double> products(N * 4 * d);  // of each image: sums of g and g * x of center, then of around
  for_each_task<T>(N, (P + 2) * d, [&](int64_t n, T* scratch) {
    T *x = scratch, *row = x + P * d;
    double* sum = products.data() + n * 4 * d;
    affine(center + n * P * d, P, d, problem.center_origin.data() + n * d, one.data(), none.data(), x, d);
    sum_products(to_center.data() + n * P * p.pitch, p.pitch, x, f, d, row, sum, sum + d);
    affine(around + n * P * d, P, d, problem.around_origin.data() + n * d, one.data(), none.data(), x, d);
    sum_products(to_around.data() + n * P * p.pitch, p.pitch, x, f, d, row, sum + 2 * d, sum + 3 * d);
    for (int64_t c = 0; c < d; ++c) sum[d + c] += problem.rest[n * d + c] * sum[c];
  });
  const std::vector<double> product = sum_over_tasks(products, 4 * d);
  std::vector<T> mean_g(d), tilt(d), minus(d);
  for (int64_t c = 0; c < d; ++c) {
    const double deviation = 1 / std::sqrt(values<T>(var1)[c] + eps);
    sum1[c] = product[c], product1[c] = deviation * (product[d + c] - product[3 * d + c]);
    if (training) {
      mean_g[c] = static_cast<T>(sum1[c] / problem.pairs);
      tilt[c] = static_cast<T>(deviation * product1[c] / problem.pairs);
    }
    minus[c] = -problem.scale[c];
  }
  Tensor grad_center = new_tensor<T>(in.center, {N, f.height, f.width, d}),
         grad_around = torch::stable::empty_like(grad_center);
  T *out_center = grad_center.template mutable_data_ptr<T>(), *out_around = grad_around.template mutable_data_ptr<T>();
  for_each_task<T>(N, (4 * P + f.padded_width() + 1) * d, [&](int64_t n, T* scratch) {
    T *x = scratch, *y = x + P * d, *box = y + P * d, *back = box + P * d, *mean = back + P * d, *row = mean + d;
    for (int64_t c = 0; c < d; ++c) mean[c] = mean_g[c] + problem.rest[n * d + c] * tilt[c];
    if (training) {
      affine(center + n * P * d, P, d, problem.center_origin.data() + n * d, one.data(), none.data(), x, d);
      affine(around + n * P * d, P, d, problem.around_origin.data() + n * d, one.data(), none.data(), y, d);
      box_sums(y, f, d, false, row, box);
      box_sums(x, f, d, true, row, back);
    }
    const T *seen_h = problem.seen_h.data(), *seen_w = problem.seen_w.data();
    finish<T>(to_center.data() + n * P * p.pitch, p.pitch, x, box, f, d, nullptr, nullptr, problem.scale.data(), mean,
              tilt.data(), out_center + n * P * d);
    // d loss / d around = -scale * (...), where y enters with the other sign: seen * y - back = -(back - seen * y).
    for (int64_t c = 0; c < d; ++c) row[c] = -tilt[c];
    finish<T>(to_around.data() + n * P * p.pitch, p.pitch, y, back, f, d, seen_h, seen_w, minus.data(), mean, row,
              out_around + n * P * d);
  });
  const auto of_maps_type = [&](const Tensor& x) {
    return x.scalar_type() == in.center.scalar_type() ? x : torch::stable::to(x, in.center.scalar_type());
  };
  const std::vector<double> to_gain2(sum2.begin() + p.hidden, sum2.end());
  return {of_maps_type(grad_center),
          of_maps_type(grad_around),
          grad_beta.take(in.beta.scalar_type()),
          tensor_of<T>(product1, in.beta, {d}),
          tensor_of<T>(sum1, in.beta, {d}),
          tensor_of<T>(to_weight1, in.beta, {E, d}),
          tensor_of<T>(to_gain2, in.beta, {E}),
          tensor_of<T>(sum2, in.beta, {E}),
          tensor_of<T>(to_weight2, in.beta, {G, E})};
}

Forward pairwise(const Tensor& center, const Tensor& around, const Tensor& beta, const Tensor& gain1,
                 const Tensor& bias1, const Tensor& weight1, const Tensor& gain2, const Tensor& bias2,
                 const Tensor& weight2, const Tensor& bias3, const Tensor& mean1, const Tensor& var1,
                 const Tensor& mean2, const Tensor& var2, int64_t kernel_size, bool training, double eps, bool tf32) {
  const bool is_double = beta.scalar_type() == ScalarType::Double;
  const Contiguous x({&gain1, &bias1, &weight1, &gain2, &bias2, &weight2, &mean1, &var1, &mean2, &var2}, is_double);
  const Inputs in{center, around, beta, x[0], x[1], x[2], x[3], x[4], x[5]};
  check_inputs(in, x[6], x[7], x[8], x[9]);
  if (is_double) return forward<double>(in, x[6], x[7], x[8], x[9], kernel_size, training, eps);
  return forward<float>(in, x[6], x[7], x[8], x[9], kernel_size, training, eps);
}

Backward pairwise_backward(const Tensor& grad_y, const Tensor& center, const Tensor& around, const Tensor& beta,
                           const Tensor& gain1, const Tensor& bias1, const Tensor& weight1, const Tensor& gain2,
                           const Tensor& bias2, const Tensor& weight2, const Tensor& mean1, const Tensor& var1,
                           const Tensor& mean2, const Tensor& var2, const Tensor& logsumexp, int64_t kernel_size,
                           bool training, double eps, bool tf32) {
  const bool is_double = beta.scalar_type() == ScalarType::Double;
  const Contiguous x({&gain1, &bias1, &weight1, &gain2, &bias2, &weight2, &mean1, &var1, &mean2, &var2, &logsumexp},
                     is_double);
  const Inputs in{center, around, beta, x[0], x[1], x[2], x[3], x[4], x[5]};
  check_inputs(in, x[6], x[7], x[8], x[9]);
  STD_TORCH_CHECK(grad_y.sizes().vec() == beta.sizes().vec(), "grad_y and beta must have the same shape");
  STD_TORCH_CHECK(logsumexp.numel() == beta.numel() / beta.size(3) * weight2.size(0), "logsumexp must be [N, H, W, G]");
  if (is_double) return backward<double>(grad_y, in, x[6], x[7], x[8], x[9], x[10], kernel_size, training, eps);
  return backward<float>(grad_y, in, x[6], x[7], x[8], x[9], x[10], kernel_size, training, eps);
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("pairwise", TORCH_BOX(&san::cpu::pairwise));
  m.impl("pairwise_backward", TORCH_BOX(&san::cpu::pairwise_backward));
}
