// Loops over the pixels of channels-last maps [P, channels] that no pair (i, j) enters.
#pragma once
#include <algorithm>

#include "plane.h"

namespace san::cpu {

// Adds to sum [channels] all pixels of a map [H, W, channels], each as often as the pairs that see it: seen_h * seen_w
// times, or once where these are null. Rows are summed in T, their sums in double.
template <class T>
SAN_VECTOR void sum_pixels(const T* SAN_RESTRICT map, const Footprint& f, int64_t channels,
                           const T* SAN_RESTRICT seen_h, const T* SAN_RESTRICT seen_w, T* SAN_RESTRICT row,
                           double* SAN_RESTRICT sum) {
  for (int64_t h = 0; h < f.height; ++h) {
    std::fill(row, row + channels, T(0));
    for (int64_t w = 0; w < f.width; ++w, map += channels) {
      const T seen = seen_h == nullptr ? T(1) : seen_h[h] * seen_w[w];
      for (int64_t c = 0; c < channels; ++c) row[c] += seen * map[c];
    }
    for (int64_t c = 0; c < channels; ++c) sum[c] += row[c];
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
