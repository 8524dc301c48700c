// A Linear layer of the patches around all pixels, after a norm and ReLU. Vectors run over neighboring pixels,
// across the ends of rows. Patches are unfolded for some channels at a time, so that they stay in the caches.
#include "kernels.h"
#include "planes.h"

namespace san::cpu {
namespace {

template <class T>
struct Tile {
  static constexpr int64_t kMostPixels = 256, kColumns = 256;  // unfolded at once, but at least one channel
  static int64_t most_columns(const Patches<T>& p) {
    const int64_t K = p.footprint.positions(), least = K > p.own ? K : p.own;
    return kColumns > least ? kColumns : least;
  }
  static int64_t scratch(const Patches<T>& p, int64_t rows, bool backward) {
    return (backward ? 2 : 1) * ShiftedPlanes<T>::size(p.footprint, p.channels, rows) +
           kMostPixels * (p.outputs + whole_vectors<T>(p.outputs) + 2 * p.own + 2 * most_columns(p));
  }

  const Patches<T> p;  // a copy, so the compiler knows that no store changes it
  const int64_t k, K, W;
  ShiftedPlanes<T> around, to_around;
  T *u, *center, *to_center, *active, *grad;  // [outputs, width], [own, width] twice, [columns, width] twice
  T* pixel_u;                                 // [width, outputs in whole vectors]
  Pixels pixels{};

  __attribute__((always_inline)) inline Tile(const Patches<T>& p, Rows rows, bool backward, T* scratch)
      : p(p),
        k(p.footprint.kernel_size),
        K(k * k),
        W(p.footprint.width),
        around(p.footprint, p.channels, rows.last - rows.first, scratch),
        to_around(p.footprint, backward ? p.channels : 0, rows.last - rows.first, scratch) {
    u = take(scratch, p.outputs * kMostPixels);
    center = take(scratch, p.own * kMostPixels), to_center = take(scratch, p.own * kMostPixels);
    pixel_u = take(scratch, whole_vectors<T>(p.outputs) * kMostPixels);
    active = take(scratch, most_columns(p) * kMostPixels), grad = take(scratch, most_columns(p) * kMostPixels);
  }

  template <class Visit>
  __attribute__((always_inline)) inline void for_each(Rows rows, const Visit& visit) {
    const int64_t all = (rows.last - rows.first) * W;
    for (int64_t first = 0; first < all; first += kMostPixels) {
      const int64_t count = all - first < kMostPixels ? all - first : kMostPixels;
      pixels = {first, count, whole_vectors<T>(count)};
      visit(rows.first * W + first);
    }
  }

  __attribute__((always_inline)) inline void read_center(const T* map, int64_t pixel) const {
    memset(center, 0, p.own * pixels.width * sizeof(T));
    to_planes(map + pixel * p.own, p.own, pixels.count, center, pixels.width);
  }

  // Offset in the planes of around of the first pixel's value in this column.
  __attribute__((always_inline)) inline int64_t seen(int64_t column) const {
    const int64_t c = (column - p.own) / K, o = (column - p.own) % K;
    return around.at(c, o % k) - around.data + pixels.first + o / k * W;
  }

  // Divides the columns into groups. For each group, fills `active` and calls visit(first column, number of columns).
  template <class Visit>
  __attribute__((always_inline)) inline void for_each_columns(const Visit& visit) {
    const int64_t all = p.columns(), step = most_columns(p) / K * K;
    for (int64_t first = 0, count = p.own; first < all;
         first += count, count = all - first < step ? all - first : step) {
      for (int64_t n = 0; n < count; ++n) {
        const T* from = first < p.own ? center + n * pixels.width : around.data + seen(first + n);
        const Vector<T> mean = broadcast(p.norm.mean[first + n]), scale = broadcast(p.norm.scale[first + n]);
        const Vector<T> shift = broadcast(p.norm.shift[first + n]);
        T* to = active + n * pixels.width;
        for (int64_t t = 0; t < pixels.width; t += kLanes<T>)
          store(to + t, relu((load(from + t) - mean) * scale + shift));
      }
      visit(first, count);
    }
  }

  // Adds the gradients of center or around, scale and shift that follow from the gradients of the active columns.
  __attribute__((always_inline)) inline void columns_backward(int64_t first, int64_t count,
                                                              const PatchGradients<T>& to) const {
    for (int64_t n = 0; n < count; ++n) {
      const bool is_own = first < p.own;
      const int64_t at = is_own ? n * pixels.width : seen(first + n);
      const T *from = (is_own ? center : around.data) + at, *a = active + n * pixels.width,
              *g = grad + n * pixels.width;
      T* out = (is_own ? to_center : to_around.data) + at;
      const Vector<T> mean = broadcast(p.norm.mean[first + n]), scale = broadcast(p.norm.scale[first + n]);
      Vector<T> sum{}, product{};
      for (int64_t t = 0; t < pixels.width; t += kLanes<T>) {
        const Vector<T> passed = where_positive(load(a + t), load(g + t));
        sum += passed, product += passed * (load(from + t) - mean);
        store(out + t, load(out + t) + passed * scale);
      }
      to.shift[first + n] += total(sum), to.scale[first + n] += total(product);
    }
  }
};

template <class T>
void map(const Patches<T>& p, const T* center, const T* around, Rows rows, T* scratch, T* u) {
  Tile<T> tile(p, rows, false, scratch);
  tile.around.read(around, rows.first, [](int64_t, T value) { return value; });
  tile.for_each(rows, [&](int64_t pixel) __attribute__((always_inline)) {
    const int64_t width = tile.pixels.width, count = tile.pixels.count;
    tile.read_center(center, pixel);
    memset(tile.u, 0, p.outputs * width * sizeof(T));
    tile.for_each_columns([&](int64_t first, int64_t columns) __attribute__((always_inline)) {
      multiply<Start::sum>(p.outputs, width, columns, p.weight + first, p.columns(), 1, tile.active, width, tile.active,
                           tile.u, width);
    });
    for (int64_t e = 0; e < p.outputs; ++e)
      memcpy(u + e * p.footprint.pixels() + pixel, tile.u + e * width, count * sizeof(T));
  });
}

template <class T>
void map_backward(const Patches<T>& p, const T* center, const T* around, const T* grad_u, Rows rows, T* scratch,
                  const PatchGradients<T>& to) {
  Tile<T> tile(p, rows, true, scratch);
  tile.around.read(around, rows.first, [](int64_t, T value) { return value; });
  tile.to_around.clear();
  const int64_t pitch = whole_vectors<T>(p.outputs);
  tile.for_each(rows, [&](int64_t pixel) __attribute__((always_inline)) {
    const int64_t width = tile.pixels.width, count = tile.pixels.count;
    tile.read_center(center, pixel);
    memset(tile.to_center, 0, p.own * width * sizeof(T));
    memset(tile.u, 0, p.outputs * width * sizeof(T));
    for (int64_t e = 0; e < p.outputs; ++e)
      memcpy(tile.u + e * width, grad_u + e * p.footprint.pixels() + pixel, count * sizeof(T));
    memset(tile.pixel_u, 0, width * pitch * sizeof(T));
    from_planes<false>(tile.u, width, p.outputs, width, tile.pixel_u, pitch);
    tile.for_each_columns([&](int64_t first, int64_t columns) __attribute__((always_inline)) {
      multiply<Start::sum>(columns, pitch, width, tile.active, width, 1, tile.pixel_u, pitch, tile.u,
                           to.weight + first * pitch, pitch);
      multiply<Start::zero>(columns, width, p.outputs, p.weight + first, 1, p.columns(), tile.u, width, tile.u,
                            tile.grad, width);
      tile.columns_backward(first, columns, to);
    });
    from_planes<true>(tile.to_center, width, p.own, count, to.center + pixel * p.own);
  });
  tile.to_around.add_to(to.around, rows.first);
}

// Copies pixels of a [hidden, P] to [hidden, pitch], with zeros behind them.
template <class T>
SAN_INLINE void take_pixels(const LastLayer<T>& layer, const T* a, int64_t P, int64_t count, T* to, int64_t pitch) {
  for (int64_t e = 0; e < layer.hidden; ++e, a += P, to += pitch) {
    memcpy(to, a, count * sizeof(T));
    memset(to + count, 0, (pitch - count) * sizeof(T));
  }
}

template <class T>
void weights(const LastLayer<T>& layer, const T* a, int64_t P, int64_t first, int64_t count, T* scratch,
             BandWeights<T> w) {
  take_pixels(layer, a + first, P, count, scratch, w.pitch);
  multiply<Start::bias>(layer.rows, w.pitch, layer.hidden, layer.weight, layer.hidden, 1, scratch, w.pitch, layer.bias,
                        w.data, w.pitch);
}

template <class T>
void weights_backward(const LastLayer<T>& layer, const T* a, int64_t P, int64_t first, int64_t count,
                      BandWeights<T> grad_w, T* scratch, const LastLayerGradients<T>& to) {
  const int64_t E = layer.hidden, pitch = grad_w.pitch, wide = whole_vectors<T>(E);
  T *planes = scratch, *pixel_a = scratch + E * pitch;  // [E, pitch], [pitch, wide]
  take_pixels(layer, a + first, P, count, planes, pitch);
  memset(pixel_a, 0, pitch * wide * sizeof(T));
  from_planes<false>(planes, pitch, E, pitch, pixel_a, wide);
  multiply<Start::sum>(layer.rows, wide, count, grad_w.data, pitch, 1, pixel_a, wide, planes, to.weight, wide);
  for (int64_t row = 0; row < layer.rows; ++row) {
    Vector<T> sum{};
    for_each_vector_of<T>(count, [&](int64_t t, int64_t values) __attribute__((always_inline)) {
      sum += load_some(grad_w.data + row * pitch + t, values);
    });
    to.bias[row] += total(sum);
  }
  multiply<Start::zero>(E, pitch, layer.rows, layer.weight, 1, E, grad_w.data, pitch, planes, planes, pitch);
  for (int64_t e = 0; e < E; ++e) memcpy(to.a + e * P + first, planes + e * pitch, count * sizeof(T));
}

}  // namespace

template <class T>
const PatchKernels<T>& SAN_ISA::patches() {
  static constexpr PatchKernels<T> kernels{kLanes<T>,       Tile<T>::scratch, map<T>,
                                           map_backward<T>, weights<T>,       weights_backward<T>};
  return kernels;
}
template const PatchKernels<float>& SAN_ISA::patches();
template const PatchKernels<double>& SAN_ISA::patches();

}  // namespace san::cpu
