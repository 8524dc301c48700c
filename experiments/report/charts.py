"""The charts of a grid: which points they have, and in which style."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from experiments.grids.config import value_at
from experiments.grids.grid import Plot, Trial
from experiments.report import plots
from experiments.report.data import GridReport, TableRow, family, has_small_networks
from experiments.report.plots import Chart, Point, Series

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
