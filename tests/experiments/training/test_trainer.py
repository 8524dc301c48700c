"""Whole trials; those that are killed run in separate processes."""

import math
import threading
from collections.abc import Mapping
from typing import TextIO

import pytest
import torch

from experiments.config.grid import Trial
from experiments.report.data import table_rows
from experiments.runner.grid_run import GridRun
from experiments.runs.summary import CONFUSION, Confusion
from experiments.runs.workspace import Workspace
from experiments.training import reporter, trainer
from experiments.training.checkpoint import Checkpoint, last_of
from experiments.training.engine import Engine
from experiments.training.metrics import Scores
from experiments.training.reporter import Watchdog
from experiments.training.trainer import Control, run_trial
from tests.experiments.conftest import HELD_OUT, OpenGrid, Place, Trained
from tests.experiments.processes import Kill, ended, start, weights
from tests.experiments.samples import ALWAYS, SHORT, silent, without_times

pytestmark = pytest.mark.usefixtures("process_group")


def resnet(grid_run: GridRun) -> Trial:
    (trial,) = (trial for trial in grid_run.trials if trial.row == "resnet26_3")
    return trial


def newest(workspace: Workspace, trial: Trial) -> Checkpoint:
    return Checkpoint.of_bytes(max(workspace.checkpoints(trial).glob("epoch-*.pt")).read_bytes())


ONE_WORKER = ("recipe.warmup_epochs=0.5", "recipe.precision=bfloat16", "resources.cpus=2")


@pytest.mark.parametrize(
    ("world", "kill", "options"),
    [
        (1, Kill("write", 7), ONE_WORKER),
        pytest.param(2, Kill("step", 7), (), marks=pytest.mark.slow),
    ],
    ids=["one worker", "two workers"],
)
def test_killed_trial_resumes_with_identical_weights(
    world: int,
    kill: Kill,
    options: tuple[str, ...],
    open_small_grid: OpenGrid,
    place: Place,
) -> None:
    regularization = ("mixup_alpha=0.2", "cutmix_alpha=1", "drop_path=0.2", "augment=trivial")
    recipe = [f"recipe.{option}" for option in (*regularization, "ema_decay=0.9", "grad_accum_steps=2")]
    trial = resnet(open_small_grid(*SHORT, *ALWAYS, *recipe, "engine.deterministic=true", *options))
    whole = place("whole")
    assert ended(start(whole, trial, world)) == [0] * world
    averaged = newest(whole, trial).engine["average"]
    for rank in range(world):
        assert all(torch.equal(value, averaged[name]) for name, value in weights(whole, rank).items()), rank
    correct = newest(whole, trial).history[-1].top1 / 100 * 360  # every image counts once, also with two workers
    assert correct == pytest.approx(round(correct), abs=1e-6)
    killed = place("killed")
    assert ended(start(killed, trial, world, kill))[-1] == -9
    begun = newest(killed, trial)
    assert ended(start(killed, trial, world)) == [0] * world
    assert f"resuming from {begun.name}" in killed.log(trial).read_text()
    for rank in range(world):
        resumed = weights(killed, rank)
        for name, value in weights(whole, rank).items():
            assert torch.equal(value, resumed[name]), (rank, name)
    assert without_times(newest(killed, trial).history) == without_times(newest(whole, trial).history)
    assert not list(killed.checkpoints(trial).glob("*.partial"))


def test_validates_every_few_epochs_and_after_the_last(open_small_grid: OpenGrid) -> None:
    options = ("recipe.epochs=5", "recipe.validate_every_n_epochs=2", "recipe.drop_path=0.2")
    grid_run = open_small_grid(*SHORT, *HELD_OUT[:2], *options)
    trial = grid_run.trials[0]
    model = run_trial(grid_run.workspace, trial, silent)
    assert max(getattr(module, "drop_path_rate", 0.0) for module in model.modules()) == 0.2
    history = newest(grid_run.workspace, trial).history
    assert [epoch.top1 is not None for epoch in history] == [False, True, False, True, True]
    client, result = grid_run.tracker.client, grid_run.tracker.results()[trial.key]
    assert result.metrics["summary/last_top1"] == history[-1].top1
    logged = {name: client.get_metric_history(result.run_id, name) for name in ("val/top1", "train/top1")}
    assert [metric.step for metric in logged["val/top1"]] == [1, 3, 4]
    assert [metric.value for metric in logged["train/top1"]] == [epoch.train_top1 for epoch in history]


def test_non_finite_loss_stops_the_trial(open_small_grid: OpenGrid) -> None:
    """It is found at the next check. The message names the step. The thread that logs metrics ends."""
    grid_run = open_small_grid(
        *SHORT, "recipe.lr=1e30", "checkpointing.check_every_n_steps=3", "checkpointing.checkpoint_every_n_minutes=1e-9"
    )
    with pytest.raises(FloatingPointError, match=r"loss in step [23] of epoch 0 .*: .*/epoch-0000-step-0000001.pt"):
        run_trial(grid_run.workspace, grid_run.trials[0], silent)
    assert "metric-logger" not in {thread.name for thread in threading.enumerate()}


def test_trial_saves_its_work_when_it_is_asked_to_stop(open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "SECONDS_BETWEEN_CHECKS", -1.0)
    grid_run = open_small_grid(*SHORT, "recipe.epochs=1")
    trial = resnet(grid_run)
    first: list[Mapping[str, float]] = []
    run_trial(grid_run.workspace, trial, first.append, Control(should_stop=lambda: True))
    assert [(report["interrupted"], report["epoch"], report["step"]) for report in first] == [(1, 0, 1)]
    again: list[Mapping[str, float]] = []
    run_trial(grid_run.workspace, trial, again.append)
    assert (again[0]["epoch"], again[0]["step"]) == (0, 2)


def test_trial_ends_without_patience_and_is_finished(open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    grid_run = open_small_grid(*SHORT, "recipe.epochs=5", "recipe.patience=2")
    trial, workspace = grid_run.trials[0], grid_run.workspace
    top1 = iter((20.0, 30.0, 25.0, 30.0, 99.0))

    def scored(*_: object) -> Scores:
        return Scores(1.0, next(top1), 50.0, 100, 10 * ((1,) * 10,))

    monkeypatch.setattr(trainer, "evaluate", scored)
    run_trial(workspace, trial, silent)
    result = grid_run.tracker.results()[trial.key]
    assert result.finished and result.stopped_at is None
    assert (result.metrics["summary/best_top1"], result.metrics["summary/best_epoch"]) == (30, 2)
    row = table_rows(grid_run, {trial.key: result})[0]
    assert row.note == "stopped at epoch 4 of 5 by recipe.patience"
    assert result.epochs(5) == 4 and last_of(workspace.checkpoints(trial), 4).exists()
    assert (workspace.checkpoints(trial) / CONFUSION).exists()
    assert "no better epoch for recipe.patience=2" in workspace.log(trial).read_text()
    run_trial(workspace, trial, silent)  # does not train another epoch


def test_non_finite_validation_loss_is_not_saved(open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    grid_run = open_small_grid(*SHORT)
    trial = resnet(grid_run)
    monkeypatch.setattr("experiments.training.trainer.evaluate", lambda *arguments: Scores(float("nan"), 10.0, 50.0, 360, None))
    with pytest.raises(FloatingPointError, match="validation loss after epoch 0; last good checkpoint: none"):
        run_trial(grid_run.workspace, trial, silent)
    assert not list(grid_run.workspace.checkpoints(trial).glob("*.pt"))
    assert not grid_run.tracker.results()[trial.key].metrics.keys() & {"val/loss", "val/top1"}


def test_non_finite_weights_are_not_saved(open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the second step is finite, but the weights after it are not."""
    grid_run = open_small_grid(*SHORT, *ALWAYS)
    trial = resnet(grid_run)
    step, calls = Engine.train_step, []

    def ruin(engine: Engine, images_NCHW: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        calls.append(step(engine, images_NCHW, labels_N))
        if len(calls) == 2:
            next(engine.model.parameters()).data[0] = float("inf")
        return calls[-1]

    monkeypatch.setattr(Engine, "train_step", ruin)
    with pytest.raises(FloatingPointError, match=r"weights after 2 steps of epoch 0; .*/epoch-0000-step-0000001.pt"):
        run_trial(grid_run.workspace, trial, silent)
    assert [path.name for path in grid_run.workspace.checkpoints(trial).glob("*.pt")] == ["epoch-0000-step-0000001.pt"]


def test_watchdog_follows_the_training(open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the time limit and the trial's log, and is told of the steps of training and validation."""
    begun: list[tuple[float, str]] = []
    ended: list[bool] = []

    class Watched(Watchdog):
        def __init__(self, seconds: float, log: TextIO) -> None:
            super().__init__(seconds, log)
            begun.append((seconds, log.name))

        def step_ended(self) -> None:
            ended.append(True)

    monkeypatch.setattr(trainer, "Watchdog", Watched)
    grid_run = open_small_grid(*SHORT, "recipe.epochs=1", "checkpointing.hang_timeout_minutes=7")
    trial = resnet(grid_run)
    run_trial(grid_run.workspace, trial, silent)
    assert begun == [(420.0, str(grid_run.workspace.log(trial)))]
    assert len(ended) >= 4 + 360 / 50  # steps of 50 images


def test_results_are_logged_to_mlflow(open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "SECONDS_BETWEEN_REPORTS", math.inf)
    grid_run = open_small_grid("recipe.epochs=1", "recipe.batch_size=160", "data.train_per_class=48")
    trial, client = grid_run.trials[0], grid_run.tracker.client
    reports: list[Mapping[str, float]] = []
    run_trial(grid_run.workspace, trial, reports.append)
    first, result = reports
    assert (first["epoch"], first["epochs"], first["step"], first["steps"]) == (0, 1, 1, 3)
    assert result["epoch"] == result["epochs"] == 1
    run = client.get_run(grid_run.tracker.results()[trial.key].run_id)
    metrics, params, tags = run.data.metrics, run.data.params, run.data.tags
    expected = {f"train/{name}" for name in ("loss", "images_per_second", "wait_share")}
    expected |= {f"val/{name}" for name in ("loss", "top1", "top5")} | {"lr", "params", "flops_paper", "flops_actual"}
    assert expected <= set(metrics) and not {"step", "steps"} & set(metrics)
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 1
    assert metrics["summary/best_top1"] == metrics["summary/last_top1"] == result["val/top1"]
    assert metrics["summary/best_epoch"] == 1
    assert metrics["summary/images_per_second"] == pytest.approx(result["train/images_per_second"])
    assert metrics["summary/training_hours"] * 3600 == pytest.approx(480 / result["train/images_per_second"])
    assert {"model.name": "san10_pairwise", "data.size": "24", "recipe.epochs": "1", "seed": "0"}.items() <= params.items()
    device = {"san.device": "cpu", "san.operators": "kernels", "san.tf32": "false"}
    assert ({"san.trial": trial.key} | device).items() <= tags.items()
    assert {"san.grid", "san.row", "san.data_digest", "mlflow.parentRunId"} <= set(tags)
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert artifacts == {"config.yaml", "environment.txt"}
    log = grid_run.workspace.log(trial).read_text()
    assert "epoch 1/1, step 1/3, loss" in log and "epoch 1/1, top-1" in log


def test_confusion_matrix_matches_the_accuracy_of_the_last_epoch(trained: Trained) -> None:
    found = Confusion.of_csv((trained.folder / "confusion.csv").read_bytes())
    assert found is not None
    assert found.classes == trained.best.origin.classes
    last = Checkpoint.of_bytes(max(trained.folder.glob("epoch-*.pt")).read_bytes())
    correct, images = sum(row[label] for label, row in enumerate(found.counts)), sum(map(sum, found.counts))
    assert images == 120
    assert 100 * correct / images == pytest.approx(last.history[-1].top1)
