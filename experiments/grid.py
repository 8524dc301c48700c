"""A grid is data: one YAML file, one question, one row per cell. Expanding it is pure: same files, same trials."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from experiments.config import Strict, TrialConfig, merged, mistakes
from experiments.errors import UserError

PROFILES_DIR = Path(__file__).parent / "profiles"


class Row(Strict):
    """A line of the table: an id and what it changes."""

    id: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    model: dict[str, Any] = Field(default={})
    data: dict[str, Any] = Field(default={})
    recipe: dict[str, Any] = Field(default={})


class Plot(Strict):
    """A picture of the grid: top-1 over the number at path `x`, one line per value at path `series`."""

    x: str
    series: str
    label: str


class Grid(Strict):
    """The file of a grid."""

    question: str
    table: str
    """Key of the paper's table whose rows have the same ids."""
    rows: tuple[Row, ...] = Field(min_length=1)
    base: Row | None = None
    """What all rows share; its `id` is not used."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    plot: Plot | None = None


@dataclass(frozen=True, slots=True)
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
    def key(self) -> str:
        """Content hash: equal for trials whose results must be equal. Places (folder, CPUs) do not count, images do."""
        config = self.config.model_dump(mode="json")
        del config["data"]["root"], config["data"]["source"]
        content = [config["model"], config["data"], config["recipe"], self.config.placement.workers]
        text = json.dumps([*content, self.seed, self.data_digest], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that must hold a mapping. Raises UserError naming file and line."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a grid's YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it is not text"
        raise UserError(f"{path}{where}: not valid YAML: {problem}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a mapping of keys was expected at the top, not {type(content).__name__}")
    return content


def read_grid(path: Path) -> Grid:
    """Reads and checks a grid's file. Raises UserError with every mistake in it."""
    content = read_yaml(path)
    try:
        grid = Grid.model_validate(content)
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {key}: {what}" for key, what in mistakes(error, Grid))) from None
    twice = [row for row, count in Counter(row.id for row in grid.rows).items() if count > 1]
    if twice:
        raise UserError(f"{path}: rows: each id must be used once, but {', '.join(twice)} is used more often")
    return grid


def read_profile(name: str) -> dict[str, Any]:
    """The profile's layer of a trial's config. Raises UserError for an unknown one."""
    path = PROFILES_DIR / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in PROFILES_DIR.glob("*.yaml")))
        raise UserError(f"unknown profile {name!r}; known: {known}")
    return read_yaml(path)


def parse_override(text: str) -> dict[str, Any]:
    """`recipe.epochs=3` as a nested mapping. Raises UserError where there is no `=`."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"{text!r}: an override is written key.path=value, such as recipe.epochs=3")
    try:
        layer: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"{text!r}: the value is not valid YAML; quote it") from None
    for part in reversed(key.split(".")):
        layer = {part: layer}
    return layer


def configs(path: Path, grid: Grid, profile: dict[str, Any], overrides: Sequence[str]) -> dict[str, TrialConfig]:
    """The checked config of every row: profile, then base, then the row, then overrides.

    Raises:
        UserError: every mistake of every row at once, with its key's path; one made everywhere is told once.
    """
    layers = [parse_override(text) for text in overrides]
    found: dict[str, TrialConfig] = {}
    wrong: dict[tuple[str, str], list[str]] = {}
    for row in grid.rows:
        shared = grid.base.model_dump(exclude={"id"}) if grid.base else {}
        values = merged(profile, shared, row.model_dump(exclude={"id"}), *layers)
        try:
            found[row.id] = TrialConfig.model_validate(values)
            found[row.id].model.spec().check_input(found[row.id].data.size)
        except ValidationError as error:
            for mistake in mistakes(error, TrialConfig):
                wrong.setdefault(mistake, []).append(row.id)
        except ValueError as error:
            wrong.setdefault(("model", str(error)), []).append(row.id)
    if wrong:
        raise UserError("\n".join(_told(path, grid, key, what, rows) for (key, what), rows in wrong.items()))
    return found


def _told(path: Path, grid: Grid, key: str, what: str, rows: list[str]) -> str:
    where = "every row" if len(rows) == len(grid.rows) > 1 else f"row {', '.join(rows)}"
    return f"{path}: {where}: {key}: {what}"
