"""The GPU check on a CPU: records of cases that crash, hang or fail, some cases, and the report."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import child, runner
from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.report import BEGIN, END, report, write
from tests.gpu.runner import Runner

ROOT = Path(__file__).parents[2]
# The processes of fake cases import this file, so it must not import torch.
CHILD = (sys.executable, "-m", "tests.gpu.test_gpu")
Records = dict[str, Row]


def aborts(settings: Settings) -> Iterator[Row]:
    yield {"check": "before", "passed": True}
    os.abort()


def hangs(settings: Settings) -> Iterator[Row]:
    yield {"check": "before", "passed": True}
    time.sleep(60)


def errs(settings: Settings) -> Iterator[Row]:
    yield {"check": "one", "passed": True}
    yield {"check": "two", "passed": False}
    yield {"check": "three", "passed": True}


def breaks_cuda(settings: Settings) -> Iterator[Row]:
    yield {"check": "before", "passed": True}
    where = "pairwise: mapping_kernel: " if os.environ.get("SAN_CUDA_SYNC") == "1" else "CUDA error: "
    raise RuntimeError(f"{where}an illegal memory access was encountered")


def needs_a_package(settings: Settings) -> Iterator[Row]:
    importlib.import_module("no_such_package")

    yield {}


def skips(settings: Settings) -> Iterator[Row]:
    raise SkipCase("needs two GPUs; this machine has 1")
    yield {}


FAKES: dict[str, Callable[[Settings], Iterator[Row]]] = {
    f.__name__: f for f in (aborts, hangs, errs, breaks_cuda, needs_a_package, skips)
}


def fakes(settings: Settings) -> list[Case]:
    cases = [Case("loader", name, run, 1, 3 if name == "hangs" else 60) for name, run in FAKES.items()]
    return [*cases, Case("build", "kernels", errs, 0), Case("cores", "last", hangs, 9, 60)]


def run(out: Path, names: list[str], budget: float = 100) -> Records:
    settings = Settings("cuda", False, str(out))  # no fake touches a GPU
    cases = [case for case in fakes(settings) if case.name in names]
    records = Runner(settings, out, budget, CHILD).run(cases)
    assert [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()] == records
    return {record["name"]: record for record in records}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return run(tmp_path_factory.mktemp("fakes"), list(FAKES))


@pytest.mark.parametrize(
    ("name", "status", "error", "rows"),
    [
        ("aborts", "crashed", "signal SIGABRT", 1),
        ("hangs", "timeout", "killed after 3 s", 1),
        ("errs", "failed", '1 checks failed, the first: {"check": "two"', 3),
        ("breaks_cuda", "crashed", "CUDA error: an illegal memory access", 1),
        ("needs_a_package", "skipped", "needs the package no_such_package", 0),
        ("skips", "skipped", "needs two GPUs", 0),
    ],
)
def test_record_of_a_case(name: str, status: str, error: str, rows: int, records: Records) -> None:
    record = records[name]
    assert record["status"] == status and error in record["error"] and len(record["rows"]) == rows, record
    if name == "breaks_cuda":
        assert record["kernel"] == "mapping_kernel", "the second, synchronous run names it"


def test_cases_that_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST", 0.5)
    found = run(tmp_path, ["skips", "last"], budget=4)
    assert found["last"]["status"] == "not run" and "budget ended after" in found["last"]["error"]
    found = run(tmp_path, ["skips"], budget=0.1)
    assert (found["skips"]["status"], found["skips"]["error"]) == ("not run", "the budget is spent")
    found = run(tmp_path, ["kernels", "skips"])
    assert (found["skips"]["status"], found["skips"]["error"]) == ("not run", "build/kernels did not pass")


CHOSEN = {
    "correctness/pair_weights float32, tf32, bfloat16": "check",
    "correctness/same bits in deterministic mode": "check",
    "correctness/operators": "check",
    "correctness/golden numbers": "check",
    "correctness/modules 1 of 2": "check",
    "cores/patchwise tf32": "core",
    "models/san10_pairwise batch 32 tf32 eager": "model",
    "loader/training": "threads",
    "training/one worker": "trial_over_plain",
}


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small")
    chosen = [part for name in CHOSEN for part in ("--case", name)]
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--out", str(out), *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / "results.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_case_of_each_part(name: str, small_run: Path) -> None:
    found = {f"{record['part']}/{record['name']}": record for record in map(json.loads, small_run.read_text().splitlines())}
    assert found[name]["status"] == "passed", found[name]
    assert any(CHOSEN[name] in row for row in found[name]["rows"])


@pytest.mark.slow
def test_report_of_a_cpu_has_all_tables_and_a_warning(small_run: Path) -> None:
    text = report([json.loads(line) for line in small_run.read_text().splitlines()])
    assert text.startswith("**Small test sizes: not a measurement.**")
    titles = (
        "Cases",
        "Training, tf32, batch 1",
        "Training steps",
        "Loading photographs",
        "`run_trial` and a plain PyTorch loop",
    )
    assert all(f"**{title}**" in text for title in titles)


@pytest.mark.slow
def test_page_rejects_results_of_a_cpu(small_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"a\n{BEGIN}\nold\n{END}\nb\n")
    command = [sys.executable, "-m", "tests.gpu.report", str(small_run), "--write", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "takes only results from a GPU at full size" in done.stderr
    assert "old" in page.read_text()


def test_replaces_the_text_between_the_markers(tmp_path: Path, records: Records) -> None:
    facts: dict[str, Any] = {"device": "cuda", "gpu": "NVIDIA H100", "driver": "580.1", "torch": "2.11.0", "date": "2026-11-22"}
    build = {"part": "build", "name": "kernels", "status": "passed", "rows": [{"machine": facts}]}
    page = tmp_path / "performance.md"
    page.write_text(f"a\n{BEGIN}\nold\n{END}\nb\n")
    write(page, report([build, *records.values()]))
    text = page.read_text()
    assert "old" not in text and text.startswith("a\n") and text.endswith("b\n")
    assert "gpu NVIDIA H100, driver 580.1, torch 2.11.0, date 2026-11-22" in text and "not a measurement" not in text
    assert "| loader/breaks_cuda | crashed | mapping_kernel |" in text


def test_page_has_one_pair_of_markers() -> None:
    text = (ROOT / "docs" / "results" / "performance.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)


if __name__ == "__main__":
    child.main(fakes)
