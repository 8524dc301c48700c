"""The GPU check on a CPU: cases that crash, hang or fail, a case of each kind, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import child
from tests.gpu.case import Case, Row, Settings
from tests.gpu.report import BEGIN, END, report, write
from tests.gpu.runner import Runner

ROOT = Path(__file__).parents[2]
# The processes of fake cases import this file, so it must not import torch.
CHILD = (sys.executable, "-m", "tests.gpu.test_gpu")


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


def fakes(settings: Settings) -> list[Case]:
    return [Case("loader", run.__name__, run, 1, 3 if run is hangs else 60) for run in (aborts, hangs, errs)]


def test_records_of_cases_that_crash_hang_or_fail(tmp_path: Path) -> None:
    settings = Settings("cuda", str(tmp_path))  # no fake touches a GPU
    records = Runner(settings, tmp_path, 100, CHILD).run(fakes(settings))
    found = {record["name"]: (record["status"], len(record["rows"])) for record in records}
    assert found == {"aborts": ("crashed", 1), "hangs": ("timeout", 1), "errs": ("failed", 3)}
    assert [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()] == records
    assert all(f"| loader/{name} | {status} |" in report(records) for name, (status, _) in found.items())


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
def test_report_of_a_cpu_has_all_tables_and_does_not_go_to_the_page(small_run: Path, tmp_path: Path) -> None:
    text = report([json.loads(line) for line in small_run.read_text().splitlines()])
    assert "not a measurement" in text
    parts = "Cases", "Training, tf32, batch 1", "Training steps", "Loading photographs", "A trial and a loop in plain PyTorch"
    assert all(f"**{title}**" in text for title in parts)
    page = tmp_path / "performance.md"
    page.write_text(f"a\n{BEGIN}\nold\n{END}\nb\n")
    assert subprocess.run([sys.executable, "-m", "tests.gpu.report", str(small_run), "--write", str(page)], cwd=ROOT).returncode
    assert "old" in page.read_text()
    write(page, text)
    assert page.read_text() == f"a\n{BEGIN}\n{text}{END}\nb\n"


if __name__ == "__main__":
    child.main(fakes)
