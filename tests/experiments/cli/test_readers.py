"""`san report` if nothing can be written."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

from experiments.grids.config import PROJECT_DIR
from experiments.runner.grid_run import GridRun
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.drivers import PATIENCE, clean_environment
from tests.experiments.samples import finish_trial


def on_a_full_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # Python must be able to write a few bytes to /tmp


def test_report_prints_the_table_if_the_disk_is_full(open_small_grid: Callable[..., GridRun]) -> None:
    grid_run = open_small_grid()
    finish_trial(grid_run, grid_run.trials[0], 91.5)
    done = subprocess.run(
        [sys.executable, "-m", "experiments", "report", str(SMALL_GRID), "--runs", str(grid_run.workspace.runs)],
        cwd=PROJECT_DIR,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=on_a_full_disk,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1  # trials are missing
    assert "Does it run?" in done.stdout and "91.5" in done.stdout
    assert f"{grid_run.workspace.runs / 'small-digits'}: cannot write" in done.stderr and "File too large" in done.stderr
