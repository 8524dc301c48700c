"""Compares the final top-1 with 1, 2 and 4 workers at the same global batch size.

    python -m tests.benchmarks.workers --folder DIR

Trains the row `pairwise_7` of the footprint grid with the profile `digits`, five seeds and one CPU per worker. Finished trials
in the folder are kept. Prints mean and standard deviation over seeds, and the difference of means to one worker with its 95 %
interval (Welch's t).
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

from experiments.grids.request import GridRequest
from experiments.report import interval
from experiments.runner.grid_run import open_grid_run
from tests.experiments.processes import ended, start

GRID = Path(__file__).parent / "workers.yaml"
COUNTS, SEEDS = (1, 2, 4), 5


def top1(folder: Path, workers: int, seed: int) -> float:
    """Returns the top-1 in percent after the last epoch; trains the trial first if needed."""
    runs = folder / f"{workers}-workers"
    grid_run = open_grid_run(GridRequest(GRID, "digits", (f"resources.workers={workers}",), runs, seed + 1))
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
    options = parser.parse_args()
    found: dict[int, list[float]] = {count: [] for count in COUNTS}
    for seed in range(SEEDS):
        for count in COUNTS:
            found[count].append(top1(options.folder.resolve(), count, seed))
            print(f"seed {seed}, {count} workers: {found[count][-1]:.2f} %", flush=True)
    print("\n| workers | images per worker and step | top-1, mean | sd | difference to the first (95 %) |")
    print("|---:|---:|---:|---:|---:|")
    first = found[COUNTS[0]]
    for count, values in found.items():
        difference = interval.of_difference(values, first, interval.pooled([values, first])) if values is not first else None
        spread = f"{difference.middle:+.2f} ± {difference.half_width:.2f}" if difference else "-"
        print(f"| {count} | {32 // count} | {statistics.mean(values):.2f} | {statistics.stdev(values):.2f} | {spread} |")


if __name__ == "__main__":
    main()
