"""Turns a grid file into the config of every row, validated step by step."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from experiments.config.config import (
    GRIDS_DIR,
    PROJECT_DIR,
    ModelConfig,
    TrialConfig,
    combination_errors,
    fine_tuning_errors,
    is_module,
    merged,
    model_errors,
    schema_errors,
    takes_text,
    unknown_key,
    value_at,
)
from experiments.config.grid import LONGEST_ID, Grid, GridRequest, Layer, Plot, ProtocolName, Row, is_checkpoint_name
from experiments.config.imports import SourceFile, import_files
from experiments.errors import UserError
from san.choice import choices

PROFILES_DIR = GRIDS_DIR / "profiles"
PATHS = (("data", "root"), ("data", "lists"), ("recipe", "init"))
"""Keys whose values are paths. Relative paths are resolved from the current folder, those in a profile file from its folder,
and those in the project's own profiles from `PROJECT_DIR`."""
MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Expanded:
    """A valid grid with its product expanded: the config of every row, and its model at the paper's size."""

    grid: Grid
    configs: dict[str, TrialConfig]
    full_size: dict[str, ModelConfig]
    imports: tuple[SourceFile, ...]
    source_of: Callable[[str, Row], str]
    """File or override that sets a key of a row, for messages."""


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML would silently use the last one, and numbers that YAML 1.1 reads in base 8 or 60.
    Dates are text."""

    def construct_date(self, node: yaml.ScalarNode) -> str:
        return str(node.value)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        read = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        number: int | float = read(node)
        if ":" in node.value or (isinstance(number, int) and re.fullmatch(r"[-+]?0[0-7_]+", node.value)):
            problem = f"{node.value} would be read as {number:g}; write the number that you mean, or put a text in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return number

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Keys as written in the file, because a key may override one that `<<` merges.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE]
        twice = [key for key, count in Counter(keys).items() if count > 1]
        if twice:
            raise yaml.MarkedYAMLError(problem=f"duplicate key {twice[0][1]!r}", problem_mark=node.start_mark)
        return node


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_date)


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
        kind = "nothing" if content is None else type(content).__name__
        raise UserError(f"{path}: must be a mapping of keys at the top level, not {kind}")
    return content


def read_grid(path: Path) -> dict[str, Any]:
    """Reads a grid file and adds the missing keys from the grid that it extends. Raises UserError."""
    content, files = _with_absolute_imports(path, read_yaml(path)), [path]
    if "question" not in content and content.keys() & {"data", "engine", "resources"}:
        raise UserError(f"{path}: this is a profile, not a grid; give it with --profile, after a grid")
    while (parent := content.pop("extends", None)) is not None:
        if not isinstance(parent, str):
            raise UserError(f"{files[-1]}: extends: must be the path of a grid, not {parent!r}; an example is comparison.yaml")
        files.append(files[-1].parent / Path(os.path.expanduser(parent)))
        if files[-1].resolve() in (file.resolve() for file in files[:-1]):
            raise UserError(f"{files[-2]}: extends: this grid extends itself ({' -> '.join(map(str, files))})")
        try:
            content = _with_absolute_imports(files[-1], read_yaml(files[-1])) | content
        except UserError as error:
            raise UserError(f"{files[-2]}: extends: {error}") from None
    return content


def _with_absolute_imports(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(imports := content.get("imports"), list):
        return content
    return content | {"imports": [os.path.abspath(path.parent / Path(os.path.expanduser(str(file)))) for file in imports]}


def grid_path(name: str | Path) -> Path:
    """The file of a grid: a path, or one of the project's grids by its name. Raises UserError for an unknown name."""
    path = Path(os.path.expanduser(name))
    if path.is_file() or path.name != str(name) or path.suffix:
        return path
    known = sorted(file.stem for file in GRIDS_DIR.glob("*.yaml"))
    if str(name) in known:
        return GRIDS_DIR / f"{name}.yaml"
    raise UserError(f"{name}: no such file or grid; {choices('grids', str(name), known)}")


def profile_path(name: str) -> Path:
    """The file of a profile: one of the project's by its name, or a path that ends in `.yaml`.

    Raises:
        UserError: an unknown profile, or a file with the name of one of the project's, from which results could not be told.
    """
    known = {path.stem: path for path in sorted(PROFILES_DIR.glob("*.yaml"), key=lambda path: path.stem)}
    if name.endswith(".yaml"):
        path = Path(os.path.expanduser(name))
        if path.stem in known and path.resolve() != known[path.stem]:
            raise UserError(f"{name}: the project has a profile with this name; give {path.stem!r}, or rename the file")
        return path
    if name not in known:
        raise UserError(f"unknown profile {name!r}; {choices('profiles', name, known)}; or give the path of a .yaml file")
    return known[name]


def read_profile(path: Path, resolve_paths: bool = True, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a profile, which the profiles `below` extend, and the profile that it extends. With `resolve_paths`, relative paths
    in the file of a user become absolute."""
    content = read_yaml(path)
    if "question" in content:
        raise UserError(f"{path}: this is a grid, not a profile; give the name of a profile, or the file of one")
    for section, settings in content.items():
        if section not in (*TrialConfig.model_fields, "extends"):
            raise UserError(f"{path}: {section}: {unknown_key(str(section), [*TrialConfig.model_fields, 'extends'])}")
        if section != "extends" and not isinstance(settings, dict):
            raise UserError(f"{path}: {section}: must be a mapping of keys, not {json.dumps(settings, default=str)}")
    extended = content.pop("extends", None)
    if resolve_paths and path.parent.resolve() != PROFILES_DIR:
        content = with_absolute_paths(content, path.parent)
    if extended is None:
        return content
    if not isinstance(extended, str):
        raise UserError(f"{path}: extends: must be the name or the path of a profile, not {extended!r}; an example is folder")
    is_file, files = extended.endswith(".yaml"), (*below, path)
    try:
        parent = profile_path(str(path.parent / os.path.expanduser(extended)) if is_file else extended)
    except UserError as error:
        raise UserError(f"{path}: extends: {error}") from None
    if parent.resolve() in (file.resolve() for file in files):
        raise UserError(f"{path}: extends: this profile extends itself ({' -> '.join(map(str, (*files, parent)))})")
    return merged(read_profile(parent, resolve_paths, files), content)


def with_absolute_paths(layer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A layer whose relative paths are resolved from a folder. Those in `PROJECT_DIR` stay relative, because other nodes may
    have it elsewhere."""
    for section, key in PATHS:
        if _has(layer, f"{section}.{key}") and isinstance(value := layer[section][key], str):
            path = Path(os.path.expanduser(value))
            if key == "init" and is_checkpoint_name(value) and not os.path.lexists(folder / path):
                continue
            if folder.resolve() != PROJECT_DIR or path.is_absolute():
                layer = merged(layer, {section: {key: os.path.abspath(folder / path)}})
    return layer


def parse_override(text: str) -> dict[str, Any]:
    """`recipe.epochs=3` as a nested mapping. The value is YAML, but the value of a key that takes text, such as `data.root`, is
    the text itself, or null. Raises UserError if there is no `=`, or no value."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"override {text!r}: not KEY=VALUE; an example is recipe.epochs=3")
    if not value:
        raise UserError(f"override {text!r}: no value (is a shell variable unset?); give one, or null")
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if takes_text(key) and not quoted and value != "null":
        return _nested(key, value)
    try:
        layer: Any = yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"override {text!r}: the value is not valid YAML: {problem}") from None
    return _nested(key, layer)


def _nested(key: str, value: Any) -> dict[str, Any]:
    """A value under a dotted path as a nested mapping."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def expand(request: GridRequest, tables: Collection[str], resolve_paths: bool = True) -> Expanded:
    """Reads a grid file and validates every row: profile, then `base`, the row, and overrides, which override earlier values.

    Args:
        tables: valid values of the key `table`.
        resolve_paths: whether relative paths are resolved, from the current folder or that of the profile.

    Raises:
        UserError: lists all errors of the first step that finds any, each with its file or override and its key: syntax, keys
            of the file, keys and values of each row, and their combinations.
    """
    path, layers = request.grid, [(text, parse_override(text)) for text in request.overrides]
    content = read_grid(path)
    try:
        grid = Grid.model_validate(content)
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {key}: {what}" for key, what in schema_errors(error, Grid))) from None
    _raise_all(path, [*_grid_errors(grid, tables), *_axis_errors(grid, layers)])
    sources = import_files([*grid.imports, *request.imports])
    grid = grid.model_copy(update={"rows": _multiplied(grid.rows, grid.product)})
    _raise_all(path, _repeated(grid))
    profile_file = profile_path(request.profile)
    all_layers = _Layers(path, grid, profile_file, read_profile(profile_file, resolve_paths), layers, resolve_paths)
    configs = _configs(all_layers)
    if grid.plot is None and grid.table is None:
        grid = grid.model_copy(update={"plot": _default_plot(grid, configs)})
    _raise_all(path, [*_plot_errors(grid.plot, configs), *_early_stopping_errors(grid, configs)])
    models = [layer.get("model", {}) for _, layer in layers]
    full_size = {
        row.id: ModelConfig.model_validate(merged({"name": configs[row.id].model.name}, grid.base.model, row.model, *models))
        for row in grid.rows
    }
    return Expanded(grid, configs, full_size, sources, all_layers.source_of)


def _raise_all(path: Path, errors: Iterable[str]) -> None:
    """Raises UserError if there are errors; each begins with a key of the file."""
    if lines := [f"{path}: {error}" for error in errors]:
        raise UserError("\n".join(lines))


def _grid_errors(grid: Grid, tables: Collection[str]) -> Iterator[str]:
    if grid.table is not None and grid.table not in tables:
        yield f"table: unknown table {grid.table!r}; {choices('tables of the paper', grid.table, tables)}"
    if grid.robustness is not None and grid.table not in (None, grid.robustness):
        yield f"table: {grid.table!r} has no results for `robustness: {grid.robustness}`; leave out `table` or `robustness`"
    if grid.robustness is None and grid.table in get_args(ProtocolName):
        yield f"robustness: missing; table {grid.table!r} requires `robustness: {grid.table}`"
    if not grid.rows and not grid.product:
        yield "rows: missing; give rows, a product, or both"


def _axis_errors(grid: Grid, layers: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    sections = "|".join(Layer.model_fields)
    for key, values in grid.product.items():
        rows = [row.id for row in grid.rows if _has(row.model_dump(), key)]
        if not re.fullmatch(rf"({sections})\.\w+", key, re.ASCII):
            yield f"product.{key}: not a key of section {', '.join(Layer.model_fields)}; an example is recipe.lr"
        elif not values:
            yield f"product.{key}: empty list; give at least one value"
        elif rows:
            yield f"product.{key}: also set in row {', '.join(rows)}; set the key in only one of the two places"
        for text, layer in layers:
            if _has(layer, key):
                yield f"product.{key}: cannot be changed by override {text!r}; change the values in this file"


def _repeated(grid: Grid) -> Iterator[str]:
    values_of: dict[str, Sequence[object]] = {"rows: each id": [row.id for row in grid.rows], "seeds: each seed": grid.seeds}
    values_of |= {f"rows: each seed of {row.id}": row.seeds for row in grid.rows if row.seeds is not None}
    for what, values in values_of.items():
        twice = [str(value) for value, count in Counter(values).items() if count > 1]
        if twice:
            yield f"{what} must be unique, but these occur more than once: {', '.join(twice)}"


def _multiplied(rows: Sequence[Row], axes: Mapping[str, Sequence[Any]]) -> tuple[Row, ...]:
    """Every row with every combination of values, which are part of its id; the last axis varies fastest. Without rows, every
    combination is a row."""
    result = []
    for row, values in itertools.product(rows or (None,), itertools.product(*axes.values())):
        named = list(zip(axes, values, strict=True))
        parts = [*([row.id] if row else []), *(_id_part(key, value) for key, value in named)]
        own = row.model_dump(exclude={"id"}) if row else {}
        layer = merged(own, *(_nested(key, value) for key, value in named))
        name = "-".join(parts)
        if len(name) > LONGEST_ID:
            name = f"{name[: LONGEST_ID - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        result.append(Row.model_validate({"id": name, **layer}))
    return tuple(result)


def _id_part(key: str, value: Any) -> str:
    """`lr0.1` for `recipe.lr` and 0.1, `r1-4` for `model.r1` and 4; characters that are not allowed in an id become a dash."""
    text, name = json.dumps(value, default=str).strip('"[]{}'), key.rpartition(".")[2]
    return f"{name}{'-' * name[-1].isdigit()}{re.sub(r'[^A-Za-z0-9_.-]+', '-', text)}"


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
        layers = (
            self.grid.base.model_dump(),
            row.model_dump(include=set(Layer.model_fields)),
            *(layer for _, layer in self.overrides),
        )
        values = merged({}, *layers)
        profile = self.profile
        model = values["model"]
        # The profile's stages and widths are those of this project's networks.
        if isinstance(model, dict) and is_module(model.get("name")):
            profile = {section: settings for section, settings in profile.items() if section != "model"}
        return merged(profile, with_absolute_paths(values, Path.cwd()) if self.resolve_paths else values)

    def source_of(self, key: str, row: Row) -> str:
        """File or override that set the value at `key`."""
        for text, layer in reversed(self.overrides):
            is_whole_section = key in layer and not (isinstance(layer[key], dict) and key in TrialConfig.model_fields)
            if is_whole_section or _has(layer, key):
                return f"override {text!r}"
        is_in_grid = _has(row.model_dump(), key) or _has(self.grid.base.model_dump(), key)
        is_in_profile = _has(self.profile, key) or not key.startswith("model")  # a missing model.name belongs in the grid
        return str(self.profile_path if is_in_profile and not is_in_grid else self.path)


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


def _configs(layers: _Layers) -> dict[str, TrialConfig]:
    """The config of every row.

    Raises:
        UserError: all errors of the first step that finds any; an error of many rows is listed once.
    """
    configs: dict[str, TrialConfig] = {}
    errors: dict[str, list[tuple[str, str]]] = {}
    known: dict[tuple[str, int], list[tuple[str, str]]] = {}  # large grids have few models
    for row in layers.grid.rows:
        try:
            config = TrialConfig.model_validate(layers.values(row))
        except ValidationError as error:
            errors[row.id] = list(schema_errors(error, TrialConfig))
            continue
        model = repr(config.model), config.data.size
        if model not in known:
            known[model] = list(model_errors(config.model, config.data.size))
        configs[row.id], errors[row.id] = config, known[model]
    _raise_rows(layers, errors)
    for row in layers.grid.rows:
        config = configs[row.id]
        errors[row.id] = [*combination_errors(config), *fine_tuning_errors(config)]
    _raise_rows(layers, errors)
    return configs


def _raise_rows(layers: _Layers, errors: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Raises UserError if rows have errors, as (path of the key, error)."""
    problems: dict[tuple[str, str, str], tuple[str, list[str]]] = {}
    for row in layers.grid.rows:
        for key, what in errors[row.id]:
            problem = what.partition("llowed: ")[0]  # rows with other models allow other keys
            problems.setdefault((layers.source_of(key, row), key, problem), (what, []))[1].append(row.id)
    lines = []
    for (source, key, _), (what, rows) in problems.items():
        every = len(rows) == len(layers.grid.rows) > 1
        where = (": every row" if every else f": row {', '.join(rows)}") if source == str(layers.path) else ""
        lines.append(f"{source}{where}: {key}: {what}")
    if lines:
        raise UserError("\n".join(lines))


def _default_plot(grid: Grid, configs: Mapping[str, TrialConfig]) -> Plot | None:
    """A plot against the first numeric axis of the grid's product; None if rows would be at the same point."""
    axes = [key for key, values in grid.product.items() if len(values) > 1]
    for x in axes:
        if not any(isinstance(value, bool) for value in grid.product[x]):
            for series in (*(key for key in axes if key != x), "model.name"):
                plot = Plot(x=x, series=series, label=x)
                if not any(_plot_errors(plot, configs)):
                    return plot
    return None


def _plot_errors(plot: Plot | None, configs: Mapping[str, TrialConfig]) -> Iterator[str]:
    if plot is None:
        return
    points: dict[tuple[Any, Any], str] = {}
    for row, config in configs.items():
        for name, kinds in (("x", (int, float)), ("series", (str, int, float))):
            try:
                fits = isinstance(value_at(config, getattr(plot, name)), kinds)
            except AttributeError:
                fits = False
            if not fits:
                expected = "number" if name == "x" else "text or number"
                yield f"plot.{name}: row {row} has no {expected} at `{getattr(plot, name)}`"
                return
        point = value_at(config, plot.series), value_at(config, plot.x)
        if (other := points.setdefault(point, row)) != row:
            yield f"plot: rows {other} and {row} would be at the same point; set plot.series to a key in which the rows differ"
            return


def _early_stopping_errors(grid: Grid, configs: Mapping[str, TrialConfig]) -> Iterator[str]:
    """Why early stopping is impossible. An option without effect is an error, too."""
    stopping = grid.early_stopping
    if stopping is None:
        return
    if grid.table is not None:
        yield (
            f"early_stopping: cannot be combined with table {grid.table!r}, which compares complete trainings; "
            "leave out `early_stopping` or `table`"
        )
    lengths = {row: config.recipe.epochs for row, config in configs.items()}
    short, long = (pick(lengths, key=lengths.__getitem__) for pick in (min, max))
    if lengths[short] != lengths[long]:
        yield (
            f"early_stopping: requires the same recipe.epochs in every row, but the value is {lengths[short]} "
            f"in row {short} and {lengths[long]} in row {long}; use one value, or leave out early_stopping"
        )
    elif stopping.grace_epochs >= lengths[short]:
        yield f"early_stopping.grace_epochs: must be less than recipe.epochs={lengths[short]}, not {stopping.grace_epochs}"
    if rare := [row for row, config in configs.items() if config.recipe.validate_every_n_epochs > 1]:
        yield f"early_stopping: needs a validation after each epoch; leave out recipe.validate_every_n_epochs in row {rare[0]}"
