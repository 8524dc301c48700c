// Channels-last maps [pixels, channels] to planes [channels, pitch] and back, a block of vectors at a time.
#pragma once
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

}  // namespace
}  // namespace san::cpu
