"""Memory of the command and of a worker over many short epochs, and the time to log 100,000 epochs.

    python -m tests.benchmarks.long_run

Prints the slope of the resident memory with a 95 % confidence interval. The first fifth of the samples, in which caches fill,
is left out. Neighboring samples are correlated, so the interval is computed from the means of 20 blocks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from scipy.stats import linregress  # type: ignore[import-untyped, unused-ignore]

from experiments.config.config import PROJECT_DIR
from experiments.runs.summary import Epoch
from experiments.tracking.tracker import Tracker, TrialRun
from tests.faults.faults import GRID

MINUTES, EPOCHS = 30, 100_000
BLOCKS = 20
T_95 = 2.101
"""Quantile of Student's t distribution with 18 degrees of freedom."""


def memory(runs: Path) -> None:
    """Trains one trial with epochs of two steps, and samples the memory of its processes every second."""
    settings = ["recipe.epochs=9999", "recipe.batch_size=300", "data.train_per_class=60"]
    command = [sys.executable, "-m", "experiments", "run", str(GRID), *settings, "--runs", str(runs)]
    driver = subprocess.Popen(command, cwd=PROJECT_DIR, stderr=subprocess.DEVNULL, start_new_session=True)
    samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    limit = time.monotonic() + 60 * MINUTES
    while time.monotonic() < limit and driver.poll() is None:
        time.sleep(1)
        for name, process in _processes(driver.pid):
            with suppress(psutil.Error):
                samples[name].append((time.monotonic() / 3600, process.memory_info().rss / 2**20))
    driver.terminate()
    driver.wait()
    epochs = sum(1 for _ in next(runs.glob("checkpoints/*/summary.csv")).open()) - 1
    print(f"{epochs} epochs in {MINUTES} minutes")
    for name, values in samples.items():
        slope, width = _slope(np.array(values[len(values) // 5 :]))
        print(f"{name}: {values[-1][1]:.0f} MiB, slope {slope:+.1f} ± {width:.1f} MiB per hour")


def _processes(driver: int) -> list[tuple[str, psutil.Process]]:
    found = [("command", psutil.Process(driver))]
    for child in found[0][1].children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if child.name().startswith("ray::Implicit"):
                found.append(("worker", child))
    return found


def _slope(samples_S2: np.ndarray) -> tuple[float, float]:
    """Slope, and half the width of its confidence interval."""
    fit = linregress(*np.array([block.mean(0) for block in np.array_split(samples_S2, BLOCKS)]).T)
    return float(fit.slope), T_95 * float(fit.stderr)


def logging(folder: Path) -> None:
    """Logs epochs one by one, as training does, and prints the time of the first and last 1 %."""
    tracker = Tracker(f"sqlite:///{folder / 'mlflow.db'}", "long", "digits")
    client = tracker.client
    run = TrialRun(tracker.uri, client, client.create_run(client.create_experiment("long")).info.run_id)
    logged: set[int] = set()
    times = []
    for epoch in range(EPOCHS):
        began = time.perf_counter()
        row = Epoch(epoch, 0.1, train_loss=1.0, images_per_second=100.0, wait_share=0.1, val_loss=1.0, top1=50.0, top5=90.0)
        logged = set(run.log([row], logged))
        times.append(time.perf_counter() - began)
    count = EPOCHS // 100
    first, last = (1000 * float(np.median(part)) for part in (times[:count], times[-count:]))
    print(f"{EPOCHS} logged epochs: median {first:.1f} ms per epoch for the first {count}, {last:.1f} ms for the last {count}")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        memory(Path(scratch) / "runs")
        logging(Path(scratch))


if __name__ == "__main__":
    main()
