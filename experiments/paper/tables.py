"""The paper's published numbers and claims, and our counts at the paper's image size."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

import san
from experiments.config.config import ModelConfig
from san.choice import ModelError
from san.models import ModelSpec

TABLES = Path(__file__).parent / "tables.yaml"
CLAIMS = Path(__file__).parent / "claims.yaml"
INPUT_SIZE, CLASSES, EPOCHS = 224, 1000, 100


@dataclass(frozen=True, slots=True)
class PaperRow:
    """A row of a table in percent, millions of parameters and 1e9 multiply-accumulates; None if the paper has no value."""

    top1: float | None = None
    top5: float | None = None
    params: float | None = None
    flops: float | None = None


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """A claim that one row of a table is better than another, from the paper's text or only from its table."""

    better: str
    worse: str
    claim: str
    source: Literal["text", "table"] = "text"
    score: str = "top1"
    """What is compared: `top1`, `drop`, or a column of the table `attack`."""


@functools.cache
def _content(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def table_names() -> list[str]:
    """The paper's tables of results."""
    return list(_content(TABLES))


def paper_rows(table: str) -> dict[str, PaperRow]:
    """The rows of one table by id."""
    rows = _content(TABLES)[table]["rows"]
    return {row["id"]: PaperRow(**{key: row.get(key) for key in ("top1", "top5", "params", "flops")}) for row in rows}


def note_on_missing_rows(table: str | None, rows: Iterable[str]) -> str:
    """A note on the rows that a table does not have, for use after its name; empty if it has them all or there is no table."""
    published = paper_rows(table) if table else {}
    lacking = [row for row in dict.fromkeys(rows) if table and row not in published]
    if not lacking:
        return ""
    return f" (which lacks {', '.join(lacking[:3])}{f' and {len(lacking) - 3} more rows' if lacking[3:] else ''})"


def paper_numbers(table: str) -> dict[str, dict[str, float]]:
    """A robustness table by row: `n2_success` for a column with one number, `cw90_top1` and `cw90_top5` for one with two."""
    columns, rows = _content(TABLES)[table]["columns"], _content(TABLES)[table]["rows"]
    if "values" in rows[0]:
        return {row["id"]: dict(zip(columns, row["values"], strict=True)) for row in rows}
    return {
        row["id"]: {f"{column}_{number}": row[column][k] for column in columns for k, number in enumerate(("top1", "top5"))}
        for row in rows
    }


def paper_claims() -> dict[str, list[PaperClaim]]:
    """The paper's claims, by table."""
    return {table: [PaperClaim(**claim) for claim in claims] for table, claims in _content(CLAIMS).items()}


def counts_at_paper_setting(models: Mapping[str, ModelConfig]) -> dict[str, san.Complexity | None]:
    """Parameters and FLOPs of every row for ImageNet at full size; None if the model does not accept this image size."""
    return {row: _count_if_it_fits(model) for row, model in models.items()}


def _count_if_it_fits(model: ModelConfig) -> san.Complexity | None:
    try:
        spec = model.spec()
        spec.check_input(INPUT_SIZE)
        return count(spec, INPUT_SIZE)
    except ModelError:
        return None


@functools.cache
def count(spec: ModelSpec, size: int, classes: int = CLASSES) -> san.Complexity:
    """A model's counts for images of `size` pixels and, by default, the paper's number of classes. Cached, because large grids
    have few models."""
    with torch.device("meta"):
        module = spec.build(classes)
    return san.complexity(module, size)  # outside of the block, in which torch would import its compiler
