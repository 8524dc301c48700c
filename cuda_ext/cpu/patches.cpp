// patch_linear and attend_patches, forward and backward. The definitions are in schemas.py; the loops over the pixels
// are in simd/patches.cpp.
#include <tuple>

#include "attend.h"

namespace san::cpu {
namespace {

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

  const PatchKernels<T>& kernels = SAN_CHOOSE(patches<T>);
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
  for_each_task<T>(bands.size(), problem.kernels.scratch(p, most_rows(bands), false), [&](int64_t task, T* scratch) {
    const int64_t n = bands[task].image;
    problem.kernels.map(p, problem.own(n), problem.others(n), bands[task].rows, scratch,
                        out + n * p.outputs * problem.P);
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
  const int64_t columns = p.columns(), lanes = problem.kernels.lanes, pitch = (p.outputs + lanes - 1) / lanes * lanes;
  const int64_t size = columns * (2 + pitch);
  std::vector<T> sums(bands.size() * size);
  for_each_band_apart<T>(
      bands, problem.kernels.scratch(p, most_rows(bands), true), [&](int64_t task, const Band& band, T* scratch) {
        const int64_t n = band.image;
        T* sum = sums.data() + task * size;
        problem.kernels.map_backward(p, problem.own(n), problem.others(n),
                                     values<T>(grad_u) + n * p.outputs * problem.P, band.rows, scratch,
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

Tensor patch_linear(const Tensor& center, const Tensor& around, const Tensor& norm, const Tensor& weight,
                    int64_t kernel_size, bool) {
  SAN_SUM_TYPE(around, return map(Problem<T>(center, around, norm, weight, kernel_size));)
}

Gradients patch_linear_backward(const Tensor& grad, const Tensor& center, const Tensor& around, const Tensor& norm,
                                const Tensor& weight, int64_t kernel_size, bool) {
  SAN_SUM_TYPE(around, {
    const Problem<T> problem(center, around, norm, weight, kernel_size);
    check_patch_gradient(grad, around, weight);
    auto [to_center, to_around, to_norm, to_weight] = map_backward(problem, grad);
    return {to_center, to_around, to_norm, as_type(to_weight, weight.scalar_type())};
  })
}

// The inputs of attend_patches. The hidden maps are planes, [N, E, H, W].
template <class T>
struct Attention {
  Attention(const Tensor& hidden, const Tensor& weight, const Tensor& bias, const Tensor& beta, const Footprint& f)
      : a(as<T>(torch::stable::transpose(torch::stable::transpose(hidden, 2, 3), 1, 2))),
        weight(as<T>(weight)),
        bias(as<T>(bias)),
        layer{weight.size(0), weight.size(1), values<T>(this->weight), values<T>(this->bias)},
        P(f.pixels()),
        x(beta, f, layer.rows / f.positions(), kernels.lanes) {}

  int64_t hidden_pitch() const { return (layer.hidden + x.lanes - 1) / x.lanes * x.lanes; }
  int64_t scratch(int64_t rows) const { return 2 * hidden_pitch() * x.pitch(rows); }
  int64_t first(const Band& band) const { return band.rows.first * x.p.footprint.width; }
  int64_t count(const Band& band) const { return (band.rows.last - band.rows.first) * x.p.footprint.width; }
  const T* image(const Band& band) const { return values<T>(a) + band.image * layer.hidden * P; }
  void weigh(const Band& band, T* scratch, BandWeights<T> w) const {
    kernels.weights(layer, image(band), P, first(band), count(band), scratch, w);
  }

  const PatchKernels<T>& kernels = SAN_CHOOSE(patches<T>);
  const Tensor a, weight, bias;
  const LastLayer<T> layer;
  const int64_t P;
  const Values<T> x;
};

template <class T>
Gradients attend_backward(const Attention<T>& attention, const Tensor& grad) {
  const LastLayer<T>& layer = attention.layer;
  const std::vector<Band> bands = bands_of_gradients(attention.x);
  const int64_t pitch = attention.hidden_pitch(), size = layer.rows * (pitch + 1);
  std::vector<T> sums(bands.size() * size);
  Tensor to_a = torch::stable::empty_like(attention.a);
  T* out = to_a.template mutable_data_ptr<T>();
  const Tensor to_beta = attend_backward(
      attention.x, grad, bands, [&](int64_t rows) { return attention.scratch(rows); },
      [&](const Band& band, T* scratch, BandWeights<T> w) { attention.weigh(band, scratch, w); },
      [&](int64_t task, const Band& band, T* scratch, BandWeights<T>, BandWeights<T> to_w, const T*) {
        T* sum = sums.data() + task * size;
        attention.kernels.weights_backward(
            layer, attention.image(band), attention.P, attention.first(band), attention.count(band), to_w, scratch,
            {out + band.image * layer.hidden * attention.P, sum, sum + layer.rows * pitch});
      });
  const std::vector<double> total = sum_over_tasks(sums, size);
  std::vector<double> to_weight(layer.rows * layer.hidden);
  for (int64_t row = 0; row < layer.rows; ++row)
    std::copy_n(total.begin() + row * pitch, layer.hidden, to_weight.begin() + row * layer.hidden);
  return {torch::stable::transpose(torch::stable::transpose(to_a, 1, 2), 2, 3),
          tensor_of<T>(to_weight.data(), attention.weight, {layer.rows, layer.hidden}),
          tensor_of<T>(total.data() + layer.rows * pitch, attention.weight, {layer.rows}), to_beta};
}

Tensor attend_patches(const Tensor& hidden, const Tensor& weight, const Tensor& bias, const Tensor& beta,
                      int64_t kernel_size, bool) {
  const Footprint f = check_last_layer(hidden, weight, bias, kernel_size);
  check_values({&beta}, hidden, weight.size(0) / f.positions()), check_same(beta, hidden, "beta and the other maps");
  SAN_SUM_TYPE(hidden, {
    const Attention<T> attention(hidden, weight, bias, beta, f);
    return attend(
        attention.x, [&](int64_t rows) { return attention.scratch(rows); },
        [&](const Band& band, T* scratch, BandWeights<T> w) { attention.weigh(band, scratch, w); });
  })
}

Gradients attend_patches_backward(const Tensor& grad, const Tensor& hidden, const Tensor& weight, const Tensor& bias,
                                  const Tensor& beta, int64_t kernel_size, bool) {
  const Footprint f = check_last_layer(hidden, weight, bias, kernel_size);
  check_values({&beta, &grad}, hidden, weight.size(0) / f.positions()),
      check_same(beta, hidden, "beta and the other maps");
  SAN_SUM_TYPE(hidden, return attend_backward(Attention<T>(hidden, weight, bias, beta, f), grad);)
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("patch_linear", TORCH_BOX(&san::cpu::patch_linear));
  m.impl("patch_linear_backward", TORCH_BOX(&san::cpu::patch_linear_backward));
  m.impl("attend_patches", TORCH_BOX(&san::cpu::attend_patches));
  m.impl("attend_patches_backward", TORCH_BOX(&san::cpu::attend_patches_backward));
}
