// Maps and weights as the kernels of fused operators read them, and the kernels that prepare them.
//
// Maps have reflected borders: every pixel then finds its footprint at the same offsets, so no other kernel computes
// reflected indices. Channels are padded with zeros to tiles of 8, and norms are applied as far as they depend on
// single pixels.
#pragma once
#include <utility>
#include <vector>

#include "sums.cuh"

namespace san::cuda {
namespace {

// Tiles of 8 channels.
inline int tiles_for(int64_t channels) { return static_cast<int>((channels + 7) / 8); }

struct Grid {
  int64_t images;
  int height, width, kernel_size;

  SAN_HOST_DEVICE int positions() const { return kernel_size * kernel_size; }
  SAN_HOST_DEVICE int padded_height() const { return height + kernel_size - 1; }
  SAN_HOST_DEVICE int padded_width() const { return width + kernel_size - 1; }
  SAN_HOST_DEVICE int64_t pixels() const { return images * height * width; }
  SAN_HOST_DEVICE int64_t padded_pixels() const { return images * padded_height() * padded_width(); }
};

inline Grid grid_of(const Tensor& map, const Footprint& f) {
  const int64_t images = map.size(0), pixels = images * f.padded_height() * f.padded_width();
  STD_TORCH_CHECK(pixels < int64_t(1) << 31, "a batch of ", images, " maps of ", f.height, "x", f.width,
                  " pixels is too large: together with their borders they must have fewer than 2^31 pixels");
  return {images, static_cast<int>(f.height), static_cast<int>(f.width), static_cast<int>(f.kernel_size)};
}

// Row `row`, with `bytes` bytes per row. This is a single instruction; with products of elements, it would be several.
template <class T>
__device__ __forceinline__ const T* row_at(const T* rows, int row, int bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(rows) + int64_t(row) * bytes);
}

// A position of the footprint.
struct Offset {
  int position = 0, down = 0, right = 0;

  Offset() = default;
  // The first position of a warp; it advances by the number of warps in its team.
  __device__ __forceinline__ Offset(const Team& team, const Grid& grid) { advance(team.member, grid.kernel_size); }

  __device__ __forceinline__ void advance(int steps, int kernel_size) {
    position += steps, right += steps;
    while (right >= kernel_size) right -= kernel_size, ++down;
  }
};

// A pixel of center or, with kAround, of the padded map around. Its partners are the pixels of the other map that form
// pairs with it.
template <bool kAround>
struct Pixel {
  int index;     // in its map; 0 if it does not exist
  int y, x;      // in its image
  int partners;  // with kAround the first pixel of the partners' image, else the first partner
  bool exists;

  Pixel() = default;
  __device__ __forceinline__ Pixel(const Grid& grid, int64_t at) {
    const int height = kAround ? grid.padded_height() : grid.height;
    const int width = kAround ? grid.padded_width() : grid.width;
    exists = at < (kAround ? grid.padded_pixels() : grid.pixels()), index = exists ? static_cast<int>(at) : 0;
    const int row = index / width, image = row / height;
    x = index - row * width, y = row - image * height;
    partners =
        kAround ? image * grid.height * grid.width : (image * grid.padded_height() + y) * grid.padded_width() + x;
  }

  // Index of the partner at this offset. If the pixel does not exist, or is a padded pixel without such a partner,
  // is_pair is false, and the index is valid but meaningless.
  __device__ __forceinline__ int partner(const Grid& grid, const Offset& o, bool& is_pair) const {
    is_pair = exists;
    if constexpr (!kAround) return partners + o.down * grid.padded_width() + o.right;
    const int row = y - o.down, column = x - o.right;
    is_pair = exists && static_cast<unsigned>(row) < static_cast<unsigned>(grid.height) &&
              static_cast<unsigned>(column) < static_cast<unsigned>(grid.width);
    return partners + (is_pair ? row * grid.width + column : 0);
  }
};

// The affine form of a norm for one map: (x - origin - mean) * scale + shift. Null parts are left out.
struct Affine {
  const float* origin = nullptr;  // [images, channels]
  const float *mean = nullptr, *scale = nullptr, *shift = nullptr;
  int stride = 1;  // between the channels of mean

  __device__ __forceinline__ float operator()(float x, int image, int channels, int c) const {
    if (origin != nullptr) x -= origin[int64_t(image) * channels + c];
    if (mean != nullptr) x -= mean[int64_t(c) * stride];
    if (scale != nullptr) x *= scale[c];
    return shift != nullptr ? x + shift[c] : x;
  }
};

// Copies maps [images, height, width, channels] with reflected borders, rounded for products of operands F.
template <class F = Operand<true>>
struct PaddedMap {
  const float* from;
  Footprint f;
  int channels, tiles;
  int64_t elements;  // tiles of all pixels; fewer than 2^32, because a 64-bit division takes a hundred instructions
  float* to;         // [images, padded height, padded width, tiles * 8]
  Affine affine;

  __device__ __forceinline__ void write(int64_t index) const {
    const int width = static_cast<int>(f.padded_width()), height = static_cast<int>(f.padded_height());
    const int pixel = static_cast<int>(static_cast<uint32_t>(index) / static_cast<uint32_t>(tiles));
    const int first = static_cast<int>(index - int64_t(pixel) * tiles) * 8;
    const int row = pixel / width, image = row / height;
    const int64_t h = reflect(row - image * height - f.reach(), f.height);
    const int64_t w = reflect(pixel - row * width - f.reach(), f.width);
    const float* values = from + ((image * f.height + h) * f.width + w) * channels;
    SAN_ROLLED
    for (int half = 0; half < 8; half += 4) {
      Pack<4, float> four;
      SAN_UNROLL
      for (int n = 0; n < 4; ++n) {
        const int c = first + half + n;
        four.data[n] = c < channels ? F::rounded(affine(values[c], image, channels, c)) : 0;
      }
      four.store(to + 8 * index + half);
    }
  }
};

// A vector padded with zeros.
struct PaddedVector {
  const float* from;
  int length;
  int64_t elements;
  float* to;

  __device__ __forceinline__ void write(int64_t index) const { to[index] = index < length ? from[index] : 0; }
};

// A matrix [rows, columns] with any strides, times a factor and, if they are given, a factor of each row.
struct Matrix {
  Floats values;
  int rows, columns;
  int64_t row_stride, column_stride;
  double factor = 1;
  const float* of_rows = nullptr;

  // Without factors of rows.
  Matrix transposed() const { return {values, columns, rows, column_stride, row_stride, factor}; }
  Matrix times(double x) const { return {values, rows, columns, row_stride, column_stride, factor * x, of_rows}; }
  Matrix times_rows(const float* x) const { return {values, rows, columns, row_stride, column_stride, factor, x}; }

  __device__ __forceinline__ float at(int row, int column) const {
    if (row >= rows || column >= columns) return 0;
    const double x = factor * values.get(row * row_stride + column * column_stride);
    return static_cast<float>(of_rows == nullptr ? x : x * of_rows[row]);
  }
};

// Writes operand `index` of right factors: [chunk][tile of columns][`wide` tiles of rows][lane]. It holds the elements
// at(chunk, row, column) of a row of the chunk and of two adjacent columns.
template <class F, class At>
__device__ __forceinline__ void pack(int64_t index, int wide, int depth, F* to, const At& at) {
  const int lane = index % kWarp, tile = static_cast<int>(index / kWarp);
  const int row = tile % wide * 8 + lane / 4, column = tile / wide % depth * 8 + lane % 4 * 2;
  const int chunk = tile / wide / depth;
  to[index] = F(at(chunk, row, column), at(chunk, row, column + 1));
}

// Rearranges a matrix into right factors, padded with zeros. A chunk has `wide` tiles of rows.
template <class F>
struct PackedMatrix {
  Matrix matrix;
  int wide, chunks, depth;  // tiles of rows in a chunk, chunks, tiles of columns
  int64_t elements;
  F* to;

  __device__ __forceinline__ void write(int64_t index) const {
    pack(index, wide, depth, to,
         [&](int chunk, int row, int column) { return matrix.at(chunk * wide * 8 + row, column); });
  }
};

template <class Job>
__device__ __forceinline__ void run_job(const Job& job) {
  SAN_ROLLED
  SAN_FOR_EACH(index, job.elements) job.write(index);
}

// Runs jobs of the kinds above.
//
// Predicted for SAN10's stage 2 at batch 32 on an H100: reads 14 MB, writes 21 MB; no products, no shared memory; 0.012
// ms, of memory bandwidth. Measured on an H200: 0.016 ms.
template <class... Job>
__global__ void __launch_bounds__(kThreads, 4) prepare_kernel(Job... jobs) {
  (run_job(jobs), ...);
}

template <class Stream, class... Job>
void prepare(Stream stream, const Job&... jobs) {
  const int64_t longest = std::max({int64_t(1), jobs.elements...});
  SAN_LAUNCH(prepare_kernel<Job...>, blocks_for(longest), kThreads, stream, jobs...);
}

// Memory of one call, which is kept until all kernels are launched.
class Workspace {
 public:
  explicit Workspace(const Tensor& like) : like_(like) {}

  auto stream() const { return current_stream(like_); }
  Tensor empty(const std::vector<int64_t>& shape) const { return torch::stable::new_empty(like_, shape); }

  template <class T = float>
  T* take(int64_t count) {
    kept_.push_back(torch::stable::new_empty(like_, {count * static_cast<int64_t>(sizeof(T))}, ScalarType::Byte));
    return reinterpret_cast<T*>(kept_.back().mutable_data_ptr());
  }

  // x as contiguous values.
  Floats keep(const Tensor& x) {
    kept_.push_back(torch::stable::contiguous(x));
    return Floats(kept_.back());
  }
  const float* keep_float(const Tensor& x) { return static_cast<const float*>(keep(x).data); }

  // Jobs that write to new memory.
  PaddedMap<> map(const float* x, int64_t images, const Footprint& f, int channels, int tiles, const Affine& affine) {
    const int64_t elements = images * f.padded_height() * f.padded_width() * tiles;
    STD_TORCH_CHECK(elements < int64_t(1) << 32, "maps of ", elements * 8, " values with their borders are too large");
    return {x, f, channels, tiles, elements, take(8 * elements), affine};
  }
  PaddedVector vector(const Tensor& x, int64_t elements) {
    return {keep_float(x), static_cast<int>(x.size(0)), elements, take(elements)};
  }
  // In chunks of `wide` tiles of rows, padded to `depth` tiles of columns.
  template <class F>
  PackedMatrix<F> matrix(const Matrix& matrix, int wide, int depth) {
    const int chunks = (matrix.rows + 8 * wide - 1) / (8 * wide);
    const int64_t elements = int64_t(chunks) * depth * wide * kWarp;
    return {matrix, wide, chunks, depth, elements, take<F>(elements)};
  }

 private:
  const Tensor like_;
  std::vector<Tensor> kept_;
};

// Calls run with the operand type of the products. Half types use TF32, which represents them exactly.
template <class Run>
auto with_operand(ScalarType weights, bool tf32, const Run& run) {
  return tf32 || weights != ScalarType::Float ? run(Operand<false>()) : run(Operand<true>());
}

// The sum of a value of a padded map [images, padded height, padded width, channels] and its mirror images.
__device__ __forceinline__ float folded(const float* padded, const Footprint& f, int channels, int64_t pixel, int c) {
  const int height = static_cast<int>(f.height), width = static_cast<int>(f.width);
  const int row = static_cast<int>(pixel) / width, image = row / height;
  float sum = 0;
  for_each_image(row - image * height, height, f.reach(), [&](int64_t h) {
    for_each_image(static_cast<int>(pixel) - row * width, width, f.reach(), [&](int64_t w) {
      const int64_t line = image * f.padded_height() + h + f.reach();
      sum += padded[(line * f.padded_width() + w + f.reach()) * channels + c];
    });
  });
  return sum;
}

__global__ void fold_map_kernel(const float* padded, Footprint f, int channels, int64_t elements, Floats out) {
  SAN_FOR_EACH(index, elements) {
    const int64_t pixel = index / channels;
    out.set(index, folded(padded, f, channels, pixel, static_cast<int>(index - pixel * channels)));
  }
}

// Writes the gradient of a map, `out`, from that of the padded map, [padded pixels, channels].
template <class Stream>
void fold_map(Stream stream, const float* padded, const Footprint& f, int channels, const Tensor& out) {
  const int64_t elements = out.numel();
  SAN_LAUNCH(fold_map_kernel, blocks_for(elements), kThreads, stream, padded, f, channels, elements, Floats(out));
}

}  // namespace
}  // namespace san::cuda
