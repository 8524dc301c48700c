"""Compares the final top-1 with 1, 2 and 4 workers at the same global batch size.

    python -m tests.benchmarks.workers --folder DIR [--seeds 5] [--counts 1 2 4] [--minutes 4]

Trains the row `pairwise_7` of the footprint grid with the profile `digits` and one CPU per worker. No trial starts after
`--minutes`; repeat the command to continue, which keeps finished trials. Prints mean and standard deviation over seeds, and the
difference of means to the first count with its 95 % interval (Welch's t).
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from pathlib import Path

from experiments.report import interval
from experiments.runner.grid_run import open_grid_run
from tests.experiments.processes import ended, start

GRID = Path(__file__).parent / "workers.yaml"


def top1(folder: Path, workers: int, seed: int) -> float:
    """Returns the top-1 in percent after the last epoch; trains the trial first if needed."""
    runs = folder / f"{workers}-workers"
    grid_run = open_grid_run(GRID, "digits", (f"resources.workers={workers}",), runs, seed + 1)
    (trial,) = (trial for trial in grid_run.trials if trial.seed == seed)
    summary = grid_run.workspace.checkpoints(trial) / "summary.csv"
    epochs = trial.config.recipe.epochs
    if not summary.exists() or len(summary.read_text().splitlines()) <= epochs:
        grid_run.tracker.prepare(grid_run.grid, runs / "artifacts")
        assert ended(start(grid_run.workspace, trial, workers), seconds=280) == [0] * workers
    with open(summary, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == epochs
    return float(rows[-1]["top1"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    limit = time.monotonic() + 60 * options.minutes
    found: dict[int, list[float]] = {count: [] for count in options.counts}
    for seed in range(options.seeds):
        for count in options.counts:
            if time.monotonic() > limit:
                sys.exit("some trials are not trained yet; repeat the command to continue")
            found[count].append(top1(options.folder.resolve(), count, seed))
            print(f"seed {seed}, {count} workers: {found[count][-1]:.2f} %", flush=True)
    print("\n| workers | images per worker and step | top-1, mean | sd | difference to the first (95 %) |")
    print("|---:|---:|---:|---:|---:|")
    first = found[options.counts[0]]
    for count, values in found.items():
        difference = interval.of_difference(values, first) if values is not first else None
        spread = f"{difference.middle:+.2f} ± {difference.half_width:.2f}" if difference else "-"
        print(f"| {count} | {32 // count} | {statistics.mean(values):.2f} | {statistics.stdev(values):.2f} | {spread} |")


if __name__ == "__main__":
    main()
