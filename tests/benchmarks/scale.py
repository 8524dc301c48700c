"""How cost grows with cells, writers and the size of a plan: the figures of docs/scale.md.

    python -m tests.benchmarks.scale cells 200        # a sweep of cells that do nothing, in a session of this machine
    python -m tests.benchmarks.scale runs 2000        # MLflow with so many finished runs in sqlite: what a new start reads
    python -m tests.benchmarks.scale writers 64       # so many writers at once, to `mlflow server` on PostgreSQL
    python -m tests.benchmarks.scale plan 10000       # `san plan` of a product with so many cells
    python -m tests.benchmarks.scale draw docs        # the curves of all that was measured

Each call appends lines of JSON to `--record`, from which `draw` takes them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mlflow.entities import Metric, Param, RunStatus
from mlflow.tracking import MlflowClient

from cluster import Placement
from cluster.session import session
from cluster.sweep import Outcome, Report, sweep
from experiments.config import PROJECT_DIR, flat
from experiments.grid import Trial
from experiments.run import Job, known_results, open_job
from experiments.tracking import PAUSE
from experiments.tracking.store import UNUSABLE
from experiments.tracking.tracker import TrialRun
from experiments.training.metrics import Epoch
from tests.experiments.servers import Server, postgres

GRID = """
question: How does cost grow?
base: {model: {name: san10_pairwise}}
product:
  model.relation: [subtraction, summation, hadamard, dot]
  model.footprint: [3, 5, 7, 9, 11]
  recipe.lr: %s
"""
EPOCHS = 20
"""That each writer logs."""
PROCESSES = 4
"""In which the writers are threads: a process for each would measure this machine's memory."""


def grid_of(cells: int, folder: Path) -> Path:
    """A grid of at least so many cells, of 20 models."""
    path = folder / "scale.yaml"
    path.write_text(GRID % [round(0.001 * (i + 1), 3) for i in range(-(-cells // 20))])
    return path


class Clock:
    """An observer that keeps when cells ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def started(self, key: str) -> None: ...

    def progress(self, key: str, metrics: Mapping[str, float]) -> None: ...

    def finished(self, outcome: Outcome) -> None:
        assert outcome.error is None, outcome
        self.ends.append(time.monotonic())


def nothing(value: int, report: Report) -> None:
    report({"value": value})


def cells(number: int, folder: Path) -> Iterator[dict[str, float]]:
    with session() as resources:
        before = _megabytes()
        clock, began = Clock(), time.monotonic()
        sweep(nothing, {f"{i:012x}": i for i in range(number)}, Placement(), storage=folder, observer=clock)
        seconds = time.monotonic() - began
        tenth = max(number // 10, 2)
        yield {
            "cells": number,
            "at_once": resources.cpus,
            "seconds": seconds,
            "first_tenth": (clock.ends[tenth - 1] - clock.ends[0]) / (tenth - 1),
            "last_tenth": (clock.ends[-1] - clock.ends[-tenth]) / (tenth - 1),
            "driver_megabytes": _megabytes() - before,
        }


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def runs(number: int, folder: Path) -> Iterator[dict[str, float]]:
    """Made as a cell makes them, but in fewer calls."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    job = open_job(grid_of(number, folder), "digits", (), folder / "runs")
    job.workspace.runs.mkdir()
    job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
    began = time.monotonic()
    for made, trial in enumerate(job.trials[:number], 1):
        _finished_run(job, trial)
        if made in (number // 20, number // 4, number // 2, number):
            writing = (time.monotonic() - began) / made
            start = time.monotonic()
            assert len(known_results(job)) == made
            reading = time.monotonic() - start
            size = (job.workspace.runs / "mlflow.db").stat().st_size / 2**20
            yield {"runs": made, "seconds_per_run": writing, "seconds_to_read": reading, "database_megabytes": size}


def _finished_run(job: Job, trial: Trial) -> None:
    run = job.tracker.open(trial)
    params = [Param(key, str(value)) for key, value in flat(trial.record).items()]
    run.client.log_batch(run.run_id, params=params, metrics=_metrics(0))
    run.client.set_terminated(run.run_id, RunStatus.to_string(RunStatus.FINISHED))


def _metrics(step: int) -> list[Metric]:
    return [Metric(key, value, int(time.time() * 1000), step) for key, value in _epoch(step).metrics().items()]


def _epoch(number: int) -> Epoch:
    return Epoch(number, lr=0.1, train_loss=1.0, images_per_second=1e3, wait_share=0.0, val_loss=1.0, top1=50.0, top5=90.0)


def writers(number: int, folder: Path) -> Iterator[dict[str, float]]:
    """Each logs its epochs one after another as a cell does, as fast as it is answered."""
    with _server(folder) as uri:
        client = MlflowClient(uri)
        experiment = client.create_experiment("scale")
        ids = [client.create_run(experiment).info.run_id for _ in range(number)]
        count = min(PROCESSES, number)
        command = [sys.executable, "-m", "tests.benchmarks.scale", "write", uri]
        began = time.monotonic()
        started = [
            subprocess.Popen([*command, *ids[i::count]], cwd=PROJECT_DIR, stdout=subprocess.PIPE, text=True)
            for i in range(count)
        ]
        answers = [json.loads(process.communicate()[0]) for process in started]
        seconds = [second for answer in answers for second in answer["seconds"]]
        busy = max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)
        logged = [len(client.get_metric_history(run, "val/top1")) for run in ids]
        assert logged == [EPOCHS] * number, logged
        yield {
            "writers": number,
            "epochs_per_second": number * EPOCHS / busy,
            "median_seconds": statistics.median(seconds),
            "p95_seconds": statistics.quantiles(seconds, n=20)[-1],
            "unanswered": sum(answer["unanswered"] for answer in answers),
            "wall": time.monotonic() - began,
        }


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    password = secrets.token_hex(16)
    with postgres(password) as database:
        server = Server(folder, database, environment={"PGPASSWORD": password})
        server.launch()
        try:
            server.wait()
            yield server.uri
        finally:
            server.kill()


def write(uri: str, ids: list[str]) -> None:
    """A process with a writer for each run; what is not answered is sent again, as the trials' `Sender` does."""
    seconds: list[float] = []
    unanswered: list[int] = []

    def work(run: TrialRun) -> None:
        history: list[Epoch] = []
        for number in range(EPOCHS):
            history.append(_epoch(number))
            start = time.monotonic()
            while True:
                try:
                    run.log(history, {epoch.epoch: int(time.time() * 1000) for epoch in history})
                    break
                except UNUSABLE:
                    unanswered.append(number)
                    time.sleep(PAUSE)
            seconds.append(time.monotonic() - start)

    threads = [threading.Thread(target=work, args=[TrialRun(uri, MlflowClient(uri), run)]) for run in ids]
    began = time.time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"seconds": seconds, "unanswered": len(unanswered), "began": began, "ended": time.time()}))


def plan(number: int, folder: Path) -> Iterator[dict[str, float]]:
    """The command itself, and the same with its imports taken off: what one cell costs it."""
    took = {}
    for cells in (20, number):
        command = [sys.executable, "-m", "experiments", "plan", str(grid_of(cells, folder)), "--runs", str(folder / "runs")]
        began = time.monotonic()
        subprocess.run(command, cwd=PROJECT_DIR, check=True, stdout=subprocess.DEVNULL)
        took[cells] = time.monotonic() - began
    yield {"cells": number, "seconds": took[number], "seconds_for_20": took[20]}


PIECES = {"cells": cells, "runs": runs, "writers": writers, "plan": plan}
CURVES = {
    "cells": ("cells", {"seconds": "seconds", "driver_megabytes": "driver, MiB more"}),
    "runs": ("runs", {"seconds_to_read": "seconds to read all", "database_megabytes": "database, MiB"}),
    "writers": (
        "writers",
        {"epochs_per_second": "epochs per second", "median_seconds": "median seconds", "p95_seconds": "95 %"},
    ),
    "plan": ("cells", {"seconds": "seconds"}),
}


def draw(record: Path, folder: Path) -> None:
    """A picture for each piece: one small plot per quantity."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in record.read_text().splitlines()]
    for piece, (x, quantities) in CURVES.items():
        points = sorted((line for line in lines if line["piece"] == piece), key=lambda line: line[x])
        if not points:
            continue
        figure = Figure(figsize=(3.4 * len(quantities), 2.8), layout="constrained")
        for axes, (quantity, label) in zip(
            figure.subplots(1, len(quantities), squeeze=False)[0], quantities.items(), strict=True
        ):
            axes.plot([point[x] for point in points], [point[quantity] for point in points], marker="o")
            axes.set(xlabel=x, ylabel=label, xlim=(0, None), ylim=(0, None))
        figure.savefig(folder / f"scale-{piece}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=[*PIECES, "draw", "write"])
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--record", type=Path, default=Path("scale.jsonl"))
    options = parser.parse_args()
    if options.piece == "write":
        return write(options.arguments[0], options.arguments[1:])
    if options.piece == "draw":
        return draw(options.record, Path(options.arguments[0]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit leaves no servers behind
    folder = Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        for line in PIECES[options.piece](int(options.arguments[0]), folder):
            text = json.dumps({"piece": options.piece, **line})
            print(text, flush=True)
            with open(options.record, "a") as file:
                file.write(text + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # The cells must be able to import their function: not from __main__.
    from tests.benchmarks import scale

    scale.main()
