// Patchwise attention, a tile of pixels and one position of the footprint at a time: no patch and no weight of a whole
// map is ever written.
#include "tiles.h"
#include "vector.h"

namespace san::cpu {
namespace {

constexpr int64_t kPixels = 56;  // of a tile at most: enough for a matrix product to use each weight it reads often

template <class T>
struct Tile {
  static int64_t scratch(const Patchwise<T>& p) {
    const int64_t widest = 2 * p.pitch > 2 * p.weights ? 2 * p.pitch : 2 * p.weights;
    return kPixels * (widest + p.footprint.positions()) + 2 * kLanes<T>;
  }

  const Patchwise<T> p;  // a copy: no store can change it, so it may stay in registers
  const Footprint f;
  T *left, *right;  // [kPixels, pitch or weights]
  int32_t* places;  // [K, kPixels]: pixel j
  int64_t first, count;

  __attribute__((always_inline)) inline Tile(const Patchwise<T>& p, T* scratch) : p(p), f(p.footprint) {
    const int64_t wider = p.pitch > p.weights ? p.pitch : p.weights;
    left = scratch, right = left + kPixels * wider;
    places = reinterpret_cast<int32_t*>(right + kPixels * wider);
  }

  __attribute__((always_inline)) inline void take(int64_t from, int64_t pixels) {
    first = from, count = pixels;
    const int64_t k = f.kernel_size, top = first / f.width - f.reach(), left = first % f.width - f.reach();
    for (int64_t y = 0; y < k; ++y)
      for (int64_t x = 0; x < k; ++x)
        for (int64_t t = 0, h = top + y, w = left + x, row = reflect(h, f.height) * f.width; t < count; ++t) {
          places[(y * k + x) * kPixels + t] = static_cast<int32_t>(row + reflect(w, f.width));
          if (++w == f.width + x - f.reach()) w = x - f.reach(), row = reflect(++h, f.height) * f.width;
        }
  }
  // The row of a piece's map that pixel t sees.
  const T* seen(const Patches<T>& x, int64_t piece, int64_t t) const {
    if (piece == f.positions()) return x.center + (first + t) * p.pitch;
    return x.around + places[piece * kPixels + t] * p.pitch;
  }
  // a1 of a piece, into `left`.
  __attribute__((always_inline)) inline void activate(const Patches<T>& x, int64_t piece, int64_t begin, int64_t end) {
    const T *scale = p.scale + piece * p.pitch, *shift = p.shift + piece * p.pitch;
    for (int64_t t = 0; t < count; ++t) {
      const T* from = seen(x, piece, t);
      for (int64_t c = begin; c < end; c += kLanes<T>)
        store(left + t * p.pitch + c, relu(load(from + c) * load(scale + c) + load(shift + c)));
    }
  }
  // The weights of a position, into `left`.
  __attribute__((always_inline)) inline void weigh(const T* a2, int64_t o, int64_t begin, int64_t end) {
    multiply<Start::bias>(count, end - begin, p.hidden, a2 + first * p.hidden, p.hidden, 1,
                          p.w2 + o * p.hidden * p.weights + begin, p.weights, p.bias3 + o * p.weights + begin,
                          left + begin, p.weights);
  }
  int64_t pieces() const { return f.positions() + (p.center > 0 ? 1 : 0); }
};

template <class T, class Visit>
SAN_INLINE void for_each_tile(const Patchwise<T>& p, int64_t first_row, int64_t last_row, const Visit& visit) {
  const int64_t begin = first_row * p.footprint.width, pixels = last_row * p.footprint.width - begin;
  const int64_t tiles = (pixels + kPixels - 1) / kPixels;
  for (int64_t at = 0; at < tiles; ++at) {
    const int64_t first = at * pixels / tiles;
    visit(begin + first, (at + 1) * pixels / tiles - first);
  }
}

template <class T>
int64_t scratch_of(const Patchwise<T>& p) {
  return Tile<T>::scratch(p);
}

template <class T>
void map(const Patchwise<T>& p, const Patches<T>& x, int64_t first_row, int64_t last_row, T* scratch) {
  Tile<T> tile(p, scratch);
  for_each_tile(p, first_row, last_row, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    tile.take(first, count);
    T* u = x.hidden + first * p.hidden;
    memset(u, 0, count * p.hidden * sizeof(T));
    for (int64_t piece = 0; piece < tile.pieces(); ++piece) {
      tile.activate(x, piece, 0, p.pitch);
      multiply<Start::sum>(count, p.hidden, p.relation, tile.left, p.pitch, 1, p.w1 + piece * p.relation * p.hidden,
                           p.hidden, p.scale, u, p.hidden);
    }
  });
}

template <class T>
void forward(const Patchwise<T>& p, const Patches<T>& x, int64_t first_row, int64_t last_row, T* scratch) {
  Tile<T> tile(p, scratch);
  for_each_tile(p, first_row, last_row, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    tile.take(first, count);
    memset(x.y + first * p.values, 0, count * p.values * sizeof(T));
    for (int64_t o = 0; o < p.footprint.positions(); ++o) {
      tile.weigh(x.hidden, o, 0, p.weights);
      for (int64_t t = 0; t < count; ++t) {
        const T* beta = x.beta + tile.places[o * kPixels + t] * p.values;
        T* y = x.y + (first + t) * p.values;
        for (int64_t c = 0; c < p.weights; c += kLanes<T>) {
          const Vector<T> w = load(tile.left + t * p.weights + c);
          for (int64_t m = c; m < p.values; m += p.weights) store(y + m, load(y + m) + w * load(beta + m));
        }
      }
    }
  });
}

template <class T>
void backward_mapping(const Patchwise<T>& p, const Patches<T>& x, int64_t first_row, int64_t last_row, T* scratch,
                      const MappingSums<T>& sums, T* grad_a2, T* grad_beta) {
  Tile<T> tile(p, scratch);
  const int64_t begin = x.first_channel, end = x.last_channel;
  for_each_tile(p, first_row, last_row, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    tile.take(first, count);
    memset(grad_a2 + first * p.hidden, 0, count * p.hidden * sizeof(T));
    for (int64_t o = 0; o < p.footprint.positions(); ++o) {
      tile.weigh(x.hidden, o, begin, end);
      T *grad_weight = tile.right, *grad_bias = sums.bias3 + o * p.weights;
      for (int64_t t = 0; t < count; ++t) {
        const int64_t at = tile.places[o * kPixels + t] * p.values;
        const T* grad_y = x.grad_y + (first + t) * p.values;
        for (int64_t c = begin; c < end; c += kLanes<T>) {
          const Vector<T> w = load(tile.left + t * p.weights + c);
          Vector<T> sum{};
          for (int64_t m = c; m < p.values; m += p.weights) {
            const Vector<T> g = load(grad_y + m);
            sum += g * load(x.beta + at + m);
            store(grad_beta + at + m, load(grad_beta + at + m) + w * g);
          }
          store(grad_weight + t * p.weights + c, sum);
          store(grad_bias + c, load(grad_bias + c) + sum);
        }
      }
      multiply<Start::sum>(count, p.hidden, end - begin, grad_weight + begin, p.weights, 1,
                           p.w2_back + (o * p.weights + begin) * p.hidden, p.hidden, p.scale,
                           grad_a2 + first * p.hidden, p.hidden);
      multiply<Start::sum>(p.hidden, end - begin, count, x.hidden + first * p.hidden, 1, p.hidden, grad_weight + begin,
                           p.weights, p.scale, sums.w2 + o * p.hidden * p.weights + begin, p.weights);
    }
  });
}

template <class T>
void backward_relation(const Patchwise<T>& p, const Patches<T>& x, int64_t first_row, int64_t last_row, T* scratch,
                       const RelationSums<T>& sums, T* to_center, T* to_around) {
  Tile<T> tile(p, scratch);
  const int64_t begin = x.first_channel, end = x.last_channel, rows = (end < p.relation ? end : p.relation) - begin;
  for_each_tile(p, first_row, last_row, [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    tile.take(first, count);
    const T* grad_u = x.hidden + first * p.hidden;
    for (int64_t piece = 0; piece < tile.pieces(); ++piece) {
      const bool is_center = piece == p.footprint.positions();
      tile.activate(x, piece, begin, end);
      multiply<Start::sum>(rows, p.hidden, count, tile.left + begin, 1, p.pitch, grad_u, p.hidden, p.scale,
                           sums.w1 + (piece * p.relation + begin) * p.hidden, p.hidden);
      multiply<Start::zero>(count, end - begin, p.hidden, grad_u, p.hidden, 1,
                            p.w1_back + piece * p.hidden * p.pitch + begin, p.pitch, p.scale, tile.right + begin,
                            p.pitch);
      for (int64_t c = begin; c < end; c += kLanes<T>) {
        T *sum = sums.shift + piece * p.pitch + c, *product = sums.product + piece * p.pitch + c;
        const Vector<T> scale = load(p.scale + piece * p.pitch + c);
        Vector<T> s{}, q{};
        for (int64_t t = 0; t < count; ++t) {
          const Vector<T> g = where_positive(load(tile.left + t * p.pitch + c), load(tile.right + t * p.pitch + c));
          s += g;
          q += g * load(tile.seen(x, piece, t) + c);
          if (is_center) {
            store(to_center + (first + t) * p.pitch + c, g);
          } else {
            T* other = to_around + tile.places[piece * kPixels + t] * p.pitch + c;
            store(other, load(other) + scale * g);
          }
        }
        store(sum, load(sum) + s);
        store(product, load(product) + q);
      }
    }
  });
}

}  // namespace

namespace SAN_ISA {
extern const PatchwiseTiles<float> patchwise_float;
extern const PatchwiseTiles<double> patchwise_double;
const PatchwiseTiles<float> patchwise_float{kLanes<float>,  scratch_of<float>,       map<float>,
                                            forward<float>, backward_mapping<float>, backward_relation<float>};
const PatchwiseTiles<double> patchwise_double{kLanes<double>,  scratch_of<double>,       map<double>,
                                              forward<double>, backward_mapping<double>, backward_relation<double>};
}  // namespace SAN_ISA
}  // namespace san::cpu
