"""Logs the best weights of a trial as a model that `mlflow.pyfunc.load_model` can load, and registers it."""

from __future__ import annotations

import json
import logging
import re
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import mlflow.pyfunc
import numpy as np
import torch
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types import Schema, TensorSpec
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

from experiments.config.grid import Trial
from experiments.runs.summary import Epoch
from experiments.tracking.client import pages
from experiments.tracking.tracker import dataset_inputs, trial_tags
from san import pyfunc, save_checkpoint
from san.models.base import BaseModel

_log = logging.getLogger(__name__)

WEIGHTS = "weights.pt"
RETRYABLE_CODES = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "UNAUTHENTICATED")
"""Error codes after which a later request may succeed. With other codes, there is no registry, or not for this user."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trial's network after one of its epochs."""

    trial: Trial
    epoch: Epoch
    classes: tuple[str, ...]
    model: BaseModel


def register(client: MlflowClient, run_id: str, best: TrainedModel) -> None:
    """Logs a trial's weights as a model of its run, and registers this model as a version of `<grid>-<profile>-<row>`. Does
    neither if the run has it already.

    After an error, the caller tries again, and what the run has by then is used. If the store has no registry or rejects a
    request, this is logged.

    Raises:
        MlflowException, SQLAlchemyError, OSError: the store cannot be used now.
        CheckpointError: temporary files cannot be written.
    """
    name, run = model_name(best.trial), client.get_run(run_id)
    try:
        models = pages(client.search_logged_models, [run.info.experiment_id], f"source_run_id = '{run_id}'")
        model = next(iter(models), None) or _create_model(client, run, best)
        if model.status != LoggedModelStatus.READY:
            model = _fill(client, model, run, best)
        versions = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
        version = versions[0] if versions else _create_version(client, name, model, best)
        # Links the page of the model to the version. A server does so itself.
        links = json.dumps([{"name": name, "version": str(version.version)}])
        client.set_logged_model_tags(model.model_id, {MLFLOW_MODEL_VERSIONS: links})
    except MlflowException as error:
        if error.error_code in RETRYABLE_CODES:
            raise
        _log.warning("the model was not registered: %s", str(error).splitlines()[0])


def _create_model(client: MlflowClient, run: Run, best: TrainedModel) -> LoggedModel:
    """Not with `mlflow.pyfunc.log_model`: it uses the address and the experiment of the process, which are global and also
    change the environment, and it copies all numbers of a step, those of the machine as well."""
    name = re.sub("[^A-Za-z0-9_-]", "-", best.trial.name)
    return client.create_logged_model(run.info.experiment_id, name, run.info.run_id, _tags(best), run.data.params)


def _fill(client: MlflowClient, model: LoggedModel, run: Run, best: TrainedModel) -> LoggedModel:
    run_id = run.info.run_id
    with tempfile.TemporaryDirectory() as folder:
        client.log_model_artifacts(model.model_id, str(_write(Path(folder), model, best)))
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, best.epoch.epoch)])
    images = dataset_inputs(best.trial)[-1].dataset
    metrics = [
        Metric(one.key, one.value, one.timestamp, one.step, model.model_id, images.name, images.digest)
        for key in ("val/loss", "val/top1", "val/top5")
        for one in client.get_metric_history(run_id, key)
        if one.step == best.epoch.epoch
    ]
    client.log_batch(run_id, metrics)  # the run has them already, and MLflow stores equal ones once
    return client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)


def _create_version(client: MlflowClient, name: str, model: LoggedModel, best: TrainedModel) -> ModelVersion:
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source, description = model.artifact_location, _description(best)
    return client.create_model_version(name, source, model.source_run_id, _tags(best), None, description, 0, model.model_id)


def model_name(trial: Trial) -> str:
    """Name of a row's registered model, which has a version for every seed and configuration."""
    return re.sub("[^A-Za-z0-9_.-]", "-", f"{trial.grid}-{trial.profile}-{trial.row}")[:250]


def _write(folder: Path, model: LoggedModel, best: TrainedModel) -> Path:
    """Writes MLflow's files of a model: weights without code, and their description. Returns their folder."""
    weights, files, size = folder / WEIGHTS, folder / "model", best.trial.config.data.size
    save_checkpoint(best.model, weights)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*input example")  # the signature says enough
        mlflow.pyfunc.save_model(
            files,
            loader_module=pyfunc.__name__,
            data_path=weights,
            mlflow_model=Model(model.artifact_location, model.source_run_id, model_id=model.model_id),
            signature=ModelSignature(inputs=_schema(-1, 3, size, size), outputs=_schema(-1, len(best.classes))),
            metadata={"classes": list(best.classes)},
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={np.__version__}"],
        )
    return files


def _schema(*shape: int) -> Schema:
    return Schema([TensorSpec(np.dtype("float32"), shape)])


def _tags(best: TrainedModel) -> dict[str, str]:
    trial, epoch = best.trial, best.epoch
    return {
        **trial_tags(trial),
        "san.seed": str(trial.seed),
        "san.epoch": str(epoch.epoch + 1),
        "san.top1": str(epoch.top1),
        "san.top5": str(epoch.top5),
    }


def _description(best: TrainedModel) -> str:
    trial, epoch, data = best.trial, best.epoch, best.trial.config.data
    return (
        f"{trial.config.model.name}: row {trial.row} of grid {trial.grid}, profile {trial.profile}, seed {trial.seed}, "
        f"after epoch {epoch.epoch + 1} of {trial.config.recipe.epochs}; top-1 {epoch.top1:.2f} %, top-5 {epoch.top5:.2f} % "
        f"on the validation images.\n\n"
        f"Input: RGB images, float32, [N, 3, {data.size}, {data.size}]: values from 0 to 1, normalized with mean "
        f"{list(data.mean)} and std {list(data.std)}. For validation, the shorter side was resized to {data.resize} pixels "
        f"(linear, antialiased), followed by a center crop. Output: logits [N, {len(best.classes)}]; the class names are "
        f"in the model's metadata.\n\n"
        f"Requires the package `san`; `san.load_checkpoint` reads the file {WEIGHTS}."
    )
