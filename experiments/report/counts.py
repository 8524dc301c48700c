"""Parameters and FLOPs of named models and of the rows of a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import san
from experiments.config.config import ModelConfig, merged, model_errors
from experiments.config.expand import expand, parse_override
from experiments.config.grid import GridRequest
from experiments.errors import UserError
from experiments.paper.tables import INPUT_SIZE, PaperRow, count, paper_rows, table_names
from experiments.report.tables import Table
from san.complexity import Part
from san.models.registry import VARIANTS

NOT_PRINTED = PaperRow()


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of a model for the paper's number of classes, and the paper's counts."""

    id: str
    counts: san.Complexity
    printed: PaperRow = NOT_PRINTED


def of_variants(size: int) -> list[Counted]:
    """Counts every named model for images of `size` pixels.

    Raises:
        UserError: names all models that cannot take such images.
    """
    return _counted({name: ModelConfig(name=name) for name in VARIANTS}, size, {})


def of_variant(name: str, overrides: Sequence[str], size: int) -> list[Counted]:
    """Counts one named model with overrides such as `footprint=9` or, as in a grid, `model.footprint=9`.

    Raises:
        UserError: an unknown name or field, or numbers that do not fit together.
    """
    fields = merged({"name": name}, *(parse_override(override.removeprefix("model.")) for override in overrides))
    if fields["name"] != name:
        raise UserError(f"override name={fields['name']}: the model is already set to {name}; leave out this override")
    return _counted({name: ModelConfig.model_validate(fields)}, size, {})


def of_grid(path: Path, size: int) -> list[Counted]:
    """Counts every row of a grid at full size, with the paper's counts if these are for images of `size` pixels.

    Raises:
        UserError: names all mistakes in the grid, or all rows that cannot take such images.
    """
    expanded = expand(GridRequest(path, "imagenet", ("resources.workers=1",)), table_names())
    table = expanded.grid.table
    return _counted(expanded.full_size, size, paper_rows(table) if table and size == INPUT_SIZE else {})


def _counted(models: Mapping[str, ModelConfig], size: int, printed: Mapping[str, PaperRow]) -> list[Counted]:
    wrong = []
    for name, model in models.items():
        for key, what in model_errors(model, size):
            field, what = key.removeprefix("model").removeprefix("."), what.replace("`model.", "`")
            wrong.append(what if field == "name" or what.startswith(name) else ": ".join(filter(None, (name, field, what))))
    if wrong:
        raise UserError("\n".join(wrong))
    return [Counted(name, count(model.spec(), size), printed.get(name, NOT_PRINTED)) for name, model in models.items()]


def as_text(lines: Iterable[Counted], stages: bool) -> str:
    """A table for a terminal without empty columns, with a line for each stage if `stages`."""
    lines = list(lines)
    unit, per_unit = ("M", 1e6) if max(line.counts.flops_paper for line in lines) < 1e8 else ("G", 1e9)
    heading = ("model", "params M", "printed", f"FLOPs {unit} (paper)", "printed", f"FLOPs {unit} (actual)")
    rows = [heading, *(row for line in lines for row in _rows(line, stages, per_unit))]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return Table(list(zip(*columns, strict=True))).text()


def _rows(line: Counted, stages: bool, per_unit: float) -> Iterator[tuple[str, ...]]:
    yield _row(line.id, line.counts, line.printed, per_unit)
    for part in line.counts.stages if stages else ():
        yield _row(f"  {part.name}", part, NOT_PRINTED, per_unit)


def _row(name: str, counts: san.Complexity | Part, printed: PaperRow, per_unit: float) -> tuple[str, ...]:
    params, flops = ("" if number is None else f"{number:.1f}" for number in (printed.params, printed.flops))
    ours = [f"{count:.3f}" for count in (counts.params / 1e6, counts.flops_paper / per_unit, counts.flops_actual / per_unit)]
    return name, ours[0], params, ours[1], flops, ours[2]
