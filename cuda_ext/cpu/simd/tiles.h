// What the sources of this folder offer: loops over bands of an image's rows, for each instruction set and type.
//
// A band reads whole images and writes what belongs to its rows; gradients of a pixel's neighbours reach `reach` rows
// further, so bands that are written at once must lie apart. All maps are channels-last; widths are multiples of
// `lanes`, which is 1 where vectors do not run over channels.
#pragma once
#include "../../footprint.h"

namespace san::cpu {

// Pairwise attention with gamma = LRL: v1 = center_i - around_j, a1 = relu(v1), h = a1 w1 + bias1 (normalised),
// a2 = relu(gain2 * h + bias2), weight = softmax_j(a2 w2), y_i = sum_j weight * beta_j. BatchNorm is folded: center and
// around are normalised, w1's columns and bias1 carry mean and deviation of h.
template <class T>
struct Pairwise {
  Footprint footprint;
  int64_t band_rows;                       // the most rows of a band
  int64_t relation, hidden_used;           // d and E
  int64_t pitch, hidden, weights, values;  // d, e, G and M, each padded to whole vectors
  const T *w1, *w1_back;                   // [relation, hidden] normalised; [hidden, pitch] as it is
  const T *w2, *w2_back;                   // [hidden, weights]; [weights, hidden]
  const T *bias1, *gain2, *bias2;          // [hidden]
  // Backward of the second BatchNorm: g_h = slope * g_v - offset - h * tilt; zero where statistics are fixed.
  const T *slope, *offset, *tilt;  // [hidden]
};

// One image.
template <class T>
struct Image {
  const T *center, *around;  // [P, pitch]
  const T* beta;             // [P, values]
  const T* grad_y;           // [P, values]
  T* logsumexp;              // [P, weights]
  T* y;                      // [P, values]
};

// Puts together means and sums of squared deviations of `count` values and of `more` (Chan, Golub, LeVeque 1983).
class Merge {
 public:
  __attribute__((always_inline)) inline Merge(double count, double more)
      : share_(more / (count + more)), spread_(count * share_) {}
  __attribute__((always_inline)) inline void operator()(double more_mean, double more_square, double& mean,
                                                        double& square) const {
    const double gap = more_mean - mean;
    mean += gap * share_, square += more_square + gap * gap * spread_;
  }

 private:
  double share_, spread_;
};

template <class T>
struct PairwiseTiles {
  int64_t lanes;
  // Values of T that a band needs as scratch: zeros at first, and what earlier bands of the same problem left then.
  int64_t (*scratch)(const Pairwise<T>&);
  // Mean of a1 w1 (without bias1) over the band's pairs and sum of squared distances from it, [hidden] each.
  void (*moments)(const Pairwise<T>&, const Image<T>&, int64_t first_row, int64_t last_row, T* scratch, double* mean,
                  double* squares);
  // y and logsumexp.
  void (*forward)(const Pairwise<T>&, const Image<T>&, int64_t first_row, int64_t last_row, T* scratch);
  // Adds to grad_w2 [hidden, weights], to the sums of g_v and g_v * h [hidden], and to grad_beta [P, values].
  void (*backward_mapping)(const Pairwise<T>&, const Image<T>&, int64_t first_row, int64_t last_row, T* scratch,
                           T* grad_w2, T* sum, T* product, T* grad_beta);
  // Adds to grad_w1 [relation, hidden] and to the sums of g_v1 over j, `to_center`, and over i, `to_around` [P, pitch].
  void (*backward_relation)(const Pairwise<T>&, const Image<T>&, int64_t first_row, int64_t last_row, T* scratch,
                            T* grad_w1, T* to_center, T* to_around);
};

// Patchwise attention with gamma = LRL. A patch is K + 1 pieces: what each position of the footprint shows of `around`,
// and, last, the pixel's own `center`. a1 = relu(scale * x + shift) with a row of scale and shift for each piece, u =
// a1 w1; the weights of position o are bias3_o + a2 w2_o, where a2 comes from u by BatchNorm and ReLU, pixel by pixel.
// Each direction has the matrices that it reads; where vectors run over pixels these are w1 and w2 alone.
template <class T>
struct Patchwise {
  Footprint footprint;
  int64_t band_rows;                       // the most rows of a band
  int64_t relation, center;                // R, channels of `around`; channels of `center`, R or 0
  int64_t pitch, hidden, weights, values;  // R, E, G and M, each padded to whole vectors
  const T *scale, *shift;                  // [K + 1, pitch]
  const T *w1, *w1_back;                   // [K + 1, relation, hidden]; [K + 1, hidden, pitch]
  const T *w2, *w2_back, *bias3;           // [K, hidden, weights]; [K, weights, hidden]; [K, weights]
};

template <class T>
struct Patches {
  const T *center, *around;  // [P, pitch]
  const T* beta;             // [P, values]
  const T* grad_y;           // [P, values]
  T* hidden;                 // [P, hidden]: u, a2 or the gradient of u, as each function says
  T* y;                      // [P, values]
  // The channels that backward works on: whole vectors of the weights, or of the relation. Without vectors over
  // channels it takes all.
  int64_t first_channel, last_channel;
};

// Sums over pixels for the gradients of gamma: of its last Linear, and of what comes before the second BatchNorm.
template <class T>
struct MappingSums {
  T *w2, *bias3;  // [K, hidden, weights]; [K, weights]
};
template <class T>
struct RelationSums {
  T *w1, *shift, *product;  // [K + 1, relation, hidden]; [K + 1, pitch]: of g_v1, and of g_v1 * x
};

template <class T>
struct PatchwiseTiles {
  int64_t lanes;
  int64_t (*scratch)(const Patchwise<T>&);
  // u, into `hidden`.
  void (*map)(const Patchwise<T>&, const Patches<T>&, int64_t first_row, int64_t last_row, T* scratch);
  // y, from a2.
  void (*forward)(const Patchwise<T>&, const Patches<T>&, int64_t first_row, int64_t last_row, T* scratch);
  // From a2: what the weight channels add to its gradient into `grad_a2` [P, hidden]; adds to the sums and to grad_beta
  // [P, values].
  void (*backward_mapping)(const Patchwise<T>&, const Patches<T>&, int64_t first_row, int64_t last_row, T* scratch,
                           const MappingSums<T>&, T* grad_a2, T* grad_beta);
  // From the gradient of u: g_v1 of the center into `to_center`; adds to the sums and scale * g_v1 of each
  // position to its pixel in `to_around` [P, pitch].
  void (*backward_relation)(const Patchwise<T>&, const Patches<T>&, int64_t first_row, int64_t last_row, T* scratch,
                            const RelationSums<T>&, T* to_center, T* to_around);
};

}  // namespace san::cpu
