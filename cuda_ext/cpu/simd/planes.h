// Converts channels-last maps [pixels, channels] to planes [channels, pitch], one per channel, and back. In planes,
// vectors run over neighboring pixels.
#pragma once
#include "../../footprint.h"
#include "vector.h"

namespace san::cpu {
namespace {

// Transposes a square block: exchanges halves of blocks of 2, 4, 8, ... rows.
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

// Writes the map, whose pixels are `step` elements apart, or adds to it.
template <bool add, class T>
__attribute__((noinline)) void from_planes(const T* planes, int64_t pitch, int64_t channels, int64_t pixels, T* map,
                                           int64_t step) {
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
        T* to = map + (i + lane) * step + c;
        store(to, add ? load(to) + x[lane] : x[lane]);
      }
    }
  for (int64_t i = 0; i < pixels; ++i)
    for (int64_t c = i < whole ? blocks : 0; c < channels; ++c) {
      const T value = planes[c * pitch + i];
      map[i * step + c] = add ? map[i * step + c] + value : value;
    }
}

template <bool add, class T>
SAN_INLINE void from_planes(const T* planes, int64_t pitch, int64_t channels, int64_t pixels, T* map) {
  from_planes<add>(planes, pitch, channels, pixels, map, channels);
}

// The first `count` lanes of x, and 0 in the others.
template <class T>
SAN_INLINE Vector<T> first_lanes(Vector<T> x, int64_t count) {
  Vector<T> lanes{};
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes<T>; ++lane) lanes[lane] = static_cast<T>(lane);
  return lanes < broadcast(static_cast<T>(count)) ? x : Vector<T>{};
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

// sums [rows, columns] += a [rows, count] b [columns, count]^T, where element (i, j) of sums is at i * row + j.
template <int rows, int columns, class T>
SAN_INLINE void add_products_block(int64_t count, const T* a, int64_t a_pitch, const T* b, int64_t b_pitch, T* sums,
                                   int64_t row) {
  Vector<T> sum[rows][columns]{};
  for (int64_t n = 0; n < count; n += kLanes<T>) {
    Vector<T> right[columns];
#pragma GCC unroll 4
    for (int j = 0; j < columns; ++j) right[j] = load(b + j * b_pitch + n);
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
      const Vector<T> left = load(a + i * a_pitch + n);
#pragma GCC unroll 4
      for (int j = 0; j < columns; ++j) sum[i][j] += left * right[j];
    }
  }
  if constexpr (rows * columns % kLanes<T> == 0) {
#pragma GCC unroll 4
    for (int first = 0; first < rows * columns; first += kLanes<T>) {
      const Vector<T> all = totals<T>(&sum[0][0] + first);
#pragma GCC unroll 4
      for (int i = first / columns; i < (first + kLanes<T>) / columns; ++i) {
        T* to = sums + i * row;
#pragma GCC unroll 4
        for (int j = 0; j < columns; ++j) to[j] += all[i * columns + j - first];
      }
    }
  } else {
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) sums[i * row + j] += total(sum[i][j]);
  }
}

template <int rows, class T>
SAN_INLINE void add_products_rows(int64_t columns, int64_t count, const T* a, int64_t a_pitch, const T* b,
                                  int64_t b_pitch, T* sums, int64_t row) {
  int64_t j = 0;
  for (; j + 4 <= columns; j += 4)
    add_products_block<rows, 4>(count, a, a_pitch, b + j * b_pitch, b_pitch, sums + j, row);
  for (; j < columns; ++j) add_products_block<rows, 1>(count, a, a_pitch, b + j * b_pitch, b_pitch, sums + j, row);
}

template <class T>
__attribute__((noinline)) void add_products(int64_t rows, int64_t columns, int64_t count, const T* a, int64_t a_pitch,
                                            const T* b, int64_t b_pitch, T* sums, int64_t row) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4)
    add_products_rows<4>(columns, count, a + i * a_pitch, a_pitch, b, b_pitch, sums + i * row, row);
  for (; i < rows; ++i) add_products_rows<1>(columns, count, a + i * a_pitch, a_pitch, b, b_pitch, sums + i * row, row);
}

// a a^T: the upper triangle with the diagonal.
template <class T>
__attribute__((noinline)) void add_squares(int64_t rows, int64_t count, const T* a, int64_t pitch, T* sums) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4)
    add_products_rows<4>(rows - i, count, a + i * pitch, pitch, a + i * pitch, pitch, sums + i * (rows + 1), rows);
  for (; i < rows; ++i)
    add_products_rows<1>(rows - i, count, a + i * pitch, pitch, a + i * pitch, pitch, sums + i * (rows + 1), rows);
}

// A band of rows and the rows above and below it that its footprints reach, mirrored at the border. There is one plane
// for each channel c and each column x of the footprint, without gaps between rows: position (y, x) of the footprint of
// pixel i is element i + y * width of plane (c, x). So vectors can cross the ends of rows.
template <class T>
struct ShiftedPlanes {
  Footprint f;
  int64_t channels, rows, pitch;
  T* data;

  static int64_t pitch_of(const Footprint& f, int64_t rows) {
    return whole_vectors<T>((rows + 2 * f.reach()) * f.width + kLanes<T>);  // room for the last vector
  }
  static int64_t padded_row(const Footprint& f, int64_t channels) {
    return whole_vectors<T>(channels * f.padded_width());
  }
  static int64_t size(const Footprint& f, int64_t channels, int64_t rows) {
    return channels * f.kernel_size * pitch_of(f, rows) + padded_row(f, channels);
  }
  __attribute__((always_inline)) inline ShiftedPlanes(const Footprint& f, int64_t channels, int64_t rows, T*& scratch)
      : f(f), channels(channels), rows(rows), pitch(pitch_of(f, rows)), data(scratch) {
    scratch += size(f, channels, rows);
  }

  T* at(int64_t c, int64_t x) const { return data + (c * f.kernel_size + x) * pitch; }
  T* line() const { return data + channels * f.kernel_size * pitch; }  // scratch for a padded row, [channels, width]

  // Reads the rows of a map around row `first`, each value as change(channel, value).
  template <class Change>
  __attribute__((always_inline)) inline void read(const T* map, int64_t first, const Change& change) const {
    const int64_t reach = f.reach(), padded = f.padded_width(), W = f.width;
    clear();
    for (int64_t row = 0; row < rows + 2 * reach; ++row) {
      T* inside = line() + reach;
      to_planes(map + reflect(first + row - reach, f.height) * W * channels, channels, W, inside, padded);
      for (int64_t c = 0; c < channels; ++c, inside += padded) {
        for (int64_t w = 0; w < W; ++w) inside[w] = change(c, inside[w]);
        for (int64_t x = 1; x <= reach; ++x) inside[-x] = inside[x], inside[W - 1 + x] = inside[W - 1 - x];
        for (int64_t x = 0; x < f.kernel_size; ++x) memcpy(at(c, x) + row * W, inside - reach + x, W * sizeof(T));
      }
    }
  }
  __attribute__((always_inline)) inline void clear() const {
    memset(data, 0, channels * f.kernel_size * pitch * sizeof(T));
  }
  // The adjoint of read: adds every element of the planes to the pixel that it was read from.
  __attribute__((always_inline)) inline void add_to(T* map, int64_t first) const {
    const int64_t reach = f.reach(), padded = f.padded_width(), W = f.width;
    for (int64_t row = 0; row < rows + 2 * reach; ++row) {
      memset(line(), 0, channels * padded * sizeof(T));
      T* inside = line() + reach;
      for (int64_t c = 0; c < channels; ++c, inside += padded) {
        for (int64_t x = 0; x < f.kernel_size; ++x) {
          const T* from = at(c, x) + row * W;
          T* to = inside - reach + x;
          for (int64_t w = 0; w < W; ++w) to[w] += from[w];
        }
        for (int64_t x = 1; x <= reach; ++x) inside[x] += inside[-x], inside[W - 1 - x] += inside[W - 1 + x];
      }
      from_planes<true>(line() + reach, padded, channels, W,
                        map + reflect(first + row - reach, f.height) * W * channels);
    }
  }
};

// Consecutive pixels of a band, across the ends of rows, in whole vectors.
struct Pixels {
  int64_t first, count, width;  // from the band's first pixel; `width` is `count` rounded up to whole vectors
};

// Sets the lanes after the last pixel to 0 in each row of [rows, width].
template <class T>
SAN_INLINE void clear_behind(const Pixels& pixels, T* values, int64_t rows) {
  if (pixels.count == pixels.width) return;
  const int64_t last = pixels.width - kLanes<T>;
  for (T* at = values + last; at < values + rows * pixels.width; at += pixels.width)
    store(at, first_lanes<T>(load(at), pixels.count - last));
}

template <class T>
SAN_INLINE T* take(T*& scratch, int64_t size) {
  T* taken = scratch;
  scratch += whole_vectors<T>(size);
  return taken;
}

}  // namespace
}  // namespace san::cpu
