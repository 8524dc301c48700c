// What each pass of fused pairwise attention keeps in a block's shared memory.
#pragma once
#include "pairwise_tile.cuh"

namespace san::cuda {

// Forward.

template <class scalar_t>
struct HiddenShared : Common<scalar_t> {
  using T = accumulate_t<scalar_t>;
  T *hidden, *sums, *shift;
  size_t bytes;

  SAN_HOST_DEVICE HiddenShared(const WeightedPairwise<scalar_t>& p, char* base) : HiddenShared(p, Carver(base)) {}

 private:
  SAN_HOST_DEVICE HiddenShared(const WeightedPairwise<scalar_t>& p, Carver carver) : Common<scalar_t>(p, carver) {
    hidden = carver.take<T>(p.rows * pitch_of(p.E));
    sums = carver.take<T>(parts_for(kPairThreads, p.E) * 2 * p.E);  // [parts, 2, E]
    shift = carver.take<T>(p.E);
    bytes = carver.used();
  }
};

template <class scalar_t>
struct ForwardShared : Common<scalar_t> {
  using T = accumulate_t<scalar_t>;
  T* logits;                  // [rows, pitch_of(G)]; later exp(logits - largest)
  T *largest, *sum, *factor;  // [pixels of the tile, G] of the softmax so far
  T* y;                       // [pixels of the tile, M]
  size_t bytes;

  SAN_HOST_DEVICE ForwardShared(const WeightedPairwise<scalar_t>& p, char* base) : ForwardShared(p, Carver(base)) {}

 private:
  SAN_HOST_DEVICE ForwardShared(const WeightedPairwise<scalar_t>& p, Carver carver) : Common<scalar_t>(p, carver) {
    logits = carver.take<T>(p.rows * pitch_of(p.G));
    largest = carver.take<T>(p.tile_pixels() * p.G), sum = carver.take<T>(p.tile_pixels() * p.G);
    factor = carver.take<T>(p.tile_pixels() * p.G);
    y = carver.take<T>(p.tile_pixels() * p.M);
    bytes = carver.used();
  }
};

// Backward.

template <class scalar_t>
struct ValuesShared : Common<scalar_t> {
  using T = accumulate_t<scalar_t>;
  T *logits, *projection;  // [rows, pitch_of(G)], [pixels of the tile, G]
  T* weights;              // [all pairs of the tile, G]; null if they lie in global memory
  size_t bytes;

  SAN_HOST_DEVICE ValuesShared(const WeightedPairwise<scalar_t>& p, char* base) : ValuesShared(p, Carver(base)) {}

 private:
  SAN_HOST_DEVICE ValuesShared(const WeightedPairwise<scalar_t>& p, Carver carver) : Common<scalar_t>(p, carver) {
    logits = carver.take<T>(p.rows * pitch_of(p.G));
    weights = p.spills ? nullptr : carver.take<T>(p.tile_weights());
    projection = carver.take<T>(p.tile_pixels() * p.G);
    bytes = carver.used();
  }
};

// What the passes `mapping` and `relation` share: the gradients up to the second BatchNorm's output.
template <class scalar_t>
struct BackwardShared : Common<scalar_t> {
  using T = accumulate_t<scalar_t>;
  T* normalised;  // [rows, pitch_of(E)]
  T* logits;      // [rows, pitch_of(G)]; later their gradients

  SAN_HOST_DEVICE BackwardShared(const WeightedPairwise<scalar_t>& p, Carver& carver) : Common<scalar_t>(p, carver) {
    normalised = carver.take<T>(p.rows * pitch_of(p.E));
    logits = carver.take<T>(p.rows * pitch_of(p.G));
  }
};

template <class scalar_t>
struct MappingShared : BackwardShared<scalar_t> {
  using T = accumulate_t<scalar_t>;
  T* hidden_gradient;  // [rows, pitch_of(E)]
  T* sums;             // [parts, 2, E]: of these gradients, and of them times `normalised`
  T* to_weight2;       // [slices, G, E]; null if the sums stay in global memory
  size_t bytes;

  SAN_HOST_DEVICE MappingShared(const WeightedPairwise<scalar_t>& p, char* base) : MappingShared(p, Carver(base)) {}

 private:
  SAN_HOST_DEVICE MappingShared(const WeightedPairwise<scalar_t>& p, Carver carver)
      : BackwardShared<scalar_t>(p, carver) {
    hidden_gradient = carver.take<T>(p.rows * pitch_of(p.E));
    sums = carver.take<T>(parts_for(kPairThreads, p.E) * 2 * p.E);
    to_weight2 = p.stages ? carver.take<T>(p.slices(p.G, p.E) * p.G * p.E) : nullptr;
    bytes = carver.used();
  }
};

template <class scalar_t>
struct RelationShared : BackwardShared<scalar_t> {
  using T = accumulate_t<scalar_t>;
  T *slope, *offset, *tilt;  // [E] the second BatchNorm's backward: slope * (gradient - offset - tilt * normalised)
  T* to_center;              // [pixels of the tile, d]
  T* to_around;              // [halo, d]; null if it stays in global memory, as the next
  T* to_weight1;             // [slices, E, d]
  size_t bytes;

  SAN_HOST_DEVICE RelationShared(const WeightedPairwise<scalar_t>& p, char* base) : RelationShared(p, Carver(base)) {}

 private:
  SAN_HOST_DEVICE RelationShared(const WeightedPairwise<scalar_t>& p, Carver carver)
      : BackwardShared<scalar_t>(p, carver) {
    const int E = padded(p.E);
    slope = carver.take<T>(E), offset = carver.take<T>(E), tilt = carver.take<T>(E);
    to_center = carver.take<T>(p.tile_pixels() * p.d);
    to_around = p.stages ? carver.take<T>(p.halo_pixels() * p.d) : nullptr;
    to_weight1 = p.stages ? carver.take<T>(p.slices(p.E, p.d) * p.E * p.d) : nullptr;
    bytes = carver.used();
  }
};

}  // namespace san::cuda
