"""Benchmarks: FLOPs, and errors for missing tools."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.benchmarks.stages import KINDS, STAGES, Core


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("stage", ["stage 1", "stage 2"])
@pytest.mark.parametrize("kind", KINDS)
def test_flops_match_the_documentation(kind: str, stage: str, training: bool) -> None:
    """Multiply-accumulates per pixel as in docs/results/performance.md; backward has twice as many products."""
    core = Core(kind, stage, batch=2, largest_side=8)
    channels, _, k, _ = STAGES[stage]
    R, M, K = channels // 16, channels // 4, k * k
    G = M // 8
    pairwise = K * ((R + 2) * R + R * G + M)  # two channels for the position
    patchwise = G * R * (K + 1) + G * K * G + K * M
    per_pixel = {"pairwise": pairwise, "patchwise": patchwise}[kind] * (3 if training else 1)
    assert core.flops(training) == 2 * core.batch * core.side**2 * per_pixel


def test_instructions_without_a_compiler_print_one_line() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.instructions"]
    done = subprocess.run(command, env=os.environ | {"CXX": "no-such-compiler"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no-such-compiler" in done.stderr and len(done.stderr.splitlines()) == 1
