"""Measures how time and memory grow with the number of trials, finished runs and the size of a grid.

    python -m tests.benchmarks.scale trials 200  # run 200 empty trials on this machine
    python -m tests.benchmarks.scale runs 2000   # read 2000 finished runs from MLflow on SQLite
    python -m tests.benchmarks.scale plan 10000  # run `san plan` on a grid of 10000 trials

Prints lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlflow.entities import Metric, Param, RunStatus

from cluster import Outcome, Placement, ReportFn
from cluster.session import session
from cluster.sweep import sweep
from experiments.config.config import PROJECT_DIR, flat
from experiments.config.grid import GridRequest
from experiments.runner.grid_run import known_results, open_grid_run
from experiments.runs.summary import Epoch

GRID = """
question: How does cost grow?
base: {model: {name: san10_pairwise}}
product:
  model.relation: [subtraction, summation, hadamard, dot]
  model.footprint: [3, 5, 7, 9, 11]
  recipe.lr: %s
"""
EPOCH = Epoch(0, lr=0.1, train_loss=1.0, images_per_second=1e3, wait_share=0.0, val_loss=1.0, top1=50.0, top5=90.0)


def grid_of(trials: int, folder: Path) -> Path:
    """Writes a grid of at least `trials` trials with 20 models."""
    path = folder / "scale.yaml"
    path.write_text(GRID % [round(0.001 * (i + 1), 3) for i in range(-(-trials // 20))])
    return path


class Clock:
    """Records when trials end and the memory of the driver at these times."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def started(self, key: str) -> None: ...

    def progress(self, key: str, metrics: Mapping[str, float]) -> None: ...

    def failed(self, key: str, reason: str) -> None: ...

    def finished(self, outcome: Outcome) -> None:
        assert outcome.error is None, outcome
        self.ends.append((time.monotonic(), _megabytes()))

    def waiting(self, reason: str) -> None: ...


def nothing(value: int, report: ReportFn) -> None:
    report({"value": value})


def trials(number: int, folder: Path) -> Iterator[dict[str, float]]:
    """Yields the time and the memory of the driver after each tenth of the trials."""
    with session() as resources:
        before, began, clock = _megabytes(), time.monotonic(), Clock()
        sweep(nothing, {f"{i:012x}": i for i in range(number)}, Placement(), storage=folder, observer=clock)
        for last in range(max(number // 10, 1), number + 1, max(number // 10, 1)):
            end, megabytes = clock.ends[last - 1]
            yield {"trials": last, "at_once": resources.cpus, "seconds": end - began, "driver_megabytes": megabytes - before}


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def runs(number: int, folder: Path) -> Iterator[dict[str, float]]:
    """Writes finished runs as trials do, but in fewer calls, and reads all of them."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    grid_run = open_grid_run(GridRequest(grid_of(number, folder), "digits", (), folder / "runs"))
    grid_run.workspace.runs.mkdir()
    grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    metrics = [Metric(key, value, int(time.time() * 1000), 0) for key, value in EPOCH.metrics().items()]
    began = time.monotonic()
    for trial in grid_run.trials[:number]:
        run = grid_run.tracker.open(trial)
        params = [Param(key, str(value)) for key, value in flat(trial.record).items()]
        run.client.log_batch(run.run_id, params=params, metrics=metrics)
        run.client.set_terminated(run.run_id, RunStatus.to_string(RunStatus.FINISHED))
    written = time.monotonic()
    assert len(known_results(grid_run)) == number
    size = (grid_run.workspace.runs / "mlflow.db").stat().st_size / 2**20
    yield {"runs": number, "write_seconds": written - began, "read_seconds": time.monotonic() - written, "megabytes": size}


def plan(number: int, folder: Path) -> Iterator[dict[str, float]]:
    """Times the whole command, including the start of Python."""
    for count in (20, number // 2, number):
        command = [sys.executable, "-m", "experiments", "plan", str(grid_of(count, folder)), "--runs", str(folder / "runs")]
        began = time.monotonic()
        subprocess.run(command, cwd=PROJECT_DIR, check=True, stdout=subprocess.DEVNULL)
        yield {"trials": count, "seconds": time.monotonic() - began}


PARTS = {"trials": trials, "runs": runs, "plan": plan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("number", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        for line in PARTS[options.part](options.number, Path(folder)):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    # Trials cannot import functions from __main__.
    from tests.benchmarks import scale

    scale.main()
