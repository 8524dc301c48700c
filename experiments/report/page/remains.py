"""What is left of accuracy under each condition of a protocol, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.report.chart import Axis, Point, Series, legend, points_chart
from experiments.report.page.charts import short_names
from experiments.report.page.content import Answer, left_out, shown_rows
from experiments.report.page.elements import figure, panel, section
from experiments.report.robustness import Cell
from experiments.report.table import Line

Top1 = Mapping[tuple[str, str], Cell]
"""Top-1 by condition and row."""


def remains(answer: Answer) -> str:
    """Top-1 under each condition over that under none, by family of models: of two networks that are as accurate without, the
    upper one stands the condition better."""
    if not answer.cells:
        return ""
    top1 = {(cell.condition, cell.row): cell for cell in answer.cells if cell.number == "top1"}
    first, *others = dict.fromkeys(condition for condition, _ in top1)
    sides = {f"ours, {answer.profile}": "ours", "paper, ImageNet": "paper"}
    families, panels = answer.families(), []
    for condition in others:
        for heading, whose in sides.items():
            series = []
            for style, (name, lines) in enumerate(families.items()):
                points = _points(answer, lines, top1, (first, condition), whose)
                series += [Series(name, style, points)] if points else []
            if series:
                alternative = f"Top-1 under {condition} against top-1 on clean images, {heading}."
                axes = Axis("top-1 on clean images, %"), Axis(f"top-1 under {condition}, %", most=100.0)
                panels.append(panel(f"{condition}, {heading}", points_chart(alternative, series, *axes)))
    if not panels:
        return ""
    key = legend(((name, style) for style, name in enumerate(families)), lines=True)
    note = "At the same horizontal position, a higher point is more robust. Hover over a point for details."
    note += left_out(answer.lines, "labels, where there is room")
    return section("Accuracy that remains", figure(panels, key, note))


def _points(answer: Answer, lines: Sequence[Line], top1: Top1, conditions: tuple[str, str], whose: str) -> list[Point]:
    """Of the rows of a family for which both numbers are known."""
    labelled, names, points = set(shown_rows(answer.lines)), short_names([line.id for line in lines]), []
    for line in lines:
        before, after = (top1.get((condition, line.id)) for condition in conditions)
        x, y = getattr(before, whose, None), getattr(after, whose, None)
        if after is None or x is None or y is None:
            continue
        around = (after.half_width if whose == "ours" else None) or 0.0
        spread = f" ± {around:.1f}" if around else ""
        title = f"{line.id}: {y:.1f}{spread} % of {x:.1f} %"
        points.append(Point(x, y, y - around, y + around, names[line.id] if line.id in labelled else "", title))
    return sorted(points, key=lambda point: point.x)
