// Pairwise attention, a tile of pixels at a time: whatever has a row per pair (i, j) lives in scratch that stays in
// cache.
#include "tiles.h"
#include "vector.h"

namespace san::cpu {
namespace {

// What a tile holds: for each of its pixels i and each position of the footprint a row.
template <class T>
struct Tile {
  static constexpr int64_t kRows = 196;
  static int64_t pixels(const Pairwise<T>& p) {
    const int64_t positions = p.footprint.positions();
    return positions < kRows ? (kRows + positions / 2) / positions : 1;
  }
  static int64_t scratch(const Pairwise<T>& p) {
    const int64_t rows = pixels(p) * p.footprint.positions();
    // An index takes no more than a value.
    return rows * (2 * p.pitch + 3 * p.hidden + 2 * p.weights + 1) + pixels(p) + p.footprint.kernel_size;
  }

  const Pairwise<T> p;  // a copy: no store can change it, so it may stay in registers
  const Image<T> image;
  const Footprint f;
  T *a1, *h, *a2, *weight, *grad_weight, *grad_a2, *grad_a1;
  int32_t *around, *columns;  // pixel j of each row; column of each pixel that the tile sees
  int64_t first = 0, count = 0, row = 0;

  SAN_INLINE T* take(T*& scratch, int64_t count) {
    T* taken = scratch;
    scratch += count;
    return taken;
  }
  __attribute__((always_inline)) inline Tile(const Pairwise<T>& p, const Image<T>& image, T* scratch)
      : p(p), image(image), f(p.footprint) {
    const int64_t rows = pixels(p) * f.positions();
    a1 = take(scratch, rows * p.pitch), grad_a1 = take(scratch, rows * p.pitch);
    h = take(scratch, rows * p.hidden), a2 = take(scratch, rows * p.hidden), grad_a2 = take(scratch, rows * p.hidden);
    weight = take(scratch, rows * p.weights), grad_weight = take(scratch, rows * p.weights);
    around = reinterpret_cast<int32_t*>(scratch), columns = around + rows;
  }

  int64_t rows() const { return count * f.positions(); }
  int64_t pixel(int64_t t) const { return row * f.width + first + t; }

  // a1 = relu(center_i - around_j) of `count` pixels of a row from column `first`.
  __attribute__((always_inline)) inline void relate(int64_t at_row, int64_t from, int64_t pixel_count) {
    row = at_row, first = from, count = pixel_count;
    const int64_t k = f.kernel_size, reach = f.reach();
    for (int64_t x = 0; x < count + k - 1; ++x) columns[x] = static_cast<int32_t>(reflect(first + x - reach, f.width));
    for (int64_t y = 0; y < k; ++y) {
      const int32_t above = static_cast<int32_t>(reflect(row + y - reach, f.height) * f.width);
      for (int64_t t = 0; t < count; ++t)
        for (int64_t x = 0; x < k; ++x) around[t * f.positions() + y * k + x] = above + columns[t + x];
    }
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < p.pitch; c += kLanes<T>) {
        const Vector<T> center = load(image.center + pixel(t) * p.pitch + c);
        for (int64_t o = 0, n = t * f.positions(); o < f.positions(); ++o, ++n)
          store(a1 + n * p.pitch + c, relu(center - load(image.around + around[n] * p.pitch + c)));
      }
  }

  // a2, and with Finish::both h too.
  template <Finish finish>
  __attribute__((always_inline)) inline void map_hidden() {
    multiply<Start::bias, finish>(rows(), p.hidden, p.relation, a1, p.pitch, 1, p.w1, p.hidden, p.bias1, h, p.hidden,
                                  {p.gain2, p.bias2, a2});
  }
  __attribute__((always_inline)) inline void map_weights() {
    multiply<Start::zero>(rows(), p.weights, p.hidden_used, a2, p.hidden, 1, p.w2, p.weights, p.bias2, weight,
                          p.weights);
  }

  // weight = exp(z - largest), and the sum over the footprint of each pixel's, which logsumexp becomes.
  __attribute__((always_inline)) inline Vector<T> softmax(int64_t t, int64_t c) {
    T* z = weight + t * f.positions() * p.weights + c;
    const Vector<T> top = largest_of<Vector<T>>(
        f.positions(), [&](int64_t o) __attribute__((always_inline)) { return load(z + o * p.weights); });
    const Vector<T> sum = sum_of<Vector<T>>(f.positions(), [&](int64_t o) __attribute__((always_inline)) {
      const Vector<T> e = exp(load(z + o * p.weights) - top);
      store(z + o * p.weights, e);
      return e;
    });
    store(image.logsumexp + pixel(t) * p.weights + c, top + log(sum));
    return sum;
  }

  // y of `shares` value channels that have the weights of channels c, c + 1, ...
  template <int shares>
  __attribute__((always_inline)) inline int64_t aggregate(int64_t t, int64_t c, int64_t share, Vector<T> sum) {
    for (; (share + shares) * p.weights <= p.values; share += shares) {
      Vector<T> y[shares]{};
      const T* from = image.beta + share * p.weights + c;
      for (int64_t o = 0, n = t * f.positions(); o < f.positions(); ++o, ++n) {
        const Vector<T> w = load(weight + n * p.weights + c);
        const T* beta = from + around[n] * p.values;
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) y[s] += w * load(beta + s * p.weights);
      }
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) store(image.y + pixel(t) * p.values + (share + s) * p.weights + c, y[s] / sum);
    }
    return share;
  }

  // weight from logsumexp, then grad_weight_j = sum of grad_y * beta_j over the channels that share a weight.
  __attribute__((always_inline)) inline void weights_again() {
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < p.weights; c += kLanes<T>) {
        const Vector<T> logsumexp = load(image.logsumexp + pixel(t) * p.weights + c);
        T* z = weight + t * f.positions() * p.weights + c;
        // What logsumexp lost to rounding is the same for all, and grows with it: their sum takes it off again.
        const Vector<T> sum = sum_of<Vector<T>>(f.positions(), [&](int64_t o) __attribute__((always_inline)) {
          const Vector<T> e = exp(load(z + o * p.weights) - logsumexp);
          store(z + o * p.weights, e);
          return e;
        });
        const Vector<T> scale = T(1) / sum;
        for (int64_t o = 0; o < f.positions(); ++o) store(z + o * p.weights, load(z + o * p.weights) * scale);
      }
  }
  template <int shares, bool first_shares>
  __attribute__((always_inline)) inline void correlate(int64_t t, int64_t c, int64_t share, T* grad_beta) {
    Vector<T> grad_y[shares];
#pragma GCC unroll 8
    for (int s = 0; s < shares; ++s) grad_y[s] = load(image.grad_y + pixel(t) * p.values + (share + s) * p.weights + c);
    for (int64_t o = 0, n = t * f.positions(); o < f.positions(); ++o, ++n) {
      const int64_t at = around[n] * p.values + share * p.weights + c;
      Vector<T> sum = first_shares ? Vector<T>{} : load(grad_weight + n * p.weights + c);
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) sum += grad_y[s] * load(image.beta + at + s * p.weights);
      store(grad_weight + n * p.weights + c, sum);
      if (grad_beta != nullptr) {
        const Vector<T> w = load(weight + n * p.weights + c);
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s)
          store(grad_beta + at + s * p.weights, load(grad_beta + at + s * p.weights) + w * grad_y[s]);
      }
    }
  }

  // Everything up to the gradient of a2; grad_weight becomes the gradient before softmax.
  __attribute__((always_inline)) inline void backward_to_hidden(T* grad_beta) {
    map_hidden<Finish::both>();
    map_weights();
    weights_again();
    const int64_t shares = p.values / p.weights;
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < p.weights; c += kLanes<T>) {
        int64_t share = 0;
        if (shares >= 8)
          correlate<8, true>(t, c, 0, grad_beta), share = 8;
        else if (shares >= 2)
          correlate<2, true>(t, c, 0, grad_beta), share = 2;
        else
          correlate<1, true>(t, c, 0, grad_beta), share = 1;
        for (; share + 8 <= shares; share += 8) correlate<8, false>(t, c, share, grad_beta);
        for (; share + 2 <= shares; share += 2) correlate<2, false>(t, c, share, grad_beta);
        for (; share < shares; ++share) correlate<1, false>(t, c, share, grad_beta);
        const int64_t from = t * f.positions() * p.weights + c;
        const Vector<T> mean = sum_of<Vector<T>>(f.positions(), [&](int64_t o) __attribute__((always_inline)) {
          return load(weight + from + o * p.weights) * load(grad_weight + from + o * p.weights);
        });
        for (int64_t o = 0; o < f.positions(); ++o) {
          T* g = grad_weight + from + o * p.weights;
          store(g, load(weight + from + o * p.weights) * (load(g) - mean));
        }
      }
    multiply<Start::zero>(rows(), p.hidden, p.weights, grad_weight, p.weights, 1, p.w2_back, p.hidden, p.bias1, grad_a2,
                          p.hidden);
  }
};

// Calls visit(row, first column, pixels) for the tiles of a band.
template <class T, class Visit>
SAN_INLINE void for_each_tile(const Pairwise<T>& p, int64_t first_row, int64_t last_row, const Visit& visit) {
  const int64_t most = Tile<T>::pixels(p), width = p.footprint.width;
  for (int64_t row = first_row; row < last_row; ++row)
    for (int64_t column = 0; column < width; column += most)
      visit(row, column, width - column < most ? width - column : most);
}

template <class T>
int64_t scratch_of(const Pairwise<T>& p) {
  return Tile<T>::scratch(p);
}

template <class T>
void moments(const Pairwise<T>& p, const Image<T>& image, int64_t first_row, int64_t last_row, T* scratch, double* mean,
             double* squares) {
  Tile<T> tile(p, image, scratch);
  double pairs = 0;
  for (int64_t c = 0; c < p.hidden; ++c) mean[c] = squares[c] = 0;
  for_each_tile(p, first_row, last_row, [&](int64_t row, int64_t column, int64_t count) __attribute__((always_inline)) {
    tile.relate(row, column, count);
    multiply<Start::zero>(tile.rows(), p.hidden, p.relation, tile.a1, p.pitch, 1, p.w1, p.hidden, p.bias1, tile.h,
                          p.hidden);
    const double rows = static_cast<double>(tile.rows()), each = 1 / rows;
    const Merge merge(pairs, rows);
    pairs += rows;
    for (int64_t c = 0; c < p.hidden; c += kLanes<T>) {
      const auto h = [&](int64_t n) __attribute__((always_inline)) { return load(tile.h + n * p.hidden + c); };
      // Distances from the tile's own mean, so that squares do not cancel.
      const Vector<T> middle = sum_of<Vector<T>>(tile.rows(), h) * static_cast<T>(each);
      const Vector<T> sum =
          sum_of<Vector<T>>(tile.rows(), [&](int64_t n) __attribute__((always_inline)) { return h(n) - middle; });
      const Vector<T> square = sum_of<Vector<T>>(tile.rows(), [&](int64_t n) __attribute__((always_inline)) {
        const Vector<T> distance = h(n) - middle;
        return distance * distance;
      });
      for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
        const double left = sum[lane] * each;
        merge(middle[lane] + left, square[lane] - sum[lane] * left, mean[c + lane], squares[c + lane]);
      }
    }
  });
}

template <class T>
void forward(const Pairwise<T>& p, const Image<T>& image, int64_t first_row, int64_t last_row, T* scratch) {
  Tile<T> tile(p, image, scratch);
  for_each_tile(p, first_row, last_row, [&](int64_t row, int64_t column, int64_t count) __attribute__((always_inline)) {
    tile.relate(row, column, count);
    tile.template map_hidden<Finish::activate>();
    tile.map_weights();
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < p.weights; c += kLanes<T>) {
        const Vector<T> sum = tile.softmax(t, c);
        int64_t share = tile.template aggregate<8>(t, c, 0, sum);
        share = tile.template aggregate<2>(t, c, share, sum);
        tile.template aggregate<1>(t, c, share, sum);
      }
  });
}

template <class T>
void backward_mapping(const Pairwise<T>& p, const Image<T>& image, int64_t first_row, int64_t last_row, T* scratch,
                      T* grad_w2, T* sum, T* product, T* grad_beta) {
  Tile<T> tile(p, image, scratch);
  for_each_tile(p, first_row, last_row, [&](int64_t row, int64_t column, int64_t count) __attribute__((always_inline)) {
    tile.relate(row, column, count);
    tile.backward_to_hidden(grad_beta);
    multiply<Start::sum>(p.hidden_used, p.weights, tile.rows(), tile.a2, 1, p.hidden, tile.grad_weight, p.weights,
                         p.bias1, grad_w2, p.weights);
    for (int64_t c = 0; c < p.hidden; c += kLanes<T>) {
      const auto grad_v = [&](int64_t n) __attribute__((always_inline)) {
        return where_positive(load(tile.a2 + n * p.hidden + c), load(tile.grad_a2 + n * p.hidden + c));
      };
      store(sum + c, load(sum + c) + sum_of<Vector<T>>(tile.rows(), grad_v));
      store(product + c,
            load(product + c) + sum_of<Vector<T>>(tile.rows(), [&](int64_t n) __attribute__((always_inline)) {
              return grad_v(n) * load(tile.h + n * p.hidden + c);
            }));
    }
  });
}

template <class T>
void backward_relation(const Pairwise<T>& p, const Image<T>& image, int64_t first_row, int64_t last_row, T* scratch,
                       T* grad_w1, T* to_center, T* to_around) {
  Tile<T> tile(p, image, scratch);
  for_each_tile(p, first_row, last_row, [&](int64_t row, int64_t column, int64_t count) __attribute__((always_inline)) {
    tile.relate(row, column, count);
    tile.backward_to_hidden(nullptr);
    for (int64_t n = 0; n < tile.rows() * p.hidden; n += p.hidden)
      for (int64_t c = 0; c < p.hidden; c += kLanes<T>) {
        const Vector<T> g = where_positive(load(tile.a2 + n + c), load(tile.grad_a2 + n + c));
        store(tile.grad_a2 + n + c,
              load(p.slope + c) * g - load(p.offset + c) - load(tile.h + n + c) * load(p.tilt + c));
      }
    multiply<Start::sum>(p.relation, p.hidden, tile.rows(), tile.a1, 1, p.pitch, tile.grad_a2, p.hidden, p.bias1,
                         grad_w1, p.hidden);
    multiply<Start::zero>(tile.rows(), p.pitch, p.hidden_used, tile.grad_a2, p.hidden, 1, p.w1_back, p.pitch, p.bias1,
                          tile.grad_a1, p.pitch);
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < p.pitch; c += kLanes<T>) {
        const int64_t first = t * tile.f.positions();
        const Vector<T> sum = sum_of<Vector<T>>(tile.f.positions(), [&](int64_t o) __attribute__((always_inline)) {
          const int64_t at = (first + o) * p.pitch + c;
          const Vector<T> g = where_positive(load(tile.a1 + at), load(tile.grad_a1 + at));
          T* other = to_around + tile.around[first + o] * p.pitch + c;
          store(other, load(other) + g);
          return g;
        });
        store(to_center + tile.pixel(t) * p.pitch + c, sum);
      }
  });
}

}  // namespace

// SAN_ISA names the instruction set that this source is compiled for.
namespace SAN_ISA {
extern const PairwiseTiles<float> pairwise_float;
extern const PairwiseTiles<double> pairwise_double;
const PairwiseTiles<float> pairwise_float{kLanes<float>,  scratch_of<float>,       moments<float>,
                                          forward<float>, backward_mapping<float>, backward_relation<float>};
const PairwiseTiles<double> pairwise_double{kLanes<double>,  scratch_of<double>,       moments<double>,
                                            forward<double>, backward_mapping<double>, backward_relation<double>};
}  // namespace SAN_ISA
}  // namespace san::cpu
