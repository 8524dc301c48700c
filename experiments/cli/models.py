"""`san models`, `san complexity` and `san doctor`."""

from __future__ import annotations

import dataclasses
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import click

from experiments.cli.options import AS_JSON, IMPORT_NOW, OVERRIDES, GridFile, as_value
from experiments.errors import UserError


@click.command()
@click.argument("pattern", default="*")
@AS_JSON
@IMPORT_NOW
def models(pattern: str, as_json: bool) -> None:
    """List the named models and their fields.

    PATTERN selects models by name. Every field can be overridden in grids and commands.

    \b
    Example: san models 'san*_pairwise'
    """
    from san.models.registry import VARIANTS, model_spec

    records = [dataclasses.asdict(model_spec(name)) for name in VARIANTS if fnmatchcase(name, pattern)]
    if not records:
        raise UserError(f"no model matches {pattern!r}; run `san models` to list all models")
    if as_json:
        click.echo(json.dumps(records))
        return
    for record in records:
        name = record.pop("name")
        click.echo(" ".join([f"{name:16s}", *(f"{key}={as_value(value)}" for key, value in record.items())]))


@click.command()
def doctor() -> None:
    """Show which kernels run, and why others do not.

    Also shows the versions of Python, the packages, the compilers and CUDA. The exit code is 1 if the CPU kernels do not run.

    \b
    Example: san doctor
    """
    import torch

    from experiments.runs.provenance import machine, versions
    from san.ops import library

    click.echo(f"{versions()}\n{machine()}\nCUDA of torch: {torch.version.cuda or 'none'}")
    for line in library.describe():
        click.echo(line)
    sys.exit(library.missing("cpu") is not None)


@click.command()
@click.argument("name", required=False)
@OVERRIDES
@click.option("--grid", type=GridFile(), help="Count every row of this grid at full size, next to the paper's counts.")
@click.option("--size", type=click.IntRange(1, 100_000), default=224, show_default=True, help="Image side in pixels.")
@IMPORT_NOW
@AS_JSON
def complexity(name: str | None, overrides: tuple[str, ...], grid: Path | None, size: int, as_json: bool) -> None:
    """Count a model's parameters and FLOPs.

    NAME is one of the models that `san models` lists; overrides such as footprint=9 change its fields. Its stages are counted,
    too. Without NAME, counts all models, or the rows of --grid.

    \b
    Example: san complexity san10_pairwise footprint=9
    """
    if name is not None and grid is not None:
        raise UserError(f"both a model and a grid: {name!r} and `--grid {grid}`; give only one of these")
    from experiments.report import counts

    if name is not None:
        lines = counts.of_variant(name, overrides, size)
    else:
        lines = counts.of_variants(size) if grid is None else counts.of_grid(grid, size)
    if as_json:
        click.echo(json.dumps([{"id": line.id} | dataclasses.asdict(line.counts) for line in lines]))
    else:
        click.echo(counts.as_text(lines, stages=name is not None))
