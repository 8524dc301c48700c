// What the kernels over pairs (i, j) of a pixel and a position of its footprint share: the maps, how warps divide the
// pairs among themselves, and a1 = relu(relation of i and j) in registers. Definitions: tests/ops/oracle.py.
//
// A warp takes 16 pixels (or 8) and walks over the footprint. Everything that depends on its own pixel is a pair of
// coefficients, a1 = relu(scale * partner + bias), which lies in shared memory; partners come from a map with reflected
// borders through L1. So there is no index arithmetic with reflection, no tensor over pairs, and no barrier in the
// loop.
#pragma once
#include <algorithm>
#include <vector>

#include "mma.cuh"

namespace san::cuda {
namespace {

constexpr int kWarps = 8;  // of each block
constexpr int kPairThreads = kWarps * kWarp;
constexpr int64_t kWantedWarps = 4096;  // of a launch: they fill an H100
constexpr int64_t kSumBlocks = 528;     // of a launch at most whose blocks leave partial sums

// Channels are padded with zeros to tiles of 8, and so are all products.
template <class T>
struct Pairs {
  int64_t images;
  int height, width, kernel_size;
  int d, tiles, products;  // relation channels, tiles of 8 of them, and how many are products
  const T* center;         // [images, height, width, pitch]
  const T* around;         // [images, padded_height, padded_width, pitch], with reflected borders
  const T* shift;          // [pitch]

  SAN_HOST_DEVICE int pitch() const { return 8 * tiles; }
  SAN_HOST_DEVICE int row_bytes() const { return pitch() * static_cast<int>(sizeof(T)); }
  SAN_HOST_DEVICE int positions() const { return kernel_size * kernel_size; }
  SAN_HOST_DEVICE int padded_height() const { return height + kernel_size - 1; }
  SAN_HOST_DEVICE int padded_width() const { return width + kernel_size - 1; }
  SAN_HOST_DEVICE int64_t pixels() const { return images * height * width; }
  SAN_HOST_DEVICE int64_t padded_pixels() const { return images * padded_height() * padded_width(); }
};

// Row `row` of some with so many bytes each: one instruction, which the compiler does not find for products of
// elements.
template <class T>
__device__ __forceinline__ const T* row_at(const T* rows, int row, int bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(rows) + int64_t(row) * bytes);
}

// A position of the footprint.
struct Offset {
  int position = 0, down = 0, right = 0;

  __device__ __forceinline__ void advance(int steps, int kernel_size) {
    position += steps, right += steps;
    while (right >= kernel_size) right -= kernel_size, ++down;
  }
};

// A pixel of center; with kAround, of the padded map of around, whose partners are pixels of center.
template <class T, bool kAround>
struct Pixel {
  int index;     // in its map; 0 if it does not exist
  int y, x;      // in its image
  int partners;  // for kAround where the image of its partners begins, else its first partner
  bool exists;

  __device__ __forceinline__ Pixel(const Pairs<T>& p, int64_t at) {
    const int height = kAround ? p.padded_height() : p.height, width = kAround ? p.padded_width() : p.width;
    exists = at < (kAround ? p.padded_pixels() : p.pixels()), index = exists ? static_cast<int>(at) : 0;
    const int row = index / width, image = row / height;
    x = index - row * width, y = row - image * height;
    partners = kAround ? image * p.height * p.width : (image * p.padded_height() + y) * p.padded_width() + x;
  }

  // The partner's index in its map. There may be none for a padded pixel; then it is any index.
  __device__ __forceinline__ int partner(const Pairs<T>& p, const Offset& o, bool& is_pair) const {
    if constexpr (kAround) {
      const int row = y - o.down, column = x - o.right;
      is_pair = static_cast<unsigned>(row) < static_cast<unsigned>(p.height) &&
                static_cast<unsigned>(column) < static_cast<unsigned>(p.width);
      return partners + (is_pair ? row * p.width + column : 0);
    } else {
      return partners + o.down * p.padded_width() + o.right;
    }
  }

  // a1 = relu(scale * partner + bias) in a channel. A pixel that does not exist has a1 = 0, which stops its gradients.
  __device__ __forceinline__ void coefficients(const Pairs<T>& p, int channel, T& scale, T& bias) const {
    const T own = (kAround ? p.around : p.center)[int64_t(index) * p.pitch() + channel];
    const bool is_product = channel < p.products;
    scale = is_product ? own : T(kAround ? 1 : -1);
    bias = p.shift[channel] + (is_product ? T(0) : kAround ? -own : own);
    if (!exists) scale = bias = 0;
  }
};

// How a block's warps divide work: `split` of them, a team, have the same pixels and take footprint positions in turn.
struct Team {
  int lane, row, pair;  // the lane's row and column pair in a product's sum: g and 2t of mma.cuh
  int team, member, split;

  __device__ __forceinline__ explicit Team(int split)
      : lane(threadIdx.x % kWarp), row(lane / 4), pair(lane % 4 * 2), split(split) {
    const int warp = threadIdx.x / kWarp;
    team = warp / split, member = warp - team * split;
  }
};

// Large teams where there are few pixels, or where coefficients of a pixel take much shared memory.
inline int split_for(int64_t groups, int positions, int tiles) {
  int split = 1;
  while (split < kWarps &&
         (tiles * (kWarps / split) > 32 || (groups * split < kWantedWarps && 2 * split <= positions))) {
    split *= 2;
  }
  return split;
}

// Sums N values over the warps of each team, in a fixed order; the first warp of a team gets the sums. `shared` holds
// kWarps / 2 * N * kWarp values.
template <int N, class T>
__device__ __forceinline__ void sum_over_team(const Team& mine, T* shared, T (&values)[N]) {
  for (int half = mine.split / 2; half > 0; half /= 2) {
    __syncthreads();
    T* slot = shared + (mine.team * half + mine.member % half) * N * kWarp + mine.lane;
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      if (mine.member >= half && mine.member < 2 * half) slot[n * kWarp] = values[n];
    }
    __syncthreads();
    SAN_UNROLL
    for (int n = 0; n < N; ++n) {
      if (mine.member < half) values[n] += slot[n * kWarp];
    }
  }
  __syncthreads();
}

// Four consecutive values as a product's sum.
template <int N, class T>
__device__ __forceinline__ T (&four_of(T (&values)[N], int first))[4] {
  return reinterpret_cast<T(&)[4]>(values[first]);
}

// Stores the sums [KM, KD, 4] of products, from values[first] on, as the matrix [16 KM, 8 KD] that they are.
template <int KM, int KD, int N, class T>
__device__ __forceinline__ void store_sums(const Team& mine, const T (&values)[N], int first, T* out, int pitch) {
  SAN_UNROLL
  for (int n = 0; n < 2 * KM * KD; ++n) {
    const int row = n / (2 * KD) * 16 + n % 2 * 8 + mine.row, column = n / 2 % KD * 8 + mine.pair;
    Pack<2, T>{values[first + 2 * n], values[first + 2 * n + 1]}.store(out + int64_t(row) * pitch + column);
  }
}

// Sums over the lanes of one row of a product and stores the totals of 8 rows.
template <class T>
__device__ __forceinline__ void store_row_sums(const Team& mine, T sum, T* out) {
  for (int bits = 1; bits < 4; bits *= 2) sum += __shfl_xor_sync(~0u, sum, bits);
  if (mine.pair == 0) out[mine.row] = sum;
}

// Calls visit(0) .. visit(count - 1). If N > 0, count is N, and arrays that visit indexes can lie in registers.
template <int N, class Visit>
__device__ __forceinline__ void for_each_tile(int count, const Visit& visit) {
  if constexpr (N > 0) {
    SAN_UNROLL
    for (int n = 0; n < N; ++n) visit(n);
  } else {
    SAN_ROLLED
    for (int n = 0; n < count; ++n) visit(n);
  }
}

// a1 of 16 pixels at one footprint position, in the layout of a product's sum.
template <class T, bool kAround>
struct Rows {
  using Two = Pack<2, T>;
  using Four = Pack<4, T>;

  // Coefficients of one tile of channels of a team's pixels, and where a lane finds its own.
  static constexpr int kCoefficients = 8 * kWarp;
  static SAN_HOST_DEVICE size_t bytes(const Pairs<T>& p, int split) {
    return size_t(kWarps / split) * p.tiles * kCoefficients * sizeof(T);
  }

  const Pairs<T>& p;
  Pixel<T, kAround> pixels[2];  // of row g and g + 8
  T* coefficients;
  const T* partners[2];
  int partner[2];
  bool is_pair[2] = {true, true};

  __device__ __forceinline__ Rows(const Pairs<T>& p, const Team& mine, int64_t group, T* shared)
      : p(p), pixels{{p, group * 16 + mine.row}, {p, group * 16 + mine.row + 8}} {
    coefficients = shared + mine.team * p.tiles * kCoefficients + 4 * mine.lane;
    for (int c = mine.member; c < p.tiles; c += mine.split) {
      Four scale, bias;
      SAN_UNROLL
      for (int n = 0; n < 4; ++n) {
        pixels[n / 2].coefficients(p, 8 * c + mine.pair + n % 2, scale.data[n], bias.data[n]);
      }
      scale.store(coefficients + c * kCoefficients), bias.store(coefficients + c * kCoefficients + 4 * kWarp);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void move(const Team& mine, const Offset& offset) {
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) {
      partner[n] = pixels[n].partner(p, offset, is_pair[n]);
      partners[n] = row_at((kAround ? p.center : p.around) + mine.pair, partner[n], p.row_bytes());
    }
  }

  // Index of a pair's pixel of center.
  __device__ __forceinline__ int center(int n) const { return kAround ? partner[n] : pixels[n].index; }

  __device__ __forceinline__ void values(int c, T (&result)[4]) const {
    const Two upper = Two::load(partners[0] + 8 * c), lower = Two::load(partners[1] + 8 * c);
    result[0] = upper.data[0], result[1] = upper.data[1], result[2] = lower.data[0], result[3] = lower.data[1];
  }

  __device__ __forceinline__ void activate(int c, T (&a1)[4]) const {
    const Four scale = Four::load(coefficients + c * kCoefficients);
    const Four bias = Four::load(coefficients + c * kCoefficients + 4 * kWarp);
    values(c, a1);
    SAN_UNROLL
    for (int n = 0; n < 4; ++n) a1[n] = rectified(scale.data[n] * a1[n] + bias.data[n]);
  }
};

// a1 of 8 pixels as a right factor. Pairs are its depth: a lane has channel g of the pixels 2t and 2t + 1. With
// kFlipped channels are: it has the channels 2t and 2t + 1 of pixel g.
template <class T, bool kFlipped = false>
struct Columns {
  using Two = Pack<2, T>;
  static constexpr int kCoefficients = 4 * kWarp;  // of one tile of channels

  const Pairs<T>& p;
  Pixel<T, false> pixels[2];
  T* coefficients;
  const T* partners[2];

  // Where `missing` is not null, pixels that do not exist have it as their a1 instead of 0; it must not be negative.
  __device__ __forceinline__ Columns(const Pairs<T>& p, const Team& mine, int64_t group, T* shared,
                                     const T* missing = nullptr)
      : p(p),
        pixels{{p, group * 8 + (kFlipped ? mine.row : mine.pair)},
               {p, group * 8 + (kFlipped ? mine.row : mine.pair + 1)}} {
    coefficients = shared + mine.team * p.tiles * kCoefficients + 4 * mine.lane;
    for (int c = mine.member; c < p.tiles; c += mine.split) {
      Pack<4, T> both;
      SAN_UNROLL
      for (int n = 0; n < 2; ++n) {
        const int channel = 8 * c + (kFlipped ? mine.pair + n : mine.row);
        pixels[n].coefficients(p, channel, both.data[n], both.data[2 + n]);
        if (missing != nullptr && !pixels[n].exists) both.data[2 + n] = missing[channel];
      }
      both.store(coefficients + c * kCoefficients);
    }
  }

  __device__ __forceinline__ void move(const Team& mine, const Offset& offset) {
    bool is_pair;
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) {
      const int partner = pixels[n].partner(p, offset, is_pair);
      partners[n] = row_at(p.around + (kFlipped ? mine.pair : mine.row), partner, p.row_bytes());
    }
  }

  __device__ __forceinline__ Two activate(int c) const {
    const auto both = Pack<4, T>::load(coefficients + c * kCoefficients);
    Two a1;
    if constexpr (kFlipped) {
      a1 = Two::load(partners[0] + 8 * c);
    } else {
      a1 = {partners[0][8 * c], partners[1][8 * c]};
    }
    SAN_UNROLL
    for (int n = 0; n < 2; ++n) a1.data[n] = rectified(both.data[n] * a1.data[n] + both.data[2 + n]);
    return a1;
  }
};

// u = weight1 a1 + shift2 of 16 pairs in KE tiles of hidden channels. `weight1` and `shift2` begin where the lane finds
// its first operand and its first value; the depth is KT tiles, or `tiles` if KT is 0.
template <int KE, int KT, class F, class T, class Activation>
__device__ __forceinline__ void hidden_of(const Activation& activation, const F* weight1, const T* shift2, int tiles,
                                          T (&u)[KE][4]) {
  SAN_UNROLL
  for (int e = 0; e < KE; ++e) {
    const auto shift = Pack<2, T>::load(shift2 + 8 * e);
    u[e][0] = u[e][2] = shift.data[0], u[e][1] = u[e][3] = shift.data[1];
  }
  for_each_tile<KT>(tiles, [&](int c) {
    T a1[4];
    activation(c, a1);
    const F upper(a1[0], a1[1]), lower(a1[2], a1[3]);
    SAN_UNROLL
    for (int e = 0; e < KE; ++e) multiply(u[e], upper, lower, weight1[(c * KE + e) * kWarp]);
  });
}

// A matrix [rows, columns] anywhere in memory; with `symmetric`, its sum with its transpose.
template <class T>
struct Matrix {
  const T* data;
  int rows, columns, row_stride, column_stride;
  double factor = 1;
  bool symmetric = false;
};

// Rearranges a matrix, padded with zeros, into right factors: [chunk of rows][tile of columns][`wide` tiles of rows] of
// one operand for each lane.
template <class F, class T>
__global__ void pack_kernel(Matrix<T> matrix, int wide, int depth, int64_t elements, F* out) {
  SAN_FOR_EACH(index, elements) {
    const int lane = index % kWarp, tile = static_cast<int>(index / kWarp), k = tile / wide % depth;
    const int row = (tile / wide / depth * wide + tile % wide) * 8 + lane / 4;
    typename F::Value values[2];
    for (int n = 0; n < 2; ++n) {
      const int column = 8 * k + lane % 4 * 2 + n;
      const auto at = [&](int i, int j) {
        return static_cast<double>(matrix.data[int64_t(i) * matrix.row_stride + int64_t(j) * matrix.column_stride]);
      };
      double value = 0;
      if (row < matrix.rows && column < matrix.columns) {
        value = matrix.factor * (at(row, column) + (matrix.symmetric ? at(column, row) : 0));
      }
      values[n] = static_cast<typename F::Value>(value);
    }
    out[index] = F(values[0], values[1]);
  }
}

// Copies a map [images, height, width, channels] with reflected borders and channels padded with zeros, a tile of 8
// channels in each thread.
template <class T>
__global__ void pad_kernel(const T* from, Footprint f, int channels, int tiles, int64_t elements, T* to) {
  const int height = static_cast<int>(f.padded_height()), width = static_cast<int>(f.padded_width());
  SAN_FOR_EACH(index, elements) {
    const int pixel = static_cast<int>(index / tiles), first = static_cast<int>(index - int64_t(pixel) * tiles) * 8;
    const int row = pixel / width, image = row / height;
    const int64_t h = reflect(row - image * height - f.reach(), f.height);
    const int64_t w = reflect(pixel - row * width - f.reach(), f.width);
    const T* values = from + ((image * f.height + h) * f.width + w) * channels + first;
    SAN_UNROLL
    for (int half = 0; half < 8; half += 4) {
      Pack<4, T> four;
      SAN_UNROLL
      for (int n = 0; n < 4; ++n) four.data[n] = first + half + n < channels ? values[half + n] : T(0);
      four.store(to + 8 * index + half);
    }
  }
}

// A rectangle of a padded matrix that lies at `first` in each row of partial sums.
template <class T>
struct Part {
  T* out;  // [rows, columns]
  int rows, columns, pitch;
  int64_t first, size;
};
template <class T>
struct Parts {
  Part<T> parts[3];
};

constexpr int kTotalColumns = 8, kTotalThreads = 1024;

// Sums the rows of partial [rows, columns] in double, in a fixed order.
template <class T, class out_t>
__global__ void __launch_bounds__(kTotalThreads)
    total_kernel(const T* partial, int rows, int64_t columns, Parts<out_t> parts) {
  double* sums = reinterpret_cast<double*>(shared_memory_base());  // [kTotalThreads]
  const int thread = threadIdx.x, slice = thread / kTotalColumns;
  const int64_t column = int64_t(blockIdx.x) * kTotalColumns + thread % kTotalColumns;
  double sum = 0;
  for (int row = slice; column < columns && row < rows; row += kTotalThreads / kTotalColumns) {
    sum += partial[row * columns + column];
  }
  sums[thread] = sum;
  for (int half = kTotalThreads / 2; half >= kTotalColumns; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread >= kTotalColumns) return;
  for (const Part<out_t>& part : parts.parts) {
    const int64_t at = column - part.first;
    if (at < 0 || at >= part.size) continue;
    const int64_t row = at / part.pitch, inside = at % part.pitch;
    if (row < part.rows && inside < part.columns)
      part.out[row * part.columns + inside] = static_cast<out_t>(sums[thread]);
  }
}

// Tiles of 8 relation channels. Kernels are compiled for 1, 3 and 5 tiles, the numbers of SAN's first stages.
inline int padded_tiles(int channels) {
  const int tiles = (channels + 7) / 8;
  return tiles <= 1 ? 1 : tiles <= 3 ? 3 : tiles <= 5 ? 5 : tiles;
}

// The host side of one call: maps ready for the kernels, and memory that lives until all of them are launched.
template <class T>
class PairWork {
 public:
  Pairs<T> pairs;

  PairWork(const Tensor& center, const Tensor& around, const Tensor& shift, const Footprint& f, int64_t products)
      : like_(center) {
    const int d = static_cast<int>(center.size(3)), tiles = padded_tiles(d);
    const int64_t longest = center.size(0) * f.padded_height() * f.padded_width();
    STD_TORCH_CHECK(longest < (int64_t(1) << 31), "center has ", center.size(0), " images of ", f.height, "x", f.width,
                    " pixels; together with their borders they must have fewer than 2^31 pixels");
    pairs = {center.size(0),
             static_cast<int>(f.height),
             static_cast<int>(f.width),
             static_cast<int>(f.kernel_size),
             d,
             tiles,
             static_cast<int>(products),
             nullptr,
             nullptr,
             nullptr};
    pairs.center = pad(center, {1, f.height, f.width}, tiles), pairs.around = pad(around, f, tiles);
    pairs.shift = pad(shift, {1, 1, 1}, tiles);
  }

  auto stream() const { return current_stream(like_); }

  template <class Element>
  Element* take(int64_t count) {
    const int64_t words = (count * sizeof(Element) + sizeof(T) - 1) / sizeof(T);
    kept_.push_back(torch::stable::new_empty(like_, {words}));
    return reinterpret_cast<Element*>(kept_.back().template mutable_data_ptr<T>());
  }

  // A vector, or a map with its borders; kept with channels padded with zeros to so many tiles.
  const T* pad(const Tensor& x, const Footprint& f, int tiles) {
    const Tensor from = torch::stable::contiguous(x);
    const int channels = static_cast<int>(x.size(x.dim() - 1));
    const int64_t images = x.dim() == 1 ? 1 : x.size(0);
    const int64_t elements = images * f.padded_height() * f.padded_width() * tiles;
    T* to = take<T>(8 * elements);
    if (elements > 0) {
      SAN_LAUNCH(pad_kernel<T>, blocks_for(elements), kThreads, stream(), from.const_data_ptr<T>(), f, channels, tiles,
                 elements, to);
    }
    kept_.push_back(from);
    return to;
  }

  // Right factors, `wide` tiles of rows in a chunk and `depth` tiles of columns.
  template <class F, class weight_t>
  const F* pack(const Matrix<weight_t>& matrix, int wide, int depth) {
    const int chunks = (matrix.rows + 8 * wide - 1) / (8 * wide);
    const int64_t elements = int64_t(chunks) * depth * wide * kWarp;
    F* out = take<F>(elements);
    if (elements > 0) {
      SAN_LAUNCH((pack_kernel<F, weight_t>), blocks_for(elements), kThreads, stream(), matrix, wide, depth, elements,
                 out);
    }
    return out;
  }

  // Writes the totals of partial sums; see total_kernel.
  template <class out_t>
  void total(const T* partial, int rows, const Parts<out_t>& parts) {
    int64_t columns = 0;
    for (const auto& part : parts.parts) columns += part.size;
    const int blocks = static_cast<int>((columns + kTotalColumns - 1) / kTotalColumns);
    SAN_LAUNCH_SHARED((total_kernel<T, out_t>), blocks, kTotalThreads, kTotalThreads * sizeof(double), stream(),
                      partial, rows, columns, parts);
  }

 private:
  const Tensor& like_;
  std::vector<Tensor> kept_;
};

inline void check_shared_memory(size_t bytes, int channels) {
  STD_TORCH_CHECK(bytes <= shared_memory_limit(), channels, " relation channels need ", bytes,
                  " bytes of shared memory, and a block of this GPU has ", shared_memory_limit(),
                  "; use fewer channels");
}

// Calls run with a zero of the maps' type.
template <class Run>
void with_pair_type(const Tensor& center, const Run& run) {
  if (center.scalar_type() == ScalarType::Double) {
    run(double());
  } else {
    run(float());
  }
}

// Calls run with a type of operand: what `tf32` and the weights' type allow.
template <class T, class Run>
void with_operand(bool tf32, const Run& run) {
  if constexpr (std::is_same_v<T, double>) {
    run(Operand<double, true>());
  } else if (tf32) {
    run(Operand<float, false>());
  } else {
    run(Operand<float, true>());
  }
}

}  // namespace
}  // namespace san::cuda
