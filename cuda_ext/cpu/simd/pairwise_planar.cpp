// Pairwise attention where channels are too few to fill a vector: vectors run over neighbouring pixels of a row, and
// each channel lies in a plane of its own.
//
// A band copies its rows, and those that they see, into padded planes once; a footprint's position is then an offset.
// Behind the last pixel of a row vectors hold what no pair has: `clear` keeps it out of sums over pairs.
#include "planes.h"
#include "tiles.h"

namespace san::cpu {
namespace {

// sums [rows, columns] += a [rows, count] b [columns, count]^T
template <int rows, int columns, class T>
SAN_INLINE void add_products_block(int64_t count, const T* a, const T* b, T* sums, int64_t pitch) {
  Vector<T> sum[rows][columns]{};
  for (int64_t n = 0; n < count; n += kLanes<T>) {
    Vector<T> right[columns];
#pragma GCC unroll 4
    for (int j = 0; j < columns; ++j) right[j] = load(b + j * count + n);
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
      const Vector<T> left = load(a + i * count + n);
#pragma GCC unroll 4
      for (int j = 0; j < columns; ++j) sum[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) sums[i * pitch + j] += total(sum[i][j]);
}

template <int rows, class T>
SAN_INLINE void add_products_row(int64_t columns, int64_t count, const T* a, const T* b, T* sums, int64_t pitch) {
  int64_t j = 0;
  for (; j + 4 <= columns; j += 4) add_products_block<rows, 4>(count, a, b + j * count, sums + j, pitch);
  for (; j < columns; ++j) add_products_block<rows, 1>(count, a, b + j * count, sums + j, pitch);
}

template <class T>
__attribute__((noinline)) void add_products(int64_t rows, int64_t columns, int64_t count, const T* a, const T* b,
                                            T* sums, int64_t pitch) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) add_products_row<4>(columns, count, a + i * count, b, sums + i * pitch, pitch);
  for (; i < rows; ++i) add_products_row<1>(columns, count, a + i * count, b, sums + i * pitch, pitch);
}

// Rows of an image as planes [rows, channels, width], padded by reflection.
template <class T>
struct Planes {
  Footprint f;
  int64_t channels, width;
  T* data;

  static int64_t width_of(const Footprint& f) { return whole_vectors<T>(f.width) + 2 * f.reach(); }
  static int64_t size(const Footprint& f, int64_t channels, int64_t rows) {
    return (rows + 2 * f.reach()) * channels * width_of(f);
  }
  // Row `row` of the band, counted from the first one that it sees, from the padding's first column.
  T* at(int64_t row, int64_t c) const { return data + (row * channels + c) * width; }

  __attribute__((always_inline)) inline void read(const T* map, int64_t first, int64_t last) const {
    const int64_t reach = f.reach();
    for (int64_t row = first - reach; row < last + reach; ++row) {
      T* planes = at(row - first + reach, 0) + reach;
      to_planes(map + reflect(row, f.height) * f.width * channels, channels, f.width, planes, width);
      for (T* plane = planes; plane < planes + channels * width; plane += width)
        for (int64_t x = 1; x <= reach; ++x) plane[-x] = plane[x], plane[f.width - 1 + x] = plane[f.width - 1 - x];
    }
  }
  __attribute__((always_inline)) inline void clear(int64_t rows) const {
    memset(data, 0, (rows + 2 * f.reach()) * channels * width * sizeof(T));
  }
  // The adjoint of read: adds what lies in the planes to the pixels that they show.
  __attribute__((always_inline)) inline void add_to(T* map, int64_t first, int64_t last) const {
    const int64_t reach = f.reach();
    for (int64_t row = first - reach; row < last + reach; ++row) {
      T* planes = at(row - first + reach, 0) + reach;
      for (T* plane = planes; plane < planes + channels * width; plane += width)
        for (int64_t x = 1; x <= reach; ++x) plane[x] += plane[-x], plane[f.width - 1 - x] += plane[f.width - 1 + x];
      from_planes<true>(planes, width, channels, f.width, map + reflect(row, f.height) * f.width * channels);
    }
  }
};

// Some neighbouring pixels of a row. What it holds per pair is [channels, K, width], per pixel [channels, width].
template <class T>
struct Tile {
  static int64_t pair_channels(const Pairwise<T>& p) { return 2 * p.relation + 3 * p.hidden + 2 * p.weights; }
  // As many pixels as leave a tile's pairs in the first cache, one vector at least.
  static int64_t pixels(const Pairwise<T>& p) {
    constexpr int64_t kBytes = 32 << 10;
    const int64_t bytes_of_pixel = p.footprint.positions() * pair_channels(p) * sizeof(T);
    const int64_t fit = kBytes / bytes_of_pixel / kLanes<T> * kLanes<T>, row = whole_vectors<T>(p.footprint.width);
    return fit < kLanes<T> ? kLanes<T> : fit < row ? fit : row;
  }
  static int64_t scratch(const Pairwise<T>& p) {
    const int64_t map_channels = p.relation + p.values;
    return 2 * Planes<T>::size(p.footprint, map_channels, p.band_rows) +
           pixels(p) * (p.footprint.positions() * pair_channels(p) + 2 * map_channels + p.weights);
  }

  const Pairwise<T> p;  // a copy: no store can change it, so it may stay in registers
  const Image<T> image;
  const Footprint f;
  const int64_t K;
  T *a1, *grad_a1, *h, *a2, *grad_a2, *weight, *grad_weight;  // per pair
  T *center, *to_center, *grad_y, *y, *logsumexp;             // per pixel
  Planes<T> around, beta, to_around, to_beta;
  int64_t row = 0, first = 0;    // of the map, where the tile begins
  int64_t count = 0, width = 0;  // pixels; the same in whole vectors

  SAN_INLINE T* take(T*& scratch, int64_t size) {
    T* taken = scratch;
    scratch += size;
    return taken;
  }
  __attribute__((always_inline)) inline Planes<T> take_planes(T*& scratch, int64_t channels) {
    T* data = take(scratch, Planes<T>::size(f, channels, p.band_rows));
    return {f, channels, Planes<T>::width_of(f), data};
  }
  __attribute__((always_inline)) inline Tile(const Pairwise<T>& p, const Image<T>& image, T* scratch)
      : p(p), image(image), f(p.footprint), K(f.positions()) {
    const int64_t most = pixels(p), pairs = most * K;
    a1 = take(scratch, pairs * p.relation), grad_a1 = take(scratch, pairs * p.relation);
    h = take(scratch, pairs * p.hidden), a2 = take(scratch, pairs * p.hidden);
    grad_a2 = take(scratch, pairs * p.hidden);
    weight = take(scratch, pairs * p.weights), grad_weight = take(scratch, pairs * p.weights);
    center = take(scratch, most * p.relation), to_center = take(scratch, most * p.relation);
    grad_y = take(scratch, most * p.values), y = take(scratch, most * p.values);
    logsumexp = take(scratch, most * p.weights);
    around = take_planes(scratch, p.relation), to_around = take_planes(scratch, p.relation);
    beta = take_planes(scratch, p.values), to_beta = take_planes(scratch, p.values);
  }

  int64_t pairs() const { return K * width; }
  int64_t pixel() const { return row * f.width + first; }

  // Calls visit(row of the band) for the tiles of a band, once a1 is there.
  template <class Visit>
  __attribute__((always_inline)) inline void for_each(int64_t first_row, int64_t last_row, const Visit& visit) {
    const int64_t most = pixels(p);
    around.read(image.around, first_row, last_row);
    for (row = first_row; row < last_row; ++row)
      for (first = 0; first < f.width; first += most) {
        count = f.width - first < most ? f.width - first : most, width = whole_vectors<T>(count);
        relate(row - first_row);
        visit(row - first_row);
      }
  }
  // Calls visit(position, y, x): what the tile's first pixel sees there lies y rows below its own and at column x of
  // the padded planes.
  template <class Visit>
  __attribute__((always_inline)) inline void for_each_position(const Visit& visit) const {
    for (int64_t y = 0, o = 0; y < f.kernel_size; ++y)
      for (int64_t x = 0; x < f.kernel_size; ++x, ++o) visit(o, y, first + x);
  }
  // A map's pixels of the tile, as planes.
  __attribute__((always_inline)) inline void read(const T* map, int64_t channels, T* planes) const {
    if (count < width) memset(planes, 0, channels * width * sizeof(T));
    to_planes(map + pixel() * channels, channels, count, planes, width);
  }
  // Sets values per pair to 0, or to one of each channel, where there is no pixel.
  __attribute__((always_inline)) inline void clear(T* values, int64_t channels, const T* with = nullptr) const {
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t o = 0; o < K; ++o)
        for (int64_t t = count; t < width; ++t) values[(c * K + o) * width + t] = with == nullptr ? T(0) : with[c];
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
    clear(weight, p.weights);
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

  // y of `shares` value channels from c on, that have one weight.
  template <int shares>
  __attribute__((always_inline)) inline void aggregate(int64_t band_row, int64_t c) {
    const T* w = weight + c % p.weights * pairs();
    for (int64_t t = 0; t < width; t += kLanes<T>) {
      Vector<T> sum[shares]{};
      for_each_position([&](int64_t o, int64_t y, int64_t x) __attribute__((always_inline)) {
        const Vector<T> factor = load(w + o * width + t);
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) sum[s] += factor * load(beta.at(band_row + y, c + s * p.weights) + x + t);
      });
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) store(y + (c + s * p.weights) * width + t, sum[s]);
    }
  }

  // Adds what `shares` value channels from c on have to the gradients of their weight and, where `to_values`, weight *
  // grad_y to those of beta.
  template <int shares>
  __attribute__((always_inline)) inline void correlate(int64_t band_row, int64_t c, bool is_first, bool to_values) {
    const int64_t at = c % p.weights * pairs();
    for (int64_t t = 0; t < width; t += kLanes<T>) {
      Vector<T> grad[shares];
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) grad[s] = load(grad_y + (c + s * p.weights) * width + t);
      for_each_position([&](int64_t o, int64_t y, int64_t x) __attribute__((always_inline)) {
        T* out = grad_weight + at + o * width + t;
        Vector<T> sum = is_first ? Vector<T>{} : load(out);
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) sum += grad[s] * load(beta.at(band_row + y, c + s * p.weights) + x + t);
        store(out, sum);
        if (!to_values) return;
        const Vector<T> w = load(weight + at + o * width + t);
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) {
          T* to = to_beta.at(band_row + y, c + s * p.weights) + x + t;
          store(to, load(to) + w * grad[s]);
        }
      });
    }
  }

  // Everything up to the gradient of a2, with which that of relu's argument is meant; grad_weight becomes the gradient
  // before softmax.
  __attribute__((always_inline)) inline void backward_to_hidden(int64_t band_row, bool to_values) {
    map_hidden();
    softmax_again();
    read(image.grad_y, p.values, grad_y);
    const int64_t shares = p.values / p.weights;
    for (int64_t g = 0; g < p.weights; ++g) {
      int64_t share = 0;
      for (; share + 8 <= shares; share += 8) correlate<8>(band_row, share * p.weights + g, share == 0, to_values);
      for (; share < shares; ++share) correlate<1>(band_row, share * p.weights + g, share == 0, to_values);
    }
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
  const int64_t pairs = (last_row - first_row) * p.footprint.width * p.footprint.positions();
  bool has_origin = false;
  // Distances from the first pair's values, so that squares do not cancel.
  T* origin = tile.logsumexp;
  for (int64_t e = 0; e < p.hidden; ++e) mean[e] = squares[e] = 0;
  tile.for_each(first_row, last_row, [&](int64_t) __attribute__((always_inline)) {
    tile.map_relation();
    for (int64_t e = 0; e < p.hidden && !has_origin; ++e) origin[e] = tile.h[e * tile.pairs()];
    has_origin = true;
    tile.clear(tile.h, p.hidden, origin);
    for (int64_t e = 0; e < p.hidden; ++e) {
      const Vector<T> from = broadcast(origin[e]);
      const T* h = tile.h + e * tile.pairs();
      Vector<T> sum[2]{}, square[2]{};
      for (int64_t n = 0, i = 0; n < tile.pairs(); n += kLanes<T>, i = 1 - i) {
        const Vector<T> distance = load(h + n) - from;
        sum[i] += distance, square[i] += distance * distance;
      }
      mean[e] += total(sum[0] + sum[1]), squares[e] += total(square[0] + square[1]);
    }
  });
  for (int64_t e = 0; e < p.hidden; ++e) {
    const double distance = mean[e] / pairs;
    squares[e] -= mean[e] * distance;
    mean[e] = origin[e] + distance;
  }
}

template <class T>
void forward(const Pairwise<T>& p, const Image<T>& image, int64_t first_row, int64_t last_row, T* scratch) {
  Tile<T> tile(p, image, scratch);
  tile.beta.read(image.beta, first_row, last_row);
  tile.for_each(first_row, last_row, [&](int64_t band_row) __attribute__((always_inline)) {
    tile.map_hidden();
    tile.softmax();
    const int64_t shares = p.values / p.weights;
    for (int64_t g = 0; g < p.weights; ++g) {
      int64_t share = 0;
      for (; share + 8 <= shares; share += 8) tile.template aggregate<8>(band_row, share * p.weights + g);
      for (; share < shares; ++share) tile.template aggregate<1>(band_row, share * p.weights + g);
    }
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
    add_products(p.hidden, p.weights, pairs, tile.a2, tile.grad_weight, grad_w2, p.weights);
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
    tile.clear(tile.grad_a2, p.hidden);
    add_products(p.relation, p.hidden, pairs, tile.a1, tile.grad_a2, grad_w1, p.hidden);
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
