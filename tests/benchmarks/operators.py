"""Times the operators of a training step and of an evaluation of each network on the CPU.

    python -m tests.benchmarks.operators [--size 224] [--threads 2] [--isa AVX2] [--rounds 8]

Networks are those of `tests.benchmarks.versions`, with two images of 224x224 or 64 smaller ones. Each round runs a step, and
then another one in which every operator is timed. The table shows the fastest timed step. *step* is the fastest other step, and
*rest* is the difference: Python, autograd and dispatch. The networks are measured one after the other; to compare their speed,
use `tests.benchmarks.versions`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode  # documented in torch's notes on extending; it has no other name

import san
from tests.benchmarks.tables import table
from tests.benchmarks.traffic import kind_of
from tests.benchmarks.versions import KEEP_MEMORY, KINDS, MODES
from tests.every_isa import SETTINGS

SIZES: dict[int, tuple[dict[str, Any], int]] = {
    32: ({"num_stages": 3, "width_mult": 0.5}, 64),
    48: ({"num_stages": 3, "width_mult": 0.5}, 64),
    224: ({}, 2),
}
"""Options of the networks and images of a step, by the size of the images."""


class Clock(TorchDispatchMode):
    """Adds up milliseconds by kind of operator. Operators of attention are listed by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ms: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        name = str(function).removesuffix(".default")
        kind = kind_of(name)
        kind = name.removeprefix("san.").removesuffix("_backward") if kind == "attention" else kind
        self.ms[kind] += 1000 * (time.perf_counter() - start)
        return result


def milliseconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - start)


def clocked(name: str, size: int, rounds: int) -> list[dict[str, float]]:
    """Milliseconds by kind of operator in training and in evaluation."""
    options, batch = SIZES[size]
    model = san.create_model(name, 10, **options).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,))

    def train() -> None:
        model.zero_grad()
        cross_entropy(model(images), labels).backward()

    def evaluate() -> None:
        with torch.no_grad():
            model(images)

    found = []
    for is_training, step in ((True, train), (False, evaluate)):
        model.train(is_training)
        steps, sums = [], []
        for _ in range(rounds + 1):
            steps.append(milliseconds(step))
            with Clock() as clock:
                step()
            sums.append(clock.ms)
        fastest = min(sums[1:], key=lambda ms: sum(ms.values()))
        rest = min(steps[1:]) - sum(fastest.values())
        found.append({**fastest, "rest": rest, "step": min(steps[1:])})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, choices=SIZES, default=224)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=SETTINGS, help="by default the largest of this machine")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--network", choices=KINDS.values(), help=argparse.SUPPRESS)  # print its milliseconds as JSON
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.network:
        print(json.dumps(clocked(options.network, options.size, options.rounds)))
        return
    environment = os.environ | KEEP_MEMORY | (SETTINGS[options.isa] if options.isa else {})
    found = {}
    for kind, name in KINDS.items():
        command = [sys.executable, "-m", "tests.benchmarks.operators", *sys.argv[1:], "--network", name]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    columns = [(kind, mode) for mode in range(len(MODES)) for kind in KINDS]
    kinds = {name for modes in found.values() for ms in modes for name in ms} - {"rest", "step"}
    largest = sorted(kinds, key=lambda name: -max(found[kind][mode].get(name, 0) for kind, mode in columns))
    rows = [[name, *(f"{found[kind][mode].get(name, 0):.1f}" for kind, mode in columns)] for name in (*largest, "rest", "step")]
    isa = options.isa or "largest instruction set"
    title = f"ms, {options.size}x{options.size}, {SIZES[options.size][1]} images, {options.threads} threads, {isa}"
    print(table(title, ["operators", *(f"{kind}, {MODES[mode]}" for kind, mode in columns)], rows))


if __name__ == "__main__":
    main()
