// Resizes, crops, mirrors and normalizes decoded images in one step, with Pillow's antialiased bilinear filter. Like
// Pillow before version 13, it filters columns, then rows, and rounds to integers after each step:
// https://github.com/python-pillow/Pillow/blob/main/src/libImaging/Resample.c
//
// Computes only the visible part of each image. The caller runs it in separate threads, next to a training step.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "cpu/vectorize.h"

namespace san::cpu {
namespace {

constexpr int64_t kRows = 16;    // that are turned into columns at a time, so that vectors run over rows
constexpr int64_t kPixels = 64;  // of an output row at a time

// The weights of the input pixels that each output pixel of an axis sees.
struct Taps {
  int64_t most;
  std::vector<int64_t> first, count;
  std::vector<float> weight;  // [outputs, most]

  // Outputs [offset, offset + size) of `extent` pixels that become `length`.
  Taps(int64_t extent, int64_t length, int64_t offset, int64_t size) : first(size), count(size) {
    const double step = static_cast<double>(extent) / length, support = std::max(step, 1.0);
    most = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
    weight.resize(size * most);
    for (int64_t i = 0; i < size; ++i) {
      const double center = (offset + i + 0.5) * step;
      first[i] = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
      count[i] = std::min(static_cast<int64_t>(center + support + 0.5), extent) - first[i];
      const auto triangle = [&](int64_t k) {
        return std::max(1 - std::abs((first[i] + k - center + 0.5) / support), 0.0);
      };
      double total = 0;
      for (int64_t k = 0; k < count[i]; ++k) total += triangle(k);
      for (int64_t k = 0; k < count[i]; ++k) weight[i * most + k] = static_cast<float>(triangle(k) / total);
    }
  }
  int64_t begin() const { return first.front(); }
  int64_t end() const { return first.back() + count.back(); }
  void reverse() {
    for (size_t i = 0, j = first.size() - 1; i < j; ++i, --j) {
      std::swap(first[i], first[j]), std::swap(count[i], count[j]);
      std::swap_ranges(&weight[i * most], &weight[(i + 1) * most], &weight[j * most]);
    }
  }
};

typedef uint8_t Bytes __attribute__((vector_size(kRows)));

// Exchanges the rows and columns of a block: four times the two halves are shuffled like cards.
inline __attribute__((always_inline)) void transpose(Bytes (&block)[kRows]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    Bytes mixed[kRows];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kRows / 2; ++i) {
      const Bytes a = block[i], b = block[i + kRows / 2];
      mixed[2 * i] = __builtin_shuffle(a, b, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
      mixed[2 * i + 1] = __builtin_shuffle(a, b, Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    }
    std::memcpy(block, mixed, sizeof mixed);
  }
}

// Rows [0, rows) of a picture whose pixels have three channels, to planes of `size` pixels a row. `columns` counts from
// the picture's first pixel; `turned` holds kRows values for each of its bytes in a row.
SAN_VECTOR void resample_columns(const uint8_t* SAN_RESTRICT picture, int64_t rows, int64_t width, const Taps& columns,
                                 int64_t size, uint8_t* SAN_RESTRICT planes, int64_t pitch, int64_t plane,
                                 float* SAN_RESTRICT turned) {
  const int64_t bytes = 3 * width;
  for (int64_t row = 0; row < rows; row += kRows) {
    for (int64_t at = 0; at < bytes; at += kRows) {
      Bytes block[kRows]{};
      for (int64_t i = 0; i < kRows; ++i) {
        const uint8_t* from = picture + std::min(row + i, rows - 1) * bytes + at;
        if (at + kRows <= bytes)
          std::memcpy(&block[i], from, kRows);
        else
          std::memcpy(&block[i], from, bytes - at);
      }
      transpose(block);
      const uint8_t* values = reinterpret_cast<const uint8_t*>(block);
      for (int64_t i = 0; i < kRows * kRows; ++i) turned[at * kRows + i] = values[i];
    }
    for (int64_t x = 0; x < size; x += kRows) {
      float sums[3][kRows][kRows];  // channel, pixel, row
      for (int64_t i = 0; i < kRows; ++i) {
        const int64_t pixel = std::min(x + i, size - 1);
        const float *weight = &columns.weight[pixel * columns.most], *from = turned + columns.first[pixel] * 3 * kRows;
        float sum[3 * kRows];
        for (int64_t lane = 0; lane < 3 * kRows; ++lane) sum[lane] = 0.5f;  // to round
        for (int64_t k = 0; k < columns.count[pixel]; ++k, from += 3 * kRows)
          for (int64_t lane = 0; lane < 3 * kRows; ++lane) sum[lane] += weight[k] * from[lane];
        for (int64_t channel = 0; channel < 3; ++channel)
          for (int64_t lane = 0; lane < kRows; ++lane) sums[channel][i][lane] = sum[channel * kRows + lane];
      }
      for (int64_t channel = 0; channel < 3; ++channel) {
        Bytes block[kRows];
        uint8_t* values = reinterpret_cast<uint8_t*>(block);
        const float* from = sums[channel][0];
        for (int64_t i = 0; i < kRows * kRows; ++i) values[i] = static_cast<uint8_t>(static_cast<int>(from[i]));
        transpose(block);
        for (int64_t i = 0; i < kRows; ++i)
          std::memcpy(planes + channel * plane + (row + i) * pitch + x, &block[i], kRows);
      }
    }
  }
}

// One plane to one channel of the output, [size, size].
SAN_VECTOR void resample_rows(const uint8_t* SAN_RESTRICT plane, int64_t pitch, const Taps& rows, int64_t size,
                              float scale, float shift, float* SAN_RESTRICT out) {
  for (int64_t y = 0; y < size; ++y) {
    const float* weight = &rows.weight[y * rows.most];
    for (int64_t x = 0; x < size; x += kPixels) {
      const uint8_t* from = plane + rows.first[y] * pitch + x;
      float sum[kPixels];
      for (int64_t i = 0; i < kPixels; ++i) sum[i] = 0.5f;
      for (int64_t k = 0; k < rows.count[y]; ++k, from += pitch)
        for (int64_t i = 0; i < kPixels; ++i) sum[i] += weight[k] * from[i];
      for (int64_t i = 0; i < kPixels; ++i) sum[i] = static_cast<float>(static_cast<int>(sum[i])) * scale + shift;
      std::memcpy(out + y * size + x, sum, std::min(kPixels, size - x) * sizeof(float));
    }
  }
}

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A row of `windows` in schemas.py.
struct Window {
  int64_t extent[2], origin[2], length[2], offset[2], mirror;
};

struct Scratch {
  std::vector<uint8_t> planes;
  std::vector<float> turned;
};

void resample_one(const Tensor& image, const Window& window, int64_t size, const float* scale, const float* shift,
                  float* out, Scratch& scratch) {
  STD_TORCH_CHECK(image.dim() == 3 && image.size(2) == 3 && image.scalar_type() == ScalarType::Byte,
                  "images must be uint8 [height, width, 3]");
  const Tensor picture = torch::stable::contiguous(image);
  std::array<Taps, 2> taps = {Taps(window.extent[0], window.length[0], window.offset[0], size),
                              Taps(window.extent[1], window.length[1], window.offset[1], size)};
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t begin = window.origin[axis], end = begin + image.size(axis);
    STD_TORCH_CHECK(begin <= taps[axis].begin() && taps[axis].end() <= end, "a square needs pixels ",
                    taps[axis].begin(), " to ", taps[axis].end(), ", but the image holds ", begin, " to ", end);
  }
  auto& [rows, columns] = taps;
  const int64_t width = image.size(1), first_row = rows.begin(), count = rows.end() - first_row;
  const int64_t pitch = round_up(size, kPixels), plane = round_up(count, kRows) * pitch;
  for (int64_t& first : rows.first) first -= first_row;
  for (int64_t& first : columns.first) first -= window.origin[1];
  if (window.mirror != 0) columns.reverse();
  scratch.planes.resize(3 * plane), scratch.turned.resize(round_up(3 * width, kRows) * kRows);
  const uint8_t* from = picture.const_data_ptr<uint8_t>() + (first_row - window.origin[0]) * 3 * width;
  resample_columns(from, count, width, columns, size, scratch.planes.data(), pitch, plane, scratch.turned.data());
  for (int64_t channel = 0; channel < 3; ++channel) {
    resample_rows(scratch.planes.data() + channel * plane, pitch, rows, size, scale[channel], shift[channel],
                  out + channel * size * size);
  }
}

void resample(const std::vector<Tensor>& images, const Tensor& windows, const Tensor& scale, const Tensor& shift,
              Tensor out) {
  const int64_t N = images.size(), size = out.size(2);
  STD_TORCH_CHECK(out.dim() == 4 && out.size(0) == N && out.size(1) == 3 && out.size(3) == size && size > 0 &&
                      out.is_contiguous() && out.scalar_type() == ScalarType::Float,
                  "out must be float32 [", N, ", 3, size, size] and contiguous");
  STD_TORCH_CHECK(windows.dim() == 2 && windows.size(0) == N && windows.size(1) == 9 && windows.is_contiguous() &&
                      windows.scalar_type() == ScalarType::Long,
                  "windows must be int64 [", N, ", 9] and contiguous");
  for (const Tensor* x : {&scale, &shift}) {
    STD_TORCH_CHECK(x->numel() == 3 && x->is_contiguous() && x->scalar_type() == ScalarType::Float,
                    "scale and shift must be float32 [3] and contiguous");
  }
  Scratch scratch;
  for (int64_t n = 0; n < N; ++n) {
    Window window;
    std::memcpy(&window, windows.const_data_ptr<int64_t>() + 9 * n, sizeof window);
    for (int axis = 0; axis < 2; ++axis) {
      STD_TORCH_CHECK(
          window.extent[axis] > 0 && window.offset[axis] >= 0 && window.offset[axis] + size <= window.length[axis],
          "window ", n, " does not show a square of ", size, " pixels");
    }
    resample_one(images[n], window, size, scale.const_data_ptr<float>(), shift.const_data_ptr<float>(),
                 out.mutable_data_ptr<float>() + n * 3 * size * size, scratch);
  }
}

}  // namespace
}  // namespace san::cpu

STABLE_TORCH_LIBRARY_IMPL(san, CPU, m) { m.impl("resample", TORCH_BOX(&san::cpu::resample)); }
