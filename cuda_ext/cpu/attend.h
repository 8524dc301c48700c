// The weighted sum of values, with attention weights that exist for one band at a time, in scratch memory. They are
// computed again for gradients, so that they are never stored. The sources of weights are in pairs.cpp,
// patches.cpp and dot.cpp.
#pragma once
#include "bands.h"

namespace san::cpu {
namespace {

// Vectors run along the rows of a map. In short rows, most lanes of AVX-512 would be empty.
template <class T>
const AggregationKernels<T>& aggregation_kernels(const Footprint& f) {
  constexpr int64_t kShortRow = 24;
  return f.width > kShortRow ? SAN_CHOOSE(aggregation<T>) : SAN_CHOOSE_SHORT(aggregation<T>);
}

// Rows per band for which two maps fit into the L2 cache.
template <class T>
int64_t band_rows(const Aggregation<T>& p, int64_t least) {
  constexpr int64_t kBytes = 512 << 10;
  const Footprint& f = p.footprint;
  const int64_t rows = kBytes / (p.values * f.padded_width() * sizeof(T)) - 2 * f.reach();
  return std::clamp<int64_t>(rows, least, std::max(least, kBandRows));
}

// A map [N, C, H, W] as [N, H, W, C]; one that is channels-last already is not copied.
template <class T>
Tensor by_pixels(const Tensor& x) {
  return as<T>(torch::stable::transpose(torch::stable::transpose(x, 1, 2), 2, 3));
}

// beta [N, H, W, M], and the bands in which it is visited.
template <class T>
struct Values {
  Values(const Tensor& beta, const Footprint& f, int64_t weights, int64_t lanes)
      : p{f, beta.size(3), weights},
        N(beta.size(0)),
        map_size(p.values * f.pixels()),
        lanes(lanes),
        beta(as<T>(beta)) {}

  // Between adjacent positions, in whole vectors. All of these values must be written: the aggregation multiplies those
  // after the last pixel by 0.
  int64_t pitch(int64_t rows) const { return (rows * p.footprint.width + lanes - 1) / lanes * lanes; }
  int64_t weights_size(int64_t rows) const { return p.weights * p.footprint.positions() * pitch(rows); }
  // Rows whose weights stay in the L2 cache.
  int64_t band_rows(int64_t least) const {
    constexpr int64_t kBytes = 512 << 10;
    return std::clamp<int64_t>(kBytes / (weights_size(1) * sizeof(T)), least, std::max(least, kBandRows));
  }
  AggregationMaps<T> maps(const Band& band, BandWeights<T> w) const {
    const int64_t size = weights_size(band.rows.last - band.rows.first);
    return {values<T>(beta) + band.image * map_size, {w.data, w.pitch}, w.data + size};
  }

  const Aggregation<T> p;
  const int64_t N, map_size, lanes;
  const Tensor beta;
};

// y [N, H, W, M]. `weigh` computes the weights of a band: weigh(band, scratch, weights).
template <class T, class Scratch, class Weigh>
Tensor attend(const Values<T>& x, const Scratch& scratch_of, const Weigh& weigh) {
  const Footprint& f = x.p.footprint;
  const AggregationKernels<T>& kernels = aggregation_kernels<T>(f);
  const std::vector<Band> bands = bands_alone(x.N, f, x.band_rows(1));
  const int64_t rows = most_rows(bands), size = x.weights_size(rows);
  const int64_t scratch_size = std::max(scratch_of(rows), kernels.scratch(x.p, rows, false));
  Tensor y = torch::stable::empty_like(x.beta);
  T* out = y.template mutable_data_ptr<T>();
  for_each_task<T>(bands.size(), size + scratch_size, [&](int64_t task, T* scratch) {
    const Band& band = bands[task];
    const BandWeights<T> w{scratch, x.pitch(band.rows.last - band.rows.first)};
    weigh(band, scratch + size, w);
    kernels.forward(x.p, x.maps(band, w), band.rows, scratch + size, out + band.image * x.map_size);
  });
  return y;
}

template <class T>
std::vector<Band> bands_of_gradients(const Values<T>& x) {
  const Footprint& f = x.p.footprint;
  return bands_of(x.N, f, x.band_rows(f.kernel_size));
}

// The gradient of beta for `grad` [N, H, W, M]. `weigh_backward` receives the weights of a band, their gradients, and
// sum_j w grad_w for each pixel, [G, pitch]: weigh_backward(task, band, scratch, weights, gradients, dots). Bands are
// those of `bands_of_gradients`.
template <class T, class Scratch, class Weigh, class WeighBackward>
Tensor attend_backward(const Values<T>& x, const Tensor& grad, const std::vector<Band>& bands,
                       const Scratch& scratch_of, const Weigh& weigh, const WeighBackward& weigh_backward) {
  const AggregationKernels<T>& kernels = aggregation_kernels<T>(x.p.footprint);
  const int64_t rows = most_rows(bands), size = x.weights_size(rows), dots_size = x.p.weights * x.pitch(rows);
  const int64_t scratch_size = std::max(scratch_of(rows), kernels.scratch(x.p, rows, true));
  const Tensor grad_y = as<T>(grad);
  Tensor to_beta = torch::stable::empty_like(x.beta);
  torch::stable::zero_(to_beta);
  T* out = to_beta.template mutable_data_ptr<T>();
  for_each_band_apart<T>(bands, 2 * size + dots_size + scratch_size, [&](int64_t task, const Band& band, T* scratch) {
    const int64_t pitch = x.pitch(band.rows.last - band.rows.first), map = band.image * x.map_size;
    const BandWeights<T> w{scratch, pitch}, to_w{scratch + size, pitch};
    T *dots = scratch + 2 * size, *free = dots + dots_size;
    weigh(band, free, w);
    kernels.backward(x.p, x.maps(band, w), values<T>(grad_y) + map, band.rows, free, out + map, to_w, dots);
    weigh_backward(task, band, free, w, to_w, dots);
  });
  return to_beta;
}

}  // namespace
}  // namespace san::cpu
