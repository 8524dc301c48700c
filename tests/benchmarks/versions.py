"""Compares training steps and evaluations of two checkouts of this project on the CPU.

    git worktree add ../before REVISION
    python -m tests.benchmarks.versions ../before [--threads 1] [--rounds 5] [--only 224]

Every round runs each checkout in turn in a process of its own, so that disturbances affect both; a process reports its fastest
step. Ratios are before / now within a round: median and range. `now, memory kept` is this checkout with the settings of glibc
that `san run` uses. Inputs and gradients are random; networks at 32x32 have three stages, half the width and 64 images, those
at 224x224 are complete and have four.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.tables import spread, table

ROOT = Path(__file__).parents[2]
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_TOP_PAD_": "67108864"}
SMALL = "num_classes=10, num_stages=3, width_mult=0.5"
NETWORKS = {
    "SAN10 pairwise, 32x32": ("san10_pairwise", SMALL, 64, 32),
    "SAN10 patchwise, 32x32": ("san10_patchwise", SMALL, 64, 32),
    "ResNet26, 32x32": ("resnet26", SMALL.replace("3", "2", 1), 64, 32),
    "SAN10 pairwise, 224x224": ("san10_pairwise", "num_classes=10", 4, 224),
    "SAN10 patchwise, 224x224": ("san10_patchwise", "num_classes=10", 4, 224),
    "ResNet26, 224x224": ("resnet26", "num_classes=10", 4, 224),
}
PROGRAM = """
import json, time, torch, san
torch.set_num_threads({threads})
torch.manual_seed(0)
model = san.create_model({name!r}, {options}).to(memory_format=torch.channels_last)
x = torch.randn({batch}, 3, {side}, {side}).contiguous(memory_format=torch.channels_last)
grad = torch.randn({batch}, 10)
def train():
    model.zero_grad()
    model(x).backward(grad)
def evaluate():
    with torch.no_grad():
        model(x)
fastest = []
for mode, step in ((True, train), (False, evaluate)):
    model.train(mode)
    step(), step()
    times = []
    for _ in range({steps}):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    fastest.append(1000 * min(times))
print(json.dumps(fastest))
"""


def fastest(checkout: Path, network: str, threads: int, settings: dict[str, str]) -> list[float]:
    """Returns the milliseconds of the fastest training step and evaluation."""
    name, options, batch, side = NETWORKS[network]
    code = PROGRAM.format(name=name, options=options, batch=batch, side=side, threads=threads, steps=20 if side < 100 else 5)
    environment = os.environ | settings
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the other checkout")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="part of the networks' names")
    options = parser.parse_args()
    versions = {"before": (options.before, {}), "now": (ROOT, {}), "now, memory kept": (ROOT, KEEP_MEMORY)}
    rows = []
    for network in (name for name in NETWORKS if options.only in name):
        times: dict[str, list[list[float]]] = {version: [] for version in versions}
        for _ in range(options.rounds):
            for version, (checkout, settings) in versions.items():
                times[version].append(fastest(checkout, network, options.threads, settings))
        for mode, name in enumerate(("training step", "evaluation")):
            ms = {version: [pair[mode] for pair in pairs] for version, pairs in times.items()}
            ratios = [[a / b for a, b in zip(ms["before"], ms[version], strict=True)] for version in list(versions)[1:]]
            rows.append([f"{network}, {name}", *(spread(x) for x in ms.values()), *(spread(x, 2) for x in ratios)])
    heads = [*(f"{version}, ms" for version in versions), *(f"before / {version}" for version in list(versions)[1:])]
    print(table(f"{options.threads} threads, {options.rounds} rounds", ["network", *heads], rows), flush=True)


if __name__ == "__main__":
    main()
