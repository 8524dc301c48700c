"""How long cells will train: by the speed of finished ones that are like them, else by the FLOPs of their models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median

import torch

import san
from experiments.config import flat
from experiments.grid import Trial
from experiments.tracking import Result

Setting = frozenset[tuple[str, str]]
SECTIONS = ("model.", "engine.", "placement.")
FIELDS = ("data.size", "recipe.batch", "recipe.accumulate", "recipe.precision")


@dataclass(frozen=True, slots=True)
class Hours:
    """What a cell takes, without validation and without the start of its processes."""

    wall: float
    cpu: float
    gpu: float


class Speeds:
    """Images per second of finished runs, for each setting that speed depends on: the mean of those that are alike."""

    def __init__(self, results: Iterable[Result]) -> None:
        found: defaultdict[Setting, list[float]] = defaultdict(list)
        for result in results:
            if result.finished and "summary/images_per_second" in result.metrics:
                found[_setting(result.params)].append(result.metrics["summary/images_per_second"])
        self._speeds = {setting: mean(speeds) for setting, speeds in found.items()}

    def hours(self, trial: Trial, images: int) -> Hours | None:
        """Of a trial whose epochs have so many images; None where no finished run is like it."""
        if not self._speeds:
            return None
        speed = self._speeds.get(_setting({key: str(value) for key, value in flat(trial.record).items()}))
        if speed is None:
            return None
        wall = trial.config.recipe.epochs * images / speed / 3600
        placement = trial.config.placement
        return Hours(wall, wall * placement.workers * placement.cpus, wall * placement.workers * placement.gpus)


class Costs:
    """What cells take, to compare them: hours by their `Speeds`, else FLOPs over the rate of finished cells of any kind."""

    def __init__(self, results: Collection[Result]) -> None:
        self.speeds = Speeds(results)
        wanted = ("summary/images_per_second", "flops_paper")
        measured = [[result.metrics[name] for name in wanted] for result in results if {*wanted} <= result.metrics.keys()]
        self._rate = median(speed * flops for speed, flops in measured) if measured else 1.0
        self._flops: dict[tuple[str, str, int], int] = {}

    def hours(self, trial: Trial, hours: Hours | None, images: int) -> float:
        """Of a trial whose epochs have so many images; `hours` are those of its `Speeds`."""
        if hours is not None:
            return hours.wall
        return trial.config.recipe.epochs * images * self._flops_of(trial) / self._rate / 3600

    def _flops_of(self, trial: Trial) -> int:
        """By the paper's convention, for one image; large grids have few models."""
        model, size = trial.config.model, trial.config.data.size
        key = model.name, repr(model.overrides), size
        if key not in self._flops:
            with torch.device("meta"):
                module = model.spec().build(num_classes=2)
            self._flops[key] = san.complexity(module, size).flops_paper  # outside: torch would bring its compiler
        return self._flops[key]


def _setting(params: Mapping[str, str]) -> Setting:
    return frozenset((key, value) for key, value in params.items() if key.startswith(SECTIONS) or key in FIELDS)
