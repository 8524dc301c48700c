"""How long cells will train, by the speed of finished ones that are like them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean

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


def _setting(params: Mapping[str, str]) -> Setting:
    return frozenset((key, value) for key, value in params.items() if key.startswith(SECTIONS) or key in FIELDS)
