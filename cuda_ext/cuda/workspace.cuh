// Shared code of the host functions of fused operators: the types of operands, the kernel that prepares maps and
// weights for the other kernels, and memory that is kept until all kernels are launched.
#pragma once
#include <vector>

#include "grid.cuh"
#include "sums.cuh"

namespace san::cuda {
namespace {

// Calls run with the operand type of the products. Half types use TF32, which represents them exactly.
template <class Run>
auto with_operand(ScalarType maps, ScalarType weights, bool tf32, const Run& run) {
  if (maps == ScalarType::Double) return run(Operand<double, true>());
  if (tf32 || weights != ScalarType::Float) return run(Operand<float, false>());
  return run(Operand<float, true>());
}

// A matrix [rows, columns] with any strides, or several that are one element apart. With `symmetric`, the sum of the
// matrix and its transpose.
template <class T>
struct Matrix {
  const T* data;
  int rows, columns, row_stride, column_stride;
  int count = 1;
  double factor = 1;
  bool symmetric = false;

  __device__ __forceinline__ T at(int n, int row, int column) const {
    if (row >= rows || column >= columns) return 0;
    const auto value = [&](int i, int j) {
      return static_cast<double>(data[n + int64_t(i) * row_stride + int64_t(j) * column_stride]);
    };
    return static_cast<T>(factor * (value(row, column) + (symmetric ? value(column, row) : 0)));
  }
};

// Rearranges matrices into right factors, padded with zeros: [matrix][chunk of rows][tile of columns][`wide` tiles of
// rows][operand of each lane].
template <class F>
struct PackedMatrix {
  Matrix<typename F::Value> matrix;
  int wide, chunks, depth;  // tiles of rows in a chunk, chunks, tiles of columns
  int64_t elements;
  F* to;

  __device__ __forceinline__ void write(int64_t index) const {
    const int lane = index % kWarp, tile = static_cast<int>(index / kWarp), k = tile / wide % depth;
    const int n = tile / wide / depth, chunk = n % chunks;
    const int row = (chunk * wide + tile % wide) * 8 + lane / 4, column = 8 * k + lane % 4 * 2;
    to[index] = F(matrix.at(n / chunks, row, column), matrix.at(n / chunks, row, column + 1));
  }
};

constexpr int kMostPrepared = 8;

template <class F>
struct Preparation {
  PaddedMap<typename F::Value> maps[kMostPrepared] = {};
  PackedMatrix<F> matrices[kMostPrepared] = {};
};

// Predicted for SAN10's stage 2 at batch 32 on an H100: reads 14 MB, writes 21 MB; no products, no shared memory; 0.012
// ms, of memory bandwidth.
template <class F>
__global__ void __launch_bounds__(kThreads) prepare_kernel(Preparation<F> all) {
  for (const auto& map : all.maps) {
    SAN_FOR_EACH(index, map.elements) map.write(index);
  }
  for (const auto& matrix : all.matrices) {
    SAN_FOR_EACH(index, matrix.elements) matrix.write(index);
  }
}

// Memory of one call. `pad` and `pack` reserve memory, and `prepare` fills it.
template <class F>
class Workspace {
 public:
  using T = typename F::Value;

  explicit Workspace(const Tensor& like) : like_(like) {}

  auto stream() const { return current_stream(like_); }
  Tensor empty(const std::vector<int64_t>& shape) const { return torch::stable::new_empty(like_, shape); }

  template <class Element = T>
  Element* take(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(Element));
    kept_.push_back(torch::stable::new_empty(like_, {bytes}, ScalarType::Byte));
    return reinterpret_cast<Element*>(kept_.back().mutable_data_ptr());
  }

  // x as contiguous values of the type of the maps.
  const T* keep(const Tensor& x) {
    const ScalarType type = like_.scalar_type();
    kept_.push_back(torch::stable::contiguous(x.scalar_type() == type ? x : torch::stable::to(x, type)));
    return kept_.back().template const_data_ptr<T>();
  }

  void pad(const PaddedMap<T>& map) { jobs_.maps[maps_++] = map, longest_ = std::max(longest_, map.elements); }
  // Reserves a padded vector, or a map with reflected borders.
  const T* pad(const Tensor& x, const Footprint& f, int tiles) {
    const int channels = static_cast<int>(x.size(x.dim() - 1));
    const int64_t elements = (x.dim() == 1 ? 1 : x.size(0)) * f.padded_height() * f.padded_width() * tiles;
    T* to = take(8 * elements);
    pad({keep(x), f, channels, tiles, elements, to, channels, 1});
    return to;
  }

  // Reserves right factors in chunks of `wide` tiles of rows, padded to `depth` tiles of columns.
  const F* pack(const Matrix<T>& matrix, int wide, int depth, F* to = nullptr) {
    const int chunks = (matrix.rows + 8 * wide - 1) / (8 * wide);
    const int64_t elements = int64_t(matrix.count) * chunks * depth * wide * kWarp;
    if (to == nullptr) to = take<F>(elements);
    jobs_.matrices[matrices_++] = {matrix, wide, chunks, depth, elements, to};
    longest_ = std::max(longest_, elements);
    return to;
  }

  void prepare() { SAN_LAUNCH(prepare_kernel<F>, blocks_for(longest_), kThreads, stream(), jobs_); }

 private:
  const Tensor& like_;
  std::vector<Tensor> kept_;
  Preparation<F> jobs_;
  int maps_ = 0, matrices_ = 0;
  int64_t longest_ = 1;
};

}  // namespace
}  // namespace san::cuda
