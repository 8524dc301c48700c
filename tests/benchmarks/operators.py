"""Compares the speed of unfused kernels and reference operators in one process.

    python -m tests.benchmarks.operators [--threads 2] [--repeats 9] [--only dot]

Prints a Markdown table of medians and the ratio reference / kernel with its range over the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import san
from san import ops
from tests.benchmarks.tables import ratio

# Batch, channels of beta, side of the map, footprint: the shapes of SAN10's stages at 224x224.
STAGES = {"stage 1": (8, 16, 112, 3), "stage 2": (8, 64, 56, 7), "stage 3": (8, 128, 28, 7), "stage 5": (8, 512, 7, 7)}

MODELS: list[tuple[str, dict[str, str]]] = [
    ("san10_pairwise", {}),
    ("san10_pairwise", {"relation": "hadamard"}),
    ("san10_pairwise", {"relation": "dot"}),
    ("san10_patchwise", {}),
    ("san10_patchwise", {"relation": "star"}),
    ("san10_scalar", {}),
]


def problems() -> dict[str, Callable[[], Any]]:
    """Returns calls that run forward and backward once."""
    found: dict[str, Callable[[], Any]] = {}
    for stage, (N, C, side, k) in STAGES.items():
        beta = torch.randn(N, C, side, side, requires_grad=True)
        weight = torch.randn(N, C // 8, k * k, side * side, requires_grad=True)
        phi, psi = (torch.randn(N, C // 4, side, side, requires_grad=True) for _ in range(2))
        relation = torch.randn(N, C // 4, k * k, side * side)
        y = torch.randn(N, C, side, side)
        found[f"aggregation, {stage}"] = step(ops.aggregation, (beta, weight), k, y)
        found[f"subtraction, {stage}"] = step(ops.subtraction, (phi, psi), k, relation)
        found[f"hadamard, {stage}"] = step(ops.hadamard, (phi, psi), k, relation)
        found[f"dot, {stage}"] = step(ops.dot, (phi, psi), k, relation[:, :1])
        found[f"unfold, {stage}"] = step(ops.unfold, (psi,), k, relation)
    for name, fields in MODELS:
        model = san.create_model(name, **fields)
        images = torch.randn(4, 3, 224, 224)
        label = " ".join([name, *fields.values()])
        found[f"{label}, training step, batch 4"] = lambda model=model, images=images: model(images).sum().backward()
    return found


def step(
    operator: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], k: int, grad: torch.Tensor
) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(operator(*inputs, k), inputs, grad)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="run only problems whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, CPU, {options.threads} threads, {options.repeats} repeats, float32\n")
    print("| forward and backward | reference, ms | kernel, ms | ratio (range) |\n|---|---:|---:|---:|")
    for name, call in problems().items():
        if options.only not in name:
            continue
        times: dict[ops.Backend, list[float]] = {"reference": [], "unfused": []}
        for repeat in range(options.repeats + 1):
            for backend in times:
                with ops.backend(backend):
                    elapsed = seconds(call)
                if repeat:  # the first is the warm-up
                    times[backend].append(elapsed)
        reference, kernel = (1000 * statistics.median(t) for t in times.values())
        print(f"| {name} | {reference:.1f} | {kernel:.1f} | {ratio(times['reference'], times['unfused'])} |", flush=True)


if __name__ == "__main__":
    main()
