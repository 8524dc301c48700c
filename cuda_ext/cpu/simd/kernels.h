// The functions of this folder, for each instruction set and type: loops over bands of rows of an image.
//
// A band reads the whole image and writes its own rows. Gradients also change `reach` rows above and below the band, so
// bands that run at the same time must not be adjacent. Maps are channels-last, [P, channels] for one image.
#pragma once
#include "../../footprint.h"

namespace san::cpu {

struct Rows {
  int64_t first, last;
};

// Attention weights of a band, [G, K, pixels], or their gradients: the first pixel's first value, and the distance
// between adjacent positions. They are part of a tensor of the whole image or lie in scratch memory.
template <class T>
struct BandWeights {
  T* data;
  int64_t pitch;
};

// The affine form of a norm, (x - mean) * scale + shift.
template <class T>
struct Norm {
  const T *mean, *scale, *shift;
};

// Pairs of a pixel i and a position j of its footprint: delta = center_i * around_j in the first `products` channels
// and center_i - around_j in the others, a1 = relu(norm(delta)), a2 = relu(weight1 a1 + shift2), z = weight2 a2.
// Without a hidden layer `hidden` is 0, and a2 is a1.
template <class T>
struct Pairs {
  Footprint footprint;
  int64_t channels, products, hidden, weights;  // d, products, E, G
  Norm<T> norm;                                 // [d]
  const T *weight1, *shift2, *weight2;          // [E, d], [E], [G, E]
};

// One image. `origin` [d] has a typical value of each channel of around. It is subtracted from both maps before they
// are scaled, so that large means cost no precision.
template <class T>
struct PairMaps {
  const T *center, *around, *origin;
};

// Gradients of one image and sums over the pixels of a band, all of which are added to. The gradients of maps still
// lack the factor norm.scale, except for that of around in products. That of norm.shift is the sum over all pairs.
template <class T>
struct PairGradients {
  T *center, *around;
  T *shift1, *weight1, *shift2, *weight2;
};

template <class T>
struct PairKernels {
  // Size of the scratch memory for a band with `rows` rows, in values of T.
  int64_t (*scratch)(const Pairs<T>&, int64_t rows, bool backward);
  // Adds to the sums of a1 - origin, [d], and of the products of its channels, the upper half of [d, d].
  void (*moments)(const Pairs<T>&, const PairMaps<T>&, const T* origin, Rows, T* scratch, T* sum, T* products);
  // Adds the gradients that follow from matrix (a1 - mean) + vector, the gradient of a1.
  void (*moments_backward)(const Pairs<T>&, const PairMaps<T>&, const T* mean, const T* matrix, const T* vector, Rows,
                           T* scratch, const PairGradients<T>&);
  // Writes w, the softmax of z over the footprint, and in `softmax` [2, G, P] for each pixel the largest z and the
  // reciprocal of the sum of exp(z - largest).
  void (*weights)(const Pairs<T>&, const PairMaps<T>&, Rows, T* scratch, BandWeights<T> w, T* softmax);
  // The same w from the values in `softmax`.
  void (*weights_again)(const Pairs<T>&, const PairMaps<T>&, Rows, T* scratch, BandWeights<T> w, const T* softmax);
  // `dots` [G, w's pitch] is sum_j w grad_w for each pixel.
  void (*weights_backward)(const Pairs<T>&, const PairMaps<T>&, BandWeights<const T> w, BandWeights<const T> grad_w,
                           const T* dots, Rows, T* scratch, const PairGradients<T>&);
};

// A patch consists of a pixel's value in `center` and of all values of its footprint in `around`. Columns of the norm
// and of weight [outputs, columns] are first the channels of center; then column c * K + o belongs to channel c of
// around at position o.
template <class T>
struct Patches {
  Footprint footprint;
  int64_t own, channels, outputs;  // channels of center, which may be 0, and of around; E
  Norm<T> norm;
  const T* weight;

  SAN_HOST_DEVICE int64_t columns() const { return own + channels * footprint.positions(); }
};

// Gradients of one image, and sums over the pixels of a band. Functions add to all of them.
template <class T>
struct PatchGradients {
  T *center, *around;
  T *scale, *shift;
  T* weight;  // [columns, outputs in whole vectors]
};

// The last layer of a patchwise mapping: w = weight a + bias, with weight [rows, hidden], rows = G * K.
template <class T>
struct LastLayer {
  int64_t rows, hidden;
  const T *weight, *bias;
};

// Gradients: that of a [hidden, P] is written, the sums [rows, hidden in whole vectors] and [rows] are added to.
template <class T>
struct LastLayerGradients {
  T *a, *weight, *bias;
};

template <class T>
struct PatchKernels {
  int64_t lanes;
  int64_t (*scratch)(const Patches<T>&, int64_t rows, bool backward);
  // u = weight relu(norm(patch)), [E, P].
  void (*map)(const Patches<T>&, const T* center, const T* around, Rows, T* scratch, T* u);
  void (*map_backward)(const Patches<T>&, const T* center, const T* around, const T* grad_u, Rows, T* scratch,
                       const PatchGradients<T>&);
  // The last layer for `count` pixels of a [hidden, P], from `first` on. The pitches of w and grad_w are whole vectors,
  // and scratch has `pitch` times twice `hidden` in whole vectors.
  void (*weights)(const LastLayer<T>&, const T* a, int64_t P, int64_t first, int64_t count, T* scratch,
                  BandWeights<T> w);
  void (*weights_backward)(const LastLayer<T>&, const T* a, int64_t P, int64_t first, int64_t count,
                           BandWeights<T> grad_w, T* scratch, const LastLayerGradients<T>&);
};

// Value channel c has weight channel c % weights.
template <class T>
struct Aggregation {
  Footprint footprint;
  int64_t values, weights;
};

template <class T>
struct AggregationMaps {
  const T* beta;  // [P, values]
  BandWeights<const T> w;
  const T* w_end;  // where the memory of the weights ends
};

// The attention weights of dot products for one image: the softmax over the footprint of phi_i psi_j + scores, where a
// weight channel has one score for each row of the footprint and one for each of its columns.
template <class T>
struct DotMaps {
  const T *phi, *psi;  // [P, values]
  const T* scores;     // [weights, 2, kernel_size, P]
};

template <class T>
struct AggregationKernels {
  int64_t lanes;
  int64_t (*scratch)(const Aggregation<T>&, int64_t rows, bool backward);
  void (*forward)(const Aggregation<T>&, const AggregationMaps<T>&, Rows, T* scratch, T* y);
  // Adds to grad_beta and writes grad_w, and in `dots` [G, w's pitch], unless it is null, sum_j w grad_w for each
  // pixel.
  void (*backward)(const Aggregation<T>&, const AggregationMaps<T>&, const T* grad_y, Rows, T* scratch, T* grad_beta,
                   BandWeights<T> grad_w, T* dots);
  // z = phi_i psi_j, for the values that share a weight channel.
  void (*dot)(const Aggregation<T>&, const T* phi, const T* psi, Rows, T* scratch, BandWeights<T> z);
  // Writes grad_phi and adds to grad_psi; `maps` has psi and the gradient of z in the places of beta and w.
  void (*dot_backward)(const Aggregation<T>&, const AggregationMaps<T>& maps, const T* phi, Rows, T* scratch,
                       T* grad_phi, T* grad_psi);
  // Writes the weights, whose pitch is in whole vectors here and below; `softmax` [2, G, P] as in PairKernels.
  void (*dot_weights)(const Aggregation<T>&, const DotMaps<T>&, Rows, T* scratch, BandWeights<T> w, T* softmax);
  void (*dot_weights_again)(const Aggregation<T>&, const DotMaps<T>&, Rows, T* scratch, BandWeights<T> w,
                            const T* softmax);
  // Replaces grad_w by the gradient of z, and writes that of the scores.
  void (*softmax_backward)(const Aggregation<T>&, BandWeights<const T> w, const T* dots, Rows, T* scratch,
                           BandWeights<T> grad_w, T* grad_scores);
};

// The functions of the sources in this folder, which are compiled for each instruction set, SAN_ISA.
#define SAN_KERNELS(isa)                      \
  namespace isa {                             \
  template <class T>                          \
  const PairKernels<T>& pairs();              \
  template <class T>                          \
  const PatchKernels<T>& patches();           \
  template <class T>                          \
  const AggregationKernels<T>& aggregation(); \
  }
SAN_KERNELS(baseline)
#if defined(__x86_64__)
SAN_KERNELS(v3)
SAN_KERNELS(v4)
#endif

}  // namespace san::cpu
