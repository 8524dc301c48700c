"""Compares training steps and evaluations of whole networks on the CPU: two checkouts of this project, or ways to run one.

    git worktree add ../before REVISION
    python -m tests.benchmarks.versions --before ../before [--threads 1] [--rounds 5] [--only 224]
    python -m tests.benchmarks.versions bfloat16 compiled
    python -m tests.benchmarks.versions "memory kept" AVX2
    python -m tests.benchmarks.versions reference --threads 2 --only 224

Every round runs each variant in turn in a process of its own, so that disturbances affect all; a process reports its fastest
step. Ratios are the first variant / another one within a round: median and range. `memory kept` has the settings of glibc that
`san run` uses, `AVX2` also chooses the code for processors without AVX-512, `reference` runs the backend of plain PyTorch
operators (pad, unfold, einsum) instead of kernels, `folded` evaluates a copy from `san.fold`,
`bfloat16` trains and evaluates under autocast, and `compiled` uses torch.compile, whose first training step and first
evaluation are listed. Inputs and gradients are random; networks at 32x32 and 48x48 halve the image three times and
have half the width and 64 images, or one; complete ones have 4 of 224x224. `pretrained size` is that of the networks whose
weights the package contains, with 64 images of 48x48.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.tables import spread, table
from tests.every_isa import SETTINGS

ROOT = Path(__file__).parents[2]
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_TOP_PAD_": "67108864"}


@dataclass(frozen=True)
class Variant:
    """What runs in a process."""

    checkout: Path = ROOT
    environment: dict[str, str] = field(default_factory=dict)
    half: bool = False
    compiled: bool = False
    folded: bool = False
    backend: str = "auto"


WAYS = {
    "memory kept": Variant(environment=KEEP_MEMORY),
    "folded": Variant(folded=True),
    "bfloat16": Variant(half=True),
    "AVX2": Variant(environment=KEEP_MEMORY | SETTINGS["AVX2"]),
    "reference": Variant(backend="reference"),
    "compiled": Variant(environment={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}, compiled=True),
}
KINDS = {
    "SAN10 pairwise": "san10_pairwise",
    "SAN10 patchwise": "san10_patchwise",
    "SAN10 scalar": "san10_scalar",
    "ResNet26": "resnet26",
}
SMALL = "num_stages=3, width_mult=0.5"
SIZES = {
    "32x32": (SMALL, 64, 32),
    "48x48": (SMALL, 64, 48),
    "one image, 32x32": (SMALL, 1, 32),
    "224x224": ("", 4, 224),
    "pretrained size": ("num_stages=3", 64, 48),
}
NETWORKS = {f"{kind}, {size}": (name, *settings) for size, settings in SIZES.items() for kind, name in KINDS.items()}
MODES = ("training step", "evaluation")
PROGRAM = """
import json, time, torch, san
torch.set_num_threads({threads})
torch.manual_seed(0)
model = san.create_model({name!r}, num_classes=10, {options}).to(memory_format=torch.channels_last)
if {compiled}:
    model = torch.compile(model)
x = torch.randn({batch}, 3, {side}, {side}).contiguous(memory_format=torch.channels_last)
grad = torch.randn({batch}, 10)
def forward():
    with torch.autocast("cpu", torch.bfloat16, enabled={half}), san.ops.backend({backend!r}):
        return model(x)
def train():
    model.zero_grad()
    forward().float().backward(grad)
def evaluate():
    with torch.no_grad():
        forward()
def seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
result = []
for mode, step in ((True, train), (False, evaluate)):
    if mode or not {folded}:
        model.train(mode)
    else:
        model = san.fold(model)
    first = seconds(step)
    step()
    result.append((1000 * min(seconds(step) for _ in range({steps})), first))
print(json.dumps(result))
"""


def measure(variant: Variant, network: str, threads: int) -> list[tuple[float, float]]:
    """Returns, for training and evaluation, the milliseconds of the fastest step and the seconds of the first one."""
    name, options, batch, side = NETWORKS[network]
    how = {
        "threads": threads,
        "steps": 5 if side > 100 else 20 if batch > 1 else 200,
        "half": variant.half,
        "compiled": variant.compiled,
        "folded": variant.folded,
        "backend": variant.backend,
    }
    code = PROGRAM.format(name=name, options=options, batch=batch, side=side, **how)
    environment = os.environ | variant.environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=variant.checkout, env=environment, check=True, stdout=subprocess.PIPE
    )
    return [(fastest, first) for fastest, first in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", choices=[*WAYS, []], help="variants of this checkout; by default memory kept")
    parser.add_argument("--before", type=Path, help="folder of another checkout, the first variant")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="part of the networks' names")
    options = parser.parse_args()
    before = {"before": Variant(options.before)} if options.before else {}
    variants = before | {"now": Variant()} | {name: WAYS[name] for name in options.ways or ["memory kept"]}
    baseline, *others = variants
    heads = ["network", *(f"{name}, ms" for name in variants), *(f"{baseline} / {name}" for name in others), "first call, s"]
    rows = []
    for network in (name for name in NETWORKS if options.only in name):
        found = [
            {v: measure(variant, network, options.threads) for v, variant in variants.items()} for _ in range(options.rounds)
        ]
        for mode, label in enumerate(MODES):
            ms = {name: [one[name][mode][0] for one in found] for name in variants}
            ratios = [[a / b for a, b in zip(ms[baseline], ms[name], strict=True)] for name in others]
            first = min(one[[*variants][-1]][mode][1] for one in found)
            cells = [*(spread(x) for x in ms.values()), *(spread(x, 2) for x in ratios), f"{first:.1f}"]
            rows.append([f"{network}, {label}", *cells])
            print("; ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    print(table(f"{options.threads} threads, {options.rounds} rounds", heads, rows))


if __name__ == "__main__":
    main()
