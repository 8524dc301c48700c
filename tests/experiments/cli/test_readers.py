"""`san report` and `san run` if the folder of runs is read-only or the disk is full."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from experiments.grids.config import PROJECT_DIR
from experiments.runner.job import open_job
from tests.experiments.drivers import PATIENCE
from tests.experiments.samples import finish_trial

GRID = """
question: Does anybody read it?
rows:
  - {id: resnet26_3, model: {name: resnet26, footprint: 3}}
  - {id: pairwise_3, model: {name: san10_pairwise, footprint: 3}}
"""
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


@pytest.fixture
def runs(tmp_path: Path, empty_database: Path) -> Iterator[Path]:
    """A read-only folder with a grid of two trials, one of them finished."""
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(empty_database, runs / "mlflow.db")
    (tmp_path / "read.yaml").write_text(GRID)
    job = open_job(tmp_path / "read.yaml", "digits", (), runs)
    job.tracker.prepare(job.grid, runs / "artifacts")
    finish(runs, "resnet26_3")
    allow(runs, False)
    yield runs
    allow(runs, True)


def allow(runs: Path, writing: bool) -> None:
    runs.chmod(0o755 if writing else 0o555)
    (runs / "mlflow.db").chmod(0o644 if writing else 0o444)


def finish(runs: Path, row: str) -> None:
    job = open_job(runs.parent / "read.yaml", "digits", (), runs)
    (trial,) = (trial for trial in job.trials if trial.row == row)
    finish_trial(job, trial, 91.5)


def without_root_rights() -> None:
    """Makes file permissions count for root and its child processes too."""
    if os.geteuid() == 0:
        assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0) == 0


def on_a_full_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # Python must be able to write a few bytes to /tmp


def san(prepare: Callable[[], None], command: str, runs: Path) -> subprocess.CompletedProcess[str]:
    """Runs `san` in a process that calls `prepare` first."""
    command_line = [sys.executable, "-m", "experiments", command, str(runs.parent / "read.yaml"), "--runs", str(runs)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return subprocess.run(
        command_line,
        cwd=PROJECT_DIR,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        preexec_fn=prepare,
    )


@pytest.mark.parametrize("prepare, reason", [(without_root_rights, "Permission denied"), (on_a_full_disk, "File too large")])
def test_report_prints_the_table_if_nothing_can_be_written(prepare: Callable[[], None], reason: str, runs: Path) -> None:
    allow(runs, prepare is on_a_full_disk)
    done = san(prepare, "report", runs)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1  # a trial is missing
    assert "Does anybody read it?" in done.stdout and "91.5" in done.stdout
    assert f"{runs / 'read-digits'}: cannot write the table, plot and page ({reason})\n" in done.stderr
    assert re.search(f"browse the runs: .*san ui --runs {runs}\n", done.stderr)
    assert "not finished: pairwise_3" in done.stderr


@pytest.mark.slow
def test_run_in_a_read_only_folder_prints_the_table_only_of_a_finished_grid(runs: Path) -> None:
    done = san(without_root_rights, "run", runs)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 2
    assert f"{runs / 'locks/grids/read-digits'}: cannot write (Permission denied); choose another folder" in done.stderr
    allow(runs, True)
    finish(runs, "pairwise_3")
    allow(runs, False)
    done = san(without_root_rights, "run", runs)
    assert "Traceback" not in done.stderr, done.stderr
    assert (done.returncode, done.stdout.count("91.5")) == (0, 2)
    assert "MLflow's pages of the grid were not updated" in done.stderr
