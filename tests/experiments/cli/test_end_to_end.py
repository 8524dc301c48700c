"""The main job with every real part: command, Ray, DALI, DeepSpeed, kernels, MLflow, table; and what it survives."""

from __future__ import annotations

import csv
import functools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster import Placement
from cluster.session import available_cpus
from cluster.sweep import Outcome, sweep
from experiments.grids.config import PROJECT_DIR
from experiments.grids.grid import Trial
from experiments.runs.workspace import Workspace
from experiments.training.job import Job, open_job
from experiments.training.trainer import run_trial
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.drivers import Driver

OVERRIDES = ("recipe.epochs=3", "recipe.batch_size=64")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Driver]]:
    drivers: list[Driver] = []

    def launch() -> Driver:
        drivers.append(Driver(SMALL_GRID, tmp_path / "runs", OVERRIDES))
        return drivers[-1]

    yield launch
    for driver in drivers:
        if driver.process.poll() is None:
            os.killpg(driver.process.pid, signal.SIGKILL)


def job_of(runs: Path) -> Job:
    return open_job(SMALL_GRID, "digits", OVERRIDES, runs)


def logged_epochs(job: Job) -> dict[str, list[int]]:
    """For each run of a trial in MLflow: the steps that it has, in the order of logging."""
    client = job.tracker.client
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.`san.role` = 'trial'")
    return {
        f"{run.data.tags['san.row']} {run.info.run_id}": [
            metric.step for metric in client.get_metric_history(run.info.run_id, "val/top1")
        ]
        for run in runs
    }


@pytest.mark.slow
def test_a_grid_survives_kill_and_interrupt_and_is_trained_once(start: Callable[[], Driver], tmp_path: Path) -> None:
    killed = start()
    killed.wait_for("pairwise_3 starts")
    killed.wait_for("resnet26_3 starts")  # two cells at the same time
    killed.wait_for("finished in")
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.finish()

    interrupted = start()
    interrupted.wait_for(r"\w+ starts")
    assert re.search(r"3 cells, [12] already finished", interrupted.said)
    os.killpg(interrupted.process.pid, signal.SIGINT)
    assert interrupted.finish() == 1
    assert "interrupted; finished work is kept. Run the same command again to resume" in interrupted.said
    assert "Traceback" not in interrupted.said

    last = start()
    assert last.finish() == 0, last.said
    job = job_of(tmp_path / "runs")
    epochs = logged_epochs(job)
    assert sorted(name.split()[0] for name in epochs) == ["pairwise_3", "patchwise_3", "resnet26_3"]
    assert all(steps == [0, 1, 2] for steps in epochs.values()), epochs
    assert all(result.finished for result in job.tracker.results().values())

    again = start()
    assert again.finish() == 0, again.said
    assert "3 cells, 3 already finished, 0 to train" in again.said
    assert again.said.count("top-1 paper") == 1
    assert logged_epochs(job) == epochs

    folder = tmp_path / "runs" / "small-digits"
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["id"] for row in rows] == ["pairwise_3", "resnet26_3", "patchwise_3"]
    assert [f"{float(row['params']):.1f} {float(row['flops']):.1f}" for row in rows] == ["10.5 1.7", "13.7 2.4", "10.7 1.6"]
    assert all(float(row["top1"]) > 15 for row in rows)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def train_and_keep(workspace: Workspace, trial: Trial, report: Callable[[Mapping[str, float]], None]) -> None:
    """Trains a cell and leaves each worker's state behind."""
    model = run_trial(workspace, trial, report)
    torch.save(model.state_dict(), workspace.runs / f"rank{dist.get_rank()}.pt")


class Silent:
    """An observer that has nothing to say."""

    def started(self, key: str) -> None: ...

    def progress(self, key: str, metrics: Mapping[str, float]) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...


@pytest.mark.slow
def test_two_workers_end_with_the_same_weights_and_statistics(open_small_job: Callable[..., Job]) -> None:
    job = open_small_job("placement.workers=2", "recipe.epochs=2", "recipe.batch_size=64")
    trial = job.trials[0]
    outcomes = sweep(
        functools.partial(train_and_keep, job.workspace),
        {trial.key: trial},
        job.placement,
        storage=job.workspace.runs,
        observer=Silent(),
        retries=0,
    )
    assert outcomes[trial.key].error is None, outcomes[trial.key].traceback
    first, second = (torch.load(job.workspace.runs / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert any("running_mean" in name for name in first)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    metrics = job.tracker.results()[trial.key].metrics
    assert (metrics["val/top1"] * 360 / 100) == pytest.approx(round(metrics["val/top1"] * 360 / 100), abs=1e-6)


def keep_by_key(workspace: Workspace, trial: Trial, report: Callable[[Mapping[str, float]], None]) -> None:
    """Trains a cell and leaves its state, and the process that it was trained in."""
    state = run_trial(workspace, trial, report).state_dict()
    torch.save({"state": state, "pid": os.getpid()}, workspace.runs / f"{trial.row}.pt")


UNLIKE = """
question: Is a cell the same whatever its process did before?
base: {recipe: {epochs: 1, batch_size: 64}, data: {train_per_class: 30}}
rows:
  - {id: pairwise, model: {name: san10_pairwise, footprint: 3}, recipe: {precision: bfloat16, mixup_alpha: 0.2}}
  - {id: resnet26, model: {name: resnet26}, recipe: {grad_accum_steps: 2}}
  - {id: patchwise, model: {name: san10_patchwise, footprint: 3}, recipe: {ema_decay: 0.9}}
"""


@pytest.mark.slow
def test_a_cell_is_the_same_whatever_its_process_did_before(
    write_grid: Callable[[str], Path], tmp_path: Path, empty_database: Path
) -> None:
    kept: list[dict[str, Any]] = []
    for name, step in (("forwards", 1), ("backwards", -1)):
        (tmp_path / name).mkdir()
        shutil.copy(empty_database, tmp_path / name / "mlflow.db")
        job = open_job(write_grid(UNLIKE), "digits", (), tmp_path / name)
        job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
        cells = {trial.key: trial for trial in job.trials[::step]}
        alone = Placement(cpus=available_cpus())  # one cell at a time
        train = functools.partial(keep_by_key, job.workspace)
        outcomes = sweep(train, cells, alone, storage=tmp_path / name, observer=Silent(), retries=0)
        assert [outcome.error for outcome in outcomes.values()] == [None] * 3, outcomes
        kept.append({trial.row: torch.load(tmp_path / name / f"{trial.row}.pt") for trial in job.trials})
    for each in kept:
        assert len({cell["pid"] for cell in each.values()}) == 1
    for row, cell in kept[0].items():
        for weights, value in cell["state"].items():
            assert torch.equal(value, kept[1][row]["state"][weights]), (row, weights)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@dataclass(frozen=True)
class Head:
    """A Ray head: its dashboard's address, and the environment in which its commands know its token."""

    address: str
    environment: dict[str, str]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    """A Ray head with dashboard and token, as `ray start` makes it, beside any other."""
    ray = Path(sys.executable).parent / "ray"
    environment = os.environ | {"PATH": f"{ray.parent}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    dashboard = free_port()
    start = [ray, "start", "--head", "--block", "--port", free_port(), "--dashboard-port", dashboard, "--num-cpus", "2"]
    with open(tmp_path / "head.log", "w") as log:
        process = subprocess.Popen(start, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    limit = time.monotonic() + 90
    while "Ray runtime started" not in (said := (tmp_path / "head.log").read_text()):
        assert process.poll() is None and time.monotonic() < limit, said
        time.sleep(0.5)
    yield Head(f"http://127.0.0.1:{dashboard}", environment)
    process.terminate()  # `ray start --block` ends what it started
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.long
def test_ray_job_submit(head: Head, tmp_path: Path) -> None:
    runtime_env = f'{{"env_vars": {{"SAN_RUNS": "{tmp_path / "runs"}"}}}}'
    grid, overrides = SMALL_GRID.relative_to(PROJECT_DIR), ("recipe.epochs=1", "recipe.batch_size=128")
    ray = Path(sys.executable).parent / "ray"
    command = [ray, "job", "submit", "--address", head.address, "--working-dir", ".", "--runtime-env-json", runtime_env, "--"]
    command += ["python", "-m", "experiments", "run", str(grid), "--profile", "digits", *overrides]
    for _ in range(6):  # a head that has just started waits 10 s for its agent, then says to try again later
        done = subprocess.run(
            command, cwd=PROJECT_DIR, env=head.environment, capture_output=True, text=True, timeout=240, check=False
        )
        if "try again later" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"patchwise_3 +77\.4 +\d+\.\d", done.stdout)
    results = open_job(SMALL_GRID, "digits", overrides, tmp_path / "runs").tracker.results()
    assert sum(result.finished for result in results.values()) == 3
