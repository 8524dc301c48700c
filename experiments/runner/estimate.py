"""Estimates training time from the speed of similar finished runs, or from the FLOPs of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Literal

import torch

import san
from experiments.grids.config import flat
from experiments.grids.grid import Trial
from experiments.tracking import Result

Setting = frozenset[tuple[str, str]]
SECTIONS = ("model.", "engine.", "resources.")
FIELDS = ("data.size", "recipe.batch_size", "recipe.grad_accum_steps", "recipe.precision")

GUESSED_RATES = {"cpu": 1e9, "gpu": 1.5e12}
"""Images per second times the paper's FLOPs per image, for one CPU core or one GPU, until a run has finished. The CPU's rate
was measured on a Xeon with the digits profile. The GPU's rate is a prediction for an A100."""

Basis = Literal["like", "flops", "guess"]
"""`like`: finished runs with the same model, size, batch and resources. `flops`: the FLOPs of the model, at the speed of other
finished runs. `guess`: its FLOPs, at a guessed rate."""


@dataclass(frozen=True, slots=True)
class Hours:
    """Training time of a trial, without validation and without starting its processes."""

    wall: float
    cpu: float
    gpu: float
    basis: Basis


class Estimator:
    """Estimates hours of training from finished runs."""

    def __init__(self, results: Iterable[Result]) -> None:
        speeds: defaultdict[Setting, list[float]] = defaultdict(list)
        rates: defaultdict[str, list[float]] = defaultdict(list)
        for result in results:
            if result.finished and "summary/images_per_second" in result.metrics:
                speed = result.metrics["summary/images_per_second"]
                speeds[_setting(result.params)].append(speed)
                if "flops_paper" in result.metrics:
                    kind, devices = _devices(*(float(result.params.get(f"resources.{key}", least)) for key, least in LEAST))
                    rates[kind].append(speed * result.metrics["flops_paper"] / devices)
        self._speeds = {setting: mean(found) for setting, found in speeds.items()}
        self._rates = {kind: median(found) for kind, found in rates.items()}
        self._flops: dict[tuple[str, str, int], int] = {}

    def hours(self, trial: Trial, images: int) -> Hours:
        """Hours for a trial with `images` images per epoch."""
        resources = trial.config.resources
        basis, speed = self._speed(trial)
        wall = trial.config.recipe.epochs * images / speed / 3600
        return Hours(wall, wall * resources.workers * resources.cpus, wall * resources.workers * resources.gpus, basis)

    def _speed(self, trial: Trial) -> tuple[Basis, float]:
        """Images per second of all workers."""
        resources = trial.config.resources
        if self._speeds:
            speed = self._speeds.get(_setting({key: str(value) for key, value in flat(trial.record).items()}))
            if speed is not None:
                return "like", speed
        kind, devices = _devices(resources.workers, resources.cpus, resources.gpus)
        rate = self._rates.get(kind)
        return "guess" if rate is None else "flops", devices * (rate or GUESSED_RATES[kind]) / self._flops_of(trial)

    def _flops_of(self, trial: Trial) -> int:
        """FLOPs of one image in the paper's convention. Cached, because large grids have few models."""
        model, size = trial.config.model, trial.config.data.size
        key = model.name, repr(model.overrides), size
        if key not in self._flops:
            with torch.device("meta"):
                module = model.spec().build(num_classes=2)
            # Outside of the block, in which torch would import its compiler.
            self._flops[key] = san.complexity(module, size).flops_paper
        return self._flops[key]


LEAST = (("workers", 1), ("cpus", 1), ("gpus", 0))
"""The parameters of a trial's resources and their defaults."""


def _devices(workers: float, cpus: float, gpus: float) -> tuple[str, float]:
    """Kind and number of devices of a trial; a worker uses one GPU or a part of it."""
    return ("gpu", workers) if gpus else ("cpu", workers * cpus)


def _setting(params: Mapping[str, str]) -> Setting:
    return frozenset((key, value) for key, value in params.items() if key.startswith(SECTIONS) or key in FIELDS)
