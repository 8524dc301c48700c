// What tensor cores do with one warp's fragments, in plain C++: lane 4 * g + t holds the elements that the PTX manual
// gives it. Each product is exact, and its sum with c is rounded towards zero, as on GPUs.
#pragma once
#include <cstdint>
#include <cstring>

namespace san::shim {

// Tensor cores ignore the lower bits.
inline double as_tf32(uint32_t bits) { return __uint_as_float(bits & 0xffffe000u); }

inline float rounded_towards_zero(double x) {
  const float nearest = static_cast<float>(x);
  return std::abs(static_cast<double>(nearest)) > std::abs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

}  // namespace san::shim

namespace san::cuda {

// c [16, 8] += a [16, 8] b [8, 8] in TF32.
inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Shown {
    uint32_t a[4], b[2];
  };
  const Shown own{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const int g = shim::Scheduler::running().lane() / 4, t = shim::Scheduler::running().lane() % 4;
  shim::with_warp(own, [&](const auto& read) {
    double sums[4] = {c[0], c[1], c[2], c[3]};
    for (int k = 0; k < 8; ++k) {
      const Shown left = read(4 * g + k % 4);
      for (int n = 0; n < 4; ++n) {
        const double right = shim::as_tf32(read(4 * (2 * t + n % 2) + k % 4).b[k / 4]);
        sums[n] += shim::as_tf32(left.a[k / 4 * 2 + n / 2]) * right;
      }
    }
    for (int n = 0; n < 4; ++n) c[n] = shim::rounded_towards_zero(sums[n]);
  });
}

}  // namespace san::cuda
