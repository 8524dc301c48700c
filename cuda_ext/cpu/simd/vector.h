// Vectors of the instruction set that a source is compiled for, and a matrix product.
//
// Sources in this folder are compiled for each instruction set (cuda_ext/build.py), in separate namespaces, of which
// each call uses one (`choose` in bands.h). They use only memcpy of the standard library, and all inline functions have
// internal linkage or are always inlined. Otherwise the linker could keep a copy that an older CPU cannot run.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define SAN_VECTOR_BYTES 64
#define SAN_BLOCK_ROWS 12  // 24 of 32 registers hold sums
#else
#define SAN_VECTOR_BYTES 32
#define SAN_BLOCK_ROWS 6  // 12 of 16
#endif
#define SAN_INLINE static inline __attribute__((always_inline))

namespace san::cpu {
namespace {

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(SAN_VECTOR_BYTES)));
  typedef T unaligned __attribute__((vector_size(SAN_VECTOR_BYTES), aligned(sizeof(T)), may_alias));
};
template <class T>
using Vector = typename VectorOf<T>::type;
template <class T>
constexpr int64_t kLanes = SAN_VECTOR_BYTES / sizeof(T);

template <class T>
SAN_INLINE Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(from);
}
template <class T>
SAN_INLINE void store(T* to, Vector<T> value) {
  *reinterpret_cast<typename VectorOf<T>::unaligned*>(to) = value;
}
template <class T>
SAN_INLINE Vector<T> broadcast(T value) {
  return value - Vector<T>{};  // x - 0 is x; x + 0 is not for x = -0, so it would cost an instruction
}
// Loads the first `count` values, at most one vector. The other lanes are 0.
template <class T>
SAN_INLINE Vector<T> load_some(const T* from, int64_t count) {
  if (count >= kLanes<T>) return load(from);
  Vector<T> value{};
  memcpy(&value, from, count * sizeof(T));
  return value;
}
template <class T>
SAN_INLINE void store_some(T* to, Vector<T> value, int64_t count) {
  if (count >= kLanes<T>)
    store(to, value);
  else
    memcpy(to, &value, count * sizeof(T));
}
// Calls visit(offset, number of values) for all vectors of a row of `count` values. Only the last vector can be
// partial. For the others the number is a constant, so the compiler removes the check for a partial vector in load_some
// and store_some.
template <class T, class Visit>
SAN_INLINE void for_each_vector_of(int64_t count, const Visit& visit) {
  const int64_t whole = count / kLanes<T> * kLanes<T>;
  for (int64_t t = 0; t < whole; t += kLanes<T>) visit(t, kLanes<T>);
  if (whole < count) visit(whole, count - whole);
}
// The sum of a vector's lanes.
template <class V>
SAN_INLINE auto total(V x) {
  auto sum = x[0];
  for (int lane = 1; lane < int(sizeof(x) / sizeof(sum)); ++lane) sum += x[lane];
  return sum;
}
// `size` rounded up to a multiple of the lanes.
template <class T>
SAN_INLINE int64_t whole_vectors(int64_t size) {
  return (size + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}
// max(0, x), where NaN stays NaN.
template <class V>
SAN_INLINE V relu(V x) {
  const V zero{};
  return zero > x ? zero : x;
}
// x where `by` is positive, else 0: the derivative of relu.
template <class V>
SAN_INLINE V where_positive(V by, V x) {
  const V zero{};
  return by > zero ? x : zero;
}
template <class V>
SAN_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}

// exp for arguments up to 88; exp(-87) below -87.
SAN_INLINE Vector<float> exp(Vector<float> x) {
  typedef int32_t Integers __attribute__((vector_size(SAN_VECTOR_BYTES)));
  const Vector<float> low = broadcast(-87.0f), rounder = broadcast(12582912.0f);  // 1.5 * 2^23
  const Vector<float> kept = x < low ? low : x;
  const Vector<float> shifted = kept * 1.44269504f + rounder;
  const Vector<float> whole = shifted - rounder;
  Vector<float> rest = kept - whole * 0.693359375f;
  rest = rest + whole * 2.12194440e-4f;
  Vector<float> p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  const Integers power = ((Integers)shifted + (127 - 0x4B400000)) << 23;
  return p * (Vector<float>)power;
}
SAN_INLINE Vector<double> exp(Vector<double> x) {
  for (int64_t lane = 0; lane < kLanes<double>; ++lane) x[lane] = __builtin_exp(x[lane]);
  return x;
}
// term(0) + ... + term(count - 1), in four independent sums, which the processor computes in parallel.
template <class V, class Term>
SAN_INLINE V sum_of(int64_t count, const Term& term) {
  V sum[4]{};
  int64_t n = 0;
  for (; n + 4 <= count; n += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[i] += term(n + i);
  for (; n < count; ++n) sum[0] += term(n);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The largest of term(0) ... term(count - 1), computed in the same way.
template <class V, class Term>
SAN_INLINE V largest_of(int64_t count, const Term& term) {
  V top[4] = {term(0), term(0), term(0), term(0)};
  int64_t n = 0;
  for (; n + 4 <= count; n += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) top[i] = larger(top[i], term(n + i));
  for (; n < count; ++n) top[0] = larger(top[0], term(n));
  return larger(larger(top[0], top[1]), larger(top[2], top[3]));
}

enum class Start { zero, bias, sum };  // initial value of a product: 0, one value per row, or the values in memory
enum class Finish { store, relu };

// One block of C that stays in registers.
template <Start start, Finish finish, int rows, int vectors, class T>
SAN_INLINE void block(int64_t depth, const T* a, int64_t a_row, int64_t a_depth, const T* b, int64_t b_pitch,
                      const T* bias, T* c, int64_t c_pitch) {
  constexpr int64_t L = kLanes<T>;
  Vector<T> sum[rows][vectors];
#pragma GCC unroll 32
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      if (start == Start::zero) sum[i][v] = Vector<T>{};
      if (start == Start::bias) sum[i][v] = broadcast(bias[i]);
      if (start == Start::sum) sum[i][v] = load(c + i * c_pitch + v * L);
    }
  // On x86, one pointer and its addressing modes reach four rows of A. With a pointer or an offset for each row,
  // registers would be spilled and loaded again for every element. The empty asm statement keeps the compiler from
  // undoing this.
  constexpr int groups = (rows + 3) / 4;
  const int64_t step = a_row * sizeof(T);
  const char* left[groups];
#pragma GCC unroll 8
  for (int g = 0; g < groups; ++g) {
    left[g] = reinterpret_cast<const char*>(a + 4 * g * a_row);
    asm("" : "+r"(left[g]));
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<T> right[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) right[v] = load(b + k * b_pitch + v * L);
#pragma GCC unroll 32
    for (int i = 0; i < rows; ++i) {
      const Vector<T> x = broadcast(*reinterpret_cast<const T*>(left[i / 4] + i % 4 * step));
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[i][v] += x * right[v];
    }
#pragma GCC unroll 8
    for (int g = 0; g < groups; ++g) left[g] += a_depth * sizeof(T);
  }
#pragma GCC unroll 32
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
      store(c + i * c_pitch + v * L, finish == Finish::relu ? relu(sum[i][v]) : sum[i][v]);
}

template <Start start, Finish finish, int rows, int vectors, class T>
SAN_INLINE void rows_of(int64_t& i, int64_t end, int64_t depth, const T* a, int64_t a_row, int64_t a_depth, const T* b,
                        int64_t b_pitch, const T* bias, T* c, int64_t c_pitch) {
  for (; i + rows <= end; i += rows)
    block<start, finish, rows, vectors>(depth, a + i * a_row, a_row, a_depth, b, b_pitch, bias + i, c + i * c_pitch,
                                        c_pitch);
}

template <Start start, Finish finish, int vectors, class T>
SAN_INLINE void columns_of(int64_t rows, int64_t depth, const T* a, int64_t a_row, int64_t a_depth, const T* b,
                           int64_t b_pitch, const T* bias, T* c, int64_t c_pitch) {
  int64_t i = 0;
  constexpr int most = 2 * SAN_BLOCK_ROWS / vectors;
  rows_of<start, finish, most, vectors>(i, rows, depth, a, a_row, a_depth, b, b_pitch, bias, c, c_pitch);
  rows_of<start, finish, 4, vectors>(i, rows, depth, a, a_row, a_depth, b, b_pitch, bias, c, c_pitch);
  rows_of<start, finish, 2, vectors>(i, rows, depth, a, a_row, a_depth, b, b_pitch, bias, c, c_pitch);
  rows_of<start, finish, 1, vectors>(i, rows, depth, a, a_row, a_depth, b, b_pitch, bias, c, c_pitch);
}

// C [rows, columns] = start + A [rows, depth] B [depth, columns]. Element (i, k) of A is a[i * a_row + k * a_depth], so
// A may be transposed. `columns` is a multiple of the lanes.
template <Start start, Finish finish = Finish::store, class T>
__attribute__((noinline)) void multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t a_row,
                                        int64_t a_depth, const T* b, int64_t b_pitch, const T* bias, T* c,
                                        int64_t c_pitch) {
  constexpr int64_t L = kLanes<T>;
  int64_t j = 0;
#if defined(__AVX512F__)
  for (; j + 4 * L <= columns; j += 4 * L)
    columns_of<start, finish, 4>(rows, depth, a, a_row, a_depth, b + j, b_pitch, bias, c + j, c_pitch);
#endif
  for (; j + 2 * L <= columns; j += 2 * L)
    columns_of<start, finish, 2>(rows, depth, a, a_row, a_depth, b + j, b_pitch, bias, c + j, c_pitch);
  if (j < columns) columns_of<start, finish, 1>(rows, depth, a, a_row, a_depth, b + j, b_pitch, bias, c + j, c_pitch);
}

}  // namespace
}  // namespace san::cpu
