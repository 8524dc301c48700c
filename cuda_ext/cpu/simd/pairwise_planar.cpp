// Pairwise attention where channels are too few to fill a vector: vectors run over neighbouring pixels of a row.
//
// Behind the last pixel of a row vectors hold what no pair has: `clear` keeps it out of sums over pairs.
#include "planes.h"
#include "tiles.h"

namespace san::cpu {
namespace {

template <class T>
struct Tile : PlanarTile<T> {
  using Base = PlanarTile<T>;
  using Base::f, Base::K, Base::row, Base::first, Base::count, Base::width, Base::pairs, Base::pixel, Base::read;
  using Base::grad_y, Base::y, Base::beta, Base::to_beta, Base::for_each_position, Base::clear;

  static int64_t pair_channels(const Pairwise<T>& p) { return 2 * p.relation + 3 * p.hidden + 2 * p.weights; }
  static int64_t pixels(const Pairwise<T>& p) {
    return Base::most_pixels(p.footprint, p.footprint.positions() * pair_channels(p));
  }
  static int64_t scratch(const Pairwise<T>& p) {
    const int64_t map_channels = p.relation + p.values;
    return 2 * Planes<T>::size(p.footprint, map_channels, p.band_rows) +
           pixels(p) * (p.footprint.positions() * pair_channels(p) + 2 * map_channels + p.weights);
  }

  const Pairwise<T> p;  // a copy: no store can change it, so it may stay in registers
  const Image<T> image;
  T *a1, *grad_a1, *h, *a2, *grad_a2, *weight, *grad_weight;  // per pair
  T *center, *to_center, *logsumexp;                          // per pixel
  Planes<T> around, to_around;

  __attribute__((always_inline)) inline Tile(const Pairwise<T>& p, const Image<T>& image, T* scratch)
      : Base(p.footprint, p.weights, p.values), p(p), image(image) {
    const int64_t most = pixels(p), pairs = most * K;
    const auto take = [&](int64_t size) { return Base::take(scratch, size); };
    const auto take_planes = [&](int64_t channels) { return Base::take_planes(scratch, channels, p.band_rows); };
    a1 = take(pairs * p.relation), grad_a1 = take(pairs * p.relation);
    h = take(pairs * p.hidden), a2 = take(pairs * p.hidden), grad_a2 = take(pairs * p.hidden);
    weight = take(pairs * p.weights), grad_weight = take(pairs * p.weights);
    center = take(most * p.relation), to_center = take(most * p.relation);
    grad_y = take(most * p.values), y = take(most * p.values);
    logsumexp = take(most * p.weights);
    around = take_planes(p.relation), to_around = take_planes(p.relation);
    beta = take_planes(p.values), to_beta = take_planes(p.values);
  }

  // Calls visit(row of the band) for the tiles of a band, once a1 is there.
  template <class Visit>
  __attribute__((always_inline)) inline void for_each(int64_t first_row, int64_t last_row, const Visit& visit) {
    around.read(image.around, first_row, last_row);
    Base::for_each(first_row, last_row, pixels(p), [&](int64_t band_row) __attribute__((always_inline)) {
      relate(band_row);
      visit(band_row);
    });
  }
  // a1 = relu(center_i - around_j)
  __attribute__((always_inline)) inline void relate(int64_t band_row) {
    read(image.center, p.relation, center);
    for (int64_t c = 0; c < p.relation; ++c)
      for_each_position([&](int64_t o, int64_t y, int64_t x) __attribute__((always_inline)) {
        const T *from = around.at(band_row + y, c) + x, *i = center + c * width;
        T* to = a1 + (c * K + o) * width;
        for (int64_t t = 0; t < width; t += kLanes<T>) store(to + t, relu(load(i + t) - load(from + t)));
      });
  }
  // a1 w1 without bias1, into h.
  __attribute__((always_inline)) inline void map_relation() {
    multiply<Start::zero>(p.hidden, pairs(), p.relation, p.w1, 1, p.hidden, a1, pairs(), a1, h, pairs());
  }
  __attribute__((always_inline)) inline void map_hidden() {
    map_relation();
    for (int64_t e = 0; e < p.hidden; ++e) {
      const Vector<T> bias1 = broadcast(p.bias1[e]), gain2 = broadcast(p.gain2[e]), bias2 = broadcast(p.bias2[e]);
      for (int64_t n = e * pairs(); n < (e + 1) * pairs(); n += kLanes<T>) {
        const Vector<T> normalised = load(h + n) + bias1;
        store(h + n, normalised), store(a2 + n, relu(normalised * gain2 + bias2));
      }
    }
    multiply<Start::zero>(p.weights, pairs(), p.hidden, p.w2, 1, p.weights, a2, pairs(), a2, weight, pairs());
  }

  // weight = exp(z - largest) / their sum, and logsumexp.
  __attribute__((always_inline)) inline void softmax() {
    for (int64_t g = 0; g < p.weights; ++g)
      for (int64_t t = 0; t < width; t += kLanes<T>) {
        T* z = weight + g * pairs() + t;
        const Vector<T> top =
            largest_of<Vector<T>>(K, [&](int64_t o) __attribute__((always_inline)) { return load(z + o * width); });
        const Vector<T> sum = weights_below(z, top);
        store(logsumexp + g * width + t, top + log(sum));
      }
  }
  // weight from logsumexp. What that lost to rounding is the same for all, and grows with it: the sum takes it off.
  __attribute__((always_inline)) inline void softmax_again() {
    read(image.logsumexp, p.weights, logsumexp);
    for (int64_t g = 0; g < p.weights; ++g)
      for (int64_t t = 0; t < width; t += kLanes<T>)
        weights_below(weight + g * pairs() + t, load(logsumexp + g * width + t));
    clear(weight, p.weights * K);
  }
  __attribute__((always_inline)) inline Vector<T> weights_below(T* z, Vector<T> top) const {
    const Vector<T> sum = sum_of<Vector<T>>(K, [&](int64_t o) __attribute__((always_inline)) {
      const Vector<T> e = exp(load(z + o * width) - top);
      store(z + o * width, e);
      return e;
    });
    const Vector<T> scale = T(1) / sum;
    for (int64_t o = 0; o < K; ++o) store(z + o * width, load(z + o * width) * scale);
    return sum;
  }

  // Everything up to the gradient of a2, with which that of relu's argument is meant; grad_weight becomes the gradient
  // before softmax.
  __attribute__((always_inline)) inline void backward_to_hidden(int64_t band_row, bool to_values) {
    map_hidden();
    softmax_again();
    read(image.grad_y, p.values, grad_y);
    for (int64_t g = 0; g < p.weights; ++g)
      Base::correlate(band_row, g, weight + g * pairs(), grad_weight + g * pairs(), to_values);
    for (int64_t g = 0; g < p.weights; ++g)
      for (int64_t t = 0; t < width; t += kLanes<T>) {
        const int64_t from = g * pairs() + t;
        const Vector<T> mean = sum_of<Vector<T>>(K, [&](int64_t o) __attribute__((always_inline)) {
          return load(weight + from + o * width) * load(grad_weight + from + o * width);
        });
        for (int64_t o = 0; o < K; ++o) {
          T* gradient = grad_weight + from + o * width;
          store(gradient, load(weight + from + o * width) * (load(gradient) - mean));
        }
      }
    multiply<Start::zero>(p.hidden, pairs(), p.weights, p.w2_back, 1, p.hidden, grad_weight, pairs(), a2, grad_a2,
                          pairs());
    for (int64_t n = 0; n < p.hidden * pairs(); n += kLanes<T>)
      store(grad_a2 + n, where_positive(load(a2 + n), load(grad_a2 + n)));
  }
};

template <class T>
int64_t scratch_of(const Pairwise<T>& p) {
  return Tile<T>::scratch(p);
}

template <class T>
void moments(const Pairwise<T>& p, const Image<T>& image, int64_t first_row, int64_t last_row, T* scratch, double* mean,
             double* squares) {
  Tile<T> tile(p, image, scratch);
  double pairs = 0;
  for (int64_t e = 0; e < p.hidden; ++e) mean[e] = squares[e] = 0;
  tile.for_each(first_row, last_row, [&](int64_t) __attribute__((always_inline)) {
    tile.map_relation();
    const double rows = static_cast<double>(tile.count * tile.K), each = 1 / rows;
    const Merge merge(pairs, rows);
    pairs += rows;
    for (int64_t e = 0; e < p.hidden; ++e) {
      T* h = tile.h + e * tile.pairs();
      Vector<T> values[2]{}, sum[2]{}, square[2]{};
      tile.clear(h, tile.K);
      for (int64_t n = 0, i = 0; n < tile.pairs(); n += kLanes<T>, i = 1 - i) values[i] += load(h + n);
      // Distances from the tile's own mean, so that squares do not cancel.
      const T middle = static_cast<T>(total(values[0] + values[1]) * each);
      const Vector<T> from = broadcast(middle);
      tile.clear(h, tile.K, middle);
      for (int64_t n = 0, i = 0; n < tile.pairs(); n += kLanes<T>, i = 1 - i) {
        const Vector<T> distance = load(h + n) - from;
        sum[i] += distance, square[i] += distance * distance;
      }
      const double all = total(sum[0] + sum[1]), left = all * each;
      merge(middle + left, total(square[0] + square[1]) - all * left, mean[e], squares[e]);
    }
  });
}

template <class T>
void forward(const Pairwise<T>& p, const Image<T>& image, int64_t first_row, int64_t last_row, T* scratch) {
  Tile<T> tile(p, image, scratch);
  tile.beta.read(image.beta, first_row, last_row);
  tile.for_each(first_row, last_row, [&](int64_t band_row) __attribute__((always_inline)) {
    tile.map_hidden();
    tile.softmax();
    for (int64_t g = 0; g < p.weights; ++g) tile.aggregate(band_row, g, tile.weight + g * tile.pairs());
    from_planes<false>(tile.y, tile.width, p.values, tile.count, image.y + tile.pixel() * p.values);
    from_planes<false>(tile.logsumexp, tile.width, p.weights, tile.count, image.logsumexp + tile.pixel() * p.weights);
  });
}

template <class T>
void backward_mapping(const Pairwise<T>& p, const Image<T>& image, int64_t first_row, int64_t last_row, T* scratch,
                      T* grad_w2, T* sum, T* product, T* grad_beta) {
  Tile<T> tile(p, image, scratch);
  tile.beta.read(image.beta, first_row, last_row);
  tile.to_beta.clear(last_row - first_row);
  tile.for_each(first_row, last_row, [&](int64_t band_row) __attribute__((always_inline)) {
    tile.backward_to_hidden(band_row, true);
    const int64_t pairs = tile.pairs();
    add_products(p.hidden, p.weights, pairs, tile.a2, tile.grad_weight, grad_w2, p.weights, 1);
    for (int64_t e = 0; e < p.hidden; ++e) {
      const T *g = tile.grad_a2 + e * pairs, *h = tile.h + e * pairs;
      Vector<T> s{}, q{};
      for (int64_t n = 0; n < pairs; n += kLanes<T>) s += load(g + n), q += load(g + n) * load(h + n);
      sum[e] += total(s), product[e] += total(q);
    }
  });
  tile.to_beta.add_to(grad_beta, first_row, last_row);
}

template <class T>
void backward_relation(const Pairwise<T>& p, const Image<T>& image, int64_t first_row, int64_t last_row, T* scratch,
                       T* grad_w1, T* to_center, T* to_around) {
  Tile<T> tile(p, image, scratch);
  tile.beta.read(image.beta, first_row, last_row);
  tile.to_around.clear(last_row - first_row);
  tile.for_each(first_row, last_row, [&](int64_t band_row) __attribute__((always_inline)) {
    tile.backward_to_hidden(band_row, false);
    const int64_t pairs = tile.pairs(), width = tile.width;
    for (int64_t e = 0; e < p.hidden; ++e) {
      const Vector<T> slope = broadcast(p.slope[e]), offset = broadcast(p.offset[e]), tilt = broadcast(p.tilt[e]);
      for (int64_t n = e * pairs; n < (e + 1) * pairs; n += kLanes<T>)
        store(tile.grad_a2 + n, slope * load(tile.grad_a2 + n) - offset - load(tile.h + n) * tilt);
    }
    tile.clear(tile.grad_a2, p.hidden * tile.K);
    add_products(p.relation, p.hidden, pairs, tile.a1, tile.grad_a2, grad_w1, p.hidden, 1);
    multiply<Start::zero>(p.relation, pairs, p.hidden, p.w1_back, 1, p.pitch, tile.grad_a2, pairs, tile.a2,
                          tile.grad_a1, pairs);
    for (int64_t c = 0; c < p.relation; ++c) {
      memset(tile.to_center + c * width, 0, width * sizeof(T));
      tile.for_each_position([&](int64_t o, int64_t y, int64_t x) __attribute__((always_inline)) {
        T *other = tile.to_around.at(band_row + y, c) + x, *own = tile.to_center + c * width;
        for (int64_t t = 0, n = (c * tile.K + o) * width; t < width; t += kLanes<T>, n += kLanes<T>) {
          const Vector<T> g = where_positive(load(tile.a1 + n), load(tile.grad_a1 + n));
          store(other + t, load(other + t) + g), store(own + t, load(own + t) + g);
        }
      });
    }
    from_planes<false>(tile.to_center, width, p.relation, tile.count, to_center + tile.pixel() * p.relation);
  });
  tile.to_around.add_to(to_around, first_row, last_row);
}

}  // namespace

// SAN_ISA names the instruction set that this source is compiled for.
namespace SAN_ISA {
extern const PairwiseTiles<float> pairwise_planar_float;
extern const PairwiseTiles<double> pairwise_planar_double;
const PairwiseTiles<float> pairwise_planar_float{
    1, scratch_of<float>, moments<float>, forward<float>, backward_mapping<float>, backward_relation<float>};
const PairwiseTiles<double> pairwise_planar_double{
    1, scratch_of<double>, moments<double>, forward<double>, backward_mapping<double>, backward_relation<double>};
}  // namespace SAN_ISA
}  // namespace san::cpu
