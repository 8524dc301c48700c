// pair_statistics and patch_statistics, forward and backward. The definitions are in schemas.py. Nothing visits every
// pair or patch: sums over footprints are box sums, which take one axis after the other. All sums are in float64, of
// distances from the first pixel, so that large means cost no precision. A task is one image.
#include <tuple>

#include "bands.h"
#include "vectorize.h"

namespace san::cpu {
namespace {

// Sums along one axis with rows of `width` values: out_i is the sum of the rows that the footprint of row i contains
// or, with is_adjoint, of the rows whose footprints contain row i, once for each mirror image.
SAN_VECTOR void box_rows(const double* in, int64_t size, int64_t width, int64_t reach, bool is_adjoint,
                         double* SAN_RESTRICT out) {
  std::fill_n(out, size * width, 0.0);
  for (int64_t i = 0; i < size; ++i)
    for (int64_t at = i - reach; at <= i + reach; ++at) {
      const int64_t j = reflect(at, size);
      const double* from = in + (is_adjoint ? i : j) * width;
      double* to = out + (is_adjoint ? j : i) * width;
      for (int64_t c = 0; c < width; ++c) to[c] += from[c];
    }
}

// The same over the footprint, for a map [H, W, width] that is overwritten; `rows` is memory for another one.
void box_sums(const Footprint& f, int64_t width, bool is_adjoint, double* map, double* rows) {
  for (int64_t h = 0; h < f.height; ++h)
    box_rows(map + h * f.width * width, f.width, width, f.reach(), is_adjoint, rows + h * f.width * width);
  box_rows(rows, f.height, f.width * width, f.reach(), is_adjoint, map);
}

// Mean and variance, [channels] each, from sums of `count` distances from an origin and of their squares.
template <class T>
std::tuple<Tensor, Tensor> moments(std::vector<double> sum, std::vector<double> square, double count,
                                   const std::vector<double>& origin, const Tensor& like) {
  const int64_t channels = sum.size();
  for (int64_t c = 0; c < channels; ++c) {
    sum[c] /= count, square[c] = square[c] / count - sum[c] * sum[c], sum[c] += origin[c];
    if (square[c] < 0) square[c] = 0;  // NaN stays NaN
  }
  return {tensor_of<T>(sum.data(), like, {channels}), tensor_of<T>(square.data(), like, {channels})};
}

// The maps of pair_statistics.
template <class T>
struct Pairs {
  Pairs(const Tensor& center, const Tensor& around, int64_t kernel_size, int64_t products)
      : f(check_pair_maps(center, around, kernel_size, products)),
        d(center.size(3)),
        products(products),
        center(as<T>(center)),
        around(as<T>(around)) {
    // The number of footprints that contain each row and each column, once for each mirror image.
    for (auto [size, counts] : {std::pair(f.height, &row_readers), std::pair(f.width, &column_readers)}) {
      counts->resize(size);
      box_rows(std::vector<double>(size, 1.0).data(), size, 1, f.reach(), true, counts->data());
    }
    if (N == 0) return;
    for (int64_t c = products; c < d; ++c) {  // products cannot be computed from distances
      center_origin[c] = values<T>(this->center)[c], around_origin[c] = values<T>(this->around)[c];
    }
  }

  const T* image(const Tensor& map, int64_t n) const { return values<T>(map) + n * f.pixels() * d; }
  double pairs() const { return double(N) * f.pixels() * f.positions(); }
  // Values of a pixel for box sums: those of the map and, of products, their squares.
  int64_t width() const { return d + products; }
  int64_t scratch() const { return f.pixels() * width(); }

  // Writes the box sums of a map's distances from an origin, [P, width()].
  SAN_VECTOR void sum_over_footprints(const T* map, const double* origin, bool is_adjoint, double* sums,
                                      double* rows) const {
    for (int64_t i = 0; i < f.pixels(); ++i) {
      const T* x = map + i * d;
      double* to = sums + i * width();
      for (int64_t c = 0; c < d; ++c) to[c] = x[c] - origin[c];
      for (int64_t c = 0; c < products; ++c) to[d + c] = to[c] * to[c];
    }
    box_sums(f, width(), is_adjoint, sums, rows);
  }

  // Adds delta and its square to their sums. Of differences, a square i^2 - 2 i j + j^2 counts j^2 once for each
  // reader.
  SAN_VECTOR void add(const T* center, const T* around, const double* boxes, double* sum, double* square) const {
    const double K = f.positions();
    for (int64_t at = 0; at < f.pixels(); ++at, center += d, around += d, boxes += width()) {
      const double readers = row_readers[at / f.width] * column_readers[at % f.width];
      for (int64_t c = 0; c < products; ++c) {
        const double i = center[c];
        sum[c] += i * boxes[c], square[c] += i * i * boxes[d + c];
      }
      for (int64_t c = products; c < d; ++c) {
        const double i = center[c] - center_origin[c], j = around[c] - around_origin[c];
        sum[c] += K * i - boxes[c], square[c] += (K * i - 2 * boxes[c]) * i + readers * j * j;
      }
    }
  }

  // Writes the gradients of the maps, where that of delta is slope * delta + offset. `seen` are the box sums of around,
  // `read` the adjoint ones of center.
  SAN_VECTOR void gradients(const T* center, const T* around, const double* seen, const double* read,
                            const double* slope, const double* offset, T* to_center, T* to_around) const {
    const double K = f.positions();
    for (int64_t at = 0; at < f.pixels(); ++at) {
      const double readers = row_readers[at / f.width] * column_readers[at % f.width];
      for (int64_t c = 0; c < products; ++c) {
        to_center[c] = static_cast<T>(slope[c] * center[c] * seen[d + c] + offset[c] * seen[c]);
        to_around[c] = static_cast<T>(slope[c] * around[c] * read[d + c] + offset[c] * read[c]);
      }
      for (int64_t c = products; c < d; ++c) {
        to_center[c] = static_cast<T>(slope[c] * (K * center[c] - seen[c]) + offset[c] * K);
        to_around[c] = static_cast<T>(slope[c] * (readers * around[c] - read[c]) - offset[c] * readers);
      }
      center += d, around += d, to_center += d, to_around += d, seen += width(), read += width();
    }
  }

  const Footprint f;
  const int64_t d, products;
  const Tensor center, around;
  const int64_t N = center.size(0);
  std::vector<double> row_readers, column_readers;
  std::vector<double> center_origin = std::vector<double>(d), around_origin = std::vector<double>(d);
};

template <class T>
std::tuple<Tensor, Tensor> statistics(const Pairs<T>& x) {
  std::vector<double> sums(x.N * 2 * x.d);
  for_each_task<double>(x.N, 2 * x.scratch(), [&](int64_t n, double* scratch) {
    x.sum_over_footprints(x.image(x.around, n), x.around_origin.data(), false, scratch, scratch + x.scratch());
    double* sum = sums.data() + n * 2 * x.d;
    x.add(x.image(x.center, n), x.image(x.around, n), scratch, sum, sum + x.d);
  });
  const std::vector<double> total = sum_over_tasks(sums, 2 * x.d);
  std::vector<double> origin(x.d);
  for (int64_t c = 0; c < x.d; ++c) origin[c] = x.center_origin[c] - x.around_origin[c];
  return moments<T>({total.begin(), total.begin() + x.d}, {total.begin() + x.d, total.end()}, x.pairs(), origin,
                    x.center);
}

template <class T>
std::tuple<Tensor, Tensor> statistics_backward(const Pairs<T>& x, const Tensor& grad_mean, const Tensor& grad_var,
                                               const Tensor& mean) {
  check_statistics({&grad_mean, &grad_var, &mean}, x.center, {x.d});
  std::vector<double> slope = doubles(grad_var), offset = doubles(grad_mean), means = doubles(mean), zeros(x.d);
  for (int64_t c = 0; c < x.d; ++c) {
    slope[c] *= 2 / x.pairs(), offset[c] = offset[c] / x.pairs() - slope[c] * means[c];
  }
  Tensor to_center = torch::stable::empty_like(x.center), to_around = torch::stable::empty_like(x.center);
  T *centers = to_center.template mutable_data_ptr<T>(), *arounds = to_around.template mutable_data_ptr<T>();
  for_each_task<double>(x.N, 3 * x.scratch(), [&](int64_t n, double* seen) {
    double *read = seen + x.scratch(), *rows = read + x.scratch();
    x.sum_over_footprints(x.image(x.around, n), zeros.data(), false, seen, rows);
    x.sum_over_footprints(x.image(x.center, n), zeros.data(), true, read, rows);
    const int64_t first = n * x.f.pixels() * x.d;
    x.gradients(x.image(x.center, n), x.image(x.around, n), seen, read, slope.data(), offset.data(), centers + first,
                arounds + first);
  });
  return {to_center, to_around};
}

// Window sums along one axis: sum(o) is the sum over all i of value(reflect(i + o - reach)), o = 0 ... k - 1, of rows
// with `channels` values each. Each window differs from the previous one in two rows, so a value 1e8 times as large as
// the others costs precision in the windows without it, too.
SAN_VECTOR void window_sums(const double* rows, int64_t size, int64_t channels, int64_t k, double* sums) {
  const int64_t reach = k / 2;
  const auto row = [&](int64_t i) { return rows + reflect(i, size) * channels; };
  for (int64_t c = 0; c < channels; ++c) sums[c] = 0;
  for (int64_t i = -reach; i < size - reach; ++i)
    for (int64_t c = 0; c < channels; ++c) sums[c] += row(i)[c];
  for (int64_t o = 1; o < k; ++o) {
    const double *out = row(o - 1 - reach), *in = row(size + o - 1 - reach), *before = sums + (o - 1) * channels;
    for (int64_t c = 0; c < channels; ++c) sums[o * channels + c] = before[c] - out[c] + in[c];
  }
}

// The adjoint of window_sums: adds to each row the values of the windows that contain it, once for each mirror image.
SAN_VECTOR void add_to_windows(const double* values, int64_t size, int64_t channels, int64_t k, double* rows) {
  for (int64_t i = 0; i < size; ++i)
    for (int64_t o = 0; o < k; ++o) {
      double* row = rows + reflect(i + o - k / 2, size) * channels;
      for (int64_t c = 0; c < channels; ++c) row[c] += values[o * channels + c];
    }
}

// Sums over all pixels of the distances of a patch's columns from their origin, and of their squares: first of
// `center`, then of `around` for each position and channel. `origin` has a value for each channel of both.
template <class T>
SAN_VECTOR void patch_sums(const T* center, int64_t own, const T* around, int64_t channels, const Footprint& f,
                           const double* origin, double* sums) {
  const int64_t both = 2 * channels, k = f.kernel_size, W = f.width;
  for (int64_t i = 0; i < f.pixels(); ++i)
    for (int64_t c = 0; c < own; ++c) {
      const double x = center[i * own + c] - origin[c];
      sums[c] += x, sums[own + c] += x * x;
    }
  std::vector<double> row(W * both), rows(f.height * k * both), windows(k * k * both);
  for (int64_t h = 0; h < f.height; ++h) {
    for (int64_t w = 0; w < W; ++w)
      for (int64_t c = 0; c < channels; ++c) {
        const double x = around[(h * W + w) * channels + c] - origin[own + c];
        row[w * both + c] = x, row[w * both + channels + c] = x * x;
      }
    window_sums(row.data(), W, both, k, rows.data() + h * k * both);
  }
  window_sums(rows.data(), f.height, k * both, k, windows.data());
  for (int64_t at = 0; at < k * k * both; ++at) sums[2 * own + at] += windows[at];
}

template <class T>
std::tuple<Tensor, Tensor> statistics(const Tensor& center_, const Tensor& around_, const Footprint& f) {
  const Tensor center = as<T>(center_), around = as<T>(around_);
  const int64_t N = center.size(0), P = f.pixels(), K = f.positions(), C = center.size(3), R = around.size(3);
  const int64_t columns = C + K * R;
  // The first pixel, so that large means cost no precision.
  std::vector<double> origin(C + R), sums(N * 2 * columns);
  if (N > 0) {
    std::copy_n(values<T>(center), C, origin.begin());
    std::copy_n(values<T>(around), R, origin.begin() + C);
  }
  for_each_task<T>(N, 0, [&](int64_t n, T*) {
    patch_sums(values<T>(center) + n * P * C, C, values<T>(around) + n * P * R, R, f, origin.data(),
               sums.data() + n * 2 * columns);
  });
  const std::vector<double> total = sum_over_tasks(sums, 2 * columns);
  std::vector<double> sum(total.begin(), total.begin() + C), square(total.begin() + C, total.begin() + 2 * C);
  std::vector<double> from(origin.begin(), origin.begin() + C);
  for (int64_t c = 0; c < R; ++c)
    for (int64_t o = 0; o < K; ++o) {
      const double* at = total.data() + 2 * C + o * 2 * R + c;
      sum.push_back(at[0]), square.push_back(at[R]), from.push_back(origin[C + c]);
    }
  return moments<T>(sum, square, double(N) * P, from, around);
}

// gradient = slope * x + offset for each channel. The slopes of pixels are `step` apart, and each is followed by its
// offset: [slopes, offsets] of all channels.
template <class T>
SAN_VECTOR void apply_slopes(const T* x, int64_t pixels, int64_t channels, const double* slopes, int64_t step,
                             T* gradient) {
  for (int64_t i = 0; i < pixels; ++i, x += channels, gradient += channels, slopes += step)
    for (int64_t c = 0; c < channels; ++c) gradient[c] = static_cast<T>(slopes[c] * x[c] + slopes[channels + c]);
}

// The gradient of x is the sum, over the columns that read x, of slope * x + offset.
template <class T>
std::tuple<Tensor, Tensor> statistics_backward(const Tensor& grad_mean, const Tensor& grad_var, const Tensor& center_,
                                               const Tensor& around_, const Tensor& mean, const Footprint& f) {
  const Tensor center = as<T>(center_), around = as<T>(around_);
  const std::vector<double> means = doubles(mean), to_mean = doubles(grad_mean), to_var = doubles(grad_var);
  const int64_t N = center.size(0), P = f.pixels(), K = f.positions(), C = center.size(3), R = around.size(3);
  const int64_t k = f.kernel_size, W = f.width;
  check_statistics({&grad_mean, &grad_var, &mean}, around, {C + K * R});
  const double pixels = double(N) * P;
  const auto write = [&](int64_t column, double& slope, double& offset) {
    slope = 2 * to_var[column] / pixels, offset = to_mean[column] / pixels - slope * means[column];
  };
  std::vector<double> own(2 * C), windows(K * 2 * R), rows(f.height * k * 2 * R), map(P * 2 * R);
  for (int64_t c = 0; c < C; ++c) write(c, own[c], own[C + c]);
  for (int64_t o = 0; o < K; ++o)
    for (int64_t c = 0; c < R; ++c) write(C + c * K + o, windows[o * 2 * R + c], windows[o * 2 * R + R + c]);
  add_to_windows(windows.data(), f.height, k * 2 * R, k, rows.data());
  for (int64_t h = 0; h < f.height; ++h)
    add_to_windows(rows.data() + h * k * 2 * R, W, 2 * R, k, map.data() + h * W * 2 * R);
  Tensor to_center = torch::stable::empty_like(center), to_around = torch::stable::empty_like(around);
  const T *centers = values<T>(center), *arounds = values<T>(around);
  T *center_grads = to_center.template mutable_data_ptr<T>(), *around_grads = to_around.template mutable_data_ptr<T>();
  for_each_task<T>(N, 0, [&](int64_t n, T*) {
    apply_slopes(centers + n * P * C, P, C, own.data(), 0, center_grads + n * P * C);
    apply_slopes(arounds + n * P * R, P, R, map.data(), 2 * R, around_grads + n * P * R);
  });
  return {to_center, to_around};
}

std::tuple<Tensor, Tensor> pair_statistics(const Tensor& center, const Tensor& around, int64_t kernel_size,
                                           int64_t products) {
  SAN_SUM_TYPE(center, return statistics(Pairs<T>(center, around, kernel_size, products));)
}

std::tuple<Tensor, Tensor> pair_statistics_backward(const Tensor& grad_mean, const Tensor& grad_var,
                                                    const Tensor& center, const Tensor& around, const Tensor& mean,
                                                    int64_t kernel_size, int64_t products) {
  SAN_SUM_TYPE(center,
               return statistics_backward(Pairs<T>(center, around, kernel_size, products), grad_mean, grad_var, mean);)
}

std::tuple<Tensor, Tensor> patch_statistics(const Tensor& center, const Tensor& around, int64_t kernel_size) {
  const Footprint f = check_patch_maps(center, around, kernel_size);
  SAN_SUM_TYPE(around, return statistics<T>(center, around, f);)
}

std::tuple<Tensor, Tensor> patch_statistics_backward(const Tensor& grad_mean, const Tensor& grad_var,
                                                     const Tensor& center, const Tensor& around, const Tensor& mean,
                                                     int64_t kernel_size) {
  const Footprint f = check_patch_maps(center, around, kernel_size);
  SAN_SUM_TYPE(around, return statistics_backward<T>(grad_mean, grad_var, center, around, mean, f);)
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("pair_statistics", TORCH_BOX(&san::cpu::pair_statistics));
  m.impl("pair_statistics_backward", TORCH_BOX(&san::cpu::pair_statistics_backward));
  m.impl("patch_statistics", TORCH_BOX(&san::cpu::patch_statistics));
  m.impl("patch_statistics_backward", TORCH_BOX(&san::cpu::patch_statistics_backward));
}
