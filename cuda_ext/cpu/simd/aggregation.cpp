// The aggregation, each pixel's weighted sum of the values in its footprint, and dot products with these values.
// Vectors run over neighboring pixels of a row, and eight value channels share each weight that is loaded.
//
// The last vector of a row extends into the next row. Its values there are wrong, but they are overwritten: rows are
// written in order, and at the end of the band only the valid lanes are stored.
#include "kernels.h"
#include "planes.h"

namespace san::cpu {
namespace {

// Rows of a map, and the rows above and below that their footprints cover, padded by reflection: planes [rows,
// channels, width]. Rows lie a little further apart: at a multiple of 4 KB, they would displace each other in the
// cache.
template <class T>
struct PaddedRows {
  Footprint f;
  int64_t channels, rows, width, pitch;
  T* data;

  static int64_t width_of(const Footprint& f) { return whole_vectors<T>(f.width) + 2 * f.reach(); }
  static int64_t pitch_of(const Footprint& f, int64_t channels) { return channels * width_of(f) + 64 / sizeof(T); }
  static int64_t size(const Aggregation<T>& p, int64_t rows) {
    return whole_vectors<T>((rows + 2 * p.footprint.reach()) * pitch_of(p.footprint, p.values));
  }
  __attribute__((always_inline)) inline PaddedRows(const Aggregation<T>& p, Rows band, T*& scratch)
      : f(p.footprint),
        channels(p.values),
        rows(band.last - band.first + 2 * p.footprint.reach()),
        width(width_of(p.footprint)),
        pitch(pitch_of(p.footprint, p.values)),
        data(take(scratch, size(p, band.last - band.first))) {}

  // Row `row`, counted from the first row of the planes, from the first column of the padding.
  T* at(int64_t row, int64_t c) const { return data + row * pitch + c * width; }

  __attribute__((always_inline)) inline void clear() const { memset(data, 0, rows * pitch * sizeof(T)); }
  __attribute__((always_inline)) inline void read(const T* map, int64_t first) const {
    const int64_t reach = f.reach(), W = f.width;
    clear();
    for (int64_t row = 0; row < rows; ++row) {
      T* inside = at(row, 0) + reach;
      const int64_t from = reflect(first + row - reach, f.height) * W;
      to_planes(map + from * channels, channels, W, inside, width);
      for (int64_t c = 0; c < channels; ++c, inside += width)
        for (int64_t x = 1; x <= reach; ++x) inside[-x] = inside[x], inside[W - 1 + x] = inside[W - 1 - x];
    }
  }
  // The adjoint of read: adds every element of the planes to the pixel that it was read from.
  __attribute__((always_inline)) inline void add_to(T* map, int64_t first) const {
    const int64_t reach = f.reach(), W = f.width;
    for (int64_t row = 0; row < rows; ++row) {
      T* inside = at(row, 0) + reach;
      const int64_t to = reflect(first + row - reach, f.height) * W;
      for (T* plane = inside; plane < inside + channels * width; plane += width)
        for (int64_t x = 1; x <= reach; ++x) plane[x] += plane[-x], plane[W - 1 - x] += plane[W - 1 + x];
      from_planes<true>(inside, width, channels, W, map + to * channels);
    }
  }
};

// One row of the map.
template <class T>
struct Line {
  const Aggregation<T> p;  // a copy, so the compiler knows that no store changes it
  const int64_t k, K, W, width;
  PaddedRows<T> beta;
  T* own;  // [values, width]: y, its gradient, or phi

  static int64_t scratch(const Aggregation<T>& p, int64_t rows, bool backward) {
    const int64_t maps = PaddedRows<T>::size(p, rows) + p.values * whole_vectors<T>(p.footprint.width);
    const int64_t scores = 2 * p.footprint.kernel_size * whole_vectors<T>(rows * p.footprint.width);
    return (backward ? 2 : 1) * maps > scores ? (backward ? 2 : 1) * maps : scores;
  }
  __attribute__((always_inline)) inline Line(const Aggregation<T>& p, Rows rows, T*& scratch)
      : p(p),
        k(p.footprint.kernel_size),
        K(k * k),
        W(p.footprint.width),
        width(whole_vectors<T>(W)),
        beta(p, rows, scratch),
        own(take(scratch, p.values * width)) {}

  // Calls visit<is_near_end>(row of the map, row of the band); near the end, the row's last vector extends past the
  // band's last pixel.
  template <class Visit>
  __attribute__((always_inline)) inline void for_each_row(Rows rows, const Visit& visit) const {
    for (int64_t h = rows.first; h < rows.last; ++h)
      if (h * W + width > rows.last * W)
        visit.template operator()<true>(h, h - rows.first);
      else
        visit.template operator()<false>(h, h - rows.first);
  }

  // Calls visit(position, row and column of the planes that the row's first pixel has at this position).
  template <class Visit>
  SAN_INLINE void for_each_position(int64_t k, const Visit& visit) {
    for (int64_t y = 0, o = 0; y < k; ++y)
      for (int64_t x = 0; x < k; ++x, ++o) visit(o, y, x);
  }

  // The same, column by column.
  template <class Visit>
  SAN_INLINE void for_each_position_by_column(int64_t k, const Visit& visit) {
    for (int64_t x = 0; x < k; ++x)
      for (int64_t y = 0; y < k; ++y) visit(y * k + x, y, x);
  }

  // The lanes from t on that are pixels of the row. Those behind it have weights of the next row, which may be NaN.
  __attribute__((always_inline)) inline Vector<T> inside(int64_t t) const {
    return first_lanes<T>(broadcast(T(1)), W - t);
  }

  // The weights of adjacent positions can be too far apart for the processor to prefetch them on its own.
  template <bool is_near_end>
  __attribute__((always_inline)) inline Vector<T> weight_at(const T* w, const T* end) const {
    __builtin_prefetch(w + W);
    return is_near_end ? load_some(w, end - w) : load(w);
  }

  // y of the `shares` value channels that start at c and share the weights w [K, pitch].
  template <int shares, bool is_near_end>
  __attribute__((always_inline)) inline void aggregate(int64_t row, int64_t c, BandWeights<const T> w,
                                                       const T* end) const {
    for (int64_t t = 0; t < width; t += kLanes<T>) {
      Vector<T> sum[shares]{};
      for_each_position(k, [&](int64_t o, int64_t y, int64_t x) __attribute__((always_inline)) {
        const Vector<T> factor = weight_at<is_near_end>(w.data + o * w.pitch + t, end);
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) sum[s] += factor * load(beta.at(row + y, c + s * p.weights) + x + t);
      });
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) store(own + (c + s * p.weights) * width + t, sum[s]);
    }
  }

  // Before read_own, which sets `own` to a row of a map. Lanes after the last pixel stay 0.
  __attribute__((always_inline)) inline void clear_own() const { memset(own, 0, p.values * width * sizeof(T)); }
  __attribute__((always_inline)) inline void read_own(const T* map, int64_t h) const {
    to_planes(map + h * W * p.values, p.values, W, own, width);
  }

  // Gradients of a weight and, in `to_beta`, of the `shares` value channels that start at c and share it. The first
  // call for a weight overwrites its gradient, later calls add to it. Writes sum_j w grad_w to `dots`, unless it is
  // null. `room` is the number of pixels up to the end of the band. Without `is_backward`, it writes nothing else than
  // the first gradient, which is a dot product.
  template <int shares, bool is_near_end, bool is_backward>
  __attribute__((always_inline)) inline void correlate(int64_t row, int64_t c, BandWeights<const T> w, const T* end,
                                                       BandWeights<T> grad_w, T* dots, int64_t room, bool is_first,
                                                       const PaddedRows<T>& to_beta) const {
    for (int64_t t = 0; t < width; t += kLanes<T>) {
      const int64_t values = is_near_end ? room - t : kLanes<T>;
      const Vector<T> is_inside = inside(t);
      Vector<T> grad[shares], dot{};
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) grad[s] = load(own + (c + s * p.weights) * width + t);
      // Neighbors of a row would load what was just stored, before the processor can forward it.
      for_each_position_by_column(k, [&](int64_t o, int64_t y, int64_t x) __attribute__((always_inline)) {
        T* out = grad_w.data + o * grad_w.pitch + t;
        __builtin_prefetch(out + W, 1);
        Vector<T> factor{};
        if constexpr (is_backward)
          factor = where_positive(is_inside, weight_at<is_near_end>(w.data + o * w.pitch + t, end));
        Vector<T> sum = is_first ? Vector<T>{} : load_some(out, values);
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) {
          const int64_t at = beta.at(row + y, c + s * p.weights) - beta.data + x + t;
          sum += grad[s] * load(beta.data + at);
          if constexpr (is_backward) store(to_beta.data + at, load(to_beta.data + at) + factor * grad[s]);
        }
        store_some(out, sum, values), dot += factor * sum;
      });
      if (dots != nullptr) store_some(dots + t, dot, values);
    }
  }

  // Gradients of phi, in `to_own`, and of psi, from those of their dot products, `grad_z`.
  template <int shares, bool is_near_end>
  __attribute__((always_inline)) inline void distribute(int64_t row, int64_t c, BandWeights<const T> grad_z,
                                                        const T* end, T* to_own, const PaddedRows<T>& to_psi) const {
    for (int64_t t = 0; t < width; t += kLanes<T>) {
      const Vector<T> is_inside = inside(t);
      Vector<T> phi[shares], sum[shares]{};
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) phi[s] = load(own + (c + s * p.weights) * width + t);
      for_each_position_by_column(k, [&](int64_t o, int64_t y, int64_t x) __attribute__((always_inline)) {
        const Vector<T> factor =
            where_positive(is_inside, weight_at<is_near_end>(grad_z.data + o * grad_z.pitch + t, end));
#pragma GCC unroll 8
        for (int s = 0; s < shares; ++s) {
          const int64_t at = beta.at(row + y, c + s * p.weights) - beta.data + x + t;
          sum[s] += factor * load(beta.data + at);
          store(to_psi.data + at, load(to_psi.data + at) + factor * phi[s]);
        }
      });
#pragma GCC unroll 8
      for (int s = 0; s < shares; ++s) store(to_own + (c + s * p.weights) * width + t, sum[s]);
    }
  }
};

// The weights of a channel from a pixel of the band on.
template <class T>
SAN_INLINE BandWeights<T> part_of(BandWeights<T> w, int64_t channel, int64_t K, int64_t pixel) {
  return {w.data + channel * K * w.pitch + pixel, w.pitch};
}

// Calls visit<shares>(value channel, weight channel) for every eight channels that share a weight, and for the
// remaining ones in groups of 4, 2 and 1.
template <class T, class Visit>
SAN_INLINE void for_each_channel(const Aggregation<T>& p, const Visit& visit) {
  for (int64_t g = 0; g < p.weights; ++g) {
    int64_t c = g;
    for (; c + 7 * p.weights < p.values; c += 8 * p.weights) visit.template operator()<8>(c, g);
    for (; c + 3 * p.weights < p.values; c += 4 * p.weights) visit.template operator()<4>(c, g);
    for (; c + p.weights < p.values; c += 2 * p.weights) visit.template operator()<2>(c, g);
    for (; c < p.values; c += p.weights) visit.template operator()<1>(c, g);
  }
}

template <class T>
void forward(const Aggregation<T>& p, const AggregationMaps<T>& x, Rows rows, T* scratch, T* y) {
  const Line<T> line(p, rows, scratch);
  line.beta.read(x.beta, rows.first);
  line.for_each_row(rows, [&]<bool is_near_end>(int64_t h, int64_t row) __attribute__((always_inline)) {
    for_each_channel(line.p, [&]<int shares>(int64_t c, int64_t g) __attribute__((always_inline)) {
      line.template aggregate<shares, is_near_end>(row, c, part_of(x.w, g, line.K, row * line.W), x.w_end);
    });
    from_planes<false>(line.own, line.width, p.values, line.W, y + h * line.W * p.values);
  });
}

template <bool is_near_end, bool is_backward, class T>
SAN_INLINE void correlate_row(const Line<T>& line, const AggregationMaps<T>& x, int64_t row, int64_t room,
                              BandWeights<T> grad_w, T* dots, const PaddedRows<T>& to_beta) {
  for_each_channel(line.p, [&]<int shares>(int64_t c, int64_t g) __attribute__((always_inline)) {
    line.template correlate<shares, is_near_end, is_backward>(
        row, c, part_of(x.w, g, line.K, row * line.W), x.w_end, part_of(grad_w, g, line.K, row * line.W),
        dots == nullptr ? nullptr : dots + g * x.w.pitch + row * line.W, room, c == g, to_beta);
  });
}

template <class T>
void backward(const Aggregation<T>& p, const AggregationMaps<T>& x, const T* grad_y, Rows rows, T* scratch,
              T* grad_beta, BandWeights<T> grad_w, T* dots) {
  const Line<T> line(p, rows, scratch);
  const PaddedRows<T> to_beta(p, rows, scratch);
  line.beta.read(x.beta, rows.first);
  to_beta.clear();
  line.clear_own();
  line.for_each_row(rows, [&]<bool is_near_end>(int64_t h, int64_t row) __attribute__((always_inline)) {
    line.read_own(grad_y, h);
    correlate_row<is_near_end, true>(line, x, row, (rows.last - h) * line.W, grad_w, dots, to_beta);
  });
  to_beta.add_to(grad_beta, rows.first);
}

template <class T>
void dot(const Aggregation<T>& p, const T* phi, const T* psi, Rows rows, T* scratch, BandWeights<T> z) {
  const Line<T> line(p, rows, scratch);
  line.beta.read(psi, rows.first);
  line.clear_own();
  line.for_each_row(rows, [&]<bool is_near_end>(int64_t h, int64_t row) __attribute__((always_inline)) {
    line.read_own(phi, h);
    const int64_t room = (rows.last - h) * line.W;
    correlate_row<is_near_end, false>(line, AggregationMaps<T>{}, row, room, z, static_cast<T*>(nullptr), line.beta);
  });
}

template <class T>
void dot_backward(const Aggregation<T>& p, const AggregationMaps<T>& x, const T* phi, Rows rows, T* scratch,
                  T* grad_phi, T* grad_psi) {
  const Line<T> line(p, rows, scratch);
  const PaddedRows<T> to_psi(p, rows, scratch);
  T* to_own = take(scratch, p.values * line.width);
  line.beta.read(x.beta, rows.first);
  to_psi.clear();
  line.clear_own();
  line.for_each_row(rows, [&]<bool is_near_end>(int64_t h, int64_t row) __attribute__((always_inline)) {
    line.read_own(phi, h);
    for_each_channel(line.p, [&]<int shares>(int64_t c, int64_t g) __attribute__((always_inline)) {
      const BandWeights<const T> w = part_of(x.w, g, line.K, row * line.W);
      line.template distribute<shares, is_near_end>(row, c, w, x.w_end, to_own, to_psi);
    });
    from_planes<false>(to_own, line.width, p.values, line.W, grad_phi + h * line.W * p.values);
  });
  to_psi.add_to(grad_psi, rows.first);
}

// The pixels of a band, and their scores for one weight channel, [2 kernel_size, width].
template <class T>
struct Scores {
  const int64_t k, P, first;
  const Pixels pixels;
  T* data;

  __attribute__((always_inline)) inline Scores(const Aggregation<T>& p, Rows rows, T* scratch)
      : k(p.footprint.kernel_size),
        P(p.footprint.pixels()),
        first(rows.first * p.footprint.width),
        pixels{0, (rows.last - rows.first) * p.footprint.width,
               whole_vectors<T>((rows.last - rows.first) * p.footprint.width)},
        data(scratch) {
    memset(data, 0, 2 * k * pixels.width * sizeof(T));
  }
  __attribute__((always_inline)) inline void read(const T* scores) const {
    for (int64_t n = 0; n < 2 * k; ++n)
      memcpy(data + n * pixels.width, scores + n * P + first, pixels.count * sizeof(T));
  }
  __attribute__((always_inline)) inline void write(T* scores) const {
    for (int64_t n = 0; n < 2 * k; ++n)
      memcpy(scores + n * P + first, data + n * pixels.width, pixels.count * sizeof(T));
  }
};

template <bool is_known, class T, class Known>
void dot_weights(const Aggregation<T>& p, const DotMaps<T>& x, Rows rows, T* scratch, BandWeights<T> w,
                 Known* softmax) {
  dot(p, x.phi, x.psi, rows, scratch, w);
  const Scores<T> scores(p, rows, scratch);
  const int64_t k = scores.k, K = k * k, width = scores.pixels.width;
  clear_behind(scores.pixels, w.data, p.weights * K);
  for (int64_t g = 0; g < p.weights; ++g) {
    scores.read(x.scores + g * 2 * k * scores.P);
    Known *top = softmax + g * scores.P + scores.first, *scale = top + p.weights * scores.P;
    for_each_vector_of<T>(scores.pixels.count, [&](int64_t t, int64_t values) __attribute__((always_inline)) {
      T* const first = w.data + g * K * width + t;
      // Calls visit(address, z).
      const auto for_each_z = [&](const auto& visit) __attribute__((always_inline)) {
        const T *of_rows = scores.data + t, *of_columns = of_rows + k * width;
        T* at = first;
        for (int64_t y = 0; y < k; ++y)
          for (int64_t column = 0; column < k; ++column, at += width)
            visit(at, load(at) + (load(of_rows + y * width) + load(of_columns + column * width)));
      };
      if constexpr (is_known) {
        const Vector<T> largest = load_some(top + t, values), factor = load_some(scale + t, values);
        for_each_z([&](T* at, Vector<T> z) __attribute__((always_inline)) { store(at, exp(z - largest) * factor); });
      } else {
        Vector<T> largest = broadcast(static_cast<T>(-__builtin_inf()));
        for_each_z([&](T* at, Vector<T> z)
                       __attribute__((always_inline)) { store(at, z), largest = larger(largest, z); });
        const Vector<T> sum = sum_of<Vector<T>>(K, [&](int64_t o) __attribute__((always_inline)) {
          const Vector<T> e = exp(load(first + o * width) - largest);
          store(first + o * width, e);
          return e;
        });
        const Vector<T> factor = T(1) / sum;
        for (T* at = first; at < first + K * width; at += width) store(at, load(at) * factor);
        store_some(top + t, largest, values), store_some(scale + t, factor, values);
      }
    });
  }
}

template <class T>
void softmax_backward(const Aggregation<T>& p, BandWeights<const T> w, const T* dots, Rows rows, T* scratch,
                      BandWeights<T> grad_w, T* grad_scores) {
  const Scores<T> to(p, rows, scratch);
  const int64_t k = to.k, K = k * k, width = to.pixels.width;
  for (int64_t g = 0; g < p.weights; ++g) {
    for (int64_t t = 0; t < width; t += kLanes<T>) {
      const Vector<T> dot = load(dots + g * width + t);
      T *of_rows = to.data + t, *of_columns = of_rows + k * width;
      int64_t at = g * K * width + t;
      for (int64_t y = 0; y < k; ++y) {
        Vector<T> sum{};
        for (int64_t column = 0; column < k; ++column, at += width) {
          const Vector<T> grad_z = load(w.data + at) * (load(grad_w.data + at) - dot);
          T* of_column = of_columns + column * width;
          store(grad_w.data + at, grad_z), sum += grad_z;
          store(of_column, y == 0 ? grad_z : load(of_column) + grad_z);
        }
        store(of_rows + y * width, sum);
      }
    }
    to.write(grad_scores + g * 2 * k * to.P);
  }
  clear_behind(to.pixels, grad_w.data, p.weights * K);
}

}  // namespace

template <class T>
const AggregationKernels<T>& SAN_ISA::aggregation() {
  static constexpr AggregationKernels<T> kernels{kLanes<T>,
                                                 Line<T>::scratch,
                                                 forward<T>,
                                                 backward<T>,
                                                 dot<T>,
                                                 dot_backward<T>,
                                                 dot_weights<false, T, T>,
                                                 dot_weights<true, T, const T>,
                                                 softmax_backward<T>};
  return kernels;
}
template const AggregationKernels<float>& SAN_ISA::aggregation();
template const AggregationKernels<double>& SAN_ISA::aggregation();

}  // namespace san::cpu
