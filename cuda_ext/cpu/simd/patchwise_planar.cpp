// Patchwise attention where channels are too few to fill a vector: vectors run over neighbouring pixels of a row. A
// tile has the pieces of one row of the footprint at a time, and the weights of one channel.
//
// Behind the last pixel of a row vectors hold what no pixel sees there; it is kept out of all sums over pixels, for 0
// times what is not finite would spoil them.
#include "planes.h"
#include "tiles.h"

namespace san::cpu {
namespace {

template <class T>
struct Tile : PlanarTile<T> {
  using Base = PlanarTile<T>;
  using Base::f, Base::K, Base::first, Base::count, Base::width, Base::pairs, Base::pixel, Base::read;
  using Base::grad_y, Base::y, Base::beta, Base::to_beta, Base::clear;

  static int64_t line(const Patchwise<T>& p) { return p.footprint.kernel_size * p.relation; }
  static int64_t pixels(const Patchwise<T>& p) {
    const int64_t K = p.footprint.positions();
    return Base::most_pixels(p.footprint, 2 * (line(p) > K ? line(p) : K));  // no pass has both
  }
  static int64_t scratch(const Patchwise<T>& p) {
    const int64_t map_channels = p.relation + p.values;
    return 2 * Planes<T>::size(p.footprint, map_channels, p.band_rows) +
           2 * pixels(p) * (line(p) + p.footprint.positions() + map_channels + p.hidden);
  }

  const Patchwise<T> p;                        // a copy: no store can change it, so it may stay in registers
  T *a1, *grad_a1;                             // [kernel_size, relation, width]
  T *weight, *grad_weight;                     // [K, width]
  T *center, *to_center, *hidden, *to_hidden;  // per pixel
  Planes<T> around, to_around;

  __attribute__((always_inline)) inline Tile(const Patchwise<T>& p, T* scratch)
      : Base(p.footprint, p.weights, p.values), p(p) {
    const int64_t most = pixels(p);
    const auto take = [&](int64_t size) { return Base::take(scratch, size); };
    const auto take_planes = [&](int64_t channels) { return Base::take_planes(scratch, channels, p.band_rows); };
    a1 = take(most * line(p)), grad_a1 = take(most * line(p));
    weight = take(most * K), grad_weight = take(most * K);
    center = take(most * p.relation), to_center = take(most * p.relation);
    grad_y = take(most * p.values), y = take(most * p.values);
    hidden = take(most * p.hidden), to_hidden = take(most * p.hidden);
    around = take_planes(p.relation), to_around = take_planes(p.relation);
    beta = take_planes(p.values), to_beta = take_planes(p.values);
  }

  template <class Visit>
  __attribute__((always_inline)) inline void for_each(int64_t first_row, int64_t last_row, const Visit& visit) {
    Base::for_each(first_row, last_row, pixels(p), visit);
  }
  // Calls visit(first piece, their number, what the first sees, distance between its channels) for the pieces of each
  // row of the footprint, which see what the first does but a column further on each, and for the center, once a1 of
  // them is there.
  template <class Visit>
  __attribute__((always_inline)) inline void for_each_line(const Patches<T>& x, int64_t band_row, const Visit& visit) {
    if (p.center > 0) read(x.center, p.relation, center);
    for (int64_t row = 0; row < f.kernel_size + (p.center > 0 ? 1 : 0); ++row) {
      const bool is_center = row == f.kernel_size;
      const int64_t piece = row * f.kernel_size, pieces = is_center ? 1 : f.kernel_size;
      const int64_t pitch = is_center ? width : around.width;
      const T* from = is_center ? center : around.at(band_row + row, 0) + first;
      for (int64_t n = 0; n < pieces * p.relation; ++n) {
        const Vector<T> scale = broadcast(p.scale[piece * p.relation + n]);
        const Vector<T> shift = broadcast(p.shift[piece * p.relation + n]);
        const T* seen = from + n / p.relation + n % p.relation * pitch;
        for (int64_t t = 0; t < width; t += kLanes<T>) store(a1 + n * width + t, relu(load(seen + t) * scale + shift));
      }
      visit(piece, pieces, from, pitch);
    }
  }
  // Weight g, from a2 in `hidden`.
  __attribute__((always_inline)) inline void weigh(int64_t g) {
    for (int64_t o = 0; o < K; ++o) {
      const Vector<T> bias = broadcast(p.bias3[o * p.weights + g]);
      for (int64_t t = 0; t < width; t += kLanes<T>) store(weight + o * width + t, bias);
    }
    multiply<Start::sum>(K, width, p.hidden, p.w2 + g, p.hidden * p.weights, p.weights, hidden, width, hidden, weight,
                         width);
  }
};

template <class T>
int64_t scratch_of(const Patchwise<T>& p) {
  return Tile<T>::scratch(p);
}

template <class T>
void map(const Patchwise<T>& p, const Patches<T>& x, int64_t first_row, int64_t last_row, T* scratch) {
  Tile<T> tile(p, scratch);
  tile.around.read(x.around, first_row, last_row);
  tile.for_each(first_row, last_row, [&](int64_t band_row) __attribute__((always_inline)) {
    const int64_t width = tile.width;
    memset(tile.hidden, 0, p.hidden * width * sizeof(T));
    tile.for_each_line(x, band_row, [&](int64_t piece, int64_t pieces, const T*, int64_t) {
      multiply<Start::sum>(p.hidden, width, pieces * p.relation, p.w1 + piece * p.relation * p.hidden, 1, p.hidden,
                           tile.a1, width, tile.a1, tile.hidden, width);
    });
    from_planes<false>(tile.hidden, width, p.hidden, tile.count, x.hidden + tile.pixel() * p.hidden);
  });
}

template <class T>
void forward(const Patchwise<T>& p, const Patches<T>& x, int64_t first_row, int64_t last_row, T* scratch) {
  Tile<T> tile(p, scratch);
  tile.beta.read(x.beta, first_row, last_row);
  tile.for_each(first_row, last_row, [&](int64_t band_row) __attribute__((always_inline)) {
    tile.read(x.hidden, p.hidden, tile.hidden);
    for (int64_t g = 0; g < p.weights; ++g) {
      tile.weigh(g);
      tile.aggregate(band_row, g, tile.weight);
    }
    from_planes<false>(tile.y, tile.width, p.values, tile.count, x.y + tile.pixel() * p.values);
  });
}

template <class T>
void backward_mapping(const Patchwise<T>& p, const Patches<T>& x, int64_t first_row, int64_t last_row, T* scratch,
                      const MappingSums<T>& sums, T* grad_a2, T* grad_beta) {
  Tile<T> tile(p, scratch);
  tile.beta.read(x.beta, first_row, last_row);
  tile.to_beta.clear(last_row - first_row);
  tile.for_each(first_row, last_row, [&](int64_t band_row) __attribute__((always_inline)) {
    const int64_t width = tile.width, step = p.hidden * p.weights;  // of w2, from one position to the next
    tile.read(x.hidden, p.hidden, tile.hidden);
    tile.read(x.grad_y, p.values, tile.grad_y);
    memset(tile.to_hidden, 0, p.hidden * width * sizeof(T));
    for (int64_t g = 0; g < p.weights; ++g) {
      tile.weigh(g);
      tile.correlate(band_row, g, tile.weight, tile.grad_weight, true);
      tile.clear(tile.grad_weight, tile.K);
      multiply<Start::sum>(p.hidden, width, tile.K, p.w2 + g, p.weights, step, tile.grad_weight, width, tile.weight,
                           tile.to_hidden, width);
      add_products(tile.K, p.hidden, width, tile.grad_weight, tile.hidden, sums.w2 + g, step, p.weights);
      for (int64_t o = 0; o < tile.K; ++o) {
        Vector<T> sum{};
        for (int64_t t = 0; t < width; t += kLanes<T>) sum += load(tile.grad_weight + o * width + t);
        sums.bias3[o * p.weights + g] += total(sum);
      }
    }
    from_planes<false>(tile.to_hidden, width, p.hidden, tile.count, grad_a2 + tile.pixel() * p.hidden);
  });
  tile.to_beta.add_to(grad_beta, first_row, last_row);
}

template <class T>
void backward_relation(const Patchwise<T>& p, const Patches<T>& x, int64_t first_row, int64_t last_row, T* scratch,
                       const RelationSums<T>& sums, T* to_center, T* to_around) {
  Tile<T> tile(p, scratch);
  tile.around.read(x.around, first_row, last_row);
  tile.to_around.clear(last_row - first_row);
  tile.for_each(first_row, last_row, [&](int64_t band_row) __attribute__((always_inline)) {
    const int64_t width = tile.width, whole = tile.count / kLanes<T> * kLanes<T>;
    tile.read(x.hidden, p.hidden, tile.hidden);
    tile.for_each_line(x, band_row, [&](int64_t piece, int64_t pieces, const T* from, int64_t pitch) {
      const int64_t channels = pieces * p.relation, skipped = piece * p.relation;
      const bool is_center = piece == tile.K;
      T* to = is_center ? tile.to_center : tile.to_around.data + (from - tile.around.data);
      tile.clear(tile.a1, channels);
      add_products(channels, p.hidden, width, tile.a1, tile.hidden, sums.w1 + skipped * p.hidden, p.hidden, 1);
      multiply<Start::zero>(channels, width, p.hidden, p.w1 + skipped * p.hidden, p.hidden, 1, tile.hidden, width,
                            tile.hidden, tile.grad_a1, width);
      for (int64_t n = 0; n < channels; ++n) {
        const int64_t seen = n / p.relation + n % p.relation * pitch;
        const Vector<T> scale = broadcast(p.scale[skipped + n]);
        Vector<T> s{}, q{};
        const auto add = [&](int64_t t, Vector<T> x) __attribute__((always_inline)) {
          const Vector<T> g = where_positive(load(tile.a1 + n * width + t), load(tile.grad_a1 + n * width + t));
          s += g, q += g * x;
          store(to + seen + t, is_center ? g : load(to + seen + t) + scale * g);
        };
        for (int64_t t = 0; t < whole; t += kLanes<T>) add(t, load(from + seen + t));
        if (whole < width) add(whole, first_lanes<T>(load(from + seen + whole), tile.count - whole));
        sums.shift[skipped + n] += total(s), sums.product[skipped + n] += total(q);
      }
    });
    if (p.center > 0)
      from_planes<false>(tile.to_center, width, p.relation, tile.count, to_center + tile.pixel() * p.relation);
  });
  tile.to_around.add_to(to_around, first_row, last_row);
}

}  // namespace

namespace SAN_ISA {
extern const PatchwiseTiles<float> patchwise_planar_float;
extern const PatchwiseTiles<double> patchwise_planar_double;
const PatchwiseTiles<float> patchwise_planar_float{
    1, scratch_of<float>, map<float>, forward<float>, backward_mapping<float>, backward_relation<float>};
const PatchwiseTiles<double> patchwise_planar_double{
    1, scratch_of<double>, map<double>, forward<double>, backward_mapping<double>, backward_relation<double>};
}  // namespace SAN_ISA
}  // namespace san::cpu
