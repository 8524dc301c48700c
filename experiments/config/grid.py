"""The schema of a grid file, what a user asks for with `san run` (a grid under a profile), and a trial of a grid, which is a
row with a seed. `expand` reads the files."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from experiments.config.config import GRIDS_DIR, Count, Strict, TrialConfig, Whole
from experiments.config.imports import SourceFile
from san.models import ModelSpec, ModuleSpec, pretrained
from san.models.modules import TIMM
from san.nn.relation import PAIRWISE, PATCHWISE

KEY = "[0-9a-f]{12}"
"""The content hash of a trial."""
RUN_ID = "[0-9a-f]{32}"
"""The id of an MLflow run."""


def is_checkpoint_name(text: str) -> bool:
    """Whether this can be a checkpoint's key, run, address or network with weights instead of its path."""
    return bool(re.fullmatch(f"{KEY}|{RUN_ID}", text)) or ":/" in text or text in pretrained.included()


Seeds = Annotated[tuple[Annotated[Whole, Field(ge=0, lt=2**63)], ...], Field(min_length=1)]


class Layer(Strict):
    """Changes to the profile's configuration."""

    model: dict[str, Any] = Field(default={})
    """Changes to the `model` section."""
    data: dict[str, Any] = Field(default={})
    """Changes to the `data` section."""
    recipe: dict[str, Any] = Field(default={})
    """Changes to the `recipe` section."""


LONGEST_ID = 120
"""Characters. File systems allow 255 in a name, to which the seed, the key and more are added."""


class Row(Layer):
    """One row of the results table: an id and its changes."""

    id: str = Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$", max_length=LONGEST_ID)
    """Name of the row: letters, digits, `_`, `.` and `-`, not only dots. Files are named after it. A longer name from a product
    ends with a digest."""
    seeds: Seeds | None = None
    """Seeds of this row. Null: those of the grid."""


class Plot(Strict):
    """The grid's plot: top-1 against `x`, with one line for each value of `series`."""

    x: str
    """Configuration key with numeric values for the x axis, for example `model.footprint`."""
    series: str = "model.name"
    """Configuration key whose values become the lines of the plot, for example `model.relation`."""
    label: str
    """Label of the x axis."""


class EarlyStopping(Strict):
    """Ends trials whose top-1 is low compared with other trials at the same epoch (asynchronous successive halving)."""

    grace_epochs: Count
    """Number of epochs before the first comparison. Each later comparison follows at `reduction` times as many epochs."""
    reduction: Annotated[Whole, Field(ge=2)] = 3
    """About one in `reduction` trials continues after each comparison."""


ProtocolName = Literal["rotation", "attack"]


class Grid(Strict):
    """The keys of a grid file."""

    extends: str | None = None
    """Another grid, as a path relative to this file, whose keys apply unless this file sets them."""
    question: str
    """Question that the grid answers; used as the title of the results."""
    imports: tuple[str, ...] = ()
    """Python files that register relations (`@san.register_relation`) and models (`@san.register_model`) for this grid. A
    relative path is resolved from this file's folder. The files travel to every worker; what they import must be installed."""
    table: str | None = None
    """Table of the paper with which the results are compared, row by row (the same `id`). Null: no comparison."""
    rows: tuple[Row, ...] = Field(default=(), min_length=1)
    """Rows of the results table. Optional if `product` is given."""
    product: dict[str, tuple[Any, ...]] = Field(default={}, min_length=1)
    """Lists of values by dotted key, for example `recipe.lr: [0.1, 0.2]`. Every row is repeated with each combination. Without
    `rows`, each combination is a row."""
    base: Layer = Layer()
    """Changes that apply to every row."""
    seeds: Seeds = (0,)
    """Seeds of the runs: each row is trained once per seed."""
    plot: Plot | None = None
    """Plot of the results. Null: top-1 against the first numeric key of `product` by which no two rows are at one point, or one
    mark per row if there is none."""
    early_stopping: EarlyStopping | None = None
    """Early stopping of weak trials. Null: off. Not part of a trial's key."""
    robustness: ProtocolName | None = None
    """Protocol to measure on each trained trial; the table then shows the results of the protocol instead of accuracy."""


LOCATION_FIELDS = (
    *("source", "root", "lists", "split", "val_split_per_class", "val_split_seed", "train_per_class", "val_per_class"),
    *("synthetic_classes", "synthetic_per_class"),
)
"""Fields of `data` for the location and the choice of images. The digest of the image list replaces them in a key."""
LATER_FIELDS = {"hidden_reduction": 16}
"""Fields of a model's spec that are newer than some finished runs, with the values of these runs. A key contains only other
values."""


@dataclass(frozen=True)
class Trial:
    """One trial of a grid: an immutable value, identified by a hash of everything that affects its results."""

    grid: str
    profile: str
    row: str
    seed: int
    config: TrialConfig
    data_digest: str
    init_digest: str = ""
    """Digest of the file `recipe.init`, if there is one."""
    imports: tuple[SourceFile, ...] = ()
    """Files that a worker imports before it builds the model."""

    @property
    def name(self) -> str:
        """Name in messages and tables; seed 0 is left out."""
        return self.row if self.seed == 0 else f"{self.row}-seed{self.seed}"

    @property
    def record(self) -> dict[str, Any]:
        """The config as plain values, including all default values of the model's spec."""
        return self.config.model_dump(mode="json") | {"model": asdict(self.config.model.spec())}

    @functools.cached_property
    def key(self) -> str:
        """Content hash, which is equal for trials with equal results, even in different grids.

        It does not depend on locations, hardware, or settings with default values, so that new settings do not change the keys
        of finished runs. It depends on the digest of the image list, and, if an imported file has registered the model or its
        relation, on the source of all imported files.
        """
        config, recipe = self.config, self.config.recipe
        data = config.data.model_dump(mode="json", exclude_defaults=True, exclude=set(LOCATION_FIELDS))
        settings = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"lr_batch_size", "init"})
        settings |= {"lr": recipe.lr_used}
        settings |= {"init": self.init_digest} if self.init_digest else {}
        spec = config.model.spec()
        content: list[object] = [_record(spec, repr(spec)), data, settings, self.seed, self.data_digest]
        if _is_added(spec):
            content.append(sorted(file.source for file in self.imports))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def _record(model: ModelSpec, text: str) -> dict[str, Any]:
    """Must not be modified. Cached, because large grids have few models and `asdict` takes as long as the rest of a key: by the
    `text` of a model, too, because 1 and 1.0 are equal but different keys."""
    return {name: value for name, value in asdict(model).items() if (name, value) not in LATER_FIELDS.items()}


def _is_added(model: ModelSpec) -> bool:
    """Whether the model, or its relation, was registered by an imported file."""
    if isinstance(model, ModuleSpec):
        return not model.name.startswith(TIMM)
    return any(
        row.is_added for name, row in (*PAIRWISE.items(), *PATCHWISE.items()) if name == getattr(model, "relation", None)
    )


@dataclass(frozen=True, slots=True)
class GridRequest:
    """A grid as it was asked for; nothing is checked yet."""

    grid: Path
    """File of the grid, or the folder with the grids of `san study`."""
    profile: str = "digits"
    """Name or file of the profile."""
    overrides: tuple[str, ...] = ()
    """Changes to every trial, such as `recipe.epochs=5`."""
    runs: str | Path | None = None
    """Folder or bucket of the runs. None: `SAN_RUNS`, else `runs/`."""
    seeds: int | None = None
    """Seeds 0 to `seeds` - 1 replace those of the grid. None: those of the grid."""
    only: tuple[str, ...] = ()
    """Rows to train; empty for all."""
    take_over: bool = False
    """Whether this command replaces the claim of another one, in a bucket."""
    serial: bool = False
    """Whether this process trains the trials itself, without Ray."""
    imports: tuple[str, ...] = ()
    """Files to import in addition to the grid's."""

    @property
    def command(self) -> str:
        """The `san run` to type in the same folder for the same trials, wherever their runs are."""
        grid = self.grid.stem if self.grid.parent == GRIDS_DIR else self.grid
        seeds = [] if self.seeds is None else ["--seeds", str(self.seeds)]
        options = [*(f"--only={row}" for row in self.only), *(f"--import={file}" for file in self.imports)]
        options += ["--serial"] if self.serial else []
        return shlex.join(["san", "run", str(grid), "--profile", self.profile, *seeds, *self.overrides, *options])

    def with_runs(self, command: str) -> str:
        """A command for the same store of runs."""
        return command if self.runs is None else f"{command} --runs {shlex.quote(str(self.runs))}"
