"""Measures how time and memory grow with cells, writers and the size of a grid, for docs/results/scale.md.

    python -m tests.benchmarks.scale cells 200        # run 200 empty cells on this machine
    python -m tests.benchmarks.scale nodes 8 40       # run 40 empty cells on a cluster of 8 nodes, all on this machine
    python -m tests.benchmarks.scale workers 4 8      # run 8 empty cells of 4 workers each, one after another
    python -m tests.benchmarks.scale runs 2000        # read 2000 finished runs from MLflow on SQLite
    python -m tests.benchmarks.scale writers 64 10 2  # log an epoch of 64 cells every 10 s to `mlflow server --workers 2`
                                                      # on PostgreSQL; every 0 s: as fast as the server responds
    python -m tests.benchmarks.scale plan 10000       # run `san plan` on a grid of 10000 cells
    python -m tests.benchmarks.scale draw docs/results  # draw all measurements

Each call appends lines of JSON to `--record`; `draw` reads them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunStatus

from cluster import Placement
from cluster.session import session
from cluster.sweep import Outcome, Report, sweep
from experiments.grids.config import PROJECT_DIR, flat
from experiments.grids.grid import Trial
from experiments.report.plots import DASHES, MARKERS, SERIES
from experiments.runner.job import Job, known_results, open_job
from experiments.runs.summary import Epoch
from experiments.tracking.store import UNUSABLE
from experiments.tracking.tracker import TrialRun
from experiments.training.metric_logger import AsyncMetricLogger
from san import Complexity
from tests.cluster.nodes import nodes as several_nodes
from tests.experiments.servers import POOL, Server, postgres

GRID = """
question: How does cost grow?
base: {model: {name: san10_pairwise}}
product:
  model.relation: [subtraction, summation, hadamard, dot]
  model.footprint: [3, 5, 7, 9, 11]
  recipe.lr: %s
"""
EPOCHS = 20
"""Number of epochs that each writer logs."""
PROCESSES = 4
"""Number of processes that share the writers as threads; one process per writer would exhaust the memory."""


def grid_of(cells: int, folder: Path) -> Path:
    """Writes a grid of at least `cells` cells with 20 models."""
    path = folder / "scale.yaml"
    path.write_text(GRID % [round(0.001 * (i + 1), 3) for i in range(-(-cells // 20))])
    return path


class Clock:
    """Records when cells end and the memory of the driver at these times."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.megabytes: list[float] = []

    def started(self, key: str) -> None: ...

    def progress(self, key: str, metrics: Mapping[str, float]) -> None: ...

    def finished(self, outcome: Outcome) -> None:
        assert outcome.error is None, outcome
        self.ends.append(time.monotonic())
        self.megabytes.append(_megabytes())

    def waiting(self, reason: str) -> None: ...


def nothing(value: int, report: Report) -> None:
    report({"value": value})


def cells(number: int, folder: Path) -> Iterator[dict[str, float]]:
    with session() as resources:
        yield from _sweep_of_nothing(number, resources.cpus, folder, Placement())


def nodes(number: int, folder: Path, cells: float = 40) -> Iterator[dict[str, float]]:
    """Runs cells on `number` nodes of one CPU on this machine: measures Ray's bookkeeping without a network."""
    with several_nodes(head_cpus=1) as several:
        for _ in range(number - 1):
            several.add()
        yield from ({"nodes": number, **line} for line in _joined(several.address, int(cells), 1, folder))


def workers(number: int, folder: Path, cells: float = 8) -> Iterator[dict[str, float]]:
    """Runs cells of `number` workers, one after another, on a node that claims to have as many CPUs: measures their start."""
    with several_nodes(head_cpus=number) as several:
        for line in _joined(several.address, int(cells), number, folder):
            if "all_trials" in line:
                each = (line["last_after"] - line["first_after"]) / (cells - 1)
                yield {"workers": number, "seconds_each": each, **line}


def _joined(address: str, cells: int, workers: int, folder: Path) -> Iterator[dict[str, float]]:
    command = [sys.executable, "-m", "tests.benchmarks.scale", "join", address, str(cells), str(workers), str(folder)]
    done = subprocess.run(command, cwd=PROJECT_DIR, check=True, stdout=subprocess.PIPE, text=True)
    yield from map(json.loads, done.stdout.splitlines())


def join(address: str, cells: int, workers: int, folder: Path) -> None:
    """Runs the driver of a sweep on a cluster."""
    with session(address) as resources:
        for line in _sweep_of_nothing(cells, resources.cpus // workers, folder, Placement(workers)):
            print(json.dumps(line))


def _sweep_of_nothing(number: int, at_once: int, folder: Path, placement: Placement) -> Iterator[dict[str, float]]:
    """Yields up to twelve intermediate measurements, then the total."""
    before, began = _megabytes(), time.monotonic()
    clock = Clock()
    sweep(nothing, {f"{i:012x}": i for i in range(number)}, placement, storage=folder, observer=clock)
    whole = time.monotonic() - began
    steps = range(max(number // 12, 2), number + 1, max(number // 12, 2))
    for last in steps:
        first = last - steps.step
        yield {
            "cells": last,
            "at_once": at_once,
            "seconds": clock.ends[last - 1] - began,
            "seconds_per_cell": (clock.ends[last - 1] - clock.ends[first]) / (last - 1 - first),
            "driver_megabytes": clock.megabytes[last - 1] - before,
        }
    yield {
        "all_trials": number,
        "at_once": at_once,
        "first_after": clock.ends[0] - began,
        "last_after": clock.ends[-1] - began,
        "seconds": whole,
    }


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def runs(number: int, folder: Path) -> Iterator[dict[str, float]]:
    """Writes finished runs as cells do, but in fewer calls."""
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


def writers(number: int, folder: Path, every: float = 0.0, workers: float = 1) -> Iterator[dict[str, float]]:
    """Runs one `AsyncMetricLogger` per cell, which sends the run's description, epochs, the node's metrics and the end.

    With `every=0`, it sends the next epoch after the response to the last one.
    """
    with _server(folder, int(workers)) as uri:
        os.environ["MLFLOW_TRACKING_URI"] = uri
        job = open_job(grid_of(number, folder), "digits", (), folder / "runs")
        job.tracker.prepare(job.grid, folder)
        count = min(PROCESSES, number)
        command = [sys.executable, "-m", "tests.benchmarks.scale", "write", str(number), str(every)]
        began = time.monotonic()
        started = [
            subprocess.Popen([*command, str(folder), f"{i}", f"{count}"], cwd=PROJECT_DIR, stdout=subprocess.PIPE, text=True)
            for i in range(count)
        ]
        answers = [json.loads(process.communicate()[0]) for process in started]
        seconds = [second for answer in answers for second in answer["seconds"]]
        busy = max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)
        client, results = job.tracker.client, job.tracker.results()
        ids = [results[trial.key].run_id for trial in job.trials[:number] if trial.key in results]
        epochs = [[metric.step for metric in client.get_metric_history(run, "val/top1")] for run in ids]
        yield {
            "writers": number,
            "every": every,
            "workers": workers,
            "epochs_per_second": sum(map(len, epochs)) / busy,
            "median_seconds": statistics.median(seconds),
            "p95_seconds": statistics.quantiles(seconds, n=20)[-1],
            "p99_seconds": statistics.quantiles(seconds, n=100)[-1],
            "unanswered": sum(answer["unanswered"] for answer in answers),
            "lost": number * EPOCHS - sum(len(set(steps)) for steps in epochs),
            "doubled": sum(len(steps) - len(set(steps)) for steps in epochs),
            "finished": sum(results[trial.key].finished for trial in job.trials[:number] if trial.key in results),
            "wall": time.monotonic() - began,
        }


@contextmanager
def _server(folder: Path, workers: int) -> Iterator[str]:
    password = secrets.token_hex(16)
    with postgres(password) as database:
        server = Server(folder, database, environment={"PGPASSWORD": password, **POOL}, workers=workers)
        server.launch()
        try:
            server.wait()
            yield server.uri
        finally:
            server.kill()


def write(number: int, every: float, folder: Path, first: int, step: int) -> None:
    """Runs the writers of the trials first, first + step, and so on, in this process."""
    job = open_job(folder / "scale.yaml", "digits", (), folder / "runs")
    seconds: list[float] = []
    unanswered: list[str] = []
    answered: dict[str, int] = {}
    send = TrialRun.log

    def timed(run: TrialRun, *what: Any) -> Any:
        start = time.monotonic()
        try:
            answer = send(run, *what)
        except UNUSABLE:
            unanswered.append(run.run_id)
            raise
        if what[-1] is None or len(answer) > len(what[-1]):  # otherwise there was nothing to send
            seconds.append(time.monotonic() - start)
        answered[run.run_id] = len(answer)
        return answer

    TrialRun.log = timed  # type: ignore[method-assign]

    def work(trial: Trial) -> None:
        logger = AsyncMetricLogger(lambda: job.tracker, trial, Complexity(1, 2, 3, ()), {}, 1000, resumed=False)
        ended: dict[int, int] = {}
        history: list[Epoch] = []
        time.sleep(random.uniform(0, every))  # cells start at different times
        for epoch in range(EPOCHS):
            history.append(_epoch(epoch))
            ended[epoch] = int(time.time() * 1000)
            logger.log(history, ended)
            time.sleep(every)
            while not every and (logger._run is None or answered.get(logger._run.run_id, 0) <= epoch):
                time.sleep(0.01)
        logger.finish(None)

    trials = job.trials[:number][first::step]
    threads = [threading.Thread(target=work, args=[trial]) for trial in trials]
    began = time.time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"seconds": seconds, "unanswered": len(unanswered), "began": began, "ended": time.time()}))


def plan(number: int, folder: Path) -> Iterator[dict[str, float]]:
    """Times the whole command, including the start of Python."""
    for cells in (20, number // 4, number // 2, number):
        command = [sys.executable, "-m", "experiments", "plan", str(grid_of(cells, folder)), "--runs", str(folder / "runs")]
        began = time.monotonic()
        subprocess.run(command, cwd=PROJECT_DIR, check=True, stdout=subprocess.DEVNULL)
        took = time.monotonic() - began
        yield {"cells": cells, "seconds": took}


PIECES = {"cells": cells, "nodes": nodes, "workers": workers, "runs": runs, "writers": writers, "plan": plan}


@dataclass(frozen=True)
class Panel:
    """A plot of `y` over `x` with one line per value of `series`."""

    piece: str
    x: str
    y: str
    xlabel: str
    ylabel: str
    series: str = ""
    where: Callable[[Mapping[str, float]], bool] = lambda line: True

    def lines(self, records: Sequence[Mapping[str, Any]]) -> dict[float, list[tuple[float, float]]]:
        found: dict[float, list[tuple[float, float]]] = {}
        for line in records:
            if line["piece"] == self.piece and self.x in line and self.y in line and self.where(line):
                found.setdefault(line.get(self.series, 0), []).append((line[self.x], line[self.y]))
        return {series: sorted(points) for series, points in sorted(found.items())}


def _in_intervals(line: Mapping[str, float]) -> bool:
    return line["every"] > 0


def _at_full_speed(line: Mapping[str, float]) -> bool:
    return line["every"] == 0


PICTURES = {
    "cells": (
        Panel("cells", "cells", "seconds_per_cell", "cells that ended before", "seconds per cell"),
        Panel("cells", "cells", "driver_megabytes", "cells that ended before", "driver, MiB more than at the start"),
    ),
    "runs": (
        Panel("runs", "runs", "seconds_to_read", "finished runs in sqlite", "seconds to read all"),
        Panel("runs", "runs", "database_megabytes", "finished runs in sqlite", "database, MiB"),
        Panel("plan", "cells", "seconds", "cells of a grid", "seconds of `san plan`"),
    ),
    "writers": (
        Panel(
            "writers",
            "every",
            "p95_seconds",
            "64 cells: seconds per epoch",
            "95 % answered within, s",
            "workers",
            _in_intervals,
        ),
        Panel("writers", "writers", "epochs_per_second", "writers, full speed", "epochs per second", "workers", _at_full_speed),
        Panel("writers", "writers", "p95_seconds", "writers, full speed", "95 % answered within, s", "workers", _at_full_speed),
    ),
}


def draw(record: Path, folder: Path) -> None:
    """Draws a figure for each subject with measurements."""
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in record.read_text().splitlines()]
    for name, panels in PICTURES.items():
        panels = tuple(panel for panel in panels if panel.lines(records))
        if not panels:
            continue
        figure = Figure(figsize=(3.6 * len(panels), 3), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            lines = panel.lines(records)
            styles = zip(itertools.cycle(SERIES), itertools.cycle(MARKERS), itertools.cycle(DASHES))
            for (series, points), (colour, marker, dashes) in zip(lines.items(), styles, strict=False):
                label = f"{series:g} {panel.series}"
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=dashes, markersize=4, label=label)
            axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, xlim=(0, None), ylim=(0, None))
            axes.grid(alpha=0.3)
            if len(lines) > 1:
                axes.legend(fontsize="small", title="`mlflow server`", title_fontsize="small")
        figure.savefig(folder / f"scale-{name}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=[*PIECES, "draw", "join", "write"])
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--record", type=Path, default=Path("scale.jsonl"))
    options = parser.parse_args()
    if options.piece == "write":
        number, every, at, first, step = options.arguments
        return write(int(number), float(every), Path(at), int(first), int(step))
    if options.piece == "join":
        address, cells, group, at = options.arguments
        return join(address, int(cells), int(group), Path(at))
    if options.piece == "draw":
        return draw(options.record, Path(options.arguments[0]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM must stop the servers, too
    folder = Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        for line in PIECES[options.piece](int(options.arguments[0]), folder, *map(float, options.arguments[1:])):
            text = json.dumps({"piece": options.piece, **line})
            print(text, flush=True)
            with open(options.record, "a") as file:
                file.write(text + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    # Cells cannot import functions from __main__.
    from tests.benchmarks import scale

    scale.main()
