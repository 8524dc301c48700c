// A part of the shim library that tests call: whether blocks cover the pixels of the largest batches.
#include "cuda/pairs.cuh"

// Returns the number of pixels that the blocks for 2^29 pixels compute.
extern "C" long long san_planned_pixels() {
  using namespace san::cuda;
  Pairs p{};
  p.images = 1 << 13, p.height = p.width = 1 << 8, p.kernel_size = 3, p.d = 8, p.tiles = 1;
  const Plan plan = Plan::for_groups(p, (p.pixels() + 15) / 16, 1);
  return static_cast<long long>(plan.blocks) * plan.teams() * 16;
}
