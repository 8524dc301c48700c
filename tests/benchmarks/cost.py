"""Predicts the time of attention without stored weights on an H100, from the instructions of the compiled kernels. Needs nvcc.

    python -m tests.benchmarks.cost

For each of SAN10's stages with 32 images and TF32: instructions of the inner loop, and the milliseconds that the GPU needs to
start them if it starts one in every cycle. Kernels have reached about half of this rate. In vector attention, an iteration
computes 16 pixels; in scalar attention, 32 lanes, each of which has up to 16 channels of a head.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from cuda_ext import build
from tests.benchmarks.stages import KINDS, STAGES
from tests.benchmarks.tables import table
from tests.ops.machine_code import NVCC_FLAGS, Loop, main_loops

BATCH, HEADS = 32, 8
INSTRUCTIONS_PER_SECOND = 132 * 4 * 1.755e9  # multiprocessors, their schedulers, and the clock of an H100


class Stage:
    """The work of a stage in inner loops; each iteration computes 16 pixels and a position of the footprint."""

    def __init__(self, number: int, channels: int, side: int, footprint: int) -> None:
        self.number = number
        self.weight_tiles = self.depth = -(-channels // 32 // 8)  # of 8 weight channels, and of as many hidden channels
        self.groups = BATCH * side**2 * footprint**2 / 16
        self.padded_groups = BATCH * (side + footprint - 1) ** 2 * footprint**2 / 16
        self.pair_tiles = min(self.weight_tiles, 2)  # that a warp of a pairwise kernel computes
        self.strips = -(-channels // 16 // 16)  # of 16 hidden channels of a pairwise mapping
        shares = channels // 4 // HEADS  # channels of a head in scalar attention
        self.own, self.lanes = (max(4, shares), 1) if shares <= 16 else (16, shares // 16)
        self.heads = HEADS * self.lanes / 2  # iterations of a warp, which computes 32 lanes


KERNELS: dict[str, tuple[str, Callable[[Stage], str], Callable[[Stage], float]]] = {
    "patchwise, forward": (
        "attend_patches.cu",
        lambda s: f"attend_kernel<Operand<false>, {s.depth}>",
        lambda s: s.groups * s.weight_tiles,
    ),
    "patchwise, gradients of β": (
        "attend_patches.cu",
        lambda s: f"attend_around_kernel<Operand<false>, {s.depth}>",
        lambda s: s.padded_groups * s.weight_tiles,
    ),
    "patchwise, gradients of weights and hidden channels": (
        "attend_patches.cu",
        lambda s: f"attend_center_kernel<Operand<false>, {s.depth}>",
        lambda s: s.groups * s.weight_tiles,
    ),
    "pairwise, forward": (
        "attend_pairs.cu",
        lambda s: f"attend_pairs_kernel<Operand<false>, Stage{s.number}, {s.pair_tiles}>",
        lambda s: s.groups * s.weight_tiles / s.pair_tiles,
    ),
    "pairwise, gradients of logits": (
        "attend_pairs.cu",
        lambda s: f"logit_gradient_kernel<Operand<false>, Stage{s.number}, {s.pair_tiles}>",
        lambda s: s.groups * s.weight_tiles / s.pair_tiles,
    ),
    "pairwise, gradients of β": (
        "attend_pairs.cu",
        lambda s: f"value_gradient_kernel<Operand<false>, Stage{s.number}, {s.pair_tiles}>",
        lambda s: s.padded_groups * s.weight_tiles / s.pair_tiles,
    ),
    "pairwise, gradients of φ": (
        "attend_pairs.cu",
        lambda s: f"pair_gradient_kernel<Operand<false>, Stage{s.number}, false>",
        lambda s: s.groups,
    ),
    "pairwise, gradients of ψ": (
        "attend_pairs.cu",
        lambda s: f"pair_gradient_kernel<Operand<false>, Stage{s.number}, true>",
        lambda s: s.padded_groups,
    ),
    "pairwise, gradients of the layers": (
        "attend_pairs.cu",
        lambda s: f"layer_gradient_kernel<Operand<false>, Stage{s.number}>",
        lambda s: 2 * s.groups * s.strips,
    ),
    "pairwise, statistics of the second norm": (
        "pair_covariance.cu",
        lambda s: f"gram_kernel<Operand<false>, Stage{s.number}>",
        lambda s: 2 * s.groups,
    ),
    "scalar, forward": (
        "attend_dot.cu",
        lambda s: f"attend_dot_kernel<{s.own}, {s.lanes}>",
        lambda s: s.groups * s.heads,
    ),
    "scalar, gradients of φ": (
        "attend_dot.cu",
        lambda s: f"attend_dot_center_kernel<{s.own}, {s.lanes}>",
        lambda s: s.groups * s.heads,
    ),
    "scalar, gradients of ψ and β": (
        "attend_dot.cu",
        lambda s: f"attend_dot_around_kernel<{s.own}, {s.lanes}>",
        lambda s: s.padded_groups * s.heads,
    ),
}


def compiled(source: str, folder: Path) -> dict[str, Loop]:
    toolchain = build.Toolchain.find(cuda=True)
    output = folder / f"{source}.o"
    command = build.compile_command(build.SOURCE_DIR / "cuda" / source, output, toolchain)
    build.run([*(flag for flag in command if not flag.startswith("-gencode")), *NVCC_FLAGS])
    return main_loops(output)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    stages = [Stage(number, *sizes) for number, sizes in enumerate(STAGES.values(), 1)]
    with tempfile.TemporaryDirectory() as folder:
        loops = {source: compiled(source, Path(folder)) for source in {source for source, _, _ in KERNELS.values()}}
    rows = []
    sums = {kind: [0.0] * len(stages) for kind in KINDS}
    for label, (source, name, work) in KERNELS.items():
        cells = []
        for at, stage in enumerate(stages):
            kernel = name(stage)
            loop = None if "Stage5" in kernel else loops[source][kernel]  # which runs its layers one by one
            ms = 1000 * loop.instructions * work(stage) / INSTRUCTIONS_PER_SECOND if loop else 0
            sums[label.split(",")[0]][at] += ms
            cells.append(f"{loop.instructions}; {ms:.3f}" if loop else "-")
        rows.append([label, *cells])
    rows += [[f"{kind}, sum", *(f"{ms:.3f}" if ms else "-" for ms in of_stages)] for kind, of_stages in sums.items()]
    print(table("Instructions of the inner loop; ms to start all of them", ["kernel", *STAGES], rows))


if __name__ == "__main__":
    main()
