// Matrix products of one warp with all operands in registers.
//
// Every product is sum [16, 8] += left [16, 8] right [8, 8]. Lane 4 * g + t holds
//   of sum:    (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
//   of left:   row g and row g + 8, each at 2t and 2t + 1 along the depth
//   of right:  column g, at 2t and 2t + 1 along the depth
// Tensor cores expect t and t + 4 along the depth. Both factors use the order above instead, which changes no sum. So a
// sum has the layout of a left factor and can enter the next product without shuffles or shared memory.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "launch.h"

namespace san::cuda {

constexpr int kWarp = 32;

#ifndef SAN_SHIM
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// N adjacent elements that are loaded and stored in one instruction.
template <int N, class T>
struct alignas(N * sizeof(T)) Pack {
  T data[N];

  static __device__ __forceinline__ Pack load(const T* from) { return *reinterpret_cast<const Pack*>(from); }
  __device__ __forceinline__ void store(T* to) const { *reinterpret_cast<Pack*>(to) = *this; }
};

// Rounds to TF32: to nearest, halves away from zero. This is cvt.rna.tf32.f32 without its last instruction, which
// clears the lower bits, because tensor cores ignore them. Infinity and NaN stay as they are.
__device__ __forceinline__ uint32_t rounded_to_tf32(float x) {
  const uint32_t bits = __float_as_uint(x);
  return std::abs(x) < std::numeric_limits<float>::infinity() ? bits + 0x1000u : bits;
}

// Two adjacent elements along the depth of a factor, converted for the product: a lane's part of a right factor, or of
// one of the two rows of a left factor.
//
// Elements are rounded to TF32, whose 10 bits of mantissa hold float16 and bfloat16 without error. With kAccurate, an
// element is split into two TF32 numbers, x = big + small, and a product is big * big + big * small + small * big. Its
// error is about that of float arithmetic (this is known as 3xTF32).
template <bool kAccurate>
struct Operand;

template <>
struct Operand<false> {
  uint32_t data[2];

  Operand() = default;
  __device__ __forceinline__ Operand(float first, float second)
      : data{rounded_to_tf32(first), rounded_to_tf32(second)} {}

  // For values that `rectified` returned: as above, in one instruction on newer GPUs. NaN has the largest bits.
  static __device__ __forceinline__ Operand of_rectified(float first, float second) {
    Operand operand;
    operand.data[0] = std::min(__float_as_uint(first) + 0x1000u, 0x7fffffffu);
    operand.data[1] = std::min(__float_as_uint(second) + 0x1000u, 0x7fffffffu);
    return operand;
  }
  // For values that `rounded` returned.
  static __device__ __forceinline__ Operand of_rounded(float first, float second) {
    Operand operand;
    operand.data[0] = __float_as_uint(first), operand.data[1] = __float_as_uint(second);
    return operand;
  }
  static __device__ __forceinline__ float rounded(float x) { return __uint_as_float(rounded_to_tf32(x) & 0xffffe000u); }
};

template <>
struct Operand<true> {
  uint32_t big[2], small[2];

  Operand() = default;
  __device__ __forceinline__ Operand(float first, float second) {
    const float values[2] = {first, second};
    SAN_UNROLL
    for (int k = 0; k < 2; ++k) {
      big[k] = rounded_to_tf32(values[k]) & 0xffffe000u;
      small[k] = __float_as_uint(values[k] - __uint_as_float(big[k]));
    }
  }

  static __device__ __forceinline__ Operand of_rectified(float first, float second) { return {first, second}; }
  static __device__ __forceinline__ Operand of_rounded(float first, float second) { return {first, second}; }
  static __device__ __forceinline__ float rounded(float x) { return x; }
};

// sum += left right, where `upper` and `lower` are the left factor's rows g and g + 8.
__device__ __forceinline__ void multiply(float (&sum)[4], const Operand<false>& upper, const Operand<false>& lower,
                                         const Operand<false>& right) {
  mma_m16n8k8_tf32(sum, {upper.data[0], lower.data[0], upper.data[1], lower.data[1]}, right.data);
}

__device__ __forceinline__ void multiply(float (&sum)[4], const Operand<true>& upper, const Operand<true>& lower,
                                         const Operand<true>& right) {
  const uint32_t big[4] = {upper.big[0], lower.big[0], upper.big[1], lower.big[1]};
  mma_m16n8k8_tf32(sum, {upper.small[0], lower.small[0], upper.small[1], lower.small[1]}, right.big);
  mma_m16n8k8_tf32(sum, big, right.small);
  mma_m16n8k8_tf32(sum, big, right.big);
}

// A lane's operands for tiles of right factors, which are loaded when they are needed, 8 bytes at a time.
template <class F>
struct Loaded {
  const F* first;  // of the first tile

  __device__ __forceinline__ F operator[](int tile) const {
    struct Words {
      Pack<2, uint32_t> pairs[sizeof(F) / 8];
    } words;
    SAN_UNROLL
    for (size_t k = 0; k < sizeof(F) / 8; ++k) {
      words.pairs[k] = Pack<2, uint32_t>::load(reinterpret_cast<const uint32_t*>(first + tile * kWarp) + 2 * k);
    }
    return std::bit_cast<F>(words);
  }
};

// The same for N tiles, in registers.
template <class F, int N>
struct Kept {
  F data[N];

  __device__ __forceinline__ explicit Kept(const Loaded<F>& loaded) {
    SAN_UNROLL
    for (int tile = 0; tile < N; ++tile) data[tile] = loaded[tile];
  }
  __device__ __forceinline__ const F& operator[](int tile) const { return data[tile]; }
};

// sum += left right, for N tiles of the right factor.
template <int N, class F, class Right>
__device__ __forceinline__ void multiply_all(float (&sum)[N][4], const F& upper, const F& lower, const Right& right,
                                             int first = 0) {
  SAN_UNROLL
  for (int n = 0; n < N; ++n) multiply(sum[n], upper, lower, right[first + n]);
}
template <int N, class F>
__device__ __forceinline__ void multiply_all(float (&sum)[N][4], const F& upper, const F& lower, const F* right) {
  multiply_all(sum, upper, lower, Loaded<F>{right});
}

// max(x, 0), where NaN stays NaN, and -0 becomes 0.
__device__ __forceinline__ float rectified(float x) {
#ifdef SAN_SHIM
  return x <= 0 ? 0 : x;
#else
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
  return result;
#endif
}

__device__ __forceinline__ float power_of_two(float x) {
#ifdef SAN_SHIM
  return std::exp2(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

}  // namespace san::cuda
