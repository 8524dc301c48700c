"""Parts of the GPU check that need no GPU: the order of cases, failures, sanitizers, comparisons of CUDA graphs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import san
from tests.gpu import cores, graphs, models, timing
from tests.gpu.case import Settings
from tests.gpu.cases import all_cases
from tests.gpu.correctness import NETWORKS, sanitized
from tests.gpu.report import report
from tests.ops.cases import OPERATORS

ON_CPU = Settings("cpu", True, "")


def test_important_cases_come_first() -> None:
    cases = [case.id for case in sorted(all_cases(Settings("cuda", False, "")), key=lambda case: case.priority)]
    networks = [f"models/{name} batch 32" for name in NETWORKS]
    first = [f"{name} {how}" for name in networks for how in ("tf32 eager", "tf32 graphs", "bfloat16 eager", "bfloat16 graphs")]
    first += [f"cores/{kind} tf32" for kind in ("pairwise", "patchwise")]
    first += [f"correctness/{operator} float32, tf32, bfloat16" for operator in OPERATORS]
    then = [case.id for case in graphs.ALL] + ["correctness/modules 1 of 2", "correctness/modules 2 of 2"]
    then += ["correctness/memcheck", "correctness/racecheck", "loader/training", "training/one worker"]
    assert max(map(cases.index, first)) < min(map(cases.index, then))
    assert max(map(cases.index, then)) < 34
    assert all("compiled" in case for case in cases[-8:])


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
    line = f"case \"$*\" in *'--kernel-name kernel_substring=san '*) printf '%s' '{row}' > \"$last\";; esac"
    sanitizer.write_text(f"#!/bin/sh\nfor last; do :; done\n{line}\n")
    sanitizer.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(sanitizer))
    found = list(sanitized("memcheck", Settings("cuda", False, str(tmp_path))))
    assert [each["passed"] for each in found] == passes


def fails() -> None:
    raise RuntimeError("no memory format\nand many more lines")


@pytest.mark.parametrize("name", ["fused", "reference"])
def test_failure_of_one_contender_keeps_the_other_timings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {each: fails if each == name else lambda: None for each in ("fused", "unfused", "reference")}
    monkeypatch.setattr(cores, "contenders", lambda *args: calls)
    rows = [row for row in cores.cores("pairwise", ["stage 4", "stage 5"], "tf32", False, ON_CPU) if "core" in row]
    assert len(rows) == 4
    for row in rows:
        assert row["left_out"] == {name: "RuntimeError: no memory format"}
        assert set(row["ms"]) == set(calls) - {name}
        assert row["passed"] == (name != "fused")
    assert "RuntimeError: no memory format" in report([{"part": "cores", "name": "", "status": "passed", "rows": rows}])


@pytest.mark.parametrize("name", ["san10_pairwise", "resnet26"])
def test_failure_of_one_network_keeps_the_other_timings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = san.create_model
    monkeypatch.setattr(san, "create_model", lambda each, **size: make(each, **size) if each != name else fails())
    rows = [
        row for row in models.network("san10_pairwise", models.Setting(2, "tf32", "eager"), ["eval"], ON_CPU) if "model" in row
    ]
    assert rows[0]["left_out"] == {name: "RuntimeError: no memory format"}
    assert set(rows[0]["images_per_s"]) == {"san10_pairwise", "resnet26"} - {name}
    assert rows[0]["passed"] == (name == "resnet26")


def test_peak_multiplies_matrices_of_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    types, product = set(), torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: types.add(a.dtype) or product(a, b))
    timing.peaks(ON_CPU)
    assert types == {torch.float32, torch.bfloat16}


def test_rows_hold_the_state_of_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '1980, 2619, 310.5, 700.00, 61, 0x0000000000000004'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    before, row, after = timing.with_state(lambda: iter([{"check": "one"}]))()
    assert row == {"check": "one"} and before == after
    assert before["state"]["clocks.sm"] == "1980" and before["state"]["clocks_event_reasons.active"].endswith("4")
    text = report([{"part": "cores", "name": "", "status": "passed", "rows": [before, after]}])
    assert "| clocks.sm | 1980-1980 |" in text and "| clocks_event_reasons.active | 0x0000000000000004 |" in text
    smi.write_text("#!/bin/sh\nexit 2\n")
    assert timing.gpu_state() == {}


def replays_by_calling(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """Replaces the capture of a graph: warms up, and replays by calling again."""
    result = run().clone()
    return lambda: result.copy_(run()), result


def replays_nothing(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    result = run().clone()
    return lambda: None, result


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
    rows = [*graphs.steps(ON_CPU), *graphs.engines(ON_CPU)]
    assert len(rows) == 2 * 5 + 4 * 4
    for row in rows:
        assert row["passed"] == passes, row
