// patch_linear and patch_statistics, forward and backward. The definitions are in schemas.py; the loops over the pixels
// of patch_linear are in simd/patches.cpp.
#include <tuple>

#include "bands.h"
#include "plane.h"

namespace san::cpu {
namespace {

template <class T>
const PatchKernels<T>& kernels() {
  if constexpr (std::is_same_v<T, double>)
    return SAN_CHOOSE(patches_double);
  else
    return SAN_CHOOSE(patches_float);
}

template <class T>
struct Problem {
  Problem(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight, int64_t kernel_size)
      : center(as<T>(center)), around(as<T>(around)), norm(as<T>(norm)), weight(as<T>(weight)) {
    p.footprint = check_patches(center, around, norm, weight, kernel_size);
    p.own = center.size(3), p.channels = around.size(3), p.outputs = weight.size(0);
    p.norm = norm_of<T>(this->norm), p.weight = values<T>(this->weight);
    N = center.size(0), P = p.footprint.pixels();
  }
  const T* own(int64_t n) const { return values<T>(center) + n * P * p.own; }
  const T* others(int64_t n) const { return values<T>(around) + n * P * p.channels; }

  Tensor center, around, norm, weight;
  int64_t N = 0, P = 0;
  Patches<T> p{};
};

template <class T>
Tensor map(const Problem<T>& problem) {
  const Patches<T>& p = problem.p;
  Tensor u = torch::stable::new_empty(problem.around, {problem.N, p.outputs, p.footprint.height, p.footprint.width});
  T* out = u.template mutable_data_ptr<T>();
  const std::vector<Band> bands = bands_alone(problem.N, p.footprint);
  for_each_task<T>(bands.size(), kernels<T>().scratch(p, most_rows(bands), false), [&](int64_t task, T* scratch) {
    const int64_t n = bands[task].image;
    kernels<T>().map(p, problem.own(n), problem.others(n), bands[task].rows, scratch, out + n * p.outputs * problem.P);
  });
  return u;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class T>
Gradients map_backward(const Problem<T>& problem, const Tensor& grad) {
  const Patches<T>& p = problem.p;
  const Tensor grad_u = as<T>(grad);
  Tensor to_center = torch::stable::empty_like(problem.center), to_around = torch::stable::empty_like(problem.around);
  torch::stable::zero_(to_center), torch::stable::zero_(to_around);
  T* centers = to_center.template mutable_data_ptr<T>();
  T* arounds = to_around.template mutable_data_ptr<T>();
  const std::vector<Band> bands = bands_apart(problem.N, p.footprint);
  const int64_t columns = p.columns(), lanes = kernels<T>().lanes, pitch = (p.outputs + lanes - 1) / lanes * lanes;
  const int64_t size = columns * (2 + pitch);
  std::vector<T> sums(bands.size() * size);
  for_each_band_apart<T>(
      bands, kernels<T>().scratch(p, most_rows(bands), true), [&](int64_t task, const Band& band, T* scratch) {
        const int64_t n = band.image;
        T* sum = sums.data() + task * size;
        kernels<T>().map_backward(p, problem.own(n), problem.others(n), values<T>(grad_u) + n * p.outputs * problem.P,
                                  band.rows, scratch,
                                  {centers + n * problem.P * p.own, arounds + n * problem.P * p.channels, sum,
                                   sum + columns, sum + 2 * columns});
      });
  const std::vector<double> total = sum_over_tasks(sums, size);
  const double *of_scale = total.data(), *of_shift = of_scale + columns, *of_weight = of_shift + columns;
  std::vector<double> to_norm(3 * columns), to_weight(p.outputs * columns);
  for (int64_t c = 0; c < columns; ++c) {
    to_norm[c] = -p.norm.scale[c] * of_shift[c];
    to_norm[columns + c] = of_scale[c], to_norm[2 * columns + c] = of_shift[c];
  }
  for (int64_t e = 0; e < p.outputs; ++e)
    for (int64_t c = 0; c < columns; ++c) to_weight[e * columns + c] = of_weight[c * pitch + e];
  return {to_center, to_around, tensor_of<T>(to_norm.data(), problem.around, {3, columns}),
          tensor_of<T>(to_weight.data(), problem.around, {p.outputs, columns})};
}

// Window sums along one axis: sum(o) is the sum over all i of value(reflect(i + o - reach)), o = 0 ... k - 1, of rows
// with `channels` values each. Each window differs from the previous one in two rows, so a row whose values are 1e16 times
// as large as the others' costs precision in the windows without it, too.
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

// Sums over all pixels of the columns of patches minus their origin, and of the squares of these differences, in
// float64: first of `center`, then of `around` for each position and channel. `origin` has the values of both maps.
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
  std::vector<double> mean(columns), var(columns);
  const double pixels = double(N) * P;
  const auto write = [&](int64_t column, double from, double sum, double square) {
    const double distance = sum / pixels;
    mean[column] = from + distance, var[column] = square / pixels - distance * distance;
    if (var[column] < 0) var[column] = 0;  // NaN stays NaN
  };
  for (int64_t c = 0; c < C; ++c) write(c, origin[c], total[c], total[C + c]);
  for (int64_t o = 0; o < K; ++o)
    for (int64_t c = 0; c < R; ++c) {
      const double* at = total.data() + 2 * C + o * 2 * R + c;
      write(C + c * K + o, origin[C + c], at[0], at[R]);
    }
  return {tensor_of<T>(mean.data(), around, {columns}), tensor_of<T>(var.data(), around, {columns})};
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
                                               const Tensor& around_, const Tensor& mean_, const Footprint& f) {
  const Tensor center = as<T>(center_), around = as<T>(around_), mean = as<T>(mean_);
  const Tensor from_mean = as<T>(grad_mean), from_var = as<T>(grad_var);
  const T *means = values<T>(mean), *to_mean = values<T>(from_mean), *to_var = values<T>(from_var);
  const int64_t N = center.size(0), P = f.pixels(), K = f.positions(), C = center.size(3), R = around.size(3);
  const int64_t k = f.kernel_size, W = f.width;
  check_statistics({&grad_mean, &grad_var, &mean_}, around_, {C + K * R});
  const double pixels = double(N) * P;
  const auto write = [&](int64_t column, double& slope, double& offset) {
    slope = 2 * double(to_var[column]) / pixels, offset = to_mean[column] / pixels - slope * means[column];
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

Tensor patch_linear(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight,
                    int64_t kernel_size, bool) {
  SAN_SUM_TYPE(around, return map(Problem<T>(center, around, norm, weight, kernel_size));)
}

Gradients patch_linear_backward(const Tensor& grad, const Tensor& center, const Tensor& around, const Tensor& norm,
                                const Tensor& weight, int64_t kernel_size, bool) {
  const std::vector<int64_t> wanted{around.size(0), weight.size(0), around.size(1), around.size(2)};
  STD_TORCH_CHECK(grad.sizes().vec() == wanted, "grad must be [", wanted[0], ", ", wanted[1], ", ", wanted[2], ", ",
                  wanted[3], "]");
  SAN_SUM_TYPE(around, {
    auto [to_center, to_around, to_norm, to_weight] =
        map_backward(Problem<T>(center, around, norm, weight, kernel_size), grad);
    return {to_center, to_around, to_norm, as_type(to_weight, weight.scalar_type())};
  })
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("patch_statistics", TORCH_BOX(&san::cpu::patch_statistics));
  m.impl("patch_statistics_backward", TORCH_BOX(&san::cpu::patch_statistics_backward));
  m.impl("patch_linear", TORCH_BOX(&san::cpu::patch_linear));
  m.impl("patch_linear_backward", TORCH_BOX(&san::cpu::patch_linear_backward));
}
