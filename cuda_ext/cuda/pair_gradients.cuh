// Gradients of center, around and shift. A `Source` recomputes the gradient of a1 for each pair.
//
// The same kernel runs twice: for pixels of center, whose gradients are sums over the footprint, and for padded pixels
// of around, whose gradients are sums over the pixels of center whose footprints contain them. Each sum stays in the
// registers of one warp, without atomics. fold_kernel adds the gradients of reflected pixels.
//
// Predicted for SAN10's stage 2 at batch 32 (4.9 million pairs) on an H100, TF32, 3 KB of shared memory for each warp,
// all limited by instruction issue. pair_covariance: 9 mma for 16 pairs, 145 instructions for center and 190 for
// around; reads and writes 40 MB; 0.048 and 0.062 ms. pair_weights: 14 mma, 205 and 245 instructions; reads another 157
// MB of gz; 0.068 and 0.081 ms.
#pragma once
#include "pairs.cuh"

namespace san::cuda {
namespace {

// Sums [KD, 4] over all pixels of the block, in a fixed order.
template <int KD, class T, int N>
__device__ __forceinline__ void sum_rows(const Team& mine, T* shared, const T (&sums)[N], T* out) {
  SAN_UNROLL
  for (int n = 0; n < 2 * KD; ++n) {
    T sum = sums[n / 2 * 4 + n % 2] + sums[n / 2 * 4 + n % 2 + 2];
    for (int bits = 4; bits < kWarp; bits *= 2) sum += __shfl_xor_sync(~0u, sum, bits);
    if (mine.member == 0 && mine.row == 0) shared[mine.team * 8 * KD + n / 2 * 8 + mine.pair + n % 2] = sum;
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < 8 * KD; channel += kThreads) {
    T sum = 0;
    for (int team = 0; team < kWarps / mine.split; ++team) sum += shared[team * 8 * KD + channel];
    out[channel] = sum;
  }
}

// Stores the gradients of a team's pixels in KD tiles of channels. `sums` are the gradients of the argument of a1's
// ReLU [KD, 4] and, with kProducts, of its products with the partners [KD, 4].
template <int KD, bool kProducts, bool kAround, int N, class T>
__device__ __forceinline__ void store_gradients(const Rows<T, kAround>& rows, const Team& mine, int first_tile,
                                                const T (&sums)[N], T* grad) {
  SAN_UNROLL
  for (int n = 0; n < 4 * KD; ++n) {
    const int channel = 8 * (first_tile + n / 4) + mine.pair + n % 2;
    const Pixel<kAround>& pixel = rows.pixels[n % 4 / 2];
    if (!pixel.exists || channel >= rows.p.d) continue;
    T value = kAround ? -sums[n] : sums[n];
    if constexpr (kProducts) value = channel < rows.p.products ? sums[4 * KD + n] : value;
    grad[int64_t(pixel.index) * rows.p.d + channel] = value;
  }
}

// Number of blocks per multiprocessor for which the compiler does not spill registers.
template <class F, bool kAround>
constexpr int resident_blocks(int tiles) {
  const bool is_accurate = sizeof(F) > 2 * sizeof(float);
  return tiles == 1 ? 3 : tiles == 3 && !(is_accurate && kAround) ? 2 : 1;
}

// Writes the gradient of center [pixels, d] or, with kAround, of the padded map around [padded pixels, d]. Without
// kAround, it also writes the partial sums to_shift [blocks, chunks * 8 KD]. A block computes one chunk of KD tiles of
// channels. With kWhole, one chunk holds all tiles.
template <class F, int KD, bool kWhole, bool kProducts, bool kAround, class Source, class T = typename F::Value>
__global__ void __launch_bounds__(kThreads, resident_blocks<F, kAround>(kWhole ? KD : 0))
    pair_gradient_kernel(Pairs<T> p, Source source, Plan plan, T* grad, T* to_shift) {
  T* shared = reinterpret_cast<T*>(shared_memory_base());
  const Job<kWhole> job(plan);
  const int chunk = job.chunk, first = chunk * KD;
  const Team mine(plan.split);
  Rows<T, kAround> rows(p, mine, int64_t(job.block) * plan.teams() + mine.team, shared);
  // Sums of the gradients of the argument of a1's ReLU [KD, 4] and, with kProducts, of its products with the partners
  // [KD, 4].
  T sums[(kProducts ? 8 : 4) * KD] = {};
  Offset offset;
  offset.advance(mine.member, p.kernel_size);
  for (; offset.position < p.positions(); offset.advance(plan.split, p.kernel_size)) {
    rows.move(mine, offset);
    if (kAround && !__any_sync(~0u, rows.is_pair[0] || rows.is_pair[1])) continue;
    T kept[kWhole ? KD : 1][4];
    if constexpr (kWhole) for_each_tile<KD>(KD, [&](int c) { rows.activate(c, kept[c]); });
    const auto activation = [&](int c, T(&a1)[4]) {
      if constexpr (kWhole) {
        SAN_UNROLL
        for (int n = 0; n < 4; ++n) a1[n] = kept[c][n];
      } else {
        rows.activate(c, a1);
      }
    };
    T g[KD][4] = {};
    source.template add<KD, kWhole ? KD : 0>(rows, mine, offset, chunk, activation, g);
    SAN_UNROLL
    for (int c = 0; c < KD; ++c) {
      if (!kWhole && first + c >= p.tiles) break;
      if constexpr (!kWhole) __syncwarp();  // else the compiler loads all tiles at once and spills registers
      T a1[4];
      activation(first + c, a1);
      SAN_UNROLL
      for (int n = 0; n < 4; ++n) {
        g[c][n] = a1[n] > 0 && rows.is_pair[n / 2] ? g[c][n] : T(0);
        sums[4 * c + n] += g[c][n];
      }
      if constexpr (kProducts) {
        T partner[4];
        rows.values(first + c, partner);
        SAN_UNROLL
        for (int n = 0; n < 4; ++n) sums[4 * (KD + c) + n] += g[c][n] * partner[n];
      }
    }
  }
  __syncthreads();
  sum_over_team(mine, shared, sums);
  if (mine.member == 0) store_gradients<KD, kProducts>(rows, mine, first, sums, grad);
  if constexpr (!kAround) {
    sum_rows<KD>(mine, shared, sums, to_shift + (int64_t(job.block) * plan.chunks + chunk) * 8 * KD);
  }
}

struct PairGradients {
  Tensor center, around, shift;

  PairGradients(const Tensor& center, const Tensor& shift)
      : center(torch::stable::new_empty(center, center.sizes())),
        around(torch::stable::new_empty(center, center.sizes())),
        shift(torch::stable::new_zeros(shift, shift.sizes())) {}
};

// Writes the gradients of a non-empty problem. With kWhole, KD tiles cover all channels. With kProducts, some channels
// are products instead of differences.
template <int KD, bool kWhole, bool kProducts, class F, class Source>
void pair_gradients(PairWork<F>& work, const Footprint& f, const Source& source, PairGradients& out) {
  using T = typename F::Value;
  const Pairs<T>& p = work.pairs;
  const int chunks = (p.tiles + KD - 1) / KD;
  const Plan plan(p, (p.pixels() + 15) / 16, 1, chunks), padded_plan(p, (p.padded_pixels() + 15) / 16, 1, chunks);
  const auto bytes = [&](const Plan& some) { return work.shared_bytes(some, Rows<T, false>::bytes(p), 8 * KD); };
  const int64_t channels = int64_t(chunks) * 8 * KD;
  T *to_shift = work.take(plan.blocks * channels), *padded = work.take(p.padded_pixels() * p.d);
  SAN_LAUNCH_SHARED((pair_gradient_kernel<F, KD, kWhole, kProducts, false, Source>), plan.blocks * chunks, kThreads,
                    bytes(plan), work.stream(), p, source, plan, out.center.template mutable_data_ptr<T>(), to_shift);
  const Part<T> part{out.shift.template mutable_data_ptr<T>(), 1, p.d, static_cast<int>(channels), 0, channels};
  sum_blocks(to_shift, plan.blocks, channels, part, work.stream());
  SAN_LAUNCH_SHARED((pair_gradient_kernel<F, KD, kWhole, kProducts, true, Source>), padded_plan.blocks * chunks,
                    kThreads, bytes(padded_plan), work.stream(), p, source, padded_plan, padded,
                    static_cast<T*>(nullptr));
  const int64_t elements = p.pixels() * p.d;
  SAN_LAUNCH(fold_kernel<T>, blocks_for(elements), kThreads, work.stream(), padded, f, p.d, elements,
             out.around.template mutable_data_ptr<T>());
}

}  // namespace
}  // namespace san::cuda
