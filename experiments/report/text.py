"""Rows of cells as text: for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A heading and rows of cells, the first column on the left, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in ruled)


def markdown(rows: Sequence[Sequence[str]], words: int) -> str:
    """A heading and rows of cells as Markdown; the first `words` columns stand on the left, numbers on the right."""
    rule = ["---" if column < words else "---:" for column in range(len(rows[0]))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))
