"""Parts of the GPU check that need no GPU: the order of cases, sanitizers, comparisons of CUDA graphs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu import child, graphs
from tests.gpu.case import Case, Settings
from tests.gpu.cases import all_cases
from tests.gpu.correctness import NETWORKS, sanitized
from tests.ops.cases import OPERATORS

ROOT = Path(__file__).parents[2]


def test_important_cases_come_first() -> None:
    cases = [case.id for case in sorted(all_cases(Settings("cuda", False, "")), key=lambda case: case.priority)]
    networks = [f"models/{name} batch 32" for name in NETWORKS]
    first = [f"{name} {how}" for name in networks for how in ("tf32 eager", "tf32 graphs", "bfloat16 eager", "bfloat16 graphs")]
    first += [f"cores/{kind} tf32" for kind in ("pairwise", "patchwise")]
    first += [f"correctness/{operator} tf32 and bfloat16" for operator in OPERATORS]
    then = [case.id for case in graphs.ALL] + ["correctness/modules 1 of 2", "correctness/modules 2 of 2"]
    then += ["correctness/memcheck", "correctness/racecheck", "loader/training", "training/one worker"]
    assert max(map(cases.index, first)) < min(map(cases.index, then))
    assert max(map(cases.index, then)) < 34


@pytest.mark.parametrize(
    ("row", "passes"),
    [
        ('{"end": {"status": "passed"}}', [True, True]),
        ('{"end": {"status": "failed", "error": "ValueError: a wrong value"}}', [True, False]),
        ('{"check": "the process was killed after this row"}', [True, False]),
        ("", [True, False]),
    ],
)
def test_sanitizer_case_fails_with_its_checks(
    row: str, passes: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\nfor last; do :; done\nprintf '%s' '{row}' > \"$last\"\n")
    sanitizer.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(sanitizer))
    found = list(sanitized("memcheck", Settings("cuda", False, str(tmp_path))))
    assert [each["passed"] for each in found] == passes


def replays_by_calling(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """Replaces the capture of a graph: warms up, and replays by calling again."""
    result = run().clone()
    return lambda: result.copy_(run()), result


def replays_nothing(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    result = run().clone()
    return lambda: None, result


GRAPHS = Settings("cpu", True, "")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With other work on the machine, several threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("record", "passes"), [(replays_by_calling, True), (replays_nothing, False)])
def test_comparison_of_graphs_with_eager_steps(
    record: Callable[..., object], passes: bool, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setattr("experiments.training.graphs.record", record)
    monkeypatch.setattr("tests.gpu.graphs.NETWORKS", ("san10_pairwise",))
    rows = [*graphs.steps(GRAPHS), *graphs.engines(GRAPHS)]
    assert len(rows) == 2 * 5 + 4 * 4
    for row in rows:
        assert row["passed"] == passes, row


@pytest.mark.parametrize("case", graphs.ALL, ids=lambda case: case.name)
def test_graphs_need_a_gpu(case: Case) -> None:
    assert child.run(case, GRAPHS, lambda row: None) == {"status": "skipped", "error": "needs a GPU: a CPU has no CUDA graphs"}


@pytest.mark.parametrize(("case", "package"), zip(graphs.ALL, ("pydantic", "deepspeed"), strict=True))
def test_graphs_are_skipped_without_their_packages(case: Case, package: str, tmp_path: Path) -> None:
    """Runs in a new process, which has not imported the package."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from tests.gpu import child, graphs\nfrom tests.gpu.case import Settings\n"
        f"case = next(case for case in graphs.ALL if case.name == {case.name!r})\n"
        "print(child.run(case, Settings('cuda', True, ''), print))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == str({"status": "skipped", "error": f"needs the package {package}"}), done.stderr
