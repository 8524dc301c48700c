"""Arguments and options that several commands share, and the formats of values."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from experiments.errors import UserError

Command = Callable[..., None]
Option = Callable[[Command], Command]


def not_empty(_context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The value of an option. `--address "$HEAD"` must not mean this machine if HEAD is not set."""
    if value is not None and not value.strip():
        raise UserError(
            f"--{option.name}: empty value (is a shell variable unset?); give a value, or leave out --{option.name}"
        )
    return value


def import_now(_context: click.Context, _option: click.Parameter, paths: Sequence[str]) -> None:
    """Imports the files of `--import` for a command without a grid."""
    from experiments.config.imports import import_files

    import_files(paths)


INPUTS = (".yaml", ".yml", ".pt", ".pth", ".safetensors", ".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
"""Suffixes of grids, checkpoints and images. A forgotten file name makes the next argument, such as an image, the output."""


class FilePath(click.Path):
    """A path, in which `~` is the home folder also where no shell has replaced it, as in `--csv=~/results.csv`.

    With `is_output`, it is a file to write, which must not have the name of an input.
    """

    def __init__(self, exists: bool = False, is_output: bool = False) -> None:
        super().__init__(exists=exists, path_type=Path)
        self.is_output = is_output

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.path.expanduser(value))
        super().convert(path, param, ctx)
        if self.is_output and param is not None and path.suffix.lower() in INPUTS:
            raise UserError(f"{param.opts[0]} {path}: would overwrite a grid, checkpoint or image; give another name")
        return path


class GridFile(click.ParamType[Path]):
    """The path of a grid's file, or the name of a grid of this project."""

    name = "grid"

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from experiments.config.expand import grid_path

        return grid_path(value)


_GRID = click.argument("grid", type=GridFile())
_PROFILE = click.option(
    "--profile",
    default="digits",
    show_default=True,
    help="Dataset and model size: digits, cifar10, cifar10-full, folder (your own images), imagenet (as in the paper), "
    "imagenet-1gpu, imagenet-fast, or a .yaml file.",
)
RUNS = click.option(
    "--runs",
    callback=not_empty,
    metavar="FOLDER",
    help="Store for runs: a folder or s3://bucket/prefix?endpoint_override=...  [default: SAN_RUNS, else runs/]",
)
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
_SEEDS = click.option(
    "--seeds", type=click.IntRange(1, 1000), metavar="N", help="Use seeds 0 to N-1 instead of the grid's seeds."
)
ONLY = click.option("--only", multiple=True, metavar="ROW", help="Only this row; can be given several times.")
_IMPORT = functools.partial(
    click.option,
    "--import",
    "imports",
    multiple=True,
    metavar="FILE",
    help="Python file that registers relations or models; can be given several times.",
)
IMPORT_NOW = _IMPORT(callback=import_now, expose_value=False)
ADDRESS = click.option(
    "--address",
    callback=not_empty,
    help="Ray cluster, for example auto or host:6379.  [default: RAY_ADDRESS, else this machine]",
)
TAKE_OVER = click.option(
    "--take-over", is_flag=True, help="For runs in a bucket: train the grid although another `san run` has claimed it."
)
SERIAL = click.option(
    "--serial", is_flag=True, help="Train one trial after the other in this process, without Ray, for a debugger or a profiler."
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def grid_options(*options: Option) -> Option:
    """Adds a grid's arguments and options to a command, which gets them as one argument, `request`. `options` are those that
    only some commands have."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def with_request(**given: Any) -> None:
            from experiments.config.grid import GridRequest

            request = {field.name: given.pop(field.name) for field in dataclasses.fields(GridRequest) if field.name in given}
            command(request=GridRequest(**request), **given)

        decorated: Command = with_request
        everything: list[Option] = [_GRID, OVERRIDES, _PROFILE, _SEEDS, *options, _IMPORT()]
        for option in reversed(everything):
            decorated = option(decorated)
        return decorated

    return add


def as_value(value: object) -> str:
    """The value as written in an override."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def printable(text: str) -> str:
    """Escapes characters that a terminal would interpret, which file names and servers may contain."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
