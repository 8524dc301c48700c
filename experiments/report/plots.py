"""The charts of a grid: which points they have, in which style, and matplotlib's drawing of them as PNG, and as SVG that takes
its colors and fonts from the page around it.

Series differ in color, marker and dashes. Points of an SVG show their titles when the mouse is over them.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments.config.config import value_at
from experiments.config.grid import Plot, Trial
from experiments.report import plots
from experiments.report.data import GridReport, TableRow, family, has_small_networks

COLORS = {
    # Name on the page: in light and in dark mode.
    "ground": ("#ffffff", "#14171b"),
    "raised": ("#f6f7f8", "#1c2025"),
    "ink": ("#1b1f24", "#e9ecef"),
    "quiet": ("#59616b", "#a4adb8"),
    "rule": ("#dfe2e6", "#343a42"),
    "link": ("#00619a", "#7cc3f2"),
    "missing": ("#a33f00", "#ff9d5c"),
    # Series, as far apart as their contrast with the ground allows, also for color-blind readers.
    "c0": ("#1070c4", "#5fa3e8"),
    "c1": ("#dc6e1e", "#f07c2e"),
    "c2": ("#0f5f4a", "#2fe0ac"),
    "c3": ("#b4488a", "#d18fb0"),
    "c4": ("#846600", "#ecb92e"),
    "c5": ("#009bcf", "#4280c8"),
    "c6": ("#1b1f24", "#e9ecef"),
}
GROUND, INK, QUIET, RULE = (COLORS[name][0] for name in ("ground", "ink", "quiet", "rule"))
# No two of the three lengths have a common divisor, so styles repeat as late as possible.
SERIES = tuple(light for name, (light, _) in COLORS.items() if re.fullmatch(r"c\d", name))
MARKERS = ("o", "s", "^", "D", "v")
SIZES = (8.4, 7.4, 9.6, 7.4, 9.6)
DASHES = ("-", (0, (7, 4)), (0, (1.5, 4)), (0, (9, 3, 2, 3)))

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 30, 44
"""Margins of an SVG chart in pixels at its own size."""
LETTER, LINE = 8.4, 15.0
"""Width and height of a label's letter where the page shows it largest, on a telephone."""
SETTINGS: Any = {"svg.fonttype": "none", "lines.scale_dashes": False, "axes.axisbelow": True}


@dataclass(frozen=True, slots=True)
class Point:
    """A point with its interval from `low` to `high`, a short label beside it and a title for the mouse."""

    x: float
    y: float
    low: float
    high: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one style that are joined by a line."""

    name: str
    style: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Chart:
    """One or more series over common axes."""

    heading: str
    description: str
    """First sentence of the text alternative."""
    series: Sequence[Series]
    x_label: str
    y_label: str
    ticks: Sequence[float] = ()
    """Of the horizontal axis; round numbers by default."""
    most: float = math.inf
    """Values cannot exceed this number."""
    is_curve: bool = False
    """Draws bands instead of intervals, and only a few markers."""

    @property
    def styles(self) -> dict[str, int]:
        return {one.name: one.style for one in self.series}

    @property
    def alternative(self) -> str:
        """The chart in words: all points of short series, the first and last of long ones."""
        sentences = [self.description]
        for one in self.series:
            points = one.points if len(one.points) <= 12 else (one.points[0], one.points[-1])
            sentences.append(f"{one.name}: {'; '.join(point.title for point in points)}.")
        return " ".join(sentences)


def svg(chart: Chart) -> str:
    """The chart as an SVG element for the page."""
    whole, (axes,) = _panels(1, WIDTH, HEIGHT)
    axes.set_position((LEFT / WIDTH, BOTTOM / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - TOP - BOTTOM) / HEIGHT))
    titles = _draw(axes, chart)
    axes.xaxis.labelpad = 9
    whole.text(6 / WIDTH, 1 - 13 / HEIGHT, chart.y_label, color=QUIET)
    _draw_labels(axes, chart)
    return as_element(whole, f'class="chart" role="img" aria-label="{escape(chart.alternative)}"', titles)


def icon(style: int, salt: str) -> str:
    """The line and the marker of a style for a legend. Icons on one page need different salts."""
    whole, (axes,) = _panels(1, 28, 16)
    axes.set_position((0, 0, 1, 1))
    axes.set(xlim=(0, 28), ylim=(0, 16))
    axes.axis("off")
    color, _, dashes = _style(style)
    axes.plot([0, 28], [8, 8], color=color, ls=dashes, lw=2)
    _mark(axes, 14, 8, style)
    return as_element(whole, 'aria-hidden="true"', salt=salt)


def save(charts: Sequence[Chart], title: str, path: Path) -> None:
    """Writes charts beside each other as PNG."""
    whole, axes = _panels(len(charts), 360 * len(charts), 302, layout="constrained")
    for axis, chart in zip(axes, charts, strict=True):
        _draw(axis, chart)
        axis.set_title(chart.heading, fontsize="medium")
        axis.set_ylabel(chart.y_label)
    styles = {name: style for chart in charts for name, style in chart.styles.items()}
    for name, (color, marker, dashes) in {name: _style(style) for name, style in styles.items()}.items():
        axes[-1].plot([], [], color=color, marker=marker, ls=dashes, label=name)
    axes[-1].legend(frameon=False)
    whole.suptitle(textwrap.fill(title, 42 * len(charts)))
    whole.savefig(path, dpi=130)


def save_rows(charts: Sequence[Chart], title: str, path: Path) -> None:
    """Writes charts beside each other as PNG whose points are one below the other, with their labels on the left."""
    labels = list(dict.fromkeys(point.label for chart in charts for one in chart.series for point in one.points))
    width = 5.8 * max(map(len, labels)) + 302 * len(charts)
    whole, axes = _panels(len(charts), width, 108 + 23 * len(labels), sharey=True, layout="constrained")
    for axis, chart in zip(axes, charts, strict=True):
        for one in chart.series:
            color, marker, _ = _style(one.style)
            for point in one.points:
                error = point.high - point.y or math.nan
                axis.errorbar(
                    point.y, labels.index(point.label), xerr=error, color=color, marker=marker, ms=7, capsize=4, elinewidth=1.8
                )
        axis.set_title(chart.heading, fontsize="medium")
        axis.set_xlabel(chart.y_label)
        axis.margins(x=0.12)
        axis.grid(color=RULE)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(labels) - 0.5, -0.5)  # the first row is on top
    whole.suptitle(textwrap.fill(title, int(width / 8.5)))
    whole.savefig(path, dpi=130)


def figure(width: float, height: float, **layout: Any) -> Any:
    """An empty figure of that size in points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(SETTINGS)
    return Figure(figsize=(width / 72, height / 72), dpi=72, **layout)


def _panels(number: int, width: float, height: float, sharey: bool = False, **layout: Any) -> tuple[Any, Any]:
    """A figure and that many axes beside each other."""
    whole = figure(width, height, **layout)
    axes = whole.subplots(1, number, sharey=sharey, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "left", "right"]].set_visible(False)
        axis.spines["bottom"].set_color(QUIET)
        axis.tick_params(length=0, pad=7, colors=QUIET)
        axis.xaxis.label.set_color(QUIET)
        axis.yaxis.label.set_color(QUIET)
    return whole, axes


def _style(style: int) -> tuple[str, str, Any]:
    return SERIES[style % len(SERIES)], MARKERS[style % len(MARKERS)], DASHES[style % len(DASHES)]


def _draw(axes: Any, chart: Chart) -> dict[str, str]:
    """Draws everything but the labels; returns the titles of the markers by their ids."""
    from matplotlib.ticker import MaxNLocator

    points = [point for one in chart.series for point in one.points]
    x_limits, y_limits = _limits([point.x for point in points] + list(chart.ticks)), _y_limits(chart, points)
    axes.set(xlim=x_limits, ylim=y_limits, xlabel=chart.x_label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=chart.is_curve and axis is axes.xaxis))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    if chart.ticks:
        axes.set_xticks(chart.ticks)
    axes.grid(axis="y", color=RULE)
    titles: dict[str, str] = {}
    for number, one in enumerate(chart.series):
        color, _, dashes = _style(one.style)
        xs, ys = [point.x for point in one.points], [point.y for point in one.points]
        if chart.is_curve:
            axes.fill_between(xs, [p.low for p in one.points], [p.high for p in one.points], color=color, alpha=0.16, lw=0)
        axes.plot(xs, ys, color=color, ls=dashes, lw=2 if chart.is_curve else 1.4, gid="line")
        marked = one.points
        if chart.is_curve:  # one in each third, at a different place for each series
            parts = [(third + (number + 1) / (len(chart.series) + 1)) / 3 for third in range(3)]
            marked = [one.points[int(part * len(one.points))] for part in parts]
        for point in marked:
            if not chart.is_curve and point.low < point.high:
                _draw_interval(axes, point, y_limits, color)
            gid = f"mark{len(titles)}"
            titles[gid] = f"{one.name}, {point.title}" if chart.is_curve else point.title
            _mark(axes, point.x, point.y, one.style, gid)
    return titles


def _mark(axes: Any, x: float, y: float, style: int, gid: str = "") -> None:
    color, marker, _ = _style(style)
    size = SIZES[style % len(SIZES)]
    axes.plot([x], [y], marker, color=color, mec=GROUND, mew=1.2, ms=size, gid=gid, clip_on=False, zorder=3)


def _draw_interval(axes: Any, point: Point, y_limits: tuple[float, float], color: str) -> None:
    """Draws a point's interval; an end outside the chart is cut off and has no cap."""
    low, high = y_limits
    axes.plot([point.x] * 2, [max(point.low, low), min(point.high, high)], color=color, lw=1.4, gid="line")
    caps = [end for end in (point.low, point.high) if low <= end <= high]
    axes.plot([point.x] * len(caps), caps, "_", color=color, ms=8, mew=1.4, clip_on=False)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) / 20 or 1.0
    return low - room, high + room


def _y_limits(chart: Chart, points: Sequence[Point]) -> tuple[float, float]:
    """Leaves room for the intervals, but cuts off very wide ones so that the points stay apart."""
    ys = [point.y for point in points]
    room = 0.6 * (max(ys) - min(ys)) or math.inf
    ys += [max(point.low, min(ys) - room) for point in points] + [min(point.high, max(ys) + room) for point in points]
    low, high = _limits(ys)
    return low, min(high, chart.most)


def _draw_labels(axes: Any, chart: Chart) -> None:
    """Labels the points, except where a label would cover that of another point; the mouse shows those."""
    taken: list[tuple[float, float, float]] = []
    for point in (point for one in chart.series for point in one.points if point.label):
        x, y = axes.transData.transform((point.x, point.y))
        width = LETTER * len(point.label)
        is_left = x + width > WIDTH
        left = x - width if is_left else x
        if any(left < right and start < left + width and abs(y - height) < LINE for start, right, height in taken):
            continue
        taken.append((left, left + width, y))
        where = {"xytext": (-6 if is_left else 6, 6), "textcoords": "offset points", "ha": "right" if is_left else "left"}
        axes.annotate(point.label, (point.x, point.y), color=INK, gid="label", **where)


def as_element(drawn: Any, attributes: str, titles: Mapping[str, str] = MappingProxyType({}), salt: str = "") -> str:
    """Converts a figure to an SVG element that uses the page's font and CSS variables."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt + attributes}):  # ids that are repeatable and unique on a page
        drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    view = re.search(r'viewBox=".*?"', text)
    assert view is not None
    text = text[text.index("</metadata>") + 11 :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-size.*?text-anchor", "text-anchor", text)
    text = re.sub(r' transform="rotate\(-0 .*?\)"', "", text)
    text = re.sub(r"<(?!image)[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"\s+", " ", text).replace("> <", "><")
    for gid, title in titles.items():
        text = text.replace(f'<g id="{gid}">', f'<g class="mark"><title>{escape(title)}</title>')
    text = re.sub(r' id="(line|label)"', r' class="\1"', text)
    text = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", text)
    for name, (light, _) in COLORS.items():
        text = text.replace(light, f"var(--{name})")
    return f"<svg {attributes} {view[0]}>{text}"


CURVES = {"val/top1": ("validation top-1, %", 100.0), "train/loss": ("training loss", math.inf)}
"""Metrics with curves, the label of their axis and the largest possible value."""
MOST_CURVES = 10
"""In one chart."""
ACCURACY = "top-1, %"

Side = tuple[str, str, str]
"""A heading, and the fields of `TableRow` with the accuracy and with half of its interval."""


def _sides(rows: Sequence[TableRow], profile: str) -> list[Side]:
    """Ours and the paper's, if there are any accuracies."""
    sides = [(f"ours, {profile}", "top1", "top1_half_width"), ("paper, ImageNet", "paper_top1", "")]
    return [side for side in sides if any(getattr(row, side[1]) is not None for row in rows)]


def _points(rows: Iterable[tuple[TableRow, float, str]], side: Side, words: str = "") -> list[Point]:
    """Points for the rows with an accuracy, at the given places and with the given labels."""
    _, accuracy, half = side
    points = []
    for row, x, label in rows:
        value = getattr(row, accuracy)
        if value is not None:
            around = (getattr(row, half) if half else None) or 0.0
            title = f"{row.id}: {value:.1f}{_plus_minus(around)} % at {x:.3g} {words}".strip()
            points.append(Point(x, value, value - around, value + around, label, title))
    return sorted(points, key=lambda point: point.x)


def _plus_minus(around: float) -> str:
    return f" ± {around:.1f}" if around else ""


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
            by_x = {row.id: coordinates[row.id][1] for row in rows if coordinates[row.id][0] == name}
            points = _points(((row, by_x[row.id], "") for row in rows if row.id in by_x), side)
            offset = shift * (style - (len(names) - 1) / 2)
            moved = [Point(p.x + offset, p.y, p.low, p.high, p.label, p.title) for p in points]
            series += [Series(name, style, moved)] if moved else []
        description = f"Top-1 accuracy against {plot.label}, {side[0]}."
        charts.append(Chart(side[0], description, series, plot.label, ACCURACY, ticks, most=100.0))
    return charts


def cost_charts(report: GridReport) -> list[Chart]:
    """Accuracy over parameters and over FLOPs, by family of models."""
    charts = []
    labels = _labels(report)
    flops = ("flops_millions", "million FLOPs") if has_small_networks(report.rows) else ("flops", "billion FLOPs")
    for field, words in (("params", "million parameters"), flops):
        for side in _sides(report.rows, report.grid_run.profile):
            series = []
            for style, (name, rows) in enumerate(report.families.items()):
                counted = [(row, getattr(row, field), labels[row.id]) for row in rows if row.params is not None]
                points = _points(counted, side, words)
                series += [Series(name, style, points)] if points else []
            heading = f"{side[0]}, by {'parameters' if field == 'params' else 'FLOPs'}"
            charts.append(Chart(heading, f"Top-1 accuracy against {words}, {side[0]}.", series, words, ACCURACY, most=100.0))
    return _charts_with_points(charts)


def curve_charts(report: GridReport) -> list[list[Chart]]:
    """Metrics over epochs: a chart for each metric with the `MOST_CURVES` best rows, then the same for the next best rows, and
    so on."""
    in_order = {row.id: number for number, row in enumerate(report.rows)}
    best = [row.id for row in sorted(report.rows, key=lambda row: -(row.top1 or 0.0)) if row.id in report.shown_rows]
    groups = []
    for first in range(0, len(best), MOST_CURVES):
        rows = sorted(best[first : first + MOST_CURVES], key=in_order.__getitem__)
        charts = []
        for metric, (words, most) in CURVES.items():
            curves = [(style, row, _curve(report, row, metric)) for style, row in enumerate(rows)]
            series = [Series(row, style, points) for style, row, points in curves if points]
            heading, description = words.split(",")[0], f"{words.capitalize()} by epoch."
            charts.append(Chart(heading, description, series, "epoch", words, most=most, is_curve=True))
        groups.append(_charts_with_points(charts))
    return [charts for charts in groups if charts]


def _curve(report: GridReport, row: str, metric: str) -> list[Point]:
    """Mean, minimum and maximum over the seeds of a row, for the epochs that all of them have."""
    seeds = [dict(report.curves.get(trial.key, {}).get(metric, ())) for trial in report.grid_run.trials if trial.row == row]
    seeds = [values for values in seeds if values]
    points = []
    for epoch in sorted(set.intersection(*map(set, seeds))) if seeds else ():
        values = [seed[epoch] for seed in seeds]
        mean = statistics.fmean(values)
        points.append(Point(epoch, mean, min(values), max(values), "", f"epoch {epoch}: {mean:.3g}"))
    return points


def _labels(report: GridReport) -> Mapping[str, str]:
    """A short label for each row, empty for rows that are not shown."""
    shown = set(report.shown_rows)
    labels: dict[str, str] = {}
    for rows in report.families.values():
        labels |= {row: label if row in shown else "" for row, label in short_names([row.id for row in rows]).items()}
    return labels


def short_names(ids: Sequence[str]) -> dict[str, str]:
    """The ids without the words and numbers that all of them have at the beginning and at the end."""
    if len(ids) < 2:
        return {row: row for row in ids}
    parts = [re.findall(r"[^\W\d_]+|\d+|[\W_]+", row) for row in ids]
    start = _common(parts)
    end = _common([part[start:][::-1] for part in parts])
    return {row: "".join(part[start : len(part) - end]).strip("_-.") or row for row, part in zip(ids, parts, strict=True)}


def _common(parts: Sequence[Sequence[str]]) -> int:
    """The number of equal parts at the beginning."""
    return len(list(takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))))


def save_plot(plot: Plot | None, trials: Sequence[Trial], rows: Sequence[TableRow], title: str, path: Path) -> None:
    """Writes top-1 with its 95 % interval as PNG: ours on the left, the paper's on the right if it has any. With a plot, it is
    drawn over the plot's number; otherwise each row of the table is a row of the picture. At least one row must have an
    our accuracy."""
    has_intervals = any(row.top1_half_width is not None for row in rows)

    def heading(side: str) -> str:
        return f"{side}: mean and 95 % interval" if has_intervals and side.startswith("ours") else side

    if plot is not None:
        charts = plot_charts(plot, trials, rows)
        plots.save([replace(chart, heading=heading(chart.heading)) for chart in charts], title, path)
        return
    families = {trial.row: family(trial) for trial in trials}
    names = list(dict.fromkeys(families[row.id] for row in rows))
    charts = []
    for side in _sides(rows, trials[0].profile):
        by_row = [(names.index(families[row.id]), _points([(row, 0.0, row.id)], side)) for row in rows]
        series = [Series(names[style], style, points) for style, points in by_row if points]
        charts.append(Chart(heading(side[0]), "", series, "", ACCURACY))
    plots.save_rows(charts, title, path)
