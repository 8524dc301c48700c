"""The GPU check on a CPU: cases that crash, hang or fail, a case of each kind, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import child
from tests.gpu.case import Case, Row, Settings
from tests.gpu.report import report
from tests.gpu.runner import Runner

ROOT = Path(__file__).parents[2]
# The processes of fake cases import this file, so it must not import torch.
CHILD = (sys.executable, "-m", "tests.gpu.test_gpu")
PATIENCE = 1800.0
"""Seconds that no case needs, even on a busy machine."""


def aborts(settings: Settings) -> Iterator[Row]:
    yield {"check": "before", "passed": True}
    os.abort()


def hangs(settings: Settings) -> Iterator[Row]:
    threading.Event().wait()
    yield {}


def errs(settings: Settings) -> Iterator[Row]:
    yield {"check": "one", "passed": True}
    yield {"check": "two", "passed": False}
    yield {"check": "three", "passed": True}


def fakes(settings: Settings) -> list[Case]:
    return [Case("loader", run.__name__, run, 1, 0 if run is hangs else PATIENCE) for run in (aborts, hangs, errs)]


def test_records_of_cases_that_crash_hang_or_fail(tmp_path: Path) -> None:
    settings = Settings("cuda", str(tmp_path))  # no fake touches a GPU
    records = Runner(settings, tmp_path, PATIENCE, CHILD).run(fakes(settings))
    found = {record["name"]: (record["status"], len(record["rows"])) for record in records}
    assert found == {"aborts": ("crashed", 1), "hangs": ("timeout", 0), "errs": ("failed", 3)}
    assert [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()] == records
    assert all(f"| loader/{name} | {status} |" in report(records) for name, (status, _) in found.items())


NCU = """\
==PROF== Connected to process 7
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Description"
"0","gram_kernel","GPU Speed Of Light Throughput","Duration","ns","130,048","",""
"0","gram_kernel","GPU Speed Of Light Throughput","DRAM Throughput","%","12.5","",""
"0","gram_kernel","Compute Workload Analysis","Issue Slots Busy","%","71.25","",""
"1","gram_kernel","GPU Speed Of Light Throughput","DRAM Throughput","%","20","",""
"1","gram_kernel","Warp State Statistics","","","","CPIStall","Each warp is stalled for 6.5 cycles, waiting for memory."
"""


def test_limit_of_a_kernel_from_the_output_of_ncu() -> None:
    from tests.gpu.limits import by_kernel

    busy, waiting = by_kernel(NCU.splitlines())
    assert (busy["limit"], busy["metrics"]["Duration"], busy["why"]) == ("instruction issue", 130048, [])
    assert waiting["limit"] == "latency" and "6.5 cycles" in waiting["why"][0]


HERE = {
    "correctness/attend_pairs float32, tf32, bfloat16": "check",
    "correctness/same bits in deterministic mode": "check",
    "correctness/operators": "check",
    "correctness/modules 1 of 2": "check",
    "cores/patchwise tf32": "core",
    "models/san10_scalar tf32 eager": "model",
    "correctness/norm_relu": "check",
    "correctness/pooling": "check",
    "network/san10_patchwise tf32": "variant",
    "network/resnet26 compiled": "variant",
    "tune/256 threads": "variant",
    "tune/launches": "operator",
    "loader/training": "threads",
    "system/doctor": "what",
}
"""Cases of each kind that run in this process, and a field of their rows."""
STARTED = {"build/kernels": "machine", "system/four trials at once": "top1"}
"""Cases that `python -m tests.gpu` starts."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    import torch

    from tests.gpu.cases import all_cases

    out = tmp_path_factory.mktemp("small")
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--out", str(out), "--budget", str(PATIENCE)]
    done = subprocess.run([*command, "--case", "system/four"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    settings = Settings("cpu", str(tmp_path_factory.mktemp("work")))
    for case in all_cases(settings):
        if case.id in HERE:
            rows: list[Row] = []
            end = child.run(case, settings, rows.append)
            found.append({"part": case.part, "name": case.name, "seconds": 0.0, "rows": rows, **end})
    torch.use_deterministic_algorithms(False)  # a case turns them on
    return found


@pytest.mark.slow
def test_cases_of_each_part_pass(records: list[Row]) -> None:
    found = {f"{record['part']}/{record['name']}": record for record in records}
    for name, field in (HERE | STARTED).items():
        assert found[name]["status"] == "passed", found[name]
        assert any(field in row for row in found[name]["rows"]), name


@pytest.mark.slow
def test_report_has_all_tables(records: list[Row]) -> None:
    text = report(records)
    assert "not a measurement" in text
    assert all(
        f"**{title}**" in text for title in ("Cases", "Training, tf32, batch 1", "Training steps", "Loading photographs")
    )


if __name__ == "__main__":
    child.main(fakes)
