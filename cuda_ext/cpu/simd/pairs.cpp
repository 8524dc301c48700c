// The computations for every pair of a pixel and a position of its footprint. Matrices are [channels, pairs]. Vectors
// run over neighboring pixels, across the ends of rows, so lanes are used fully for any number of channels, except at
// the end of a band.
//
// A step computes one row of the footprint for some pixels, so its data stays in the caches.
#include "kernels.h"
#include "planes.h"

namespace san::cpu {
namespace {

template <class T>
struct Tile {
  // Scratch memory for one pixel. Forward: center, a1 and a2 of one row of the footprint, and z of the whole footprint.
  // Backward: center, a1, a2 and z of one row, and the gradients of all of them.
  static int64_t values_per_pixel(const Pairs<T>& p, bool backward) {
    const int64_t k = p.footprint.kernel_size, row = k * (p.channels + p.hidden) + p.channels;
    return backward ? 2 * row + k * p.weights : row + k * k * p.weights;
  }
  static constexpr int64_t kMostPixels = 128;
  static int64_t most_pixels(const Pairs<T>& p, bool backward) {
    constexpr int64_t kBytes = 1 << 20;  // leaves room in an L2 cache of 2 MB
    const int64_t fit = kBytes / (values_per_pixel(p, backward) * sizeof(T)) / kLanes<T> * kLanes<T>;
    return fit < kLanes<T> ? kLanes<T> : fit < kMostPixels ? fit : kMostPixels;
  }
  static int64_t scratch(const Pairs<T>& p, int64_t rows, bool backward) {
    return (backward ? 2 : 1) * ShiftedPlanes<T>::size(p.footprint, p.channels, rows) +
           most_pixels(p, backward) * values_per_pixel(p, backward) + p.channels * kLanes<T>;
  }

  const Pairs<T> p;  // a copy, so the compiler knows that no store changes it
  const int64_t k, K, W, most;
  ShiftedPlanes<T> around, to_around;
  T *center, *a1, *a2, *z, *to_center, *grad_a1, *grad_a2, *to_shift;
  Pixels pixels{};

  __attribute__((always_inline)) inline Tile(const Pairs<T>& p, Rows rows, bool backward, T* scratch)
      : p(p),
        k(p.footprint.kernel_size),
        K(k * k),
        W(p.footprint.width),
        most(most_pixels(p, backward)),
        around(p.footprint, p.channels, rows.last - rows.first, scratch),
        to_around(p.footprint, backward ? p.channels : 0, rows.last - rows.first, scratch) {
    center = take(scratch, p.channels * most);
    a1 = take(scratch, k * p.channels * most), a2 = take(scratch, k * p.hidden * most);
    z = take(scratch, (backward ? k : K) * p.weights * most);
    if (!backward) return;
    to_center = take(scratch, p.channels * most), to_shift = take(scratch, p.channels * kLanes<T>);
    grad_a1 = take(scratch, k * p.channels * most), grad_a2 = take(scratch, k * p.hidden * most);
  }

  int64_t columns() const { return k * pixels.width; }  // pairs in one row of the footprint

  // Divides the band into groups of pixels. For each group, fills `center` and calls visit().
  template <class Visit>
  __attribute__((always_inline)) inline void for_each(const PairMaps<T>& maps, Rows rows, const Visit& visit) {
    around.read(maps.around, rows.first, [&](int64_t c, T value) __attribute__((always_inline)) {
      return c < p.products ? value : (value - maps.origin[c]) * p.norm.scale[c];
    });
    const int64_t all = (rows.last - rows.first) * W;
    for (int64_t first = 0; first < all; first += most) {
      const int64_t count = all - first < most ? all - first : most;
      pixels = {first, count, whole_vectors<T>(count)};
      if (count < pixels.width) memset(center, 0, p.channels * pixels.width * sizeof(T));
      to_planes(maps.center + (rows.first * W + first) * p.channels, p.channels, count, center, pixels.width);
      for (int64_t c = 0; c < p.channels; ++c) {
        const bool is_product = c < p.products;
        const Vector<T> origin = broadcast(is_product ? T(0) : maps.origin[c]), scale = broadcast(p.norm.scale[c]);
        const Vector<T> mean = broadcast(is_product ? T(0) : p.norm.mean[c]);
        const Vector<T> shift = broadcast(is_product ? T(0) : p.norm.shift[c]);
        for (T* at = center + c * pixels.width; at < center + (c + 1) * pixels.width; at += kLanes<T>)
          store(at, (load(at) - origin - mean) * scale + shift);
      }
      visit();
    }
  }

  // Computes a1 - origin of row y of the footprint.
  template <bool has_origin>
  __attribute__((always_inline)) inline void relate(int64_t y, const T* origin) {
    for (int64_t c = 0; c < p.channels; ++c) {
      const bool is_product = c < p.products;
      const Vector<T> product_shift = broadcast(p.norm.shift[c] - p.norm.mean[c] * p.norm.scale[c]);
      const Vector<T> from = broadcast(has_origin ? origin[c] : T(0));
      for (int64_t x = 0; x < k; ++x) {
        const T *own = center + c * pixels.width, *other = around.at(c, x) + pixels.first + y * W;
        T* to = a1 + (c * k + x) * pixels.width;
        for (int64_t t = 0; t < pixels.width; t += kLanes<T>) {
          const Vector<T> i = load(own + t), j = load(other + t);
          const Vector<T> active = relu(is_product ? i * j + product_shift : i - j);
          store(to + t, has_origin ? active - from : active);
        }
      }
    }
  }

  // Adds the gradients of center and around that follow from the gradient of a1, and that of shift unless it is the
  // same sum as the gradient of center.
  template <bool has_origin>
  __attribute__((always_inline)) inline void relate_backward(int64_t y, const T* origin) {
    for (int64_t c = 0; c < p.channels; ++c) {
      const Vector<T> floor = broadcast(has_origin ? -origin[c] : T(0));  // a1 - origin where a1 is 0
      if (c < p.products)
        add_gradients<true>(c, y, floor);
      else
        add_gradients<false>(c, y, floor);
    }
  }
  template <bool is_product>
  __attribute__((always_inline)) inline void add_gradients(int64_t c, int64_t y, Vector<T> floor) {
    Vector<T> sum{};
    for (int64_t t = 0; t < pixels.width; t += kLanes<T>) {
      T* own = to_center + c * pixels.width + t;
      const Vector<T> i = load(center + c * pixels.width + t);
      Vector<T> to_i = load(own);
      for (int64_t x = 0; x < k; ++x) {
        const int64_t pair = (c * k + x) * pixels.width + t;
        const int64_t other = around.at(c, x) - around.data + pixels.first + y * W + t;
        const Vector<T> g = where_positive(load(a1 + pair) - floor, load(grad_a1 + pair));
        if (is_product) sum += g;
        to_i += is_product ? g * load(around.data + other) : g;
        T* to_j = to_around.data + other;
        store(to_j, is_product ? load(to_j) + g * i : load(to_j) - g);
      }
      store(own, to_i);
    }
    if (is_product) store(to_shift + c * kLanes<T>, load(to_shift + c * kLanes<T>) + sum);
  }
  __attribute__((always_inline)) inline void begin_backward() const {
    to_around.clear();
    memset(to_shift, 0, p.channels * kLanes<T> * sizeof(T));
  }
  __attribute__((always_inline)) inline void end_pixels(const PairGradients<T>& to, Rows rows) const {
    for (int64_t c = p.products; c < p.channels; ++c)
      for (int64_t t = 0; t < pixels.width; t += kLanes<T>)
        store(to_shift + c * kLanes<T>, load(to_shift + c * kLanes<T>) + load(to_center + c * pixels.width + t));
    from_planes<true>(to_center, pixels.width, p.channels, pixels.count,
                      to.center + (rows.first * W + pixels.first) * p.channels);
  }
  __attribute__((always_inline)) inline void end_backward(const PairGradients<T>& to, Rows rows) const {
    for (int64_t c = 0; c < p.channels; ++c) to.shift1[c] += total(load(to_shift + c * kLanes<T>));
    to_around.add_to(to.around, rows.first);
  }

  // Computes a2 from a1 of one row of the footprint.
  __attribute__((always_inline)) inline const T* map_hidden() const {
    if (p.hidden == 0) return a1;
    multiply<Start::bias, Finish::relu>(p.hidden, columns(), p.channels, p.weight1, p.channels, 1, a1, columns(),
                                        p.shift2, a2, columns());
    return a2;
  }
  int64_t last_hidden() const { return p.hidden == 0 ? p.channels : p.hidden; }
};

template <class T>
void moments(const Pairs<T>& p, const PairMaps<T>& maps, const T* origin, Rows rows, T* scratch, T* sum, T* products) {
  Tile<T> tile(p, rows, false, scratch);
  tile.for_each(maps, rows, [&]() __attribute__((always_inline)) {
    for (int64_t y = 0; y < tile.k; ++y) {
      tile.template relate<true>(y, origin);
      clear_behind(tile.pixels, tile.a1, p.channels * tile.k);
      add_squares(p.channels, tile.columns(), tile.a1, tile.columns(), products);
      for (int64_t c = 0; c < p.channels; ++c) {
        const T* from = tile.a1 + c * tile.columns();
        sum[c] += total(sum_of<Vector<T>>(tile.columns() / kLanes<T>, [&](int64_t n) __attribute__((always_inline)) {
          return load(from + n * kLanes<T>);
        }));
      }
    }
  });
}

template <class T>
void moments_backward(const Pairs<T>& p, const PairMaps<T>& maps, const T* mean, const T* matrix, const T* vector,
                      Rows rows, T* scratch, const PairGradients<T>& to) {
  Tile<T> tile(p, rows, true, scratch);
  const int64_t d = p.channels;
  tile.begin_backward();
  tile.for_each(maps, rows, [&]() __attribute__((always_inline)) {
    memset(tile.to_center, 0, d * tile.pixels.width * sizeof(T));
    for (int64_t y = 0; y < tile.k; ++y) {
      tile.template relate<true>(y, mean);
      multiply<Start::bias>(d, tile.columns(), d, matrix, d, 1, tile.a1, tile.columns(), vector, tile.grad_a1,
                            tile.columns());
      clear_behind(tile.pixels, tile.grad_a1, d * tile.k);
      tile.template relate_backward<true>(y, mean);
    }
    tile.end_pixels(to, rows);
  });
  tile.end_backward(to, rows);
}

// Computes w of one weight channel from z [K, width], and overwrites z. `top` and `scale` are the pixels' largest z and
// the reciprocals of their sums: with `is_known` they are read, otherwise written. Loops that
// access w have positions as their outer loop: adjacent positions can be too far apart for the processor to prefetch
// them on its own.
template <bool is_known, class T, class Known>
SAN_INLINE void softmax(const Tile<T>& tile, T* z, T* w, int64_t pitch, Known* top, Known* scale) {
  const int64_t width = tile.pixels.width;
  Vector<T> tops[Tile<T>::kMostPixels / kLanes<T>], scales[Tile<T>::kMostPixels / kLanes<T>];
  for_each_vector_of<T>(tile.pixels.count, [&](int64_t t, int64_t values) __attribute__((always_inline)) {
    Vector<T>&largest = tops[t / kLanes<T>], &factor = scales[t / kLanes<T>];
    if constexpr (is_known) {
      largest = load_some(top + t, values), factor = load_some(scale + t, values);
    } else {
      T* at = z + t;
      largest =
          largest_of<Vector<T>>(tile.K, [&](int64_t o) __attribute__((always_inline)) { return load(at + o * width); });
      factor = T(1) / sum_of<Vector<T>>(tile.K, [&](int64_t o) __attribute__((always_inline)) {
                 const Vector<T> e = exp(load(at + o * width) - largest);
                 store(at + o * width, e);
                 return e;
               });
      store_some(top + t, largest, values), store_some(scale + t, factor, values);
    }
  });
  for (int64_t o = 0; o < tile.K; ++o, z += width, w += pitch)
    for_each_vector_of<T>(tile.pixels.count, [&](int64_t t, int64_t values) __attribute__((always_inline)) {
      const Vector<T> at = load(z + t), e = is_known ? exp(at - tops[t / kLanes<T>]) : at;
      store_some(w + t, e * scales[t / kLanes<T>], values);
    });
}

template <bool is_known, class T, class Known>
void weights(const Pairs<T>& p, const PairMaps<T>& maps, Rows rows, T* scratch, BandWeights<T> w, Known* softmaxes) {
  Tile<T> tile(p, rows, false, scratch);
  const int64_t K = tile.K, P = p.footprint.pixels();
  tile.for_each(maps, rows, [&]() __attribute__((always_inline)) {
    const int64_t width = tile.pixels.width;
    for (int64_t y = 0; y < tile.k; ++y) {
      tile.template relate<false>(y, nullptr);
      const T* a2 = tile.map_hidden();
      multiply<Start::zero>(p.weights, tile.columns(), tile.last_hidden(), p.weight2, tile.last_hidden(), 1, a2,
                            tile.columns(), p.shift2, tile.z + y * tile.columns(), K * width);
    }
    Known* top = softmaxes + rows.first * tile.W + tile.pixels.first;
    for (int64_t g = 0; g < p.weights; ++g, top += P) {
      softmax<is_known>(tile, tile.z + g * K * width, w.data + g * K * w.pitch + tile.pixels.first, w.pitch, top,
                        top + p.weights * P);
    }
  });
}

// Computes the gradient of z, w (grad_w - sum_j w grad_w), in one row of the footprint, and zeros after the last pixel.
template <class T>
SAN_INLINE void softmax_backward_row(const Tile<T>& tile, int64_t y, BandWeights<const T> w,
                                     BandWeights<const T> grad_w, BandWeights<const T> dots) {
  const int64_t width = tile.pixels.width, first = tile.pixels.first;
  for (int64_t g = 0; g < tile.p.weights; ++g)
    for (int64_t x = 0; x < tile.k; ++x) {
      const int64_t row = g * tile.K + y * tile.k + x;
      const T *w_row = w.data + row * w.pitch + first, *grad = grad_w.data + row * grad_w.pitch + first;
      for_each_vector_of<T>(tile.pixels.count, [&](int64_t t, int64_t values) __attribute__((always_inline)) {
        const Vector<T> w_t = load_some(w_row + t, values), grad_t = load_some(grad + t, values);
        const Vector<T> dot = load_some(dots.data + g * dots.pitch + t, values);
        store(tile.z + (g * tile.k + x) * width + t, w_t * (grad_t - dot));
      });
    }
}

template <class T>
void weights_backward(const Pairs<T>& p, const PairMaps<T>& maps, BandWeights<const T> w, BandWeights<const T> grad_w,
                      const T* dots, Rows rows, T* scratch, const PairGradients<T>& to) {
  Tile<T> tile(p, rows, true, scratch);
  const int64_t d = p.channels, last = tile.last_hidden();
  tile.begin_backward();
  tile.for_each(maps, rows, [&]() __attribute__((always_inline)) {
    const int64_t columns = tile.columns();
    memset(tile.to_center, 0, d * tile.pixels.width * sizeof(T));
    const BandWeights<const T> sums{dots + tile.pixels.first, w.pitch};
    for (int64_t y = 0; y < tile.k; ++y) {
      softmax_backward_row(tile, y, w, grad_w, sums);
      tile.template relate<false>(y, nullptr);
      const T* a2 = tile.map_hidden();
      add_products(p.weights, last, columns, tile.z, columns, a2, columns, to.weight2, last);
      T* grad_a2 = p.hidden == 0 ? tile.grad_a1 : tile.grad_a2;
      multiply<Start::zero>(last, columns, p.weights, p.weight2, 1, last, tile.z, columns, p.shift2, grad_a2, columns);
      if (p.hidden > 0) {
        for (int64_t e = 0; e < p.hidden; ++e) {
          Vector<T> sum{};
          for (int64_t n = e * columns; n < (e + 1) * columns; n += kLanes<T>) {
            const Vector<T> g = where_positive(load(a2 + n), load(grad_a2 + n));
            store(grad_a2 + n, g), sum += g;
          }
          to.shift2[e] += total(sum);
        }
        add_products(p.hidden, d, columns, grad_a2, columns, tile.a1, columns, to.weight1, d);
        multiply<Start::zero>(d, columns, p.hidden, p.weight1, 1, d, grad_a2, columns, p.shift2, tile.grad_a1, columns);
      }
      tile.template relate_backward<false>(y, nullptr);
    }
    tile.end_pixels(to, rows);
  });
  tile.end_backward(to, rows);
}

}  // namespace

template <class T>
const PairKernels<T>& SAN_ISA::pairs() {
  static constexpr PairKernels<T> kernels{Tile<T>::scratch,          moments<T>,
                                          moments_backward<T>,       weights<false, T, T>,
                                          weights<true, T, const T>, weights_backward<T>};
  return kernels;
}
template const PairKernels<float>& SAN_ISA::pairs();
template const PairKernels<double>& SAN_ISA::pairs();

}  // namespace san::cpu
