"""The paper's printed numbers, and our counts at the paper's setting."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

import san
from experiments.config import ModelConfig
from experiments.errors import UserError
from experiments.grid import Grid

TABLES = Path(__file__).parent / "paper_tables.yaml"
INPUT_SIZE, CLASSES = 224, 1000


@dataclass(frozen=True, slots=True)
class PaperRow:
    """A printed line; None where the paper prints nothing. Percent, millions, 1e9 multiply-accumulates."""

    top1: float | None = None
    top5: float | None = None
    params: float | None = None
    flops: float | None = None


@functools.cache
def _tables() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
    return content


def paper_rows(table: str) -> dict[str, PaperRow]:
    """The rows of one table by id.

    Raises:
        UserError: the paper has no such table.
    """
    if table not in _tables():
        raise UserError(f"table: the paper has no table {table!r}; its tables: {', '.join(_tables())}")
    rows = _tables()[table]["rows"]
    return {row["id"]: PaperRow(**{key: row.get(key) for key in ("top1", "top5", "params", "flops")}) for row in rows}


def counts_at_paper_setting(grid: Grid) -> Mapping[str, san.Complexity]:
    """Parameters and FLOPs of every row for ImageNet at full size, whatever profile was trained. Instant: meta device."""
    return {
        row.id: _counts(ModelConfig.model_validate((grid.base.model if grid.base else {}) | row.model)) for row in grid.rows
    }


def _counts(model: ModelConfig) -> san.Complexity:
    with torch.device("meta"):
        return san.complexity(san.create_model(model.name, CLASSES, **model.overrides), INPUT_SIZE)
