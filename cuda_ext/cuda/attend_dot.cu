// attend_dot, forward and backward: scalar attention, whose weights are never stored. Definition:
// san/ops/fused_reference.py.
//
// A team of one, two or four adjacent lanes computes a pixel in one weight channel. The maps are copied, so that each
// lane loads its channels at once, borders are reflected, and logits are to base 2. Backward computes the weights
// again: from the side of pixels, for the gradients of phi and the scores, and from the side of their partners, for
// those of psi and beta. There are no atomics.
//
// Predicted for the copies in SAN10's stage 2 at batch 32 on an H100: forward moves 260 MB, 0.09 ms; backward, with the
// sums over borders, 430 MB, 0.15 ms.
#include <tuple>

#include "maps.cuh"
#include "window.cuh"

namespace san::cuda {
namespace {

constexpr int kMostOwn = 16, kMostLanes = 4;  // channels of a lane, lanes of a team
constexpr float kLog2E = 1.4426950408889634f;

// Maps are [pixels, G, channels of a team]; psi and beta have borders.
struct Dots : Grid {
  int G, shares, value_shares;
  const float *phi, *psi, *beta, *grad;
  float* scores;  // [pixels, G, pitch()]: those of rows, those of columns, the logarithm of the softmax's sum, and
                  // sum_j w grad_w, which attend_dot_center_kernel stores

  SAN_HOST_DEVICE int pitch() const { return 2 * kernel_size + 2; }
  SAN_HOST_DEVICE int keys() const { return G * shares; }
  SAN_HOST_DEVICE int values() const { return G * value_shares; }
  SAN_HOST_DEVICE int size() const { return height * width; }
  // A pixel's first place in [images, G, 2 kernel_size, size()].
  SAN_HOST_DEVICE int64_t first_score(int pixel, int g) const {
    const int image = pixel / size();
    return (int64_t(image) * G + g) * 2 * kernel_size * size() + pixel - image * size();
  }
  // The place of the number near a pixel's largest logit in [images, 2, G, size()]. That of the reciprocal is G size()
  // further.
  SAN_HOST_DEVICE int64_t softmax(int pixel, int g) const {
    const int image = pixel / size();
    return (int64_t(image) * 2 * G + g) * size() + pixel - image * size();
  }
};

// Copies a map [images, height, width, G * shares], where channel s * G + g has weight channel g, with reflected
// borders.
struct TeamMap {
  const float* from;
  Footprint f;
  int G, shares, width;  // `width`: channels of a team, at least `shares`
  float factor;
  int64_t elements;  // pixels times G
  float* to;

  __device__ __forceinline__ void write(int64_t index) const {
    const int across = static_cast<int>(f.padded_width()), down = static_cast<int>(f.padded_height());
    const int team = static_cast<int>(index), pixel = team / G, line = pixel / across, image = line / down;
    const int64_t h = reflect(line - image * down - f.reach(), f.height);
    const int64_t w = reflect(pixel - line * across - f.reach(), f.width);
    const float* found = from + ((image * f.height + h) * f.width + w) * G * shares + team - pixel * G;
    SAN_ROLLED
    for (int first = 0; first < width; first += 4) {
      Pack<4, float> four;
      SAN_UNROLL
      for (int n = 0; n < 4; ++n) four.data[n] = first + n < shares ? factor * found[(first + n) * G] : 0;
      four.store(to + index * width + first);
    }
  }
};

// Copies scores [images, G, 2 kernel_size, pixels of an image] to those of Dots, and from `softmax`, if it is not null,
// the logarithms.
struct TeamScores {
  Dots p;
  const float *from, *softmax;
  int64_t elements;  // pixels times G

  __device__ __forceinline__ void write(int64_t index) const {
    const int team = static_cast<int>(index), pixel = team / p.G, g = team - pixel * p.G, rows = 2 * p.kernel_size;
    const float* found = from + p.first_score(pixel, g);
    float* to = p.scores + index * p.pitch();
    SAN_ROLLED
    for (int row = 0; row < rows; ++row) to[row] = kLog2E * found[int64_t(row) * p.size()];
    if (softmax == nullptr) return;
    const float* most = softmax + p.softmax(pixel, g);
    to[rows] = kLog2E * most[0] - std::log2(most[int64_t(p.G) * p.size()]);
  }
};

// A lane's channels of one pixel.
template <int kOwn, int kLanes>
struct Shares {
  float data[kOwn];

  Shares() = default;
  __device__ __forceinline__ explicit Shares(const float* from) {
    SAN_UNROLL
    for (int n = 0; n < kOwn; n += 4) {
      const auto four = Pack<4, float>::load(from + n);
      SAN_UNROLL
      for (int m = 0; m < 4; ++m) data[n + m] = four.data[m];
    }
  }
  // The dot product over the lanes of the team.
  __device__ __forceinline__ float times(const Shares& other) const {
    float sum = 0;
    SAN_UNROLL
    for (int n = 0; n < kOwn; ++n) sum += data[n] * other.data[n];
    SAN_UNROLL
    for (int bits = 1; bits < kLanes; bits *= 2) sum += __shfl_xor_sync(~0u, sum, bits);
    return sum;
  }
  __device__ __forceinline__ void add(float factor, const Shares& other) {
    SAN_UNROLL
    for (int n = 0; n < kOwn; ++n) data[n] += factor * other.data[n];
  }
};

// The pixel and the weight channel of a lane's team: of a map or, with kAround, of one with a border. All lanes of a
// warp run, because they exchange sums; those of teams that do not exist store nothing.
template <int kOwn, int kLanes, bool kAround>
struct DotTeam {
  using Own = Shares<kOwn, kLanes>;

  const Dots& p;
  int lane, g;
  Pixel<kAround> pixel;

  __device__ __forceinline__ explicit DotTeam(const Dots& p) : p(p) {
    const unsigned thread = blockIdx.x * kThreads + threadIdx.x, team = thread / kLanes;
    lane = thread % kLanes, g = team % p.G, pixel = Pixel<kAround>(p, team / p.G);
  }

  SAN_HOST_DEVICE int step() const { return p.G * kOwn * kLanes; }  // between adjacent pixels
  __device__ __forceinline__ const float* at(const float* map, int index) const {
    return row_at(map + (g * kLanes + lane) * kOwn, index, step() * static_cast<int>(sizeof(float)));
  }
  __device__ __forceinline__ float* scores(int index) const { return p.scores + int64_t(index * p.G + g) * p.pitch(); }
  // Channel n of the lane in a map [pixels, G * shares], or null.
  __device__ __forceinline__ float* channel(float* map, int shares, int n) const {
    const int s = lane * kOwn + n;
    return pixel.exists && s < shares ? map + (int64_t(pixel.index) * shares + s) * p.G + g : nullptr;
  }
  __device__ __forceinline__ void store(const Own& own, float factor, float* map, int shares) const {
    SAN_UNROLL
    for (int n = 0; n < kOwn; ++n) {
      if (float* to = channel(map, shares, n)) *to = factor * own.data[n];
    }
  }
  // Calls visit(row, column, logit, keys and values of the partner) for the footprint of a pixel of the map.
  template <class Visit>
  __device__ __forceinline__ void for_each_partner(const Own& own, const Visit& visit) const {
    const int k = p.kernel_size;
    const float* found = scores(pixel.index);
    for (int row = 0; row < k; ++row) {
      const int first = pixel.partners + row * p.padded_width();
      const float *keys = at(p.psi, first), *values = at(p.beta, first), of_row = found[row];
      SAN_ROLLED
      for (int column = 0; column < k; ++column, keys += step(), values += step()) {
        const Own key(keys);
        visit(row, column, own.times(key) + (of_row + found[k + column]), key, Own(values));
      }
    }
  }
};

// y, with a softmax whose reference is raised only if a logit exceeds it by far, because that changes all sums.
//
// Predicted for SAN10's stage 2 at batch 32 (8 heads of 8 channels, 56x56, k = 7) on an H100: reads 140 MB, writes 32
// MB; 629 M products; no shared memory; 0.07 ms, limited by instruction issue.
template <int kOwn, int kLanes>
__global__ void __launch_bounds__(kThreads, 2) attend_dot_kernel(Dots p, float* y, float* softmax) {
  using Own = Shares<kOwn, kLanes>;
  constexpr float kMostAbove = 6;  // powers of 2
  const DotTeam<kOwn, kLanes, false> team(p);
  Own sums{};
  float most = std::numeric_limits<float>::lowest(), sum = 0;
  const Own own(team.at(p.phi, team.pixel.index));
  team.for_each_partner(own, [&](int, int, float z, const Own&, const Own& values) {
    if (z > most + kMostAbove) {
      const float factor = power_of_two(most - z);
      most = z, sum *= factor;
      SAN_UNROLL
      for (int n = 0; n < kOwn; ++n) sums.data[n] *= factor;
    }
    const float power = power_of_two(z - most);
    sum += power, sums.add(power, values);
  });
  team.store(sums, 1 / sum, y, p.value_shares);
  if (team.lane > 0 || !team.pixel.exists) return;
  float* out = softmax + p.softmax(team.pixel.index, team.g);
  out[0] = most / kLog2E, out[int64_t(p.G) * p.size()] = 1 / sum;
}

// The gradients of phi and the scores.
//
// Predicted as above: reads 190 MB, writes 71 MB; 0.9 G products; 7 KB of shared memory; 0.08 ms, limited by
// instruction issue.
template <int kOwn, int kLanes>
__global__ void __launch_bounds__(kThreads, 2)
    attend_dot_center_kernel(Dots p, float* y, float* to_phi, float* to_scores) {
  using Own = Shares<kOwn, kLanes>;
  const DotTeam<kOwn, kLanes, false> team(p);
  const int k = p.kernel_size, index = team.pixel.index;
  float* of_columns = reinterpret_cast<float*>(shared_memory_base()) + threadIdx.x;  // [k, kThreads]
  for (int column = 0; column < k; ++column) of_columns[column * kThreads] = 0;
  const Own grad(team.at(p.grad, index));
  Own result{}, sums{};
  SAN_UNROLL
  for (int n = 0; n < kOwn; ++n) {
    if (const float* found = team.channel(y, p.value_shares, n)) result.data[n] = *found;
  }
  float *scores = team.scores(index), *first = to_scores + p.first_score(index, team.g);
  const float most = scores[2 * k], dot = grad.times(result);
  float of_row = 0;
  const bool is_writer = team.lane == 0 && team.pixel.exists;
  const Own own(team.at(p.phi, index));
  team.for_each_partner(own, [&](int row, int column, float z, const Own& keys, const Own& values) {
    const float of_z = power_of_two(z - most) * (grad.times(values) - dot);
    sums.add(of_z, keys), of_columns[column * kThreads] += of_z, of_row += of_z;
    if (column < k - 1) return;
    if (is_writer) first[int64_t(row) * p.size()] = of_row;
    of_row = 0;
  });
  team.store(sums, 1, to_phi, p.shares);
  if (!is_writer) return;
  scores[2 * k + 1] = dot;
  for (int column = 0; column < k; ++column) {
    first[int64_t(k + column) * p.size()] = of_columns[column * kThreads];
  }
}

// The gradients of psi and beta on the padded grid, [padded pixels, keys()] and [padded pixels, values()]: each
// position of the footprint pairs a padded pixel with at most one pixel of the map.
//
// Predicted as above: reads 170 MB, writes 63 MB; 1.5 G products; no shared memory; 0.14 ms, limited by instruction
// issue.
template <int kOwn, int kLanes>
__global__ void __launch_bounds__(kThreads, 2) attend_dot_around_kernel(Dots p, float* to_psi, float* to_beta) {
  using Own = Shares<kOwn, kLanes>;
  const DotTeam<kOwn, kLanes, true> team(p);
  const int k = p.kernel_size;
  const Own own(team.at(p.psi, team.pixel.index)), values(team.at(p.beta, team.pixel.index));
  Own of_psi{}, of_beta{};
  for (Offset o; o.position < p.positions(); o.advance(1, k)) {
    bool is_pair;
    const int partner = team.pixel.partner(p, o, is_pair);
    const Own keys(team.at(p.phi, partner)), grad(team.at(p.grad, partner));
    const float *scores = team.scores(partner), z = keys.times(own) + (scores[o.down] + scores[k + o.right]);
    const float weight = is_pair ? power_of_two(z - scores[2 * k]) : 0, of_weight = grad.times(values);
    of_psi.add(is_pair ? weight * (of_weight - scores[2 * k + 1]) : 0, keys), of_beta.add(weight, grad);
  }
  team.store(of_psi, 1 / kLog2E, to_psi, p.shares), team.store(of_beta, 1, to_beta, p.value_shares);
}

// Calls run with the number of a lane's channels and of a team's lanes.
template <class Run>
void with_shares(int shares, const Run& run) {
  const Int<kMostOwn> most;
  if (shares <= 4) return run(Int<4>(), Int<1>());
  if (shares <= 8) return run(Int<8>(), Int<1>());
  if (shares <= kMostOwn) return run(most, Int<1>());
  if (shares <= 2 * kMostOwn) return run(most, Int<2>());
  run(most, Int<kMostLanes>());
}

// One call: the checked inputs, and the jobs that copy them.
class DotWork : public Workspace {
 public:
  const Footprint f;
  Dots p{};
  TeamMap phi, psi, beta, grad;
  TeamScores scores;

  // `grad` and `softmax` are null in forward.
  DotWork(const Tensor& phi_map, const Tensor& psi_map, const Tensor& score_map, const Tensor& beta_map,
          int64_t kernel_size, const Tensor* grad_map = nullptr, const Tensor* softmax = nullptr)
      : Workspace(phi_map), f(check_attend_dot(phi_map, psi_map, score_map, kernel_size)) {
    check_float32(phi_map), check_values({&beta_map}, phi_map, score_map.size(1));
    check_same(beta_map, phi_map, "beta and the other maps");
    static_cast<Grid&>(p) = grid_of(phi_map, f), p.G = static_cast<int>(score_map.size(1));
    p.shares = static_cast<int>(phi_map.size(3)) / p.G, p.value_shares = static_cast<int>(beta_map.size(3)) / p.G;
    const int most = std::max(p.shares, p.value_shares);
    STD_TORCH_CHECK(most <= kMostOwn * kMostLanes, "on GPUs, at most ", kMostOwn * kMostLanes,
                    " channels may share a weight channel, not ", most);
    with_shares(most, [&](auto own, auto lanes) { channels_ = own() * lanes(), lanes_ = lanes(); });
    grid_for(p.padded_pixels() * p.G * lanes_);  // all indices fit into 31 bits
    const Footprint none{1, f.height, f.width};
    phi = map(phi_map, none, kLog2E), psi = map(psi_map, f), beta = map(beta_map, f);
    p.phi = phi.to, p.psi = psi.to, p.beta = beta.to;
    if (grad_map != nullptr) grad = map(*grad_map, none), p.grad = grad.to;
    p.scores = take(p.pixels() * p.G * p.pitch());
    scores = {p, keep_float(score_map), softmax == nullptr ? nullptr : keep_float(*softmax), p.pixels() * p.G};
  }

  // Blocks for the teams of these pixels.
  int blocks(int64_t pixels) const { return grid_for(pixels * p.G * lanes_); }
  // Calls run with the number of a lane's channels and of a team's lanes.
  template <class Run>
  void with_teams(const Run& run) const {
    with_shares(std::max(p.shares, p.value_shares), run);
  }

 private:
  TeamMap map(const Tensor& x, const Footprint& border, float factor = 1) {
    const int64_t pixels = x.size(0) * border.padded_height() * border.padded_width();
    const int shares = static_cast<int>(x.size(3)) / p.G;
    return {keep_float(x), border, p.G, shares, channels_, factor, pixels * p.G, take(pixels * p.G * channels_)};
  }

  int channels_ = 0, lanes_ = 0;  // of a team
};

std::tuple<Tensor, Tensor> attend_dot(const Tensor& phi, const Tensor& psi, const Tensor& scores, const Tensor& beta,
                                      int64_t kernel_size) {
  DotWork work(phi, psi, scores, beta, kernel_size);
  const Dots& p = work.p;
  const OperatorGuard guard("attend_dot", phi);
  Tensor y = torch::stable::new_empty(beta, beta.sizes()), softmax = work.empty({phi.size(0), 2, p.G, p.size()});
  if (y.numel() == 0) return {y, softmax};
  prepare(work.stream(), work.phi, work.psi, work.beta, work.scores);
  work.with_teams([&](auto own, auto lanes) {
    SAN_LAUNCH_SHARED((attend_dot_kernel<own(), lanes()>), work.blocks(p.pixels()), kThreads, 0, work.stream(), p,
                      y.mutable_data_ptr<float>(), softmax.mutable_data_ptr<float>());
  });
  return {y, softmax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attend_dot_backward(const Tensor& grad, const Tensor& y,
                                                               const Tensor& softmax, const Tensor& phi,
                                                               const Tensor& psi, const Tensor& scores,
                                                               const Tensor& beta, int64_t kernel_size) {
  check_attend_dot(phi, psi, scores, kernel_size);
  check_values({&beta, &grad, &y}, phi, scores.size(1)), check_softmax(softmax, phi, scores.size(1));
  DotWork work(phi, psi, scores, beta, kernel_size, &grad, &softmax);
  const Dots& p = work.p;
  const OperatorGuard guard("attend_dot_backward", phi);
  const auto empty = [](const Tensor& x) { return torch::stable::new_empty(x, x.sizes()); };
  Tensor to_phi = empty(phi), to_psi = empty(psi), to_scores = empty(scores), to_beta = empty(beta);
  if (to_beta.numel() == 0) return {to_phi, to_psi, to_scores, to_beta};
  float* result = static_cast<float*>(work.keep(y).data);
  float *padded_psi = work.take(p.padded_pixels() * p.keys()), *padded_beta = work.take(p.padded_pixels() * p.values());
  const auto stream = work.stream();
  prepare(stream, work.phi, work.psi, work.beta, work.grad, work.scores);
  work.with_teams([&](auto own, auto lanes) {
    SAN_LAUNCH_SHARED((attend_dot_center_kernel<own(), lanes()>), work.blocks(p.pixels()), kThreads,
                      size_t(kThreads) * kernel_size * sizeof(float), stream, p, result,
                      to_phi.mutable_data_ptr<float>(), to_scores.mutable_data_ptr<float>());
    SAN_LAUNCH_SHARED((attend_dot_around_kernel<own(), lanes()>), work.blocks(p.padded_pixels()), kThreads, 0, stream,
                      p, padded_psi, padded_beta);
  });
  fold_map(stream, padded_psi, work.f, p.keys(), to_psi), fold_map(stream, padded_beta, work.f, p.values(), to_beta);
  return {to_phi, to_psi, to_scores, to_beta};
}

}  // namespace
}  // namespace san::cuda

STABLE_TORCH_LIBRARY_IMPL(SAN_LIBRARY, SAN_DEVICE, m) {
  m.impl("attend_dot", TORCH_BOX(&san::cuda::attend_dot));
  m.impl("attend_dot_backward", TORCH_BOX(&san::cuda::attend_dot_backward));
}
