// Numbers that only measurements can choose. `python -m tests.gpu --case tune/` compiles the attention kernels with
// other ones and compares them on a GPU.
#pragma once

// Threads of a block of the kernels with tensor cores. Small blocks let more warps be resident: kernels with 129 to 168
// registers have 12 warps on a multiprocessor instead of the 8 of one block of 256 threads.
#ifndef SAN_TEAM_THREADS
#define SAN_TEAM_THREADS 128
#endif

// Bytes of a lane's registers, at most, that hold the layers of a pairwise mapping. Larger layers are loaded for each
// position of the footprint. 224 bytes suffice for SAN's stages 1 to 3.
#ifndef SAN_KEPT_BYTES
#define SAN_KEPT_BYTES 224
#endif

// Tiles of 8 weight channels, at most, that a warp of pairwise attention computes at once. With more tiles, a1 and the
// hidden layer are computed less often, but sums take more registers.
#ifndef SAN_MOST_TILES
#define SAN_MOST_TILES 2
#endif

// Warps of pairwise attention for which a multiprocessor must have registers in stages 1 and 2 with TF32.
#ifndef SAN_ATTEND_WARPS
#define SAN_ATTEND_WARPS 16
#endif
