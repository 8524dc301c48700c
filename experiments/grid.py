"""A grid is data: one YAML file, one question, one row per cell. `expand` reads it."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from experiments.config import Count, Strict, TrialConfig, Whole
from experiments.custom_code import custom_code
from experiments.renamed import with_old_keys
from san.models import ModelSpec


class Layer(Strict):
    """What a row, or all rows together, change of a trial's config."""

    model: dict[str, Any] = Field(default={})
    data: dict[str, Any] = Field(default={})
    recipe: dict[str, Any] = Field(default={})


class Row(Layer):
    """A line of the table: an id and what it changes."""

    id: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")


class Plot(Strict):
    """A picture of the grid: top-1 over the number at path `x`, one line per value at path `series`."""

    x: str
    series: str
    label: str


class EarlyStopping(Strict):
    """Cells whose top-1 is low among those of the same epoch end early: asynchronous successive halving."""

    grace_epochs: Count
    """After so many epochs cells are compared first, and then after each `reduction` times as many."""
    reduction: Annotated[Whole, Field(ge=2)] = 3
    """About the best 1 of so many goes on."""


ProtocolName = Literal["rotation", "attack"]


class Grid(Strict):
    """The file of a grid."""

    question: str
    table: str | None = None
    """Key of the paper's table whose rows have the same ids; none where the paper does not ask the question."""
    rows: tuple[Row, ...] = Field(default=(), min_length=1)
    product: dict[str, tuple[Any, ...]] = Field(default={}, min_length=1)
    """Values by dotted path: every row is repeated with each combination of them, which may also stand without rows."""
    base: Layer = Layer()
    """What all rows share."""
    seeds: tuple[Annotated[Whole, Field(ge=0, lt=2**63)], ...] = Field(default=(0,), min_length=1)
    plot: Plot | None = None
    early_stopping: EarlyStopping | None = None
    """Off where it is null. No part of a trial's key: what is finished has the same result."""
    robustness: ProtocolName | None = None
    """The protocol whose numbers the table holds, taken of each trained cell, in place of its accuracy."""


PLACES = (
    *("source", "root", "lists", "split", "val_split_per_class", "val_split_seed", "train_per_class"),
    *("synthetic_classes", "synthetic_per_class"),
)
"""Fields of `data` that tell where images are and how they were chosen."""


@dataclass(frozen=True)
class Trial:
    """One cell of a grid: a value that can be trained anywhere and is known by the hash of what it depends on."""

    grid: str
    profile: str
    row: str
    seed: int
    config: TrialConfig
    data_digest: str

    @property
    def name(self) -> str:
        """Name for people; the default seed goes without saying."""
        return self.row if self.seed == 0 else f"{self.row}-seed{self.seed}"

    @property
    def record(self) -> dict[str, Any]:
        """The config as plain values, with every field of the model's record, whether it was written or is a default."""
        return self.config.model_dump(mode="json") | {"model": asdict(self.config.model.spec())}

    @functools.cached_property
    def key(self) -> str:
        """Content hash: equal for trials whose results must be equal, whatever their grids. Places (folder, CPUs, number of
        workers) do not count, nor how images were chosen: the digest names them. Options at their defaults do not count either,
        so that a new one leaves finished runs as they are. The source of rows that users add to a registry counts."""
        config, recipe = self.config, self.config.recipe
        data = config.data.model_dump(mode="json", exclude_defaults=True, exclude=set(PLACES))
        how = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"lr_batch_size"}) | {"lr": recipe.lr_used}
        how = with_old_keys("recipe", how)
        spec = config.model.spec()
        content: list[object] = [_record(spec), data, how, self.seed, self.data_digest]
        if code := custom_code(spec):
            content.append(code)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def _record(model: ModelSpec) -> dict[str, Any]:
    """Only to be read. Large grids have few models, and a record takes as long as all else of a key."""
    return with_old_keys("model", asdict(model))
