// One channel of one image on the CPU. It is padded by reflection once, so inner loops run over whole rows without
// special cases at the border, and the compiler can vectorize them.
#pragma once
#include <cstring>

#include "../check.h"
#include "../footprint.h"

// The compiler emits each marked function for these instruction sets and picks one when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SAN_VECTOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SAN_VECTOR
#endif

// Pointers that do not overlap, so the compiler can vectorize without a check.
#define SAN_RESTRICT __restrict__

namespace san::cpu {

template <class scalar_t, class acc_t>
void pad(const scalar_t* map, const Footprint& f, acc_t* padded) {
  const int64_t reach = f.reach(), padded_width = f.padded_width();
  for (int64_t h = -reach; h < f.height + reach; ++h) {
    const scalar_t* row = map + reflect(h, f.height) * f.width;
    acc_t* out = padded + (h + reach) * padded_width + reach;
    for (int64_t w = 0; w < f.width; ++w) out[w] = static_cast<acc_t>(row[w]);
    for (int64_t w = 1; w <= reach; ++w) {
      out[-w] = out[w];
      out[f.width - 1 + w] = out[f.width - 1 - w];
    }
  }
}

// The adjoint of pad: adds each value of the padded plane to the pixel that it was copied from.
template <class scalar_t, class acc_t>
void fold(acc_t* padded, const Footprint& f, scalar_t* map) {
  const int64_t reach = f.reach(), padded_width = f.padded_width();
  for (int64_t h = 0; h < f.padded_height(); ++h) {
    acc_t* row = padded + h * padded_width + reach;
    for (int64_t w = 1; w <= reach; ++w) {
      row[w] += row[-w];
      row[f.width - 1 - w] += row[f.width - 1 + w];
    }
  }
  acc_t* first = padded + reach * padded_width + reach;
  for (int64_t h = 1; h <= reach; ++h) {
    for (int64_t w = 0; w < f.width; ++w) {
      first[h * padded_width + w] += first[-h * padded_width + w];
      first[(f.height - 1 - h) * padded_width + w] += first[(f.height - 1 + h) * padded_width + w];
    }
  }
  for (int64_t h = 0; h < f.height; ++h)
    for (int64_t w = 0; w < f.width; ++w) map[h * f.width + w] = static_cast<scalar_t>(first[h * padded_width + w]);
}

}  // namespace san::cpu
