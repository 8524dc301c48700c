// The geometry of all operators, on the CPU and on the GPU: a square footprint of odd size, stride 1, and reflection
// padding.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define SAN_HOST_DEVICE __host__ __device__ __forceinline__
#else  // always inlined, because simd/ has sources for several instruction sets
#define SAN_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace san {

struct Footprint {
  int64_t kernel_size, height, width;

  SAN_HOST_DEVICE int64_t reach() const { return kernel_size / 2; }
  SAN_HOST_DEVICE int64_t positions() const { return kernel_size * kernel_size; }
  SAN_HOST_DEVICE int64_t pixels() const { return height * width; }
  SAN_HOST_DEVICE int64_t padded_height() const { return height + 2 * reach(); }
  SAN_HOST_DEVICE int64_t padded_width() const { return width + 2 * reach(); }
  // Reflection needs more than `reach` pixels on each axis; a 1x1 footprint needs one.
  SAN_HOST_DEVICE bool fits() const {
    return kernel_size > 0 && kernel_size % 2 == 1 && reach() < height && reach() < width;
  }
};

// Maps a coordinate of the padded map, -reach..size+reach-1, to the coordinate of the map, 0..size-1, whose value it
// has.
SAN_HOST_DEVICE int64_t reflect(int64_t coordinate, int64_t size) {
  if (coordinate < 0) coordinate = -coordinate;
  return coordinate >= size ? 2 * (size - 1) - coordinate : coordinate;
}

// Calls visit(padded) for each padded coordinate with the value of `coordinate`: itself and its mirror images, at most
// three. Backward kernels use it to gather gradients instead of scattering them with atomics, so they are
// deterministic.
template <class Visit>
SAN_HOST_DEVICE void for_each_image(int64_t coordinate, int64_t size, int64_t reach, const Visit& visit) {
  visit(coordinate);
  if (coordinate > 0 && coordinate <= reach) visit(-coordinate);
  const int64_t mirrored = 2 * (size - 1) - coordinate;
  if (mirrored >= size && mirrored < size + reach) visit(mirrored);
}

}  // namespace san
