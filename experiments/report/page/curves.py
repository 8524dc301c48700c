"""Training over epochs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from experiments.report.chart import COLOURS, Axis, Point, Series, curves_chart, legend, round_ticks
from experiments.report.page.content import Answer, left_out, shown_rows
from experiments.report.page.elements import figure, panel, section

CURVES = {"val/top1": ("validation top-1, %", 100.0), "train/loss": ("training loss", float("inf"))}
"""Metrics that are shown over epochs, with the words of their axis and what they cannot exceed."""


def curves(answer: Answer) -> str:
    """A panel for each metric and family; large families have several, for a colour should not come back."""
    charts = []
    kept = set(shown_rows(answer.lines))
    for metric, (words, most) in CURVES.items():
        panels = []
        for name, lines in answer.families().items():
            rows = [line.id for line in lines if line.id in kept]
            for first in range(0, len(rows), COLOURS):
                series = []
                for style, row in enumerate(rows[first : first + COLOURS]):
                    points = _curve(answer, row, metric)
                    series += [Series(row, style, points)] if points else []
                if series:
                    axes = _epochs(series), Axis(words, most=most)
                    chart = curves_chart(f"{words.capitalize()} by epoch, {name}.", series, *axes)
                    key = legend([(one.name, one.style) for one in series], lines=True)
                    panels.append(panel(f"{name}, {words.split(',')[0]}", chart + key))
        if panels:
            charts.append(figure(panels, ""))
    if not charts:
        return ""
    seeds = len({trial.seed for trial in answer.trials}) > 1
    note = "Lines show the mean over seeds, bands the range from lowest to highest." if seeds else ""
    note += left_out(answer.lines, "curves")
    return section("Training curves", *charts, f'<p class="note">{escape(note.strip())}</p>' if note else "")


def _epochs(series: Sequence[Series]) -> Axis:
    """There are no halves of epochs."""
    epochs = [point.x for one in series for point in one.points]
    ticks = round_ticks(min(epochs), max(epochs)) if min(epochs) < max(epochs) else epochs[:1]
    return Axis("epoch", [tick for tick in ticks if float(tick).is_integer()])


def _curve(answer: Answer, row: str, metric: str) -> list[Point]:
    """A row's metric over the epochs that all of its seeds have begun with: mean, least and largest."""
    seeds = [dict(answer.curves.get(trial.key, {}).get(metric, ())) for trial in answer.trials if trial.row == row]
    seeds = [values for values in seeds if values]
    points = []
    for epoch in sorted(set.intersection(*map(set, seeds))) if seeds else ():
        values = [seed[epoch] for seed in seeds]
        mean = statistics.fmean(values)
        points.append(Point(epoch, mean, min(values), max(values), "", f"epoch {epoch}: {mean:.3g}"))
    return points
