"""Markdown tables and ratios that several benchmarks print."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def table(title: str, header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Returns a titled table whose first column is aligned left; floats get one decimal."""
    aligned = ["---", *["---:"] * (len(header) - 1)]
    cells = ([f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in (header, aligned, *rows))
    return "\n".join([f"\n**{title}**\n", *(f"| {' | '.join(row)} |" for row in cells)])


def spread(values: Sequence[float], decimals: int = 1) -> str:
    """Returns median and range."""
    median, low, high = (f"{value:.{decimals}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low}-{high})"


def ratio(numerators: Sequence[float], denominators: Sequence[float], decimals: int = 1) -> str:
    """Returns median and range of the ratios of each repeat."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)], decimals)
