"""The GPU check on a CPU: records of cases that crash, hang or fail, one case of each part, and the report."""

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


def passes(settings: Settings) -> Iterator[Row]:
    yield {"check": "one", "passed": True}


def aborts(settings: Settings) -> Iterator[Row]:
    yield {"check": "before", "passed": True}
    os.abort()


def hangs(settings: Settings) -> Iterator[Row]:
    yield {"check": "before", "passed": True}
    subprocess.Popen(["sleep", "1234567"])
    time.sleep(60)


def raises(settings: Settings) -> Iterator[Row]:
    yield {"check": "before", "passed": True}
    raise ValueError("a wrong value")


def errs(settings: Settings) -> Iterator[Row]:
    yield {"check": "one", "passed": True}
    yield {"check": "two", "passed": False}
    yield {"check": "three", "passed": True}


def breaks_cuda(settings: Settings) -> Iterator[Row]:
    yield {"check": "before", "passed": True}
    where = "pairwise: mapping_kernel: " if os.environ.get("SAN_CUDA_SYNC") == "1" else "CUDA error: "
    raise RuntimeError(f"{where}an illegal memory access was encountered")


def fails_to_launch(settings: Settings) -> Iterator[Row]:
    yield {"check": "before", "passed": True}
    hint = "; an earlier kernel may be the cause, set SAN_CUDA_SYNC=1 to find it" if "SAN_CUDA_SYNC" not in os.environ else ""
    raise RuntimeError(f"san::pairwise: kernel (hidden_kernel<scalar_t, 4>) failed: invalid argument{hint}")


def fails_in_a_kernel(settings: Settings) -> Iterator[Row]:
    yield {"check": "halo_kernel", "passed": False}


def needs_a_package(settings: Settings) -> Iterator[Row]:
    importlib.import_module("no_such_package")

    yield {}


def misses_our_module(settings: Settings) -> Iterator[Row]:
    importlib.import_module("tests.no_such_module")

    yield {}


def skips(settings: Settings) -> Iterator[Row]:
    raise SkipCase("needs two GPUs; this machine has 1")
    yield {}


FAKES: dict[str, Callable[[Settings], Iterator[Row]]] = {
    f.__name__: f
    for f in (
        *(passes, aborts, hangs, raises, errs, breaks_cuda, fails_to_launch, fails_in_a_kernel),
        *(needs_a_package, misses_our_module, skips),
    )
}


def fakes(settings: Settings) -> list[Case]:
    cases = [Case("loader", name, run, 1, 3 if name == "hangs" else 60) for name, run in FAKES.items()]
    cases.append(Case("cores", "kernels_need_no_package", needs_a_package, 1))
    return [*cases, Case("build", "kernels", raises, 0), Case("cores", "last", hangs, 9, 60)]


def run(out: Path, names: list[str], budget: float = 100) -> Records:
    settings = Settings("cuda", False, str(out))  # no fake touches a GPU
    cases = [case for case in fakes(settings) if case.name in names]
    records = Runner(settings, out, budget, CHILD).run(cases)
    assert [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()] == records
    return {record["name"]: record for record in records}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return run(tmp_path_factory.mktemp("fakes"), [*FAKES, "kernels_need_no_package"])


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("passes", "passed", None),
        ("aborts", "crashed", "signal SIGABRT"),
        ("hangs", "timeout", "killed after 3 s"),
        ("raises", "failed", "ValueError: a wrong value"),
        ("errs", "failed", '1 checks failed, the first: {"check": "two"'),
        ("breaks_cuda", "crashed", "CUDA error: an illegal memory access"),
        ("fails_to_launch", "crashed", "invalid argument; an earlier kernel may be the cause"),
        ("needs_a_package", "skipped", "needs the package no_such_package"),
        ("kernels_need_no_package", "failed", "No module named 'no_such_package'"),
        ("misses_our_module", "failed", "No module named 'tests.no_such_module'"),
        ("skips", "skipped", "needs two GPUs"),
    ],
)
def test_status(name: str, status: str, error: str | None, records: Records) -> None:
    record = records[name]
    assert record["status"] == status, record
    assert "error" not in record if error is None else error in record["error"]


def test_keeps_rows_before_a_crash(records: Records) -> None:
    for name in ("aborts", "hangs", "raises", "breaks_cuda"):
        assert records[name]["rows"] == [{"check": "before", "passed": True}], name
    assert len(records["errs"]["rows"]) == 3


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("breaks_cuda", "mapping_kernel"),  # only the second run names it
        ("fails_to_launch", "hidden_kernel"),
        ("fails_in_a_kernel", "halo_kernel"),
        ("aborts", None),
    ],
)
def test_record_names_the_kernel(name: str, kernel: str | None, records: Records) -> None:
    assert records[name]["kernel"] == kernel


def test_failed_launch_runs_again_with_synchronization(records: Records) -> None:
    assert records["fails_to_launch"]["synchronous"]["error"].endswith("failed: invalid argument")


def test_children_of_a_killed_case_end(records: Records) -> None:
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert records["hangs"]["status"] == "timeout"
    assert not any(b"1234567" in command for command in commands)


def test_records_the_end_of_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST", 0.5)
    found = run(tmp_path, ["passes", "last", "errs"], budget=4)
    assert found["passes"]["status"] == "passed"
    assert found["last"]["status"] == "not run" and "budget ended after" in found["last"]["error"]
    found = run(tmp_path, ["passes"], budget=0.1)
    assert (found["passes"]["status"], found["passes"]["error"]) == ("not run", "the budget is spent")


def test_no_case_runs_without_kernels(tmp_path: Path) -> None:
    found = run(tmp_path, ["kernels", "passes"])
    assert found["kernels"]["status"] == "failed"
    assert (found["passes"]["status"], found["passes"]["error"]) == ("not run", "build/kernels did not pass")


CHOSEN = {
    "correctness/pair_weights float32": "check",
    "correctness/operators": "check",
    "correctness/golden numbers": "check",
    "correctness/modules 1 of 2": "check",
    "correctness/san10_pairwise compiled": "check",
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
