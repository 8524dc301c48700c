"""The charts of a grid: which points they have, and matplotlib's drawing of them as PNG and as SVG.

Series differ in color, marker and dashes.
"""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config.config import value_at
from experiments.config.grid import Plot, Trial
from experiments.report.data import GridReport, TableRow, family, has_small_networks

GROUND, INK, QUIET, RULE = "#ffffff", "#1b1f24", "#59616b", "#dfe2e6"
# Colors are as far apart as their contrast with white allows, also for color-blind readers. No two of the three lengths have a
# common divisor, so styles repeat as late as possible.
COLORS = ("#1070c4", "#dc6e1e", "#0f5f4a", "#b4488a", "#846600", "#009bcf", "#1b1f24")
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", "--", ":", "-.")
WIDTH, HEIGHT = 4.8, 3.4
"""Inches of a chart without its legend."""
LETTERS = 8
"""Points of a legend's letters."""

CURVES = {"val/top1": ("validation top-1, %", 100.0), "train/loss": ("training loss", math.inf)}
"""Metrics with curves, the label of their axis and the largest possible value."""
MOST_SERIES = 10
"""A chart can show more series, but they would be hard to tell apart."""
TOP1_LABEL = "top-1, %"

Side = tuple[str, str, str]
"""A heading, and the fields of `TableRow` with the accuracy and with half of its interval."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point with its interval from `low` to `high`."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one style."""

    name: str
    style: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Chart:
    """One or more series over common axes."""

    heading: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    ticks: Sequence[float] = ()
    """Of the horizontal axis; round numbers by default."""
    most: float = math.inf
    """Values cannot exceed this number."""
    is_joined: bool = True
    """Draws a line through the points of each series."""
    is_curve: bool = False
    """Draws bands instead of intervals, and only a few markers."""


def svg(chart: Chart) -> str:
    """The chart as an SVG file, the same for equal charts."""
    out = io.StringIO()
    with _matplotlib_settings():
        _figure([chart]).savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _matplotlib_settings() -> AbstractContextManager[None]:
    """Names and questions are text: a dollar in them does not begin a formula."""
    import matplotlib

    return matplotlib.rc_context({"svg.hashsalt": "san", "text.parse_math": False})


def save(charts: Sequence[Chart], title: str, path: Path) -> None:
    """Writes charts beside each other as PNG."""
    whole = _figure(charts)
    whole.suptitle(textwrap.fill(title, 42 * len(charts)))
    whole.savefig(path, dpi=130)


def _figure(charts: Sequence[Chart]) -> Any:
    """Draws charts beside each other, with one legend below them."""
    from matplotlib.textpath import TextPath

    names = {one.name: textwrap.fill(one.name, 50) for chart in charts for one in chart.series}
    width, texts = WIDTH * len(charts), [line for name in names.values() for line in name.split("\n")]
    longest = max(TextPath((0, 0), text, LETTERS).get_extents().width for text in texts)
    columns = max(1, min(len(names), int(72 * width / (longest + 50))))  # with 50 points for the line and the gaps
    lines = math.ceil(sum(1 + name.count("\n") for name in names.values()) / columns)
    whole, all_axes = _panels(len(charts), width, HEIGHT + 0.2 * lines)
    handles: dict[str, Any] = {}
    for axes, chart in zip(all_axes, charts, strict=True):
        handles |= _draw(axes, chart)
    where = {"loc": "outside lower center", "ncols": columns, "fontsize": LETTERS, "handlelength": 3, "frameon": False}
    whole.legend(list(handles.values()), [names[name] for name in handles], **where)
    return whole


def _panels(number: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure of that size in inches, and that many axes beside each other."""
    from matplotlib.figure import Figure  # takes half a second

    whole = Figure(figsize=(width, height), layout="constrained")
    all_axes = whole.subplots(1, number, squeeze=False, **options)[0]
    for axes in all_axes:
        axes.spines[["top", "left", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(QUIET)
        axes.tick_params(length=0, pad=7, colors=QUIET)
        axes.xaxis.label.set_color(QUIET)
        axes.yaxis.label.set_color(QUIET)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=RULE)
    return whole, all_axes


def _style(style: int) -> dict[str, Any]:
    """The color, the marker and the dashes of a series."""
    color, marker, dashes = (values[style % len(values)] for values in (COLORS, MARKERS, DASHES))
    return {"color": color, "marker": marker, "ls": dashes, "ms": 7, "mec": GROUND, "mew": 0.8}


def _draw(axes: Any, chart: Chart) -> dict[str, Any]:
    """Draws a chart; returns the handles for its legend by name."""
    axes.set_title(textwrap.fill(chart.heading, 46), fontsize="medium")
    axes.set(xlabel=textwrap.fill(chart.x_label, 56), ylabel=chart.y_label)
    axes.margins(x=0.06)
    axes.ticklabel_format(useOffset=False)
    axes.xaxis.get_major_locator().set_params(nbins=6, integer=chart.is_curve)
    if chart.ticks:
        axes.set_xticks(chart.ticks, [f"{tick:g}" for tick in chart.ticks])
    handles: dict[str, Any] = {}
    for number, one in enumerate(chart.series):
        style = _style(one.style)
        xs, ys = [p.x for p in one.points], [p.y for p in one.points]
        if chart.is_curve:
            lows, highs = [p.low for p in one.points], [p.high for p in one.points]
            axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.16, lw=0)
            # About four markers, at different places for each series.
            step = max(1, len(xs) // 4)
            (handles[one.name],) = axes.plot(xs, ys, markevery=(number % step, step), **style)
        else:
            # Nan: no interval, which would otherwise be drawn as one of length zero.
            errors = [[p.y - p.low or math.nan for p in one.points], [p.high - p.y or math.nan for p in one.points]]
            style |= {} if chart.is_joined else {"ls": "none"}
            handles[one.name] = axes.errorbar(xs, ys, errors, capsize=4, **style).lines[0]
    axes.set_ylim(_y_limits(chart))
    return handles


def _y_limits(chart: Chart) -> tuple[float, float]:
    """Leaves room for the intervals, but cuts off very wide ones so that the points stay apart."""
    points = [point for one in chart.series for point in one.points]
    ys = [point.y for point in points]
    room = 0.6 * (max(ys) - min(ys)) or math.inf
    low = max(min(point.low for point in points), min(ys) - room)
    high = min(max(point.high for point in points), max(ys) + room)
    margin = 0.06 * (high - low) or abs(high) / 20 or 1.0
    return low - margin, min(high + margin, chart.most)


def _sides(rows: Sequence[TableRow], profile: str) -> list[Side]:
    """Ours and the paper's, if there are any accuracies."""
    has_intervals = any(row.top1_half_width is not None for row in rows)
    ours = f"ours, {profile}: mean and 95 % interval" if has_intervals else f"ours, {profile}"
    sides = [(ours, "top1", "top1_half_width"), ("paper, ImageNet", "paper_top1", "")]
    return [side for side in sides if any(getattr(row, side[1]) is not None for row in rows)]


def _points(rows: Iterable[tuple[float, TableRow]], side: Side) -> list[Point]:
    """Points for the rows with an accuracy, at the given places."""
    _, accuracy, half = side
    points = []
    for x, row in rows:
        value = getattr(row, accuracy)
        if value is not None:
            around = (getattr(row, half) if half else None) or 0.0
            points.append(Point(x, value, value - around, value + around))
    return sorted(points, key=lambda point: point.x)


def _charts_with_points(charts: Iterable[Chart]) -> list[Chart]:
    return [chart for chart in charts if chart.series]


def plot_charts(plot: Plot, trials: Sequence[Trial], rows: Sequence[TableRow]) -> list[Chart]:
    """Accuracy over the grid's own number, with a line for each of its series: ours and the paper's."""
    coordinates = {t.row: (str(value_at(t.config, plot.series)), float(value_at(t.config, plot.x))) for t in trials}
    names = list(dict.fromkeys(name for name, _ in coordinates.values()))
    ticks = sorted({x for _, x in coordinates.values()})
    # Intervals at the same number are shifted, because they would hide each other.
    has_intervals = any(row.top1_half_width for row in rows)
    charts = []
    for side in _sides(rows, trials[0].profile):
        shift = 0.012 * (ticks[-1] - ticks[0]) if has_intervals and side[2] else 0.0
        series = []
        for style, name in enumerate(names):
            offset = shift * (style - (len(names) - 1) / 2)
            of_name = [(coordinates[row.id][1] + offset, row) for row in rows if coordinates[row.id][0] == name]
            series += [Series(name, style, points)] if (points := _points(of_name, side)) else []
        charts.append(Chart(side[0], series, plot.label, TOP1_LABEL, ticks, most=100.0))
    return charts


def cost_charts(report: GridReport) -> list[Chart]:
    """Accuracy over parameters and over FLOPs. Few rows have a style each; many share one with the rows of their family."""
    is_small = len(report.rows) <= MOST_SERIES
    groups = {row.id: [row] for row in report.rows} if is_small else report.families
    flops = ("flops_millions", "million FLOPs") if has_small_networks(report.rows) else ("flops", "billion FLOPs")
    charts = []
    for field, words in (("params", "million parameters"), flops):
        for side in _sides(report.rows, report.grid_run.profile):
            series = []
            for style, (name, rows) in enumerate(groups.items()):
                points = _points([(getattr(row, field), row) for row in rows if row.params is not None], side)
                series += [Series(name, style, points)] if points else []
            charts.append(Chart(side[0], series, words, TOP1_LABEL, most=100.0, is_joined=False))
    return _charts_with_points(charts)


def curve_charts(report: GridReport) -> list[list[Chart]]:
    """Metrics over epochs: a chart for each metric with the `MOST_SERIES` best rows, then the same for the next best rows, and
    so on."""
    in_order = {row.id: number for number, row in enumerate(report.rows)}
    best = [row.id for row in sorted(report.rows, key=lambda row: -(row.top1 or 0.0)) if row.id in report.shown_rows]
    groups = []
    for first in range(0, len(best), MOST_SERIES):
        rows = sorted(best[first : first + MOST_SERIES], key=in_order.__getitem__)
        charts = []
        for metric, (words, most) in CURVES.items():
            curves = [(style, row, _curve(report, row, metric)) for style, row in enumerate(rows)]
            series = [Series(row, style, points) for style, row, points in curves if points]
            charts.append(Chart(words.split(",")[0], series, "epoch", words, most=most, is_curve=True))
        groups.append(_charts_with_points(charts))
    return [charts for charts in groups if charts]


def _curve(report: GridReport, row: str, metric: str) -> list[Point]:
    """Mean, minimum and maximum over the seeds of a row, for the epochs that all of them have."""
    seeds = [dict(report.curves.get(trial.key, {}).get(metric, ())) for trial in report.grid_run.trials if trial.row == row]
    seeds = [values for values in seeds if values]
    points = []
    for epoch in sorted(set.intersection(*map(set, seeds))) if seeds else ():
        values = [seed[epoch] for seed in seeds]
        points.append(Point(epoch, statistics.fmean(values), min(values), max(values)))
    return points


def save_plot(plot: Plot | None, trials: Sequence[Trial], rows: Sequence[TableRow], title: str, path: Path) -> None:
    """Writes top-1 with its 95 % interval as PNG: ours on the left, the paper's on the right if it has any. With a plot, it is
    drawn over the plot's number; otherwise each row of the table is a row of the picture. At least one row must have an
    accuracy of ours."""
    with _matplotlib_settings():
        if plot is not None:
            save(plot_charts(plot, trials, rows), title, path)
        else:
            _save_rows(trials, rows, title, path)


def _save_rows(trials: Sequence[Trial], rows: Sequence[TableRow], title: str, path: Path) -> None:
    """Writes the accuracies one below the other, with the names of the rows on the left."""
    families = {trial.row: family(trial) for trial in trials}
    styles = {name: style for style, name in enumerate(dict.fromkeys(families[row.id] for row in rows))}
    sides = _sides(rows, trials[0].profile)
    shown = [row for row in rows if any(getattr(row, accuracy) is not None for _, accuracy, _ in sides)]
    width = 0.08 * max(len(row.id) for row in shown) + 4.2 * len(sides)
    whole, all_axes = _panels(len(sides), width, 1.5 + 0.32 * len(shown), sharey=True)
    for axes, side in zip(all_axes, sides, strict=True):
        for number, row in enumerate(shown):
            for point in _points([(number, row)], side):
                error = point.high - point.y or math.nan
                axes.errorbar(point.y, number, xerr=error, capsize=4, **_style(styles[families[row.id]]))
        axes.set_title(side[0], fontsize="medium")
        axes.set_xlabel(TOP1_LABEL)
        axes.margins(x=0.12)
        axes.grid(color=RULE)
    all_axes[0].set_yticks(range(len(shown)), [row.id for row in shown])
    all_axes[0].set_ylim(len(shown) - 0.5, -0.5)  # the first row is on top
    whole.suptitle(textwrap.fill(title, int(9 * width)))
    whole.savefig(path, dpi=130)
