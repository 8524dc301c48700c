"""Rows of cells as text: for a terminal, as Markdown and as LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TITLES = {"success": "success", "top1": "top-1", "top5": "top-5"}
"""Of numbers that are percentages."""

LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"},
}
"""What stands for characters that mean something to LaTeX, or that old ones do not have."""


def aligned(rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A heading and rows of cells; the first `words` columns stand on the left, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    sides = [str.ljust if column < words else str.rjust for column in range(len(widths))]
    return "\n".join(
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) for row in ruled
    )


def markdown(rows: Sequence[Sequence[str]], words: int) -> str:
    """A heading and rows of cells as Markdown; the first `words` columns stand on the left, numbers on the right."""
    rule = ["---" if column < words else "---:" for column in range(len(rows[0]))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def percentages(numbers: Mapping[str, float]) -> str:
    """Such as `top-1 97.5 %, top-5 100.0 %`."""
    return ", ".join(f"{TITLES[name]} {value:.1f} %" for name, value in numbers.items())


def latex(rows: Sequence[Sequence[str]]) -> str:
    """A heading and rows of cells as LaTeX, for the package booktabs; the first column stands on the left."""
    lines = [" & ".join("".join(LATEX.get(letter, letter) for letter in cell) for cell in row) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", *body, r"\end{tabular}"])
