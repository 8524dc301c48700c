"""Pictures of a grid."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.grids.config import value_at
from experiments.grids.grid import Plot, Trial
from experiments.report.table import Line

# Okabe and Ito's palette: told apart with any colour vision; markers and dashes differ too. No two of the three lengths have
# a common divisor, so that a style comes back as late as it can.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", "--", "-.", ":")

Style = tuple[str, str, str]
"""Colour, marker, dashes."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One side of a picture: its heading, and the fields of `Line` with the accuracy and half of its interval."""

    heading: str
    accuracy: str
    half_width: str | None = None

    def numbers(self, line: Line) -> list[tuple[float, float]]:
        """The accuracy and half of its interval (NaN where it is not known); empty where there is no accuracy."""
        value = getattr(line, self.accuracy)
        half_width = getattr(line, self.half_width) if self.half_width else None
        return [] if value is None else [(value, math.nan if half_width is None else half_width)]


def draw(plot: Plot | None, trials: Sequence[Trial], table: Sequence[Line], title: str, path: Path) -> None:
    """Top-1 and its 95 % interval as PNG: ours on the left, the paper's on the right where it has any.

    With a plot: over its number, one line per series. Without: one row of the picture per line of the table. At least one
    line must have an accuracy of ours.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = _panels(trials[0].profile, table)
    width, height = (5 * len(panels), 4.2) if plot else _size_of_rows(table, len(panels))
    figure = plt.figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=plot is None, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        if plot:
            _draw_series(axis, plot, trials, table, panel)
        else:
            _draw_rows(axis, trials, table, panel)
        axis.set_title(panel.heading, fontsize="medium")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if plot:
        axes[-1].legend(frameon=False)
    figure.suptitle(textwrap.fill(title, int(8.5 * width)))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def family(trial: Trial) -> str:
    """What models that differ in depth alone have in common, such as `san pairwise`."""
    return re.sub(r"\d+", "", trial.config.model.name).replace("_", " ")


def _panels(profile: str, table: Sequence[Line]) -> list[Panel]:
    panels = [Panel(f"ours, {profile}", "top1")]
    if any(line.top1_half_width is not None for line in table):
        panels = [Panel(f"ours, {profile}: mean and 95 % interval", "top1", "top1_half_width")]
    if any(line.paper_top1 is not None for line in table):
        panels.append(Panel("paper, ImageNet", "paper_top1"))
    return panels


def _draw_series(axis: Any, plot: Plot, trials: Sequence[Trial], table: Sequence[Line], panel: Panel) -> None:
    places = {t.row: (str(value_at(t.config, plot.series)), value_at(t.config, plot.x)) for t in trials}
    ticks = sorted({x for _, x in places.values()})
    series: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for line in table:
        name, x = places[line.id]
        series[name] += [(x, value, half_width) for value, half_width in panel.numbers(line)]
    # Intervals at the same number stand a little apart, or they would hide each other.
    apart = 0.01 * (ticks[-1] - ticks[0]) if panel.half_width else 0.0
    for place, (name, (colour, marker, dashes)) in enumerate(_styles(series).items()):
        points = [(x + apart * (place - (len(series) - 1) / 2), *rest) for x, *rest in sorted(series[name])]
        if points:
            xs, values, half_widths = zip(*points, strict=True)
            bars = half_widths if panel.half_width else None
            axis.errorbar(xs, values, bars, color=colour, marker=marker, ls=dashes, capsize=3, elinewidth=1, label=name)
    axis.set(xlabel=plot.label, ylabel="top-1 accuracy, %", xticks=ticks)


def _draw_rows(axis: Any, trials: Sequence[Trial], table: Sequence[Line], panel: Panel) -> None:
    """Models of one family share a style, whatever their depths; the rows' ids stand on the left."""
    families = {trial.row: family(trial) for trial in trials}
    styles = _styles(families[line.id] for line in table)
    for place, line in enumerate(table):
        colour, marker, _ = styles[families[line.id]]
        for value, half_width in panel.numbers(line):
            axis.errorbar(value, place, xerr=half_width, color=colour, marker=marker, ms=7, capsize=4, elinewidth=1.8)
    axis.set_yticks(range(len(table)), [line.id for line in table])
    axis.set_ylim(len(table) - 0.5, -0.5)  # the table's first row on top
    axis.margins(x=0.12)
    axis.set_xlabel("top-1 accuracy, %")
    axis.tick_params(axis="y", length=0)


def _size_of_rows(table: Sequence[Line], panels: int) -> tuple[float, float]:
    """Width and height in inches: room for the longest id, and the same for every row."""
    return 0.08 * max(len(line.id) for line in table) + 4.2 * panels, 1.5 + 0.32 * len(table)


def _styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name, in the order in which they come."""
    styles = zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), itertools.cycle(DASHES), strict=False)
    return dict(zip(dict.fromkeys(names), styles, strict=False))
