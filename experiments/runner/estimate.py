"""Estimates training time from finished runs of the same model, or roughly from its FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from experiments.grids.config import flat
from experiments.grids.grid import LATER_FIELDS, Trial
from experiments.paper.tables import count
from experiments.tracking import Result
from san.models.san import SANSpec

Setting = frozenset[tuple[str, str]]
SECTIONS = ("model.", "engine.", "resources.")
FIELDS = ("data.size", "recipe.batch_size", "recipe.grad_accum_steps", "recipe.precision")

RATES = {"attention": {"cpu": 2.5e9, "gpu": 1.2e12}, "other": {"cpu": 8e9, "gpu": 8e12}}
"""The paper's FLOPs per second of training on one core and on one GPU: of SANs, and of other networks (a ResNet26).
On a Xeon with the profile `cifar10`, and on an H200 with images of 224 x 224 pixels."""
SECONDS_PER_IMAGE = 5e-4
"""The part of the training time that does not depend on FLOPs, measured with the profile `digits`."""
VALIDATION_COST = 0.25
"""Time to validate an image over the time to train with it: 0.21 to 0.28 on one core, for SAN10 and ResNet26."""
START_SECONDS, GROUP_SECONDS = 2.0, 15.0
"""For a trial with one worker after the first, and for starting several workers in addition."""
LEAST_SECONDS = 10.0
"""Of training, for a speed to count: the first steps of a process are slow."""


@dataclass(frozen=True, slots=True)
class Hours:
    """Time of a trial: its start, training and validation."""

    wall: float
    cpu: float
    gpu: float
    is_rough: bool
    """Whether it follows from the FLOPs, because no run of the same model has trained for `LEAST_SECONDS`."""


class Estimator:
    """Estimates hours of training from finished runs."""

    def __init__(self, results: Iterable[Result]) -> None:
        trained: defaultdict[Setting, list[tuple[float, float]]] = defaultdict(list)
        for result in results:
            if result.finished and "summary/training_hours" in result.metrics:
                seconds = 3600 * result.metrics["summary/training_hours"]
                trained[_setting(result.params)].append((seconds, seconds * result.metrics["summary/images_per_second"]))
        sums = {setting: [sum(column) for column in zip(*measured, strict=True)] for setting, measured in trained.items()}
        self._speeds = {setting: images / seconds for setting, (seconds, images) in sums.items() if seconds >= LEAST_SECONDS}

    def hours(self, trial: Trial, train_images: int, val_images: int) -> Hours:
        """Hours for a trial with these numbers of images per epoch."""
        config, resources = trial.config, trial.config.resources
        measured = self._speeds.get(_setting({key: str(value) for key, value in flat(trial.record).items()}))
        spec = config.model.spec()
        rate = RATES["attention" if isinstance(spec, SANSpec) else "other"]["gpu" if resources.gpus else "cpu"]
        seconds_per_image = SECONDS_PER_IMAGE + count(spec, config.data.size).flops_paper / rate
        speed = measured or resources.workers * (1 if resources.gpus else resources.cpus) / seconds_per_image
        epochs, validations = config.recipe.epochs, -(-config.recipe.epochs // config.recipe.validate_every_n_epochs)
        images = epochs * train_images + VALIDATION_COST * validations * val_images
        start = START_SECONDS + (GROUP_SECONDS if resources.workers > 1 else 0)
        wall = (start + images / speed) / 3600
        return Hours(wall, wall * resources.workers * resources.cpus, wall * resources.workers * resources.gpus, not measured)


def _setting(params: Mapping[str, str]) -> Setting:
    """Without defaults that earlier runs do not list."""
    later = {(f"model.{name}", str(value)) for name, value in LATER_FIELDS.items()}
    chosen = {(key, value) for key, value in params.items() if key.startswith(SECTIONS) or key in FIELDS}
    return frozenset(chosen - later)
