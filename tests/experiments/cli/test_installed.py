"""The packages installed in site-packages, outside of a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from experiments.cli.submit import PACKAGES
from experiments.grids.config import PROJECT_DIR
from experiments.runner.grid_run import open_grid_run
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.drivers import PATIENCE


def test_installed_project_writes_to_the_current_folder(tmp_path: Path) -> None:
    site, here = tmp_path / "site-packages", tmp_path / "here"
    for package in PACKAGES:
        shutil.copytree(PROJECT_DIR / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    here.mkdir()
    before = sorted(site.rglob("*"))
    environment = {key: value for key, value in os.environ.items() if key not in ("SAN_RUNS", "MLFLOW_TRACKING_URI")}
    environment |= {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    code = f"""
import json, sys
from pathlib import Path
from experiments.runner.grid_run import open_grid_run
job = open_grid_run(Path({str(SMALL_GRID)!r}), "digits", ())
print(json.dumps([job.trials[0].config.data.root, job.trials[0].key, str(job.workspace.runs)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    root, key, runs = json.loads(done.stdout)
    assert (root, runs) == (str(here / "data" / "digits"), str(here / "runs"))
    assert (here / "data" / "digits" / "val").exists()
    assert sorted(site.rglob("*")) == before
    assert key == open_grid_run(SMALL_GRID, "digits", (), tmp_path / "runs").trials[0].key
