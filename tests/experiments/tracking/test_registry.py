"""The best weights as a logged and registered model: loadable, told of, and there once."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow.entities import LoggedModel, LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

import san
from experiments.runner.execute import prepare
from experiments.runner.grid_run import GridRun, open_grid_run
from experiments.tracking.registry import model_name
from experiments.training import metric_logger
from experiments.training.checkpoint import Checkpoint, best_in
from experiments.training.metric_logger import AsyncMetricLogger
from experiments.training.trainer import run_trial
from san import Complexity
from tests.experiments.conftest import OpenGrid, Trained
from tests.experiments.drivers import PATIENCE
from tests.experiments.samples import silent

pytestmark = pytest.mark.usefixtures("process_group")
SHORT = ("recipe.epochs=1", "recipe.batch_size=240", "data.train_per_class=30")


def versions(grid_run: GridRun) -> list[Any]:
    return list(grid_run.tracker.client.search_model_versions())


def models(grid_run: GridRun) -> list[LoggedModel]:
    experiment = grid_run.tracker.client.get_experiment_by_name("small")
    assert experiment is not None
    return list(grid_run.tracker.client.search_logged_models([experiment.experiment_id]))


def test_best_weights_are_registered(open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grid_run = open_small_grid(*SHORT, "recipe.ema_decay=0.5")
    trial = grid_run.trials[2]
    validated = run_trial(grid_run.workspace, trial, silent).eval()
    (version,), (model,) = versions(grid_run), models(grid_run)
    best, client = best_in(grid_run.workspace.store, grid_run.workspace.folder(trial)), grid_run.tracker.client
    assert best is not None
    epoch, run_id = best.history[-1], grid_run.tracker.results()[trial.key].run_id
    assert (version.name, version.version, version.run_id) == ("small-digits-patchwise_3", 1, run_id)
    assert (version.tags["san.trial"], version.tags["san.epoch"]) == (trial.key, "1")
    assert (version.tags["san.top1"], version.tags["san.data_digest"]) == (str(epoch.top1), trial.data_digest)
    assert "[N, 3, 24, 24]" in version.description and "mean [0.5, 0.5, 0.5]" in version.description

    assert (model.name, model.source_run_id, model.status) == ("patchwise_3", run_id, LoggedModelStatus.READY)
    assert version.source == model.artifact_location
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": version.name, "version": "1"}]
    assert (model.tags["san.trial"], model.params["model.footprint"]) == (trial.key, "3")
    assert [output.model_id for output in client.get_run(run_id).outputs.model_outputs] == [model.model_id]
    measured = {"val/loss": epoch.val_loss, "val/top1": epoch.top1, "val/top5": epoch.top5}
    assert {metric.key: metric.value for metric in model.metrics} == measured
    assert {metric.dataset_digest for metric in model.metrics} == {trial.data_digest.partition("-")[2]}
    assert all(len(client.get_metric_history(run_id, key)) == 1 for key in measured)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", grid_run.workspace.tracking_uri)
    assert mlflow.pyfunc.load_model(f"models:/{model.model_id}").metadata.model_id == model.model_id
    loaded = mlflow.pyfunc.load_model(f"models:/{version.name}/{version.version}", dst_path=str(tmp_path))
    assert loaded.metadata.metadata == {"classes": [str(digit) for digit in range(10)]}
    images = torch.randn(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    weights = next(tmp_path.rglob("weights.pt"))
    with torch.no_grad():
        expected = validated(images)
        assert torch.equal(best.model()(images), expected)
        assert torch.equal(san.load_checkpoint(weights)(images), expected)
    logits = loaded.predict(images.numpy())
    assert logits.dtype == np.float32 and np.array_equal(logits, expected.numpy())
    with pytest.raises(MlflowException, match="shape"):
        loaded.predict(images[:, :, :20].numpy())


def finish(grid_run: GridRun, best: Checkpoint, resumed: bool = False, number: int = 1) -> None:
    """Ends the run of one of the grid's trials as its training does, with these weights."""
    trial = grid_run.trials[number]
    logger = AsyncMetricLogger(grid_run.workspace.tracking_uri, trial, Complexity(1, 2, 3, ()), {}, 100, resumed)
    logger.log(best.history)
    logger.finish(best, None, PATIENCE)
    assert grid_run.tracker.results()[trial.key].finished


def test_runs_folder_can_be_moved(
    open_small_grid: OpenGrid, trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = open_small_grid()
    finish(before, trained.best)
    shutil.move(before.workspace.runs, tmp_path / "moved")
    before.workspace.runs.touch()  # as on a machine where the old folder cannot be made

    after = open_grid_run(replace(before.request, runs=tmp_path / "moved"))
    prepare(after)
    results, client = after.tracker.results(), after.tracker.client
    assert list(results) == [before.trials[1].key]
    finish(after, trained.best, number=2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", after.workspace.tracking_uri)
    assert len(versions(after)) == 2
    for version in versions(after):
        assert mlflow.pyfunc.load_model(f"models:/{version.name}/{version.version}").metadata.run_id == version.run_id
    for result in after.tracker.results().values():
        assert "config.yaml" in {file.path for file in client.list_artifacts(result.run_id)}


def test_folders_that_share_a_database_keep_their_files(
    open_small_grid: OpenGrid, empty_database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(empty_database, tmp_path / "shared.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'shared.db'}")
    one = open_small_grid()
    before = one.tracker.client.get_experiment_by_name(one.name).artifact_location
    prepare(open_grid_run(replace(one.request, runs=tmp_path / "other runs")))
    assert one.tracker.client.get_experiment_by_name(one.name).artifact_location == before


@pytest.mark.parametrize(
    "call", ["create_logged_model", "log_model_artifacts", "create_model_version", "set_logged_model_tags"]
)
def test_trial_is_registered_once(
    call: str, open_small_grid: OpenGrid, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's answer is lost during the registration; the logger's thread and another start of the trial try again."""
    grid_run, request, fails = open_small_grid(), getattr(MlflowClient, call), [True]

    def lose_one_answer(*arguments: Any, **named: Any) -> Any:
        answer = request(*arguments, **named)
        if fails:
            fails.clear()
            raise ConnectionError
        return answer

    monkeypatch.setattr(metric_logger, "PAUSE", 0.01)
    monkeypatch.setattr(MlflowClient, call, lose_one_answer)
    for resumed in (False, True):
        finish(grid_run, trained.best, resumed)
        assert [(version.name, version.version) for version in versions(grid_run)] == [("small-digits-resnet26_3", 1)]
        (model,) = models(grid_run)
        assert model.status == LoggedModelStatus.READY and len(model.metrics) == 3
        assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "small-digits-resnet26_3", "version": "1"}]
    assert not fails


def test_other_trial_of_a_row_is_another_version(open_small_grid: OpenGrid, trained: Trained) -> None:
    for overrides in ((), ("recipe.lr=0.3",)):  # another trial of the row, like another seed
        grid_run = open_small_grid(*overrides)
        finish(grid_run, trained.best)
    assert {(version.name, version.version) for version in versions(grid_run)} == {
        ("small-digits-resnet26_3", 1),
        ("small-digits-resnet26_3", 2),
    }


def test_store_without_a_registry_is_no_error(
    open_small_grid: OpenGrid, trained: Trained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid_run = open_small_grid()
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "foo://nowhere")
    with caplog.at_level(logging.WARNING, "experiments"):
        finish(grid_run, trained.best)
    monkeypatch.delenv("MLFLOW_REGISTRY_URI")
    assert versions(grid_run) == [] and len(models(grid_run)) == 1
    assert "the model was not registered: " in caplog.text


def test_lost_checkpoints_are_not_registered(open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    grid_run = open_small_grid(*SHORT)
    folder = grid_run.workspace.checkpoints(grid_run.trials[1])

    def lose(metrics: object) -> None:
        for path in folder.glob("*.pt"):
            path.unlink()

    run_trial(grid_run.workspace, grid_run.trials[1], lose)
    assert grid_run.tracker.results()[grid_run.trials[1].key].finished
    assert versions(grid_run) == models(grid_run) == []
    assert "cannot read the checkpoint of the best epoch" in grid_run.workspace.log(grid_run.trials[1]).read_text()


@pytest.mark.parametrize(
    ("grid", "name"), [("mine", "mine-digits-resnet26_3"), ("a b:c/d'e", "a-b-c-d-e-digits-resnet26_3"), ("x" * 300, "x" * 250)]
)
def test_model_name_is_valid_in_mlflow(grid: str, name: str, open_small_grid: OpenGrid) -> None:
    assert model_name(replace(open_small_grid().trials[1], grid=grid)) == name
