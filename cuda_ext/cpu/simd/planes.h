// What attention with few channels is made of: vectors run over neighbouring pixels of a row, and each channel lies in
// a plane of its own. Channels-last maps [pixels, channels] become planes [channels, pitch] and back, a block of
// vectors at a time.
//
// A band copies its rows, and those that they see, into padded planes once; a footprint's position is then an offset.
#pragma once
#include "../../footprint.h"
#include "vector.h"

namespace san::cpu {
namespace {

// Exchanges the rows and columns of a square block: halves of growing blocks change places.
template <class T>
SAN_INLINE void transpose(Vector<T> (&x)[kLanes<T>]) {
  constexpr int L = kLanes<T>;
  typedef decltype(Vector<T>{} > Vector<T>{}) Places;
#pragma GCC unroll 8
  for (int half = 1; half < L; half *= 2) {
    Places upper{}, lower{};
#pragma GCC unroll 16
    for (int lane = 0; lane < L; ++lane) {
      upper[lane] = lane & half ? L + lane - half : lane;
      lower[lane] = lane & half ? L + lane : lane + half;
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if (i & half) continue;
      const Vector<T> a = x[i], b = x[i + half];
      x[i] = __builtin_shuffle(a, b, upper), x[i + half] = __builtin_shuffle(a, b, lower);
    }
  }
}

template <class T>
__attribute__((noinline)) void to_planes(const T* map, int64_t channels, int64_t pixels, T* planes, int64_t pitch) {
  constexpr int64_t L = kLanes<T>;
  const int64_t blocks = channels / L * L, whole = pixels / L * L;
  for (int64_t i = 0; i < whole; i += L)
    for (int64_t c = 0; c < blocks; c += L) {
      Vector<T> x[L];
#pragma GCC unroll 16
      for (int64_t lane = 0; lane < L; ++lane) x[lane] = load(map + (i + lane) * channels + c);
      transpose<T>(x);
#pragma GCC unroll 16
      for (int64_t lane = 0; lane < L; ++lane) store(planes + (c + lane) * pitch + i, x[lane]);
    }
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t i = c < blocks ? whole : 0; i < pixels; ++i) planes[c * pitch + i] = map[i * channels + c];
}

// Writes the map, or adds to it.
template <bool add, class T>
__attribute__((noinline)) void from_planes(const T* planes, int64_t pitch, int64_t channels, int64_t pixels, T* map) {
  constexpr int64_t L = kLanes<T>;
  const int64_t blocks = channels / L * L, whole = pixels / L * L;
  for (int64_t i = 0; i < whole; i += L)
    for (int64_t c = 0; c < blocks; c += L) {
      Vector<T> x[L];
#pragma GCC unroll 16
      for (int64_t lane = 0; lane < L; ++lane) x[lane] = load(planes + (c + lane) * pitch + i);
      transpose<T>(x);
#pragma GCC unroll 16
      for (int64_t lane = 0; lane < L; ++lane) {
        T* to = map + (i + lane) * channels + c;
        store(to, add ? load(to) + x[lane] : x[lane]);
      }
    }
  for (int64_t i = 0; i < pixels; ++i)
    for (int64_t c = i < whole ? blocks : 0; c < channels; ++c) {
      const T value = planes[c * pitch + i];
      map[i * channels + c] = add ? map[i * channels + c] + value : value;
    }
}

// The first `count` lanes of x, and `rest` in the others.
template <class T>
SAN_INLINE Vector<T> first_lanes(Vector<T> x, int64_t count, T rest = 0) {
  Vector<T> lanes{};
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes<T>; ++lane) lanes[lane] = static_cast<T>(lane);
  return lanes < broadcast(static_cast<T>(count)) ? x : broadcast(rest);
}

// The sums of each of a block's rows.
template <class T>
SAN_INLINE Vector<T> totals(const Vector<T>* rows) {
  Vector<T> x[kLanes<T>];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) x[i] = rows[i];
  transpose<T>(x);
#pragma GCC unroll 4
  for (int half = kLanes<T> / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// sums [rows, columns] += a [rows, count] b [columns, count]^T; an element (i, j) of sums lies at i * row + j * column.
template <int rows, int columns, class T>
SAN_INLINE void add_products_block(int64_t count, const T* a, const T* b, T* sums, int64_t row, int64_t column) {
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
  if constexpr (rows * columns % kLanes<T> == 0) {
    for (int first = 0; first < rows * columns; first += kLanes<T>) {
      const Vector<T> all = totals<T>(&sum[0][0] + first);
#pragma GCC unroll 16
      for (int at = first; at < first + kLanes<T>; ++at)
        sums[at / columns * row + at % columns * column] += all[at - first];
    }
  } else {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) sums[i * row + j * column] += total(sum[i][j]);
  }
}

template <int rows, class T>
SAN_INLINE void add_products_row(int64_t columns, int64_t count, const T* a, const T* b, T* sums, int64_t row,
                                 int64_t column) {
  int64_t j = 0;
  for (; j + 4 <= columns; j += 4) add_products_block<rows, 4>(count, a, b + j * count, sums + j * column, row, column);
  for (; j < columns; ++j) add_products_block<rows, 1>(count, a, b + j * count, sums + j * column, row, column);
}

template <class T>
__attribute__((noinline)) void add_products(int64_t rows, int64_t columns, int64_t count, const T* a, const T* b,
                                            T* sums, int64_t row, int64_t column) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) add_products_row<4>(columns, count, a + i * count, b, sums + i * row, row, column);
  for (; i < rows; ++i) add_products_row<1>(columns, count, a + i * count, b, sums + i * row, row, column);
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

// Some neighbouring pixels of a row, whose values lie in planes: per pair [channels, K, width], per pixel [channels,
// width]. Behind the last pixel of a row vectors hold what no pair has.
template <class T>
struct PlanarTile {
  const Footprint f;
  const int64_t K, weights, values;
  T *grad_y = nullptr, *y = nullptr;  // [values, width]
  Planes<T> beta{}, to_beta{};
  int64_t row = 0, first = 0;    // of the map, where the tile begins
  int64_t count = 0, width = 0;  // pixels; the same in whole vectors

  __attribute__((always_inline)) inline PlanarTile(const Footprint& f, int64_t weights, int64_t values)
      : f(f), K(f.positions()), weights(weights), values(values) {}

  SAN_INLINE T* take(T*& scratch, int64_t size) {
    T* taken = scratch;
    scratch += size;
    return taken;
  }
  __attribute__((always_inline)) inline Planes<T> take_planes(T*& scratch, int64_t channels, int64_t rows) const {
    return {f, channels, Planes<T>::width_of(f), take(scratch, Planes<T>::size(f, channels, rows))};
  }
  // As many pixels as leave what a tile has for each in the first cache, one vector at least.
  SAN_INLINE int64_t most_pixels(const Footprint& f, int64_t values_per_pixel) {
    constexpr int64_t kBytes = 32 << 10;
    const int64_t fit = kBytes / (values_per_pixel * sizeof(T)) / kLanes<T> * kLanes<T>;
    const int64_t row = whole_vectors<T>(f.width);
    return fit < kLanes<T> ? kLanes<T> : fit < row ? fit : row;
  }

  int64_t pairs() const { return K * width; }
  int64_t pixel() const { return row * f.width + first; }

  // Calls visit(row of the band) for the tiles of a band, of at most so many pixels.
  template <class Visit>
  __attribute__((always_inline)) inline void for_each(int64_t first_row, int64_t last_row, int64_t most,
                                                      const Visit& visit) {
    for (row = first_row; row < last_row; ++row)
      for (first = 0; first < f.width; first += most) {
        count = f.width - first < most ? f.width - first : most, width = whole_vectors<T>(count);
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

  // Sets what lies behind the last pixel in [rows, width].
  __attribute__((always_inline)) inline void clear(T* values, int64_t rows, T value = 0) const {
    if (count == width) return;
    const int64_t last = width - kLanes<T>;
    for (T* at = values + last; at < values + rows * width; at += width)
      store(at, first_lanes<T>(load(at), count - last, value));
  }

  // y of all value channels that have weight g, `weight` [K, width].
  __attribute__((always_inline)) inline void aggregate(int64_t band_row, int64_t g, const T* weight) const {
    int64_t c = g;
    for (; c + 7 * weights < values; c += 8 * weights) aggregate_shares<8>(band_row, c, weight);
    for (; c < values; c += weights) aggregate_shares<1>(band_row, c, weight);
  }
  // The gradient of weight g [K, width] and, where `to_values`, what weight * grad_y adds to that of beta.
  __attribute__((always_inline)) inline void correlate(int64_t band_row, int64_t g, const T* weight, T* grad_weight,
                                                       bool to_values) const {
    int64_t c = g;
    for (; c + 7 * weights < values; c += 8 * weights)
      correlate_shares<8>(band_row, c, weight, grad_weight, c == g, to_values);
    for (; c < values; c += weights) correlate_shares<1>(band_row, c, weight, grad_weight, c == g, to_values);
  }

 private:
  // Of `shares` value channels from c on, that have one weight.
  template <int shares>
  __attribute__((always_inline)) inline void aggregate_shares(int64_t band_row, int64_t c, const T* weight) const {
    for (int64_t t = 0; t < width; t += kLanes<T>) {
      Vector<T> sum[shares]{};
      for_each_position([&](int64_t o, int64_t y, int64_t x) __attribute__((always_inline)) {
        const Vector<T> factor = load(weight + o * width + t);
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) sum[s] += factor * load(beta.at(band_row + y, c + s * weights) + x + t);
      });
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) store(y + (c + s * weights) * width + t, sum[s]);
    }
  }
  // Likewise; the gradient of the weight is added to unless they are its first.
  template <int shares>
  __attribute__((always_inline)) inline void correlate_shares(int64_t band_row, int64_t c, const T* weight,
                                                              T* grad_weight, bool is_first, bool to_values) const {
    for (int64_t t = 0; t < width; t += kLanes<T>) {
      Vector<T> grad[shares];
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) grad[s] = load(grad_y + (c + s * weights) * width + t);
      for_each_position([&](int64_t o, int64_t y, int64_t x) __attribute__((always_inline)) {
        T* out = grad_weight + o * width + t;
        Vector<T> sum = is_first ? Vector<T>{} : load(out);
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) sum += grad[s] * load(beta.at(band_row + y, c + s * weights) + x + t);
        store(out, sum);
        if (!to_values) return;
        const Vector<T> w = load(weight + o * width + t);
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) {
          T* to = to_beta.at(band_row + y, c + s * weights) + x + t;
          store(to, load(to) + w * grad[s]);
        }
      });
    }
  }
};

}  // namespace
}  // namespace san::cpu
