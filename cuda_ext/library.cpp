// Table of contents: every operator of the library, forward and backward. Each file in cpu/ and cuda/ registers its own
// kernels at its bottom; fake kernels and autograd live in san/ops/library.py; the definitions in san/ops/reference.py.
//
// Shapes: N batch, C channels, R relation channels, G weight channels, H W map, P = H * W, K = kernel_size^2.
#include <torch/csrc/stable/library.h>

// Tests compile the same schemas again, as `san_shim`, for the CUDA sources run on the CPU.
#ifndef SAN_LIBRARY
#define SAN_LIBRARY san
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(SAN_LIBRARY, m) {
  // x [N, C, H, W] -> the reflected footprint of every pixel [N, C, K, P]
  m.def("unfold(Tensor x, int kernel_size) -> Tensor");
  m.def("unfold_backward(Tensor grad, int height, int width, int kernel_size) -> Tensor");
  // phi, psi [N, R, H, W] -> phi_i - psi_j [N, R, K, P]
  m.def("subtraction(Tensor phi, Tensor psi, int kernel_size) -> Tensor");
  m.def("subtraction_backward(Tensor grad, int height, int width, int kernel_size) -> (Tensor, Tensor)");
  // phi, psi [N, R, H, W] -> sum over the channels c of group c % G of phi_i * psi_j [N, G, K, P], G = groups
  m.def("dot(Tensor phi, Tensor psi, int kernel_size, int groups) -> Tensor");
  m.def("dot_backward(Tensor grad, Tensor phi, Tensor psi, int kernel_size) -> (Tensor, Tensor)");
  // beta [N, C, H, W], weight [N, G, K, P] -> sum_j weight_{c % G, j} beta_{c, j} [N, C, H, W]
  m.def("aggregation(Tensor beta, Tensor weight, int kernel_size) -> Tensor");
  m.def("aggregation_backward(Tensor grad, Tensor beta, Tensor weight, int kernel_size) -> (Tensor, Tensor)");
}
