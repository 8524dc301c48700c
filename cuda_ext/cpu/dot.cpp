// dot and attend_dot, forward and backward: dot products of a pixel and the pixels of its footprint, and the weighted
// sum of values whose weights are their softmax. The definitions are in schemas.py, the loops over pixels are in
// simd/aggregation.cpp.
#include <tuple>

#include "attend.h"

namespace san::cpu {
namespace {

// phi and psi, [N, H, W, R].
template <class T>
struct Problem {
  Problem(const Tensor& phi, const Tensor& psi, const Footprint& f, int64_t groups)
      : p{f, phi.size(3), groups},
        N(phi.size(0)),
        map_size(p.values * f.pixels()),
        phi(as<T>(phi)),
        psi(as<T>(psi)),
        kernels(aggregation_kernels<T>(f)) {}
  const T* own(const Band& band) const { return values<T>(phi) + band.image * map_size; }
  const T* others(const Band& band) const { return values<T>(psi) + band.image * map_size; }

  const Aggregation<T> p;
  const int64_t N, map_size;
  const Tensor phi, psi;
  const AggregationKernels<T>& kernels;
};

// The gradients of phi and psi, [N, H, W, R].
template <class T>
struct Gradients {
  explicit Gradients(const Problem<T>& problem)
      : problem(problem),
        phi(torch::stable::empty_like(problem.phi)),
        psi(torch::stable::empty_like(problem.psi)),
        to_phi(phi.template mutable_data_ptr<T>()),
        to_psi(psi.template mutable_data_ptr<T>()) {
    torch::stable::zero_(psi);
  }
  // `end` is where the band's last values of grad_z end.
  void add(const Band& band, BandWeights<const T> grad_z, const T* end, T* scratch) const {
    const int64_t map = band.image * problem.map_size;
    problem.kernels.dot_backward(problem.p, {problem.others(band), grad_z, end}, problem.own(band), band.rows, scratch,
                                 to_phi + map, to_psi + map);
  }

  const Problem<T>& problem;
  Tensor phi, psi;
  T *const to_phi, *const to_psi;
};

template <class T>
Tensor forward(const Problem<T>& problem) {
  const Footprint& f = problem.p.footprint;
  Tensor z = torch::stable::new_empty(problem.phi, {problem.N, problem.p.weights, f.positions(), f.pixels()});
  ask_for_large_pages(z);
  T* out = z.template mutable_data_ptr<T>();
  const std::vector<Band> bands = bands_alone(problem.N, f);
  for_each_task<T>(bands.size(), problem.kernels.scratch(problem.p, most_rows(bands), false),
                   [&](int64_t task, T* scratch) {
                     const Band& band = bands[task];
                     T* first = out + band.image * problem.p.weights * f.positions() * f.pixels();
                     problem.kernels.dot(problem.p, problem.own(band), problem.others(band), band.rows, scratch,
                                         {first + band.rows.first * f.width, f.pixels()});
                   });
  return z;
}

template <class T>
std::tuple<Tensor, Tensor> backward(const Problem<T>& problem, const Tensor& grad) {
  const Footprint& f = problem.p.footprint;
  const Tensor grad_z = as<T>(grad);
  const T* from = values<T>(grad_z);
  const Gradients<T> to(problem);
  const std::vector<Band> bands = bands_of(problem.N, f, band_rows(problem.p, f.kernel_size));
  for_each_band_apart<T>(
      bands, problem.kernels.scratch(problem.p, most_rows(bands), true), [&](int64_t, const Band& band, T* scratch) {
        const T* first = from + band.image * problem.p.weights * f.positions() * f.pixels();
        to.add(band, {first + band.rows.first * f.width, f.pixels()}, from + grad_z.numel(), scratch);
      });
  return {to.phi, to.psi};
}

// attend_dot with `scores` [N, G, 2 k, P].
template <class T>
struct Attention : Problem<T> {
  Attention(const Tensor& phi, const Tensor& psi, const Tensor& scores, const Tensor& beta, int64_t kernel_size)
      : Problem<T>(phi, psi, check_attend_dot(phi, psi, scores, kernel_size), scores.size(1)),
        scores(as<T>(scores)),
        scores_size(scores.size(1) * scores.size(2) * scores.size(3)),
        softmax_size(2 * scores.size(1) * scores.size(3)),
        x(beta, this->p.footprint, scores.size(1), this->kernels.lanes) {}

  int64_t scratch(int64_t rows, bool backward) const { return this->kernels.scratch(this->p, rows, backward); }
  DotMaps<T> maps(const Band& band) const {
    return {this->own(band), this->others(band), values<T>(scores) + band.image * scores_size};
  }

  const Tensor scores;
  const int64_t scores_size, softmax_size;  // of an image
  const Values<T> x;
};

template <class T>
std::tuple<Tensor, Tensor> attend(const Attention<T>& a) {
  Tensor softmax = torch::stable::new_empty(a.phi, {a.N, 2, a.p.weights, a.p.footprint.pixels()});
  T* out = softmax.template mutable_data_ptr<T>();
  const Tensor y = attend(
      a.x, [&](int64_t rows) { return a.scratch(rows, false); },
      [&](const Band& band, T* scratch, BandWeights<T> w) {
        a.kernels.dot_weights(a.p, a.maps(band), band.rows, scratch, w, out + band.image * a.softmax_size);
      });
  return {y, softmax};
}

using AttendGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class T>
AttendGradients attend_backward(const Attention<T>& a, const Tensor& grad, const Tensor& softmax) {
  const Tensor kept = as<T>(softmax);
  const Gradients<T> to(a);
  Tensor to_scores = torch::stable::empty_like(a.scores);
  T* out = to_scores.template mutable_data_ptr<T>();
  const Tensor to_beta = attend_backward(
      a.x, grad, bands_of_gradients(a.x), [&](int64_t rows) { return a.scratch(rows, true); },
      [&](const Band& band, T* scratch, BandWeights<T> w) {
        a.kernels.dot_weights_again(a.p, a.maps(band), band.rows, scratch, w,
                                    values<T>(kept) + band.image * a.softmax_size);
      },
      [&](int64_t, const Band& band, T* scratch, BandWeights<T> w, BandWeights<T> to_w, const T* dots) {
        a.kernels.softmax_backward(a.p, {w.data, w.pitch}, dots, band.rows, scratch, to_w,
                                   out + band.image * a.scores_size);
        to.add(band, {to_w.data, to_w.pitch}, a.x.maps(band, to_w).w_end, scratch);
      });
  return {to.phi, to.psi, to_scores, to_beta};
}

// A map [N, H, W, C] as a contiguous [N, C, H, W] of another type.
Tensor by_channels(const Tensor& x, ScalarType type) {
  return as_type(torch::stable::contiguous(torch::stable::transpose(torch::stable::transpose(x, 2, 3), 1, 2)), type);
}

Tensor dot(const Tensor& phi, const Tensor& psi, int64_t kernel_size, int64_t groups) {
  const Footprint f = check_dot(phi, psi, kernel_size, groups);
  SAN_SUM_TYPE(phi,
               return as_type(forward(Problem<T>(by_pixels<T>(phi), by_pixels<T>(psi), f, groups)), phi.scalar_type());)
}

std::tuple<Tensor, Tensor> dot_backward(const Tensor& grad, const Tensor& phi, const Tensor& psi, int64_t kernel_size) {
  const int64_t groups = grad.dim() == 4 ? grad.size(1) : 0;
  const Footprint f = check_dot(phi, psi, kernel_size, groups);
  check_aggregation(psi, grad, kernel_size);
  SAN_SUM_TYPE(phi, {
    const Problem<T> problem(by_pixels<T>(phi), by_pixels<T>(psi), f, groups);
    const auto [to_phi, to_psi] = backward(problem, grad);
    return {by_channels(to_phi, phi.scalar_type()), by_channels(to_psi, phi.scalar_type())};
  })
}

std::tuple<Tensor, Tensor> attend_dot(const Tensor& phi, const Tensor& psi, const Tensor& scores, const Tensor& beta,
                                      int64_t kernel_size){
    SAN_SUM_TYPE(phi,
                 {
                   const Attention<T> attention(phi, psi, scores, beta, kernel_size);
                   check_values({&beta}, phi, scores.size(1)), check_same(beta, phi, "beta and the other maps");
                   return attend(attention);
                 })}

AttendGradients attend_dot_backward(const Tensor& grad, const Tensor& y, const Tensor& softmax, const Tensor& phi,
                                    const Tensor& psi, const Tensor& scores, const Tensor& beta, int64_t kernel_size) {
  SAN_SUM_TYPE(phi, {
    const Attention<T> attention(phi, psi, scores, beta, kernel_size);
    check_values({&beta, &grad, &y}, phi, scores.size(1)), check_same(beta, phi, "beta and the other maps");
    check_softmax(softmax, phi, scores.size(1));
    return attend_backward(attention, grad, softmax);
  })
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) {
  m.impl("dot", TORCH_BOX(&san::cpu::dot));
  m.impl("dot_backward", TORCH_BOX(&san::cpu::dot_backward));
  m.impl("attend_dot", TORCH_BOX(&san::cpu::attend_dot));
  m.impl("attend_dot_backward", TORCH_BOX(&san::cpu::attend_dot_backward));
}
