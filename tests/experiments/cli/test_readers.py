"""Who may only read, or has a full disk: the table is theirs, and what cannot be written is a sentence. Real processes."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.grids.config import PROJECT_DIR
from experiments.training.job import open_job
from san import Complexity
from tests.experiments.samples import EPOCH

GRID = """
question: Does anybody read it?
rows:
  - {id: resnet26_3, model: {name: resnet26, footprint: 3}}
  - {id: pairwise_3, model: {name: san10_pairwise, footprint: 3}}
"""
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


@pytest.fixture
def runs(tmp_path: Path, empty_database: Path) -> Iterator[Path]:
    """A folder that may only be read, with a grid of which one cell is finished."""
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(empty_database, runs / "mlflow.db")
    (tmp_path / "asked.yaml").write_text(GRID)
    job = open_job(tmp_path / "asked.yaml", "digits", (), runs)
    job.tracker.prepare(job.grid, runs / "artifacts")
    finish(runs, "resnet26_3")
    allow(runs, False)
    yield runs
    allow(runs, True)


def allow(runs: Path, writing: bool) -> None:
    runs.chmod(0o755 if writing else 0o555)
    (runs / "mlflow.db").chmod(0o644 if writing else 0o444)


def finish(runs: Path, row: str) -> None:
    job = open_job(runs.parent / "asked.yaml", "digits", (), runs)
    (trial,) = (trial for trial in job.trials if trial.row == row)
    tracked = job.tracker.open(trial)
    tracked.describe(trial, Complexity(1, 2, 3, ()))
    tracked.log([replace(EPOCH, top1=91.5)], {0: 1000})
    tracked.finish()


def as_others() -> None:
    """Rights count for root too, and for what it starts."""
    if os.geteuid() == 0:
        assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0) == 0


def on_a_full_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # Python looks whether a few bytes can be written to /tmp


def san(begin: Callable[[], None], command: str, runs: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own, in which `begin` is called before all else."""
    words = [sys.executable, "-m", "experiments", command, str(runs.parent / "asked.yaml"), "--runs", str(runs)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return subprocess.run(
        words, cwd=PROJECT_DIR, env=environment, capture_output=True, text=True, timeout=120, check=False, preexec_fn=begin
    )


@pytest.mark.parametrize("begin, reason", [(as_others, "Permission denied"), (on_a_full_disk, "File too large")])
def test_the_table_is_printed_where_nothing_can_be_written(begin: Callable[[], None], reason: str, runs: Path) -> None:
    allow(runs, begin is on_a_full_disk)
    done = san(begin, "report", runs)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1  # a cell is missing
    assert "Does anybody read it?" in done.stdout and "91.5" in done.stdout
    assert f"{runs / 'asked-digits'}: cannot write the table, plot and page ({reason})\n" in done.stderr
    assert re.search(f"browse the runs: .*san ui --runs {runs}\n", done.stderr)
    assert "not finished: pairwise_3" in done.stderr


def test_a_reader_has_the_table_of_a_finished_grid_and_trains_nothing(runs: Path) -> None:
    done = san(as_others, "run", runs)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 2
    assert f"{runs / 'locks/grids/asked-digits'}: cannot write (Permission denied); choose another folder" in done.stderr
    allow(runs, True)
    finish(runs, "pairwise_3")
    allow(runs, False)
    done = san(as_others, "run", runs)
    assert "Traceback" not in done.stderr, done.stderr
    assert (done.returncode, done.stdout.count("91.5")) == (0, 2)
    assert "MLflow's pages of the grid were not updated" in done.stderr
