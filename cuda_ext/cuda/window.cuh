// The footprint of footprint.h in 32-bit integers for kernels, because a 64-bit division takes about a hundred
// instructions. Kernels start at a pixel and step through its footprint.
#pragma once
#include <algorithm>

#include "launch.h"

namespace san::cuda {

struct Window {
  int kernel_size, height, width;

  explicit Window(const Footprint& f)
      : kernel_size(static_cast<int>(f.kernel_size)),
        height(static_cast<int>(f.height)),
        width(static_cast<int>(f.width)) {
    constexpr int64_t kMost = int64_t(1) << 31;
    STD_TORCH_CHECK(f.padded_height() * f.padded_width() < kMost && f.positions() < kMost, "a ", f.height, "x", f.width,
                    " map has too many pixels: with its reflected border, fewer than 2^31 are supported");
  }

  SAN_HOST_DEVICE int reach() const { return kernel_size / 2; }
  SAN_HOST_DEVICE int positions() const { return kernel_size * kernel_size; }
  SAN_HOST_DEVICE int pixels() const { return height * width; }
};

// `reflect` of footprint.h without a branch.
SAN_HOST_DEVICE int reflect_int(int coordinate, int size) {
  const int distance = coordinate < 0 ? -coordinate : coordinate, mirrored = 2 * (size - 1) - distance;
  return distance < mirrored ? distance : mirrored;
}

// Calls visit(position, pixel) for all positions of the footprint around pixel (h, w), row by row.
template <class Visit>
SAN_HOST_DEVICE void for_each_neighbour(const Window& f, int h, int w, const Visit& visit) {
  int position = 0;
  for (int dh = -f.reach(); dh <= f.reach(); ++dh) {
    const int row = reflect_int(h + dh, f.height) * f.width;
    for (int dw = -f.reach(); dw <= f.reach(); ++dw) visit(position++, row + reflect_int(w + dw, f.width));
  }
}

// Calls visit(position, pixel) for all pixels whose footprints contain pixel (h, w), in a fixed order: first for the
// pixel itself, then for its reflections, as listed by for_each_image in footprint.h. The loop bounds exclude positions
// outside the map, so the loop body needs no test.
template <class Visit>
SAN_HOST_DEVICE void for_each_reader(const Window& f, int h, int w, const Visit& visit) {
  const int reach = f.reach();
  SAN_ROLLED
  for (int image = 0; image < 9; ++image) {
    const int down = image / 3, right = image - 3 * down;
    const int image_h = down == 0 ? h : down == 1 ? -h : 2 * (f.height - 1) - h;
    const int image_w = right == 0 ? w : right == 1 ? -w : 2 * (f.width - 1) - w;
    // A pixel on the border is its own mirror image.
    const bool is_shown = (down == 0 || image_h != h) && (right == 0 || image_w != w);
    const int first_h = image_h > reach ? image_h - reach : 0, first_w = image_w > reach ? image_w - reach : 0;
    const int end_h = image_h + reach < f.height ? image_h + reach + 1 : f.height;
    const int end_w = image_w + reach < f.width ? image_w + reach + 1 : f.width;
    if (!is_shown) continue;
    for (int from_h = first_h; from_h < end_h; ++from_h) {
      int position = (image_h - from_h + reach) * f.kernel_size + image_w - first_w + reach;
      for (int from_w = first_w; from_w < end_w; ++from_w) visit(position--, from_h * f.width + from_w);
    }
  }
}

// The number of blocks of a launch with one thread for each of fewer than 2^31 items.
inline int grid_for(int64_t threads) {
  STD_TORCH_CHECK(threads <= (int64_t(1) << 31) - kThreads, "maps that need ", threads,
                  " threads are too large, fewer than 2^31 are supported; use smaller batches");
  return static_cast<int>((threads + kThreads - 1) / kThreads);
}

}  // namespace san::cuda
