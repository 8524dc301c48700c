// Loops over the pixels of channels-last maps [P, channels] that no pair (i, j) enters.
#pragma once
#include <algorithm>

#include "plane.h"

namespace san::cpu {

template <class T>
__attribute__((always_inline)) inline void add(const T* SAN_RESTRICT from, int64_t count, T* SAN_RESTRICT to) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// Adds to sum [channels] rows first .. last - 1 of a map [H, W, channels], each pixel as often as the pairs that see
// it: seen_h * seen_w times, or once where these are null. `columns` has room for [W, channels].
template <class T>
SAN_VECTOR void sum_pixels(const T* SAN_RESTRICT map, const Footprint& f, int64_t first, int64_t last, int64_t channels,
                           const T* SAN_RESTRICT seen_h, const T* SAN_RESTRICT seen_w, double* SAN_RESTRICT columns,
                           double* SAN_RESTRICT sum) {
  const int64_t row = f.width * channels;
  std::fill(columns, columns + row, 0.0);
  for (int64_t h = first; h < last; ++h) {
    const T* SAN_RESTRICT from = map + h * row;
    const double seen = seen_h == nullptr ? 1 : seen_h[h];
    for (int64_t i = 0; i < row; ++i) columns[i] += seen * from[i];
  }
  for (int64_t w = 0; w < f.width; ++w) {
    const double seen = seen_w == nullptr ? 1 : seen_w[w];
    for (int64_t c = 0; c < channels; ++c) sum[c] += seen * columns[w * channels + c];
  }
}

// out [pixels, pitch] = scale * (map - mean) + bias, of a map [pixels, channels].
template <class T>
SAN_VECTOR void affine(const T* SAN_RESTRICT map, int64_t pixels, int64_t channels, const T* SAN_RESTRICT mean,
                       const T* SAN_RESTRICT scale, const T* SAN_RESTRICT bias, T* SAN_RESTRICT out, int64_t pitch) {
  for (int64_t i = 0; i < pixels; ++i, map += channels, out += pitch)
    for (int64_t c = 0; c < channels; ++c) out[c] = scale[c] * (map[c] - mean[c]) + bias[c];
}

// Adds to sum and product [channels] g and g * x of all pixels; g is [pixels, pitch].
template <class T>
SAN_VECTOR void sum_products(const T* SAN_RESTRICT g, int64_t pitch, const T* SAN_RESTRICT x, const Footprint& f,
                             int64_t channels, T* SAN_RESTRICT row, double* SAN_RESTRICT sum,
                             double* SAN_RESTRICT product) {
  for (int64_t h = 0; h < f.height; ++h) {
    std::fill(row, row + 2 * channels, T(0));
    for (int64_t w = 0; w < f.width; ++w, x += channels, g += pitch)
      for (int64_t c = 0; c < channels; ++c) row[c] += g[c], row[channels + c] += g[c] * x[c];
    for (int64_t c = 0; c < channels; ++c) sum[c] += row[c], product[c] += row[channels + c];
  }
}

// out [pixels, pitch] = relu(scale * x + shift) of a map [pixels, channels].
template <class T>
SAN_VECTOR void activate(const T* SAN_RESTRICT x, int64_t pixels, int64_t channels, const T* SAN_RESTRICT scale,
                         const T* SAN_RESTRICT shift, T* SAN_RESTRICT out, int64_t pitch) {
  for (int64_t i = 0; i < pixels; ++i, x += channels, out += pitch)
    for (int64_t c = 0; c < channels; ++c) {
      const T v = scale[c] * x[c] + shift[c];
      out[c] = v < T(0) ? T(0) : v;  // NaN stays
    }
}

}  // namespace san::cpu
