// What tensor cores do with one warp's fragments, in plain C++: lane 4 * g + t holds the elements that the PTX manual
// gives it. The accumulation order of real tensor cores is not known; all else is as there.
#pragma once
#include <cstdint>
#include <cstring>

namespace san::shim {

// Shows `value` to the warp; each lane then calls read(lane) for what another one showed.
template <class Value, class Visit>
void with_warp(const Value& value, const Visit& visit) {
  static_assert(sizeof(Value) <= sizeof(Fiber::exchanged));
  Scheduler& scheduler = Scheduler::running();
  std::memcpy(scheduler.self().exchanged, &value, sizeof(Value));
  scheduler.wait(State::kAtWarpBarrier);
  visit([&](int lane) {
    Value shown;
    std::memcpy(&shown, scheduler.neighbour(lane).exchanged, sizeof(Value));
    return shown;
  });
  scheduler.wait(State::kAtWarpBarrier);
}

inline float as_tf32(uint32_t bits) { return __uint_as_float(bits & 0xffffe000u); }

}  // namespace san::shim

namespace san::cuda {

// c [16, 8] += a [16, 8] b [8, 8] in TF32.
inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Shown {
    uint32_t a[4], b[2];
  };
  const Shown mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const int g = shim::Scheduler::running().lane() / 4, t = shim::Scheduler::running().lane() % 4;
  shim::with_warp(mine, [&](const auto& read) {
    for (int k = 0; k < 8; ++k) {
      const Shown left = read(4 * g + k % 4);
      for (int column = 0; column < 2; ++column) {
        const float right = shim::as_tf32(read(4 * (2 * t + column) + k % 4).b[k / 4]);
        c[column] += shim::as_tf32(left.a[k / 4 * 2]) * right;
        c[2 + column] += shim::as_tf32(left.a[k / 4 * 2 + 1]) * right;
      }
    }
  });
}

// c [8, 8] += a [8, 4] b [4, 8] in float64.
inline void mma_m8n8k4_f64(double& c0, double& c1, double a, double b) {
  struct Shown {
    double a, b;
  };
  const int g = shim::Scheduler::running().lane() / 4, t = shim::Scheduler::running().lane() % 4;
  shim::with_warp(Shown{a, b}, [&](const auto& read) {
    for (int k = 0; k < 4; ++k) {
      const double left = read(4 * g + k).a;
      c0 += left * read(4 * (2 * t) + k).b, c1 += left * read(4 * (2 * t + 1) + k).b;
    }
  });
}

}  // namespace san::cuda
