"""Compares training steps and evaluations on the CPU: of networks with ResNet26, of two checkouts, or of ways to run one.

    python -m tests.benchmarks.versions [--threads 1] [--rounds 5] [--only 224]
    python -m tests.benchmarks.versions now bfloat16 compiled
    python -m tests.benchmarks.versions reference now --threads 2 --only 224
    git worktree add ../before REVISION && python -m tests.benchmarks.versions --before ../before

Every round runs each network and variant in turn, so that disturbances affect all. Each runs in a new process, with the
settings of malloc that `san run` uses, and reports its fastest step. *Speed* is relative to ResNet26, and the other ratios are
the first variant / another one, both within a round: median and range. `AVX2` runs the code for processors without AVX-512,
`reference` the backend of plain PyTorch operators (pad, unfold, einsum) instead of kernels, `folded` evaluates a copy from
`san.fold`, `bfloat16` runs under autocast, and `compiled` uses torch.compile, whose first training step and first evaluation
are listed. Inputs and gradients are random; networks at 32x32 and 48x48 halve the image three times and have half the width
and 64 images, or one; complete ones have 4 of 224x224. `pretrained size` is that of the networks whose weights the package
contains, with 64 images of 48x48.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.tables import ratio, spread, table
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
    "now": Variant(),
    "folded": Variant(folded=True),
    "bfloat16": Variant(half=True),
    "AVX2": Variant(environment=SETTINGS["AVX2"]),
    "reference": Variant(backend="reference"),
    "AVX2 reference": Variant(environment=SETTINGS["AVX2"], backend="reference"),
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


def measure(variant: Variant, network: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Returns, for training and evaluation, the milliseconds of the fastest step and the seconds of the first one."""
    name, fields, batch, side = NETWORKS[network]
    how = {
        "threads": options.threads,
        "steps": 5 if side > 100 else 20 if batch > 1 else 200,
        "half": variant.half,
        "compiled": variant.compiled,
        "folded": variant.folded,
        "backend": variant.backend,
    }
    code = PROGRAM.format(name=name, options=fields, batch=batch, side=side, **how)
    environment = os.environ | ({} if options.default_malloc else KEEP_MEMORY) | variant.environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=variant.checkout, env=environment, check=True, stdout=subprocess.PIPE
    )
    return [(fastest, first) for fastest, first in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", choices=[*WAYS, []], help="variants of this checkout; `now` by default")
    parser.add_argument("--before", type=Path, help="folder of another checkout, the first variant")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--default-malloc", action="store_true", help="without the settings of `san run`")
    parser.add_argument("--only", default="", help="part of the networks' names")
    options = parser.parse_args()
    before = {"before": Variant(options.before)} if options.before else {}
    variants = before | {name: WAYS[name] for name in options.ways or ["now"]}
    networks = [name for name in NETWORKS if options.only in name]
    if not networks:
        parser.error(f"no network's name contains {options.only}; kinds: {', '.join(KINDS)}; sizes: {', '.join(SIZES)}")
    ms: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    firsts: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for turn in range(options.rounds):
        for network, (name, variant) in itertools.product(networks, variants.items()):
            for mode, (fastest, first) in enumerate(measure(variant, network, options)):
                ms[network, name, mode].append(fastest)
                firsts[network, name, mode].append(first)
                print(f"round {turn + 1}: {network}, {name}, {MODES[mode]}: {fastest:.1f} ms", file=sys.stderr, flush=True)
    baseline, *others = variants
    heads = ["network", *(f"{name}, ms" for name in variants), *(f"{name}, speed" for name in variants)]
    heads += [*(f"{baseline} / {name}" for name in others), *(["first call, s"] if "compiled" in variants else [])]
    rows = []
    for network, (mode, label) in itertools.product(networks, enumerate(MODES)):
        resnet = network.replace(network.partition(",")[0], "ResNet26")
        cells = [spread(ms[network, name, mode]) for name in variants]
        cells += [ratio(ms[resnet, name, mode], ms[network, name, mode], 2) if resnet in networks else "-" for name in variants]
        cells += [ratio(ms[network, baseline, mode], ms[network, name, mode], 2) for name in others]
        cells += [f"{min(firsts[network, 'compiled', mode]):.1f}"] if "compiled" in variants else []
        rows.append([f"{network}, {label}", *cells])
    print(table(f"{options.threads} threads, {options.rounds} rounds", heads, rows))


if __name__ == "__main__":
    main()
