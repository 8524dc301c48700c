// The most a core can compute: a loop of multiply-adds on registers alone, none of which waits for another.
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int kBytes = 64, kSums = 24;
#else
constexpr int kBytes = 32, kSums = 12;
#endif
typedef float Vector __attribute__((vector_size(kBytes)));

static float run(int64_t steps) {
  Vector sum[kSums]{}, factor{}, more{};
  factor += 0.5f, more += 1.0f;
  // Values that the compiler does not know, nor that they are the same.
  asm("" : "+x"(factor), "+x"(more));
#pragma GCC unroll 24
  for (Vector& x : sum) asm("" : "+x"(x));
  for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sum[i] = sum[i] * factor + more;
  float total = 0;
  for (const Vector& x : sum) total += x[0];
  return total;
}

// Runs so many steps on each thread; returned are the floating-point operations of all.
extern "C" double compute(int64_t steps, int threads) {
  std::vector<std::thread> pool;
  std::vector<float> results(threads);
  for (int at = 0; at < threads; ++at) pool.emplace_back([&, at] { results[at] = run(steps); });
  for (std::thread& thread : pool) thread.join();
  return 2.0 * kSums * (kBytes / sizeof(float)) * double(steps) * threads;
}
