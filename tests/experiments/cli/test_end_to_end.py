"""The main path with every real part: `san run`, Ray, DALI, DeepSpeed, kernels, MLflow and the table."""

import csv
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import ReportFn
from cluster.session import only_session
from experiments.cli.run import run
from experiments.config.grid import GridRequest, Trial
from experiments.runner import execute
from experiments.runner.grid_run import known_results, open_grid_run
from experiments.runner.plan import missing_measurements
from experiments.runs.claims import StopRequest
from experiments.runs.workspace import Workspace
from experiments.training import trainer
from experiments.training.trainer import run_trial
from tests.cluster.processes import AGENTS, MARK, kill_ray, marked, wait_until_gone
from tests.experiments.conftest import SMALL_GRID, OpenGrid, WriteGrid
from tests.experiments.drivers import Driver, wait_until
from tests.experiments.samples import assert_complete, runs_of

Start = Callable[..., Driver]
AGAIN = "Finished epochs are kept; run the same command again to continue"


@pytest.fixture
def start(tmp_path: Path, empty_database: Path) -> Iterator[Start]:
    """Starts `san run` in a process."""
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_database, tmp_path / "runs" / "mlflow.db")  # creating one takes seconds
    with ExitStack() as drivers:

        def start_it(*options: str, grid: Path = SMALL_GRID) -> Driver:
            return drivers.enter_context(Driver(grid, tmp_path / "runs", options, {MARK: str(tmp_path)}))

        yield start_it


def checkpoints(folder: Path) -> set[Path]:
    return set(folder.glob("runs/checkpoints/*/epoch-*.pt"))


def test_grid_is_trained_with_every_real_part(start: Start, tmp_path: Path) -> None:
    options = ("recipe.epochs=3", "recipe.batch_size=32", "data.train_per_class=64")
    with only_session() as is_only:
        driver = start(*options)
        assert driver.finish() == 0, driver.said
    assert "another `san run` is using this machine" in driver.said or not is_only  # the other one may have ended meanwhile
    assert_complete(open_grid_run(GridRequest(SMALL_GRID, "digits", options, tmp_path / "runs")), 3)
    assert driver.said.count("top-1 paper") == 1
    (folder,) = (tmp_path / "runs").glob("small-digits+*")
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["id"] for row in rows] == ["pairwise_3", "resnet26_3", "patchwise_3"]
    assert [f"{float(row['params']):.1f} {float(row['flops']):.1f}" for row in rows] == ["10.5 1.7", "13.7 2.4", "10.7 1.6"]
    assert all(float(row["top1"]) > 15 for row in rows)  # 33 to 93; 10 by chance
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # four commands, one after the other
def test_grid_resumes_after_ctrl_c_without_ray_and_without_its_driver(start: Start, tmp_path: Path) -> None:
    options = ("recipe.epochs=8", "recipe.batch_size=32", "data.train_per_class=64")
    grid_run = open_grid_run(GridRequest(SMALL_GRID, "digits", options, tmp_path / "runs"))

    def start_and_train_an_epoch() -> Driver:
        before, driver = checkpoints(tmp_path), start(*options)
        wait_until(lambda: checkpoints(tmp_path) - before, driver.process, driver.log)
        return driver

    interrupted = start_and_train_an_epoch()
    os.killpg(interrupted.process.pid, signal.SIGINT)
    assert interrupted.finish() == 1
    assert "the same `san run` continues it" in interrupted.said
    assert "Traceback" not in interrupted.said and "grpc" not in interrupted.said.lower()
    wait_until_gone(str(tmp_path))

    without_ray = start_and_train_an_epoch()
    kill_ray("raylet", str(tmp_path))
    assert without_ray.finish() == os.EX_TEMPFAIL, without_ray.said
    assert without_ray.said.splitlines()[-1].endswith(AGAIN) and "Traceback" not in without_ray.said
    assert not marked(str(tmp_path))  # a process that still trained would mark its run as running
    assert {run.info.status for run in runs_of(grid_run)} - {"FINISHED"} == {"KILLED"}

    killed = start_and_train_an_epoch()
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.finish()
    assert re.search("_3 resumes (after epoch|at epoch)", killed.said)
    wait_until_gone(str(tmp_path), AGENTS)

    last = start(*options)
    assert last.finish() == 0, last.said
    assert_complete(grid_run, 8)


@pytest.mark.slow
def test_signal_to_all_processes_ends_the_run(start: Start, tmp_path: Path) -> None:
    """As from `timeout`: Ray gets the signal, too, but the user does not want the run to continue."""
    driver = start("recipe.epochs=200", "--only", "resnet26_3")
    wait_until(lambda: checkpoints(tmp_path), driver.process, driver.log)
    os.killpg(driver.process.pid, signal.SIGTERM)
    assert driver.finish() == 1
    assert driver.said.splitlines()[-1].endswith(AGAIN) and "Traceback" not in driver.said
    wait_until_gone(str(tmp_path))


@pytest.mark.slow
def test_ray_stops_trials_early_and_measures_the_others(
    start: Start, write_grid: WriteGrid, process_group: None, tmp_path: Path
) -> None:
    """The trials that do not learn start when the scores of those that do are known."""
    grid = write_grid("""
        question: Which learning rate?
        robustness: rotation
        base: {model: {name: resnet26}, recipe: {epochs: 3, batch_size: 20}, data: {train_per_class: 24, val_per_class: 9}}
        product: {recipe.lr: [0.1, 1e-9]}
        seeds: [0, 1]
        early_stopping: {grace_epochs: 2, reduction: 2}
    """)
    grid_run = open_grid_run(GridRequest(grid, "digits", (), tmp_path / "runs"))
    grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    for trial in grid_run.trials:
        if trial.row == "lr0.1":
            run_trial(grid_run.workspace, trial, lambda metrics: None)
    driver = start(grid=grid)
    assert driver.finish() == 0, driver.said
    results = known_results(grid_run)
    stopped_at = {trial.name: results[trial.key].stopped_at for trial in grid_run.selected}
    assert stopped_at["lr1e-9"] == stopped_at["lr1e-9-seed1"] == 2
    assert None in stopped_at.values() and missing_measurements(grid_run, results) == {}


def test_interrupted_grid_saves_its_work_and_resumes(
    open_small_grid: OpenGrid,
    process_group: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One Ctrl-C in the second trial; a second one would end it at once."""
    grid_run = open_small_grid("recipe.epochs=2", "recipe.batch_size=50", "data.train_per_class=20")
    started: list[str] = []
    interrupt_once, stop = iter([signal.SIGINT]), StopRequest(grid_run.workspace.store, grid_run.full_name)

    def interrupted_in_the_second(workspace: Workspace, trial: Trial, report: ReportFn, **options: Any) -> None:
        started.append(trial.row)

        def interrupt(metrics: Mapping[str, float]) -> None:
            report(metrics)
            if len(started) == 2 and (interrupt := next(interrupt_once, None)):
                os.kill(os.getpid(), interrupt)
                while not stop():  # a thread sends it
                    time.sleep(0.01)

        run_trial(workspace, trial, interrupt, **options)

    monkeypatch.setattr(execute, "run_trial", interrupted_in_the_second)
    monkeypatch.setattr(trainer, "SECONDS_BETWEEN_CHECKS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        run(grid_run.request, None)
    assert len(started) == 2
    assert re.search(rf"{started[1]} saved at epoch [12]/2, step ", capsys.readouterr().err)
    assert sorted(found.info.status for found in runs_of(grid_run)) == ["FINISHED", "KILLED"]

    monkeypatch.setattr(execute, "run_trial", run_trial)
    assert run(grid_run.request, None)
    assert re.search("3 trials, 1 already finished, 2 to train", capsys.readouterr().err)
    (interrupted,) = (trial for trial in grid_run.trials if trial.row == started[1])
    assert "resuming from epoch-000" in grid_run.workspace.log(interrupted).read_text()
    assert_complete(grid_run, 2)


THREE_SETTINGS = """
question: Does the result of a trial depend on the trials before it?
base: {recipe: {epochs: 1, batch_size: 64}, data: {train_per_class: 30}}
rows:
  - {id: pairwise, model: {name: san10_pairwise, footprint: 3}, recipe: {precision: bfloat16, mixup_alpha: 0.2}}
  - {id: resnet26, model: {name: resnet26}, recipe: {grad_accum_steps: 2}}
  - {id: patchwise, model: {name: san10_patchwise, footprint: 3}, recipe: {ema_decay: 0.9}}
"""


def test_result_does_not_depend_on_earlier_trials_of_the_process(
    write_grid: WriteGrid, runs: Path, process_group: None
) -> None:
    saved: list[dict[str, Mapping[str, torch.Tensor]]] = []
    for order in ("forwards", "backwards"):
        grid_run = open_grid_run(GridRequest(write_grid(THREE_SETTINGS, f"{order}.yaml"), "digits", (), runs / order))
        (runs / order).mkdir()
        shutil.copy(runs / "mlflow.db", runs / order)
        grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
        trials = grid_run.trials if order == "forwards" else grid_run.trials[::-1]
        saved.append({each.row: run_trial(grid_run.workspace, each, lambda metrics: None).state_dict() for each in trials})
    for row, weights in saved[0].items():
        for name, value in weights.items():
            assert torch.equal(value, saved[1][row][name]), (row, name)
