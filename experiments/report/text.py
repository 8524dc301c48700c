"""Rows of cells as text: for a terminal, as Markdown and as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

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


LONG = 30
"""Letters of a cell that is broken into lines in LaTeX."""


def latex(rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A heading and rows of cells as LaTeX, for the package booktabs. The first `words` columns stand on the left, long cells
    of the others are broken into lines."""
    is_long = [max(map(len, column)) > LONG for column in zip(*rows, strict=True)]
    forms = ["l" if place < words else "p{4cm}" if long else "r" for place, long in enumerate(is_long)]
    body = [r"\toprule", *_headings(rows[0]), r"\midrule", *map(_line, rows[1:]), r"\bottomrule"]
    return "\n".join([r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{''.join(forms)}}}", *body, r"\end{tabular}"])


def _headings(headings: Sequence[str]) -> list[str]:
    """What paper and ours are of stands above them where both are there, for the table is too wide for a page otherwise."""
    parts = [name.rpartition(" ")[::2] if name.endswith((" paper", " ours")) else ("", name) for name in headings]
    groups = [(what, len(list(members))) for what, members in groupby(what for what, _ in parts)]
    if not any(what and count > 1 for what, count in groups):
        return [_line(headings)]
    above, rules, first = [], [], 1
    for what, count in groups:
        above += [rf"\multicolumn{{{count}}}{{c}}{{{_in_latex(what)}}}"] if what else [""] * count
        rules += [rf"\cmidrule(lr){{{first}-{first + count - 1}}}"] if what else []
        first += count
    return [" & ".join(above) + r" \\", "".join(rules), _line([own for _, own in parts])]


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(_in_latex, cells)) + r" \\"


def _in_latex(cell: str) -> str:
    """A lone `-` is a dash there, one before a digit a minus; others are hyphens."""
    text = "".join(LATEX.get(letter, letter) for letter in cell)
    return "--" if cell == "-" else re.sub(r"^-(?=\d)", "$-$", text)
