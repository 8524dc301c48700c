"""Writes the generated parts of the reference: `python -m docs.generate`. With `--check`, only compares.

Only the part between the markers is generated: in `cli.md` from the commands, in `config.md` from the pydantic classes, the
model records and the docstrings of their fields, in `pretrained.md` from the cards of the networks.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import san
from experiments.cli.commands import cli
from experiments.config import grid
from experiments.config.config import CheckpointingConfig, DataConfig, EngineConfig, RecipeConfig, ResourcesConfig
from san.models.pretrained import WEIGHTS, WEIGHTS_DIR, read_config
from san.models.resnet import ResNetSpec
from san.models.san import PairwiseSpec, PatchwiseSpec, ScalarSpec
from san.nn.relation import PAIRWISE, PATCHWISE

REFERENCE = Path(__file__).parent / "reference"
BEGIN, END = "<!-- generated: `make docs` rewrites this part -->", "<!-- /generated -->"

MODEL_FIELDS = {
    "depths": "Number of blocks in each stage.",
    "widths": "Number of channels in each stage.",
    "num_stages": "Keeps only the first stages, which halve the side of the map this often; of a ResNet, "
    "the stem is the first one. Null or 5: the complete model.",
    "width_mult": "Multiplies the number of channels in every stage by this factor.",
    "footprint": "Side of the footprint in pixels, an odd number. Stage 1 of a SAN always uses 3. In a ResNet: the kernel size"
    " of the convolutions that are usually 3x3.",
    "r1": "φ and ψ have C / r1 channels, where C is the number of channels of the stage.",
    "r2": "β has C / r2 channels, where C is the number of channels of the stage.",
    "group_size": "Number of value channels that share one weight.",
    "hidden_reduction": "The mapping's hidden layers have C / hidden_reduction channels, where C is the number of channels of"
    " the stage. `L` has no hidden layer.",
    "relation": f"Function that compares pixels. Pairwise: `{'`, `'.join(PAIRWISE)}`. Patchwise: `{'`, `'.join(PATCHWISE)}`.",
    "mapping": "Layers of the mapping from the relation to the weights: `L`, `LRL` or `LRLRL` (L: linear, R: ReLU).",
    "transformation": "Weight sharing among φ, ψ and β: `distinct` (none), `phi_eq_psi` or `phi_eq_psi_eq_beta`.",
    "position": "Position encoding: `none`, `absolute` or `relative`.",
    "heads": "Number of attention heads.",
    "stem_width": "Number of channels of the first convolution.",
}
RECORDS = {"pairwise": PairwiseSpec, "patchwise": PatchwiseSpec, "scalar": ScalarSpec, "ResNet": ResNetSpec}


def cli_reference() -> str:
    """Usage, help and options of `san` and each command."""
    return "\n\n".join(command_reference(path, command) for path, command in commands(cli, ("san",)))


def command_reference(path: tuple[str, ...], command: click.Command) -> str:
    """One section; a group lists its commands."""
    context = click.Context(command, info_name=" ".join(path))
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text = inspect.cleandoc(command.help or "")
    parts = [f"## {' '.join(path)}", f"```text\n{usage}\n```", *map(_paragraph, text.split("\n\n"))]
    if isinstance(command, click.Group):
        subcommands = {name: command.get_command(context, name) for name in command.list_commands(context)}
        rows = [
            (f"[`{name}`](#{'-'.join((*path, name))})", _text(each.get_short_help_str(200)))
            for name, each in subcommands.items()
            if each is not None and not each.hidden
        ]
        parts.append(_table(("command", "does"), rows))
    parameters = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    options = [record for each in parameters if (record := each.get_help_record(context))]
    shown = [(f"`{names}`", _text(words)) for names, words in options if "--help" not in names]
    if shown:
        parts.append(_table(("option", "meaning"), shown))
    return "\n\n".join(parts)


def _paragraph(text: str) -> str:
    """A paragraph of a help text; click marks those that keep their line breaks."""
    if not text.startswith("\b"):
        return _text(" ".join(text.split()))
    return f"```text\n{textwrap.dedent(text.removeprefix(chr(8)).strip(chr(10)))}\n```"


def _text(words: str) -> str:
    """Words of a help text as Markdown: what looks like a tag or an emphasis is neither, outside of code."""
    pieces = words.split("`")
    pieces[::2] = [re.sub(r"([*_\[])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The command and all below it, in the order of the help."""
    yield path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            subcommand = command.get_command(click.Context(command), name)
            if subcommand is not None and not subcommand.hidden:
                yield from commands(subcommand, (*path, name))


def config_reference() -> str:
    """A table for each section of a trial's config, then for a grid file."""
    parts = [_heading("model", "`model.name`, a variant that `san models` lists, and any of its settings."), model_table()]
    for section, schema in (
        ("data", DataConfig),
        ("recipe", RecipeConfig),
        ("engine", EngineConfig),
        ("resources", ResourcesConfig),
        ("checkpointing", CheckpointingConfig),
    ):
        parts += [_heading(section, inspect.getdoc(schema) or ""), key_table(schema, f"{section}.")]
    parts += [_heading("Grid file", inspect.getdoc(grid.Grid) or ""), key_table(grid.Grid, "")]
    for name, part in (("rows", grid.Row), ("plot", grid.Plot), ("early_stopping", grid.EarlyStopping)):
        prefix = f"{name}[]." if name == "rows" else f"{name}."
        parts += [f"### {name}", inspect.getdoc(part) or "", key_table(part, prefix)]
    return "\n\n".join(parts)


def _heading(name: str, text: str) -> str:
    return f"## {name}\n\n{text}"


def key_table(schema: type[BaseModel], prefix: str) -> str:
    """Key, type, default and meaning of every field."""
    docs = field_docs(schema)
    lines = []
    for name, field in schema.model_fields.items():
        default = "required" if field.is_required() else _value(field.get_default(call_default_factory=True))
        kind = _kind(field.annotation, field.metadata)
        lines.append((f"`{prefix}{name}`", kind, default, docs.get(name, "")))
    return _table(("key", "type", "default", "meaning"), lines)


def model_table() -> str:
    """Every field of the model records with its defaults, where they differ by kind of model."""
    defaults = {kind: {f.name: f.default for f in dataclasses.fields(record)} for kind, record in RECORDS.items()}
    names = dict.fromkeys(name for fields in defaults.values() for name in fields if name != "name")
    lines = []
    for name in names:
        kinds: dict[str, list[str]] = {}
        for kind, fields in defaults.items():
            if name in fields:
                kinds.setdefault(_value(fields[name], "depends on the variant"), []).append(kind)
        is_everywhere = len(kinds) == 1 and sum(map(len, kinds.values())) == len(RECORDS)
        default = "; ".join(value if is_everywhere else f"{', '.join(who)}: {value}" for value, who in kinds.items())
        lines.append((f"`model.{name}`", default, MODEL_FIELDS.get(name, "")))
    return _table(("key", "default", "meaning"), lines)


def field_docs(schema: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of the class and of those that it extends."""
    descriptions: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                descriptions[field.target.id] = " ".join(str(text.value.value).split())
    return descriptions


def _kind(annotation: object, metadata: Sequence[object] = ()) -> str:
    """A field's type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0], (*metadata, *arguments[1:]))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_kind, arguments))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        kinds = list(dict.fromkeys(_kind(argument) for argument in arguments if argument is not ...))
        count = "" if ... in arguments else f"{len(arguments)}: "
        return f"list of {count}{kinds[0]}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    words = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", typing.Any: "any value"}
    constraints = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else (item,))]
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{signs[name]} {_number(getattr(part, name))}" for part in constraints for name in signs if hasattr(part, name)]
    return " ".join([words[typing.cast(Any, annotation)], " and ".join(limits)]).strip()


def _number(value: float) -> str:
    return "2⁶³" if value == 2**63 else f"{value:g}" if value < 1e6 else str(value)


def _value(value: object, missing: str = "required") -> str:
    if value is dataclasses.MISSING:
        return missing
    if isinstance(value, BaseModel) or value in ({}, ()):
        return "empty"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def pretrained_table() -> str:
    """The networks with weights: size, FLOPs and accuracy."""
    lines = []
    for name in san.list_models(pretrained=True):
        facts, model = read_config(WEIGHTS_DIR / name), san.create_model(name, pretrained=True)
        counted = san.complexity(model, facts["pretrained_cfg"]["input_size"][1])
        size = (WEIGHTS_DIR / name / WEIGHTS).stat().st_size / 2**20
        evaluation = facts["evaluation"]
        lines.append(
            (
                f"`{name}`",
                f"{counted.params / 1e6:.3f}",
                f"{counted.flops_paper / 1e6:.1f}",
                f"{evaluation['top1']:.2f}",
                f"{evaluation['top5']:.2f}",
                f"{size:.2f}",
            )
        )
    heading = ("network", "parameters (M)", "FLOPs (M)", "top-1 (%)", "top-5 (%)", "file (MiB)")
    return _table(heading, lines)


def _table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [" | ".join(map(_cell, line)) for line in (heading, *lines)]
    return "\n".join([f"| {cells[0]} |", "|" + " --- |" * len(heading), *(f"| {line} |" for line in cells[1:])])


def _cell(text: str) -> str:
    """Bars would end the cell; no escape for them within backticks works everywhere."""
    coded = re.sub(r"`([^`]*\|[^`]*)`", lambda match: f"<code>{html.escape(match[1])}</code>", text)
    return coded.replace("|", "&#124;")


PAGES = {"cli.md": cli_reference, "config.md": config_reference, "pretrained.md": pretrained_table}


def generated(name: str) -> str:
    """The page as it should be."""
    before, rest = (REFERENCE / name).read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{PAGES[name]()}\n\n{END}{after}"


def main() -> None:
    stale = [name for name in PAGES if generated(name) != (REFERENCE / name).read_text(encoding="utf-8")]
    if "--check" in sys.argv:
        sys.exit(f"run `python -m docs.generate`: {', '.join(stale)} changed" if stale else 0)
    for name in stale:
        (REFERENCE / name).write_text(generated(name), encoding="utf-8")
        print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
