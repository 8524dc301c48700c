"""Turns a grid file into the config of every row, and reports all errors at once."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from experiments.errors import UserError
from experiments.grids.config import (
    ModelConfig,
    Strict,
    TrialConfig,
    base_folder,
    contradictions,
    fine_tuning_mistakes,
    merged,
    mistakes,
    model_mistakes,
    value_at,
)
from experiments.grids.grid import EarlyStopping, Grid, Layer, Plot, ProtocolName, Row
from experiments.grids.transform import transform_mistakes

GRIDS_DIR = Path(__file__).parent
PROFILES_DIR = GRIDS_DIR / "profiles"
PATHS = (("data", "root"), ("data", "lists"), ("recipe", "init"))
"""Keys whose values are paths. Relative paths are resolved from the current folder, those in a profile file from its folder,
and those in the project's own profiles from `base_folder`."""
MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Expanded:
    """A valid grid with its product expanded: the config of every row, and its model at the paper's size."""

    grid: Grid
    configs: dict[str, TrialConfig]
    full_size: dict[str, ModelConfig]


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML would silently use the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Keys as written in the file, because a key may override one that `<<` merges.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE]
        twice = [key for key, count in Counter(keys).items() if count > 1]
        if twice:
            raise yaml.MarkedYAMLError(problem=f"duplicate key {twice[0][1]!r}", problem_mark=node.start_mark)
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file that contains a mapping. Raises UserError with file and line."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path}{where}: not valid YAML: {problem}") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise UserError(f"{path}: must be a mapping of keys at the top level, not {found}")
    return content


def read_grid(path: Path) -> dict[str, Any]:
    """Reads a grid file and adds the missing keys from the grid that it extends. Raises UserError."""
    content, files = read_yaml(path), [path]
    while (parent := content.pop("extends", None)) is not None:
        if not isinstance(parent, str):
            raise UserError(f"{files[-1]}: extends: must be the path of a grid, not {parent!r}; an example is comparison.yaml")
        files.append(files[-1].parent / parent)
        if files[-1].resolve() in (file.resolve() for file in files[:-1]):
            raise UserError(f"{files[-2]}: extends: this grid extends itself ({' -> '.join(map(str, files))})")
        content = read_yaml(files[-1]) | content
    return content


def profile_path(name: str) -> Path:
    """The file of a profile: one of the project's by its name, or a path that ends in `.yaml`.

    Raises:
        UserError: an unknown profile, or a file with the name of one of the project's, from which results could not be told.
    """
    known = {path.stem: path for path in sorted(PROFILES_DIR.glob("*.yaml"), key=lambda path: path.stem)}
    if name.endswith(".yaml"):
        path = Path(name)
        if path.stem in known and path.resolve() != known[path.stem]:
            raise UserError(f"{name}: the project has a profile with this name; rename the file")
        return path
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`? Profiles" if near else "profiles"
        raise UserError(f"unknown profile {name!r}; {hint}: {', '.join(known)}; or give the path of a .yaml file")
    return known[name]


def read_profile(path: Path) -> dict[str, Any]:
    """Reads a profile and the profile that it extends. Relative paths in the file of a user become absolute."""
    content = read_yaml(path)
    extended = content.pop("extends", None)
    if path.parent.resolve() != PROFILES_DIR:
        content = anchored(content, path.parent)
    if extended is None:
        return content
    parent = path.parent / extended if extended.endswith(".yaml") else extended
    return merged(read_profile(profile_path(str(parent))), content)


def anchored(layer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A layer whose relative paths are resolved from a folder. Those in `base_folder` stay relative, because other nodes may
    have it elsewhere."""
    for section, key in PATHS if folder.resolve() != base_folder() else ():
        if _has(layer, f"{section}.{key}") and isinstance(value := layer[section][key], str):
            layer = merged(layer, {section: {key: os.path.abspath(folder / value)}})
    return layer


def parse_override(text: str) -> dict[str, Any]:
    """`recipe.epochs=3` as a nested mapping. Raises UserError if there is no `=`."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"override {text!r}: not KEY=VALUE; an example is recipe.epochs=3")
    try:
        layer: Any = yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        raise UserError(f"override {text!r}: the value is not valid YAML; put the value in quotes") from None
    return _nested(key, layer)


def _nested(key: str, value: Any) -> dict[str, Any]:
    """A value under a dotted path as a nested mapping."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def expand(path: Path, profile: str, overrides: Sequence[str], tables: Collection[str], resolve_paths: bool = True) -> Expanded:
    """Reads a grid file and validates every row: profile, then `base`, the row, and overrides, which override earlier values.

    Args:
        tables: valid values of the key `table`.
        resolve_paths: whether relative paths are resolved from the current folder.

    Raises:
        UserError: lists all errors in the file, the profile and the overrides, each with its location and key.
    """
    wrong: list[str] = []
    layers: list[tuple[str, dict[str, Any]]] = []
    for text in overrides:
        try:
            layers.append((text, parse_override(text)))
        except UserError as error:
            wrong.append(str(error))
    content = read_grid(path)
    grid = _readable(path, content, tables, wrong)
    product = content.get("product")
    for key in product if isinstance(product, dict) else ():
        wrong += [
            f"override {text!r}: {key} is a product axis of {path}; change the values in that file"
            for text, layer in layers
            if isinstance(key, str) and _has(layer, key)
        ]
    profile_file = profile_path(profile)
    configs = _configs(_Layers(path, grid, profile_file, read_profile(profile_file), layers, resolve_paths), wrong)
    if not wrong and grid.plot is not None:
        wrong += _unplottable(path, grid.plot, configs)
    elif not wrong and grid.table is None:
        grid = grid.model_copy(update={"plot": _default_plot(path, grid, configs)})
    if grid.early_stopping is not None:
        wrong += _unstoppable(path, grid, grid.early_stopping, configs)
    if wrong:
        raise UserError("\n".join(dict.fromkeys(wrong)))
    models = [layer.get("model", {}) for _, layer in layers]
    full_size = {row.id: ModelConfig.model_validate(merged(grid.base.model, row.model, *models)) for row in grid.rows}
    return Expanded(grid, configs, full_size)


def _readable(path: Path, content: dict[str, Any], tables: Collection[str], wrong: list[str]) -> Grid:
    """The grid in a file. Errors are added to `wrong`; the valid rest is returned, so that it is checked, too."""
    try:
        grid = Grid.model_validate(content)
    except ValidationError as error:
        wrong += [f"{path}: {key}: {what}" for key, what in mistakes(error, Grid)]
        rows, product, table = content.get("rows"), content.get("product"), content.get("table")
        robustness = content.get("robustness")
        rows = [row for row in rows if _fits(Row, row)] if isinstance(rows, list) else []
        product = product.items() if isinstance(product, dict) else ()
        base = content.get("base", {})
        grid = Grid.model_construct(
            question="",
            table=table if isinstance(table, str) else None,
            robustness=robustness if robustness in get_args(ProtocolName) else None,
            rows=tuple(map(Row.model_validate, rows)),
            product={key: tuple(values) for key, values in product if isinstance(key, str) and isinstance(values, list)},
            base=Layer.model_validate(base if _fits(Layer, base) else {}),
        )
    if grid.table is not None and grid.table not in tables:
        wrong.append(f"{path}: table: unknown table {grid.table!r}; tables of the paper: {', '.join(tables)}")
    protocols = get_args(ProtocolName)
    if grid.robustness is not None and grid.table not in (None, grid.robustness):
        wrong.append(
            f"{path}: table: {grid.table!r} has no results for `robustness: {grid.robustness}`; leave out `table` or "
            "`robustness`"
        )
    if grid.robustness is None and grid.table in protocols:
        wrong.append(f"{path}: robustness: missing; table {grid.table!r} requires `robustness: {grid.table}`")
    if not {"rows", "product"} & set(content):
        wrong.append(f"{path}: rows: missing; give rows, a product, or both")
    axes = _axes(path, grid, wrong)
    alone = "rows" not in content and axes
    rows = _multiplied((Row.model_construct(id=""),) if alone else grid.rows, axes)
    grid = grid.model_copy(update={"rows": rows, "product": axes})
    for what, values in (("rows: each id", [row.id for row in grid.rows]), ("seeds: each seed", list(grid.seeds))):
        twice = [str(value) for value, count in Counter(values).items() if count > 1]
        if twice:
            wrong.append(f"{path}: {what} must be unique, but these occur more than once: {', '.join(twice)}")
    return grid


def _axes(path: Path, grid: Grid, wrong: list[str]) -> dict[str, tuple[Any, ...]]:
    """The valid axes of a grid's product. Errors are added to `wrong`."""
    sections = "|".join(Layer.model_fields)
    axes = {}
    for key, values in grid.product.items():
        rows = [row.id for row in grid.rows if _has(row.model_dump(), key)]
        if not re.fullmatch(rf"({sections})\.\w+", key, re.ASCII):
            wrong.append(
                f"{path}: product.{key}: not a key of section {', '.join(Layer.model_fields)}; an example is recipe.lr"
            )
        elif not values:
            wrong.append(f"{path}: product.{key}: empty list; give at least one value")
        elif rows:
            wrong.append(f"{path}: product.{key}: also set in row {', '.join(rows)}; set the key in only one of the two places")
        else:
            axes[key] = values
    return axes


def _multiplied(rows: Sequence[Row], axes: Mapping[str, Sequence[Any]]) -> tuple[Row, ...]:
    """Every row with every combination of values, which are part of its id; the last axis varies fastest."""
    cells = []
    for row, values in itertools.product(rows, itertools.product(*axes.values())):
        named = list(zip(axes, values, strict=True))
        parts = [row.id, *(_id_part(key, value) for key, value in named)]
        layer = merged(row.model_dump(exclude={"id"}), *(_nested(key, value) for key, value in named))
        cells.append(Row.model_validate({"id": "-".join(filter(None, parts)), **layer}))
    return tuple(cells)


def _id_part(key: str, value: Any) -> str:
    """`lr0.1` for `recipe.lr` and 0.1; characters that are not allowed in an id become a dash."""
    text = json.dumps(value, default=str).strip('"[]{}')
    return key.rpartition(".")[2] + re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def _fits(schema: type[Strict], value: object) -> bool:
    try:
        schema.model_validate(value)
    except ValidationError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a row's values, so that an error message can name the file or override of a value."""

    path: Path
    grid: Grid
    profile_path: Path
    profile: dict[str, Any]
    overrides: Sequence[tuple[str, dict[str, Any]]]
    resolve_paths: bool

    def values(self, row: Row) -> dict[str, Any]:
        layers = self.grid.base.model_dump(), row.model_dump(exclude={"id"}), *(layer for _, layer in self.overrides)
        return merged(self.profile, anchored(merged({}, *layers), Path.cwd()) if self.resolve_paths else merged({}, *layers))

    def lacks_root(self, row: Row, source: str) -> bool:
        """Whether `data.root` is missing, so that images would be read from the folder of the embedded dataset."""
        is_embedded = self.profile.get("data", {}).get("source") == "digits"
        return is_embedded and source in ("folder", "shards") and self.place("data.root", row) == str(self.profile_path)

    def place(self, key: str, row: Row) -> str:
        """File or override that set the value at `key`."""
        for text, layer in reversed(self.overrides):
            is_whole_section = key in layer and not (isinstance(layer[key], dict) and key in TrialConfig.model_fields)
            if is_whole_section or _has(layer, key):
                return f"override {text!r}"
        if not _has(row.model_dump(), key) and not _has(self.grid.base.model_dump(), key) and _has(self.profile, key):
            return str(self.profile_path)
        return str(self.path)


def _has(layer: Any, key: str) -> bool:
    """Whether a layer sets the value at a path of two or more keys; a path with one key is a whole section."""
    if "." not in key:
        return False
    for part in key.split("."):
        part = part.split("[")[0]
        if not isinstance(layer, dict) or part not in layer:
            return False
        layer = layer[part]
    return True


def _configs(layers: _Layers, wrong: list[str]) -> dict[str, TrialConfig]:
    """The config of every valid row. An error that occurs in many rows is reported once."""
    found: dict[str, TrialConfig] = {}
    problems: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
    known: dict[tuple[str, int], list[tuple[str, str]]] = {}  # large grids have few models
    for row in layers.grid.rows:
        values = layers.values(row)
        mine: list[tuple[str, str]] = []
        try:
            found[row.id] = TrialConfig.model_validate(values)
            mine += contradictions(found[row.id])
            mine += transform_mistakes(found[row.id].data)
            if layers.lacks_root(row, found[row.id].data.source):
                needed = "needs data.root; add the folder of your images, such as data.root=/path/to/images"
                mine.append(("data.source", f"{found[row.id].data.source} {needed}"))
        except ValidationError as error:
            mine += mistakes(error, TrialConfig)
        if _fits_model(values.get("model")):
            size = found[row.id].data.size if row.id in found else 2**20  # large enough if the size is invalid itself
            model = repr(values["model"]), size
            if model not in known:
                known[model] = list(model_mistakes(ModelConfig.model_validate(values["model"]), size))
            mine += known[model]
            if row.id in found and not known[model]:
                mine += fine_tuning_mistakes(found[row.id])
        for key, what in mine:
            problem = what.partition("llowed: ")[0]  # rows with other models allow other keys
            problems.setdefault((layers.place(key, row), key, problem), (what, []))[1].append(row.id)
    for (place, key, _), (what, rows) in problems.items():
        in_grid = place == str(layers.path)
        every = len(rows) == len(layers.grid.rows) > 1
        where = (": every row" if every else f": row {', '.join(rows)}") if in_grid else ""
        wrong.append(f"{place}{where}: {key}: {what}")
    return found


def _fits_model(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _default_plot(path: Path, grid: Grid, configs: dict[str, TrialConfig]) -> Plot | None:
    """A plot against the first numeric axis of the grid's product; None if rows would be at the same point."""
    axes = [key for key, values in grid.product.items() if len(values) > 1]
    for x in axes:
        if not any(isinstance(value, bool) for value in grid.product[x]):
            for series in (*(key for key in axes if key != x), "model.name"):
                plot = Plot(x=x, series=series, label=x)
                if not _unplottable(path, plot, configs):
                    return plot
    return None


def _unplottable(path: Path, plot: Plot, configs: dict[str, TrialConfig]) -> list[str]:
    wrong = []
    for name, kinds in (("x", (int, float)), ("series", (str, int, float))):
        for row, config in configs.items():
            try:
                fits = isinstance(value_at(config, getattr(plot, name)), kinds)
            except AttributeError:
                fits = False
            if not fits:
                expected = "number" if name == "x" else "text or number"
                wrong.append(f"{path}: plot.{name}: row {row} has no {expected} at `{getattr(plot, name)}`")
                break
    if not wrong:
        places: dict[tuple[Any, Any], str] = {}
        for row, config in configs.items():
            place = value_at(config, plot.series), value_at(config, plot.x)
            if place in places:
                wrong.append(
                    f"{path}: plot: rows {places[place]} and {row} would be at the same point; set "
                    "plot.series to a key in which the rows differ"
                )
                break
            places[place] = row
    return wrong


def _unstoppable(path: Path, grid: Grid, wanted: EarlyStopping, configs: Mapping[str, TrialConfig]) -> list[str]:
    """Why early stopping is impossible. An option without effect is an error, too."""
    if grid.table is not None:
        return [
            f"{path}: early_stopping: cannot be combined with table {grid.table!r}, which compares complete trainings; "
            "leave out `early_stopping` or `table`"
        ]
    lengths = {row: config.recipe.epochs for row, config in configs.items()}
    if len(set(lengths.values())) > 1:
        short, long = (pick(lengths, key=lengths.__getitem__) for pick in (min, max))
        return [
            f"{path}: early_stopping: requires the same recipe.epochs in every row, but the value is {lengths[short]} "
            f"in row {short} and {lengths[long]} in row {long}; use one value, or leave out early_stopping"
        ]
    return [
        f"{path}: early_stopping.grace_epochs: must be less than recipe.epochs={epochs}, not {wanted.grace_epochs}"
        for epochs in set(lengths.values())
        if wanted.grace_epochs >= epochs
    ]
