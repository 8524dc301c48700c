"""Protocols: conditions under which networks are tested, and the numbers that each condition gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from experiments.evaluation.evaluate import LoadedModel
from experiments.training.device import available_device, explain_oom
from pipelines import Dataset

Numbers = dict[str, float]
"""Percent by name, such as `top1`."""

TITLES = {"success": "success", "top1": "top-1", "top5": "top-5"}
"""Titles of the numbers."""

Ended = Callable[[], None]
"""Called after each batch."""
Measure = Callable[[LoadedModel, Dataset, int, Ended], Numbers]
"""Measures a network under a condition on all images, in batches of the given size."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a protocol."""

    name: str
    """The name in the table. Followed by `_` and the name of a number, it is a column of the paper's table."""
    key: str
    """Contains all parameters; the tracker calls the numbers `robustness/<key>/<number>`."""
    numbers: tuple[str, ...]
    """Names of the numbers: `top1`, `top5`, `success`."""
    measure: Measure

    def metric(self, number: str) -> str:
        """The name of a metric in the tracker."""
        return f"robustness/{self.key}/{number}"

    def metrics(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The numbers by their names in the tracker."""
        return {self.metric(name): numbers[name] for name in self.numbers}

    def numbers_in(self, metrics: Mapping[str, float]) -> Numbers:
        """The numbers that a run has."""
        return {name: metrics[self.metric(name)] for name in self.numbers if self.metric(name) in metrics}


@dataclass(frozen=True, slots=True)
class Protocol:
    """Conditions in the order of the table; the first one does not disturb the images."""

    conditions: tuple[Condition, ...]
    caption: str

    def missing(self, metrics: Mapping[str, float]) -> tuple[Condition, ...]:
        """The conditions for which the metrics of a run are incomplete."""
        return tuple(condition for condition in self.conditions if len(condition.numbers_in(metrics)) < len(condition.numbers))


Shown = Callable[[str, int, int], AbstractContextManager[Ended]]
"""Shows the progress of a condition, given its name, the number of images and the batch size."""


def measured(
    opened: LoadedModel, images: Dataset, conditions: Iterable[Condition], shown: Shown
) -> Iterator[tuple[Condition, Numbers]]:
    """Measures conditions one after the other.

    Raises:
        DataError: an image cannot be used.
        UserError: out of GPU memory.
    """
    opened.model.eval().requires_grad_(False)
    recipe, resources = opened.config.recipe, opened.config.resources
    # What one worker trained on at once fits, with gradients, on the same hardware.
    batch = max(min(recipe.images_at_once(resources.workers), len(images)), 1)
    for condition in conditions:
        with explain_oom(opened.config, available_device()), shown(condition.name, len(images), batch) as ended:
            numbers = condition.measure(opened, images, batch, ended)
        yield condition, numbers


def percentages(numbers: Mapping[str, float]) -> str:
    """Such as `top-1 97.5 %, top-5 100.0 %`."""
    return ", ".join(f"{TITLES[name]} {value:.1f} %" for name, value in numbers.items())
