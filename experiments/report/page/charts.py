"""Accuracy over the grid's own number, and over what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from experiments.grids.config import value_at
from experiments.report.chart import Axis, Point, Series, legend, points_chart
from experiments.report.page.content import Answer, left_out, shown_rows
from experiments.report.page.elements import figure, panel, section
from experiments.report.table import Line


def _sides(answer: Answer) -> list[tuple[str, str, str]]:
    """Whose accuracies there are: a heading, and the fields of `Line` with the accuracy and half of its interval."""
    sides = [(f"ours, {answer.profile}", "top1", "top1_half_width"), ("paper, ImageNet", "paper_top1", "")]
    return [side for side in sides if any(getattr(line, side[1]) is not None for line in answer.lines)]


def _points(lines: Iterable[tuple[Line, float, str]], accuracy: str, half: str, words: str = "") -> list[Point]:
    """Of those lines that have that accuracy, at the places and with the labels that come with them."""
    points = []
    for line, x, label in lines:
        value = getattr(line, accuracy)
        if value is None:
            continue
        around = (getattr(line, half) if half else None) or 0.0
        spread = f" ± {around:.1f}" if around else ""
        title = f"{line.id}: {value:.1f}{spread} % at {x:.3g} {words}".strip()
        points.append(Point(x, value, value - around, value + around, label, title))
    return sorted(points, key=lambda point: point.x)


def plot(answer: Answer) -> str:
    """The grid's own picture: accuracy over its number, a line for each of its series."""
    plot, sides = answer.grid.plot, _sides(answer)
    if plot is None or not sides:
        return ""
    places = {t.row: (str(value_at(t.config, plot.series)), value_at(t.config, plot.x)) for t in answer.trials}
    names = list(dict.fromkeys(name for name, _ in places.values()))
    ticks = sorted({x for _, x in places.values()})
    panels = []
    for heading, accuracy, half in sides:
        series = []
        # Intervals at the same number stand a little apart, or they would hide each other.
        has_intervals = half and any(getattr(line, half) for line in answer.lines)
        apart = 0.012 * (ticks[-1] - ticks[0]) if has_intervals else 0.0
        for style, name in enumerate(names):
            aside = apart * (style - (len(names) - 1) / 2)
            mine = [(line, places[line.id][1], "") for line in answer.lines if places[line.id][0] == name]
            points = [replace(point, x=point.x + aside) for point in _points(mine, accuracy, half)]
            series += [Series(name, style, points)] if points else []
        alternative = f"Top-1 accuracy against {plot.label}, {heading}."
        axes = Axis(plot.label, ticks), Axis("top-1, %", most=100.0)
        panels.append(panel(heading, points_chart(alternative, series, *axes)))
    key = legend(((name, style) for style, name in enumerate(names)), lines=True)
    return section(f"Accuracy by {plot.label.split(',')[0]}", figure(panels, key))


def cost(answer: Answer) -> str:
    """The paper's claim as a picture: what accuracy costs in parameters and in FLOPs, by family of models."""
    costs = {"params": "million parameters", "flops": "billion FLOPs"}
    sides, families = _sides(answer), answer.families()
    if not sides or all(line.params is None for line in answer.lines):
        return ""
    labelled = set(shown_rows(answer.lines))
    panels = []
    for field, words in costs.items():
        for heading, accuracy, half in sides:
            series = []
            for style, (name, lines) in enumerate(families.items()):
                labels = {row: short for row, short in short_names([line.id for line in lines]).items() if row in labelled}
                counted = [line for line in lines if line.params is not None]
                mine = [(line, getattr(line, field), labels.get(line.id, "")) for line in counted]
                points = _points(mine, accuracy, half, words)
                series += [Series(name, style, points)] if points else []
            alternative = f"Top-1 accuracy against {words}, {heading}."
            chart = points_chart(alternative, series, Axis(words), Axis("top-1, %", most=100.0))
            panels.append(panel(f"{heading}, by {'parameters' if field == 'params' else 'FLOPs'}", chart))
    key = legend(((name, style) for style, name in enumerate(families)), lines=True)
    note = "Up and to the left is better. Intervals without an end mark are cut off. Hover over a point for details."
    note += left_out(answer.lines, "labels, where there is room")
    return section("Accuracy and cost", figure(panels, key, note))


def short_names(ids: Sequence[str]) -> dict[str, str]:
    """What tells rows of a family apart: their ids without the parts with which all of them begin and end."""
    parts = {row: _parts(row) for row in ids}
    if len(ids) < 2:
        return {row: row for row in ids}
    shortest = min(map(len, parts.values()))
    begin = next((i for i in range(shortest) if len({p[i] for p in parts.values()}) > 1), shortest)
    room = shortest - begin
    end = next((i for i in range(room) if len({p[-1 - i] for p in parts.values()}) > 1), room)
    return {row: "".join(p[begin : len(p) - end]).strip("_-.") or row for row, p in parts.items()}


def _parts(row: str) -> list[str]:
    """Words, numbers and what is between them."""
    parts = [row[:1]]
    for before, letter in pairwise(row):
        if _kind(before) == _kind(letter):
            parts[-1] += letter
        else:
            parts.append(letter)
    return parts


def _kind(letter: str) -> int:
    return 0 if letter.isalpha() else 1 if letter.isdigit() else 2
