// Fused pairwise attention, backward. Definition: san/ops/fused.py; how pairs are worked on: pairwise_tile.cuh.
//
// The gradients of a BatchNorm's input need sums over all pairs, so there are three passes over pairs:
//   values    gradient of beta, and what the softmax subtracts: projection_i = sum_j w_ij * (gradient of w_ij)
//   mapping   gradients of weight2, gain2 and bias2
//   relation  gradient of weight1, and those of relu's argument summed over j (for center) and over i (for around)
// The first BatchNorm needs no fourth: what it adds to the gradients of the maps are sums of center_i - around_j, which
// `finish` takes from the maps.
//
// Sums over i go to one pixel from several tiles. Each tile writes its part for all pixels that its footprints cover,
// its halo, and `fold` adds up the parts and the mirror images: no atomics, one order.
#include <optional>
#include <tuple>

#include "pairwise_problem.cuh"
#include "sums.cuh"

namespace san::cuda {
namespace {

// What backward reads of pixels: maps [pixels, M], and per weight channel [pixels, G].
template <class scalar_t>
struct Maps {
  using T = accumulate_t<scalar_t>;
  const scalar_t *beta, *grad_y;
  const T *logsumexp, *projection;

  // The same without the first pixels.
  Maps from(const Pairwise<T>& p, int64_t pixel) const {
    return {beta + pixel * p.M, grad_y + pixel * p.M, logsumexp + pixel * p.G,
            projection == nullptr ? nullptr : projection + pixel * p.G};
  }
};

// The softmax weight of a row's pair from its logit.
template <class scalar_t, class T = accumulate_t<scalar_t>>
__device__ __forceinline__ T softmax_weight(const Pairwise<T>& p, const Maps<scalar_t>& maps, int64_t center, int g,
                                            T logit) {
  return exponential(logit - maps.logsumexp[center * p.G + g]);
}

// projection, and each tile's part of the gradient of beta: to_beta [tiles, halo, M]. With kSpills the softmax weights
// of a block's tile lie in spilled [blocks, pairs of a tile, G].
template <class scalar_t, bool kAccurate, bool kSpills, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kPairThreads, kResident<T>)
    values_kernel(WeightedPairwise<scalar_t> p, Maps<scalar_t> maps, T* spilled, T* projection, T* to_beta) {
  const ValuesShared<scalar_t> shared(p, shared_memory_base());
  T* weights = kSpills ? spilled + blockIdx.x * p.tile_weights() : shared.weights;
  const PairBlock<scalar_t, kAccurate> block{p, shared};
  block.load(true);
  for_each_tile(p, [&](const Tile& tile, int64_t index) {
    const int count = tile.count(), pairs = count * p.positions();
    for (int k = threadIdx.x; k < count * p.G; k += kPairThreads) shared.projection[k] = 0;
    for (int first = 0; first < pairs; first += p.rows) {
      const Step step = block.compute_logits(tile, first, nullptr, shared.logits);
      block.weight_gradients(maps.grad_y, maps.beta, step.valid, [&](int row, int g, T gradient) {
        T& logit = shared.logits[row * pitch_of(p.G) + g];
        const T weight = softmax_weight(p, maps, shared.center[row], g, logit);
        weights[(first + row) * p.G + g] = weight;
        logit = weight * gradient;
      });
      __syncthreads();
      for_each_cell(count, p.G, [&](int pixel, int g) {
        T sum = 0;
        for (int row = step.row_of(pixel); row < step.valid; row += count)
          sum += shared.logits[row * pitch_of(p.G) + g];
        shared.projection[pixel * p.G + g] += sum;
      });
      // The barriers of the next step keep its logits from being written before these are read.
    }
    __syncthreads();
    for_each_cell(count, p.G, [&](int pixel, int g) {
      // Over the sum of the weights, which is 1 but for what a large logsumexp lost to rounding: so gradients cancel
      // where a softmax is saturated.
      T sum = 0;
      for (int pair = pixel; pair < pairs; pair += count) sum += weights[pair * p.G + g];
      projection[tile.pixel(p.f, pixel) * p.G + g] = shared.projection[pixel * p.G + g] / sum;
    });
    const int kernel_size = static_cast<int>(p.f.kernel_size);
    const int height = tile.height + kernel_size - 1, width = tile.width + kernel_size - 1;
    for_each_share(p, height * width, [&](int cell, auto shares) {
      const int down = divide(cell, width), right = cell - down * width;
      for (int h = std::max(0, down - kernel_size + 1); h < std::min(tile.height, down + 1); ++h) {
        for (int w = std::max(0, right - kernel_size + 1); w < std::min(tile.width, right + 1); ++w) {
          const int pair = ((down - h) * kernel_size + right - w) * count + h * tile.width + w;
          shares.add(weights + pair * p.G + shares.g, maps.grad_y + (tile.first + h * p.f.width + w) * p.M);
        }
      }
      T* out = to_beta + (index * p.halo_pixels() + down * p.halo_width() + right) * p.M;
      shares.for_each([&](int c, int, T sum) { out[c] = sum; });
    });
    __syncthreads();
  });
}

// out [pixels, channels] = the sum over a pixel's mirror images and the tiles whose halo shows them of parts [tiles,
// halo, channels].
template <class T, class out_t>
__global__ void fold_kernel(const T* parts, Pairwise<T> p, int channels, int64_t elements, out_t* out) {
  const int high = static_cast<int>(p.tiles_high()), wide = static_cast<int>(p.tiles_wide());
  const int reach = static_cast<int>(p.f.reach()), width = static_cast<int>(p.f.width);
  const int halo_width = p.halo_width(), halo_height = p.halo_pixels() / halo_width;
  SAN_FOR_EACH(index, elements) {
    const int64_t pixel = index / channels, n = pixel / p.f.pixels();
    const int place = static_cast<int>(pixel - n * p.f.pixels()), c = static_cast<int>(index - pixel * channels);
    T sum = 0;
    for_each_image(place / width, p.f.height, reach, [&](int64_t image_h) {
      for_each_image(place % width, p.f.width, reach, [&](int64_t image_w) {
        const int down = static_cast<int>(image_h) + reach, right = static_cast<int>(image_w) + reach;
        const int first_row = down < halo_height ? 0 : (down - halo_height) / p.tile_height + 1;
        const int first_column = right < halo_width ? 0 : (right - halo_width) / p.tile_width + 1;
        for (int row = first_row; row < high && row * p.tile_height <= down; ++row) {
          for (int column = first_column; column < wide && column * p.tile_width <= right; ++column) {
            const int64_t tile = (n * high + row) * wide + column;
            const int cell = (down - row * p.tile_height) * halo_width + right - column * p.tile_width;
            sum += parts[(tile * p.halo_pixels() + cell) * channels + c];
          }
        }
      });
    });
    out[index] = static_cast<out_t>(sum);
  }
}

// Computes a step up to the gradients of its logits; all threads may read them when it returns.
template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
__device__ Step logit_gradients(const PairBlock<scalar_t, kAccurate>& block, const BackwardShared<scalar_t>& shared,
                                const Maps<scalar_t>& maps, const Tile& tile, int first) {
  const WeightedPairwise<scalar_t>& p = block.p;
  const Step step = block.compute_logits(tile, first, shared.normalised, shared.logits);
  block.weight_gradients(maps.grad_y, maps.beta, step.valid, [&](int row, int g, T gradient) {
    T& logit = shared.logits[row * pitch_of(p.G) + g];
    const int64_t i = shared.center[row];
    logit = softmax_weight(p, maps, i, g, logit) * (gradient - maps.projection[i * p.G + g]);
  });
  for_each_cell(p.rows - step.valid, p.G,
                [&](int row, int g) { shared.logits[(step.valid + row) * pitch_of(p.G) + g] = 0; });
  __syncthreads();
  return step;
}

// Calls visit(row, e, gradients) with the gradients of relu's argument before weight2, of channels e and e + 1.
template <class scalar_t, bool kAccurate, class Visit>
__device__ __forceinline__ void hidden_gradients(const PairBlock<scalar_t, kAccurate>& block,
                                                 const BackwardShared<scalar_t>& shared, const Visit& visit) {
  using T = accumulate_t<scalar_t>;
  using F = factor_t<scalar_t>;
  const WeightedPairwise<scalar_t>& p = block.p;
  multiply<kAccurate>(Along<T>{shared.logits, pitch_of(p.G)}, Across<F>{block.weight2(), p.hidden_pitch()},
                      {p.rows, padded(p.E), padded(p.G)}, [&](int row, int e, Pack<2, T> gradients, int) {
                        const auto active = Pack<2, F>::load(shared.active + row * p.hidden_pitch() + e);
                        SAN_UNROLL
                        for (int n = 0; n < 2; ++n)
                          gradients.data[n] = static_cast<T>(active.data[n]) > 0 ? gradients.data[n] : T(0);
                        visit(row, e, gradients);
                      });
}

// Adds left^T right, summed over the rows of a step, to sums [slices, left_width, right_width].
template <bool kAccurate, class T, class F>
__device__ __forceinline__ void add_product(const Pairwise<T>& p, const T* left, int left_width, const F* right,
                                            int right_width, T* sums) {
  const int slices = p.slices(left_width, right_width);
  multiply<kAccurate>(Across<T>{left, pitch_of(left_width)}, Across<F>{right, pitch_of<F>(right_width)},
                      {padded(left_width), padded(right_width), p.rows, slices},
                      [&](int i, int j, Pack<2, T> values, int slice) {
                        T* to = sums + (slice * left_width + i) * right_width + j;
                        SAN_UNROLL
                        for (int n = 0; n < 2; ++n) {
                          if (i < left_width && j + n < right_width) to[n] += values.data[n];
                        }
                      });
}

template <class T>
__device__ __forceinline__ T sum_slices(const T* sums, int slices, int size, int index) {
  T sum = 0;
  for (int slice = 0; slice < slices; ++slice) sum += sums[slice * size + index];
  return sum;
}

// A block's sums over its pairs: the gradients of weight2 [G, E], bias2 [E] and gain2 [E], one behind the other.
template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kPairThreads, kResident<T>)
    mapping_kernel(WeightedPairwise<scalar_t> p, Maps<scalar_t> maps, T* partial) {
  const MappingShared<scalar_t> shared(p, shared_memory_base());
  const PairBlock<scalar_t, kAccurate> block{p, shared};
  const int parts = parts_for(kPairThreads, p.E), slices = p.slices(p.G, p.E), size = p.G * p.E;
  T* out = partial + blockIdx.x * int64_t(size + 2 * p.E);
  T* to_weight2 = p.stages ? shared.to_weight2 : out;
  block.load(true);
  for (int k = threadIdx.x; k < slices * size; k += kPairThreads) to_weight2[k] = 0;
  for (int k = threadIdx.x; k < parts * 2 * p.E; k += kPairThreads) shared.sums[k] = 0;
  for_each_tile(p, [&](const Tile& tile, int64_t) {
    const int pairs = tile.count() * p.positions();
    for (int first = 0; first < pairs; first += p.rows) {
      const Step step = logit_gradients(block, shared, maps, tile, first);
      hidden_gradients(block, shared, [&](int row, int e, Pack<2, T> gradients) {
        gradients.store(shared.hidden_gradient + row * pitch_of(p.E) + e);
      });
      add_product<kAccurate>(p, shared.logits, p.G, shared.active, p.E, to_weight2);
      __syncthreads();
      add_sums(step.valid, p.E, shared.sums, [&](int row, int e, T& sum, T& product) {
        const T gradient = shared.hidden_gradient[row * pitch_of(p.E) + e];
        sum += gradient, product += gradient * shared.normalised[row * pitch_of(p.E) + e];
      });
    }
  });
  __syncthreads();
  for (int k = threadIdx.x; p.stages && k < size; k += kPairThreads) out[k] = sum_slices(to_weight2, slices, size, k);
  for (int k = threadIdx.x; k < 2 * p.E; k += kPairThreads) out[size + k] = sum_slices(shared.sums, parts, 2 * p.E, k);
}

// The gradients of relu's argument before weight1: their sums over j, to_center [pixels, d], each tile's part of their
// sums over i, to_around [tiles, halo, d], and a block's part of the gradient of weight1 [E, d], which is added to
// `partial`. sum_gradient and sum_product [E] are what the second BatchNorm corrects for, from mapping_kernel; null in
// evaluation.
template <class scalar_t, bool kAccurate, class T = accumulate_t<scalar_t>>
__global__ void __launch_bounds__(kPairThreads, kResident<T>)
    relation_kernel(WeightedPairwise<scalar_t> p, Maps<scalar_t> maps, const T* sum_gradient, const T* sum_product,
                    T pairs_in_all, T* to_center, T* to_around, T* partial) {
  using F = factor_t<scalar_t>;
  const RelationShared<scalar_t> shared(p, shared_memory_base());
  const PairBlock<scalar_t, kAccurate> block{p, shared};
  const int slices = p.slices(p.E, p.d), size = p.E * p.d;
  const int halo_size = p.halo_pixels() * p.d;
  partial += blockIdx.x * int64_t(size);
  block.load(true);
  for (int k = threadIdx.x; p.stages && k < slices * size; k += kPairThreads) shared.to_weight1[k] = 0;
  for (int e = threadIdx.x; e < padded(p.E); e += kPairThreads) {
    const bool corrects = e < p.E && sum_gradient != nullptr;
    shared.slope[e] = e < p.E ? p.gain2[e] / std::sqrt(p.var2[e] + p.eps) : T(0);
    shared.offset[e] = corrects ? sum_gradient[e] / pairs_in_all : T(0);
    shared.tilt[e] = corrects ? sum_product[e] / pairs_in_all : T(0);
  }
  for_each_tile(p, [&](const Tile& tile, int64_t index) {
    const int count = tile.count(), pairs = count * p.positions();
    T* halo = p.stages ? shared.to_around : to_around + index * halo_size;
    for (int k = threadIdx.x; k < count * p.d; k += kPairThreads) shared.to_center[k] = 0;
    for (int k = threadIdx.x; k < halo_size; k += kPairThreads) halo[k] = 0;
    for (int first = 0; first < pairs; first += p.rows) {
      const Step step = logit_gradients(block, shared, maps, tile, first);
      hidden_gradients(block, shared, [&](int row, int e, Pack<2, T> gradients) {
        T* normalised = shared.normalised + row * pitch_of(p.E) + e;  // become the gradients of the hidden channels
        const auto slope = Pack<2, T>::load(shared.slope + e), offset = Pack<2, T>::load(shared.offset + e);
        const auto tilt = Pack<2, T>::load(shared.tilt + e), before = Pack<2, T>::load(normalised);
        SAN_UNROLL
        for (int n = 0; n < 2; ++n) {
          const T gradient = gradients.data[n] - offset.data[n] - before.data[n] * tilt.data[n];
          gradients.data[n] = row < step.valid ? slope.data[n] * gradient : T(0);
        }
        gradients.store(normalised);
      });
      __syncthreads();
      add_product<kAccurate>(p, shared.normalised, p.E, shared.relation, p.d, p.stages ? shared.to_weight1 : partial);
      __syncthreads();
      multiply<kAccurate>(Along<T>{shared.normalised, pitch_of(p.E)}, Across<F>{block.weight1(), p.relation_pitch()},
                          {p.rows, padded(p.d), padded(p.E)}, [&](int row, int c, Pack<2, T> gradients, int) {
                            F* relation = shared.relation + row * p.relation_pitch() + c;  // become their gradients
                            auto both = Pack<2, F>::load(relation);
                            SAN_UNROLL
                            for (int n = 0; n < 2; ++n) {
                              both.data[n] =
                                  static_cast<F>(static_cast<T>(both.data[n]) > 0 ? gradients.data[n] : T(0));
                            }
                            both.store(relation);
                          });
      __syncthreads();
      for_each_cell(count, p.d, [&](int pixel, int c) {
        T sum = 0;
        for (int row = step.row_of(pixel); row < step.valid; row += count) {
          sum += static_cast<T>(shared.relation[row * p.relation_pitch() + c]);
        }
        shared.to_center[pixel * p.d + c] += sum;
      });
      // Pairs at one footprint position lead to different cells of the halo; so positions take turns.
      for (int top = 0; top < step.valid;) {
        const int position = divide(first + top, count);
        const int bottom = std::min(step.valid, (position + 1) * count - first);
        for_each_cell(bottom - top, p.d, [&](int row, int c) {
          halo[shared.cell[top + row] * p.d + c] +=
              static_cast<T>(shared.relation[(top + row) * p.relation_pitch() + c]);
        });
        __syncthreads();
        top = bottom;
      }
    }
    for_each_cell(count, p.d, [&](int pixel, int c) {
      to_center[tile.pixel(p.f, pixel) * p.d + c] = shared.to_center[pixel * p.d + c];
    });
    for (int k = threadIdx.x; p.stages && k < halo_size; k += kPairThreads) to_around[index * halo_size + k] = halo[k];
    __syncthreads();
  });
  for (int k = threadIdx.x; p.stages && k < size; k += kPairThreads) {
    partial[k] += sum_slices(shared.to_weight1, slices, size, k);
  }
}

constexpr int kFinishPixels = 256;

// Sums over the pixels of a block: of to_center, and of its product with the normalised relation, which falls into one
// sum over center's pixels and one over around's. Both are taken from the image's origins, which are near the values.
template <class T>
__global__ void __launch_bounds__(kPairThreads, kResident<T>)
    relation_sums_kernel(Pairwise<T> p, const T* center, const T* around, const T* to_center, const T* to_around,
                         T* partial) {
  T* sums = reinterpret_cast<T*>(shared_memory_base());  // [parts, 2, d]
  const int64_t pixels = p.images * p.f.pixels(), first = int64_t(blockIdx.x) * kFinishPixels;
  const int64_t last = first + kFinishPixels < pixels ? first + kFinishPixels : pixels;
  const int parts = parts_for(kPairThreads, p.d);
  for_each_cell(parts, p.d, [&](int part, int c) {
    T sum = 0, product = 0;
    for (int64_t i = first + part; i < last; i += parts) {
      const T *origin = p.origins + i / p.f.pixels() * 3 * p.d + c, gradient = to_center[i * p.d + c];
      sum += gradient;
      product += gradient * (center[i * p.d + c] - origin[p.d] + origin[2 * p.d]);
      product -= to_around[i * p.d + c] * (around[i * p.d + c] - origin[0]);
    }
    sums[part * 2 * p.d + c] = sum, sums[(part * 2 + 1) * p.d + c] = product;
  });
  __syncthreads();
  for (int k = threadIdx.x; k < 2 * p.d; k += kPairThreads) {
    T sum = sum_slices(sums, parts, 2 * p.d, k);
    if (k >= p.d) sum /= std::sqrt(p.var1[k - p.d] + p.eps);
    partial[int64_t(blockIdx.x) * 2 * p.d + k] = sum;
  }
}

// The gradients of the maps from the sums over pairs; grad_bias1 and grad_gain1 are null in evaluation, where
// statistics do not depend on the maps.
template <class T>
__global__ void finish_kernel(Pairwise<T> p, const T* center, const T* around, const T* to_center, const T* to_around,
                              const T* grad_bias1, const T* grad_gain1, T pairs_in_all, int64_t elements,
                              T* grad_center, T* grad_around) {
  const int reach = static_cast<int>(p.f.reach()), H = static_cast<int>(p.f.height), W = static_cast<int>(p.f.width);
  SAN_FOR_EACH(index, elements) {
    const int64_t pixel = index / p.d, n = pixel / p.f.pixels();
    const int c = static_cast<int>(index - pixel * p.d), place = static_cast<int>(pixel - n * p.f.pixels());
    const int h = place / W, w = place % W;
    const T deviation = 1 / std::sqrt(p.var1[c] + p.eps), scale = p.gain1[c] * deviation;
    T from_center = to_center[index], from_around = to_around[index];
    if (grad_bias1 != nullptr) {
      const T *centers = center + n * p.f.pixels() * p.d + c, *arounds = around + n * p.f.pixels() * p.d + c;
      const T here_center = center[index] - p.mean1[c];
      const T here_around = around[index] + p.mean1[c];
      T as_center = 0, as_around = 0;  // sums of center_i - around_j - mean1 over the pixel's pairs
      int seen = 0;
      for (int down = -reach; down <= reach; ++down) {
        const T* row = arounds + reflect(h + down, H) * W * p.d;
        for (int right = -reach; right <= reach; ++right) {
          as_center += here_center - row[reflect(w + right, W) * p.d];
        }
      }
      for_each_image(h, H, reach, [&](int64_t image_h) {
        for_each_image(w, W, reach, [&](int64_t image_w) {
          const int top = std::max(0, int(image_h) - reach), bottom = std::min(H - 1, int(image_h) + reach);
          const int left = std::max(0, int(image_w) - reach), last = std::min(W - 1, int(image_w) + reach);
          for (int from_h = top; from_h <= bottom; ++from_h) {
            const T* row = centers + int64_t(from_h) * W * p.d;
            for (int from_w = left; from_w <= last; ++from_w) {
              as_around += row[int64_t(from_w) * p.d] - here_around;
            }
          }
          seen += std::max(0, bottom - top + 1) * std::max(0, last - left + 1);
        });
      });
      const T mean = grad_bias1[c] / pairs_in_all, tilt = grad_gain1[c] / pairs_in_all * deviation;
      from_center -= static_cast<T>(p.f.positions()) * mean + as_center * tilt;
      from_around -= static_cast<T>(seen) * mean + as_around * tilt;
    }
    grad_center[index] = scale * from_center;
    grad_around[index] = -scale * from_around;
  }
}

using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Gradients, and the passes that fill them in.
template <class scalar_t, bool kAccurate>
class Gradients {
 public:
  using T = accumulate_t<scalar_t>;

  Gradients(const Problem<scalar_t>& problem, const Tensor& grad_y, const Tensor& logsumexp, bool training)
      : problem_(problem),
        p_(problem.sizes),
        training_(training),
        stream_(problem.stream()),
        grad_y_(grad_y),
        logsumexp_(logsumexp) {
    maps_ = {problem.beta(), grad_y_.const_data_ptr<scalar_t>(), logsumexp_.const_data_ptr<T>(), nullptr};
    const std::vector<int64_t> relation{p_.images, p_.f.height, p_.f.width, p_.d};
    center = problem.new_sums(relation), around = problem.new_sums(relation), beta = problem.new_maps();
    gain1 = problem.new_sums({p_.d}), bias1 = problem.new_sums({p_.d}), weight1 = problem.new_sums({p_.E, p_.d});
    gain2 = problem.new_sums({p_.E}), bias2 = problem.new_sums({p_.E}), weight2 = problem.new_sums({p_.G, p_.E});
  }

  void zero() {
    for (Tensor* x : {&gain1, &bias1, &weight1, &gain2, &bias2, &weight2}) torch::stable::zero_(*x);
  }

  void values() {
    WeightedPairwise<scalar_t> all = p_;
    const size_t bytes = plan<ValuesShared<scalar_t>>(all, 2 * pixels_of_tile(all.f));
    projection_ = problem_.new_sums({problem_.pixels(), all.G});
    T* projection = projection_.template mutable_data_ptr<T>();
    scalar_t* grad_beta = beta.template mutable_data_ptr<scalar_t>();
    const int64_t size = all.spills ? all.tile_weights() : 0;
    const int64_t most = size > 0 ? std::max<int64_t>(1, workspace_limit() / (size * int64_t(sizeof(T)))) : kMaxBlocks;
    Tensor weights = problem_.new_sums({size > 0 ? blocks_of(all, most) : 0, size});
    auto* chosen_values_kernel =
        all.spills ? &values_kernel<scalar_t, kAccurate, true> : &values_kernel<scalar_t, kAccurate, false>;
    in_parts(all, all.M, [&](const WeightedPairwise<scalar_t>& p, const Maps<scalar_t>& maps, int64_t pixel, T* halos) {
      SAN_LAUNCH_SHARED(chosen_values_kernel, blocks_of(p, most), kPairThreads, bytes, stream_, p, maps,
                        weights.template mutable_data_ptr<T>(), projection + pixel * p.G, halos);
      fold(halos, p, p.M, grad_beta + pixel * p.M);
    });
    maps_.projection = projection;
  }

  void mapping() {
    WeightedPairwise<scalar_t> p = p_;
    const size_t bytes = plan<MappingShared<scalar_t>>(p, pixels_of_tile(p.f));
    const int64_t columns = int64_t(p.G) * p.E + 2 * p.E, blocks = blocks_of(p, kSumBlocks);
    Tensor partial = problem_.new_sums({blocks, columns});
    SAN_LAUNCH_SHARED((mapping_kernel<scalar_t, kAccurate>), static_cast<int>(blocks), kPairThreads, bytes, stream_, p,
                      maps_, partial.template mutable_data_ptr<T>());
    sum(partial, {&weight2, &bias2, &gain2});
  }

  void relation() {
    WeightedPairwise<scalar_t> all = p_;
    const size_t bytes = plan<RelationShared<scalar_t>>(all, pixels_of_tile(all.f));
    Tensor partial = problem_.new_sums({blocks_of(all, kSumBlocks), all.E, all.d});
    torch::stable::zero_(partial);
    Tensor center_sums = problem_.new_sums({problem_.pixels(), all.d});
    Tensor around_sums = torch::stable::empty_like(center_sums);
    T* to_center = center_sums.template mutable_data_ptr<T>();
    T* to_around = around_sums.template mutable_data_ptr<T>();
    in_parts(all, all.d, [&](const WeightedPairwise<scalar_t>& p, const Maps<scalar_t>& maps, int64_t pixel, T* halos) {
      SAN_LAUNCH_SHARED((relation_kernel<scalar_t, kAccurate>), blocks_of(p, kSumBlocks), kPairThreads, bytes, stream_,
                        p, maps, if_training(bias2), if_training(gain2), static_cast<T>(problem_.pairs()),
                        to_center + pixel * p.d, halos, partial.template mutable_data_ptr<T>());
      fold(halos, p, p.d, to_around + pixel * p.d);
    });
    sum(partial, {&weight1});
    finish(to_center, to_around);
  }

  Tensor center, around, beta, gain1, bias1, weight1, gain2, bias2, weight2;

 private:
  // Calls work(p, maps, first pixel, halos [tiles, halo, channels]) for some images at a time: the tiles' halos are
  // several times as large as a map, so a large batch takes turns.
  template <class Work>
  void in_parts(const WeightedPairwise<scalar_t>& all, int channels, const Work& work) {
    const int64_t size = all.tiles() / all.images * all.halo_pixels() * channels, pixels = all.f.pixels();
    const int64_t most = std::max<int64_t>(1, workspace_limit() / (size * int64_t(sizeof(T))));
    Tensor halos = problem_.new_sums({std::min(most, all.images), size});
    for (int64_t first = 0; first < all.images; first += most) {
      const int64_t pixel = first * pixels;
      WeightedPairwise<scalar_t> p = all;
      p.images = std::min(most, all.images - first);
      p.center += pixel * padded(p.d), p.around += pixel * padded(p.d);
      work(p, maps_.from(p, pixel), pixel, halos.template mutable_data_ptr<T>());
    }
  }

  const T* if_training(const Tensor& x) const { return training_ ? x.template const_data_ptr<T>() : nullptr; }

  void sum(const Tensor& partial, std::initializer_list<Tensor*> outputs) {
    Totals<T> totals{};
    int count = 0;
    for (Tensor* output : outputs) {
      totals.data[count] = output->template mutable_data_ptr<T>(), totals.size[count] = output->numel();
      ++count;
    }
    sum_blocks(partial.template const_data_ptr<T>(), partial.size(0), partial.numel() / partial.size(0), totals,
               stream_);
  }

  template <class out_t>
  void fold(const T* halos, const Pairwise<T>& p, int channels, out_t* out) {
    const int64_t elements = p.images * p.f.pixels() * channels;
    SAN_LAUNCH((fold_kernel<T, out_t>), blocks_for(elements), kThreads, stream_, halos, p, channels, elements, out);
  }

  void finish(const T* to_center, const T* to_around) {
    const int64_t blocks = (problem_.pixels() + kFinishPixels - 1) / kFinishPixels;
    Tensor partial = problem_.new_sums({blocks, 2 * p_.d});
    SAN_LAUNCH_SHARED(relation_sums_kernel<T>, static_cast<int>(blocks), kPairThreads,
                      parts_for(kPairThreads, p_.d) * 2 * p_.d * sizeof(T), stream_, p_, problem_.center(),
                      problem_.around(), to_center, to_around, partial.template mutable_data_ptr<T>());
    sum(partial, {&bias1, &gain1});
    SAN_LAUNCH(finish_kernel<T>, blocks_for(center.numel()), kThreads, stream_, p_, problem_.center(),
               problem_.around(), to_center, to_around, if_training(bias1), if_training(gain1),
               static_cast<T>(problem_.pairs()), center.numel(), center.template mutable_data_ptr<T>(),
               around.template mutable_data_ptr<T>());
  }

  const Problem<scalar_t>& problem_;
  const WeightedPairwise<scalar_t>& p_;
  bool training_;
  decltype(current_stream(Tensor())) stream_;
  Tensor grad_y_, logsumexp_, projection_;
  Maps<scalar_t> maps_{};
};

template <class scalar_t, bool kAccurate>
Backward backward(const Tensor& grad_y, const PairwiseInputs& in, const Tensor& logsumexp, int64_t kernel_size,
                  bool training, double eps) {
  Problem<scalar_t> problem(in, kernel_size, eps);
  problem.scale_maps();
  const ScalarType type = in.beta.scalar_type();
  const Tensor gradient = contiguous_of(grad_y, type);
  problem.sizes.is_wide &= problem.is_aligned(gradient.const_data_ptr<scalar_t>());
  Gradients<scalar_t, kAccurate> grads(problem, gradient, contiguous_of(logsumexp, sum_type(type)), training);
  if (problem.pixels() > 0) {
    grads.values();
    grads.mapping();
    grads.relation();
  } else {
    grads.zero();
  }
  const auto as = [](const Tensor& x, const Tensor& like) { return contiguous_of(x, like.scalar_type()); };
  return {as(grads.center, in.center),
          as(grads.around, in.around),
          as(grads.beta, in.beta),
          grads.gain1,
          grads.bias1,
          grads.weight1,
          grads.gain2,
          grads.bias2,
          grads.weight2};
}

Backward pairwise_backward(const Tensor& grad_y, const Tensor& center, const Tensor& around, const Tensor& beta,
                           const Tensor& gain1, const Tensor& bias1, const Tensor& weight1, const Tensor& gain2,
                           const Tensor& bias2, const Tensor& weight2, const Tensor& mean1, const Tensor& var1,
                           const Tensor& mean2, const Tensor& var2, const Tensor& logsumexp, int64_t kernel_size,
                           bool training, double eps, bool tf32) {
  const PairwiseInputs in{center, around, beta, gain1, bias1, weight1, gain2, bias2, weight2, mean1, var1, mean2, var2};
  check_inputs(in);
  STD_TORCH_CHECK(grad_y.sizes().vec() == beta.sizes().vec(), "grad_y and beta must have the same shape");
  STD_TORCH_CHECK(logsumexp.numel() == beta.numel() / beta.size(3) * weight2.size(0), "logsumexp must be [N, H, W, G]");
  const OperatorGuard guard("pairwise_backward", center);
  std::optional<Backward> result;
  SAN_DISPATCH(in.beta.scalar_type(), "pairwise_backward", [&] {
    result = with_precision<scalar_t>(tf32, [&](auto accurate) {
      return backward<scalar_t, accurate>(grad_y, in, logsumexp, kernel_size, training, eps);
    });
  });
  return *result;
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("pairwise_backward", TORCH_BOX(&san::cuda::pairwise_backward));
}
