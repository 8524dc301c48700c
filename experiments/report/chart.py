"""Charts as SVG inside a page, whose colours and font they take, so that one picture serves light and dark.

Series differ by colour, marker and dashes; the page gives the classes `c0` to `c6` their colours. Hovering tells a point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 30, 44
"""Margins, in pixels at the chart's own width."""
LETTER, LINE = 8.4, 15.0  # width and height of a letter where the page makes it largest, which is on a telephone

# No two of the three lengths have a common divisor, so that a style comes back as late as it can.
COLOURS = 7
MARKERS = (
    "M-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0-8.4 0z",
    "M-3.8-3.8h7.6v7.6h-7.6z",
    "M0-5 4.8 3.6h-9.6z",
    "M0-5.3 5.3 0 0 5.3-5.3 0z",
    "M0 5 4.8-3.6h-9.6z",
)
DASHES = ("", "7 4", "1.5 4", "9 3 2 3")

AROUND = (
    ("start", 6, -6),
    ("end", -6, -6),
    ("start", 6, 14),
    ("end", -6, 14),
    ("start", 8, 4),
    ("end", -8, 4),
    ("middle", 0, -9),
    ("middle", 0, 18),
)
"""Where a label may stand: its anchor, and how far that is from its point."""
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True, slots=True)
class Point:
    """A place, what lies around it from `low` to `high`, and its words: short ones beside it, all of them on hovering."""

    x: float
    y: float
    low: float
    high: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together, and their place among the styles."""

    name: str
    style: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axis:
    """What a side of a chart shows; without ticks, round numbers are chosen."""

    label: str
    ticks: Sequence[float] = ()
    most: float = math.inf
    """No value lies above; no interval is drawn above."""


def points_chart(name: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Points with their intervals and labels, those of a series joined. `name` is the text alternative's first sentence."""
    plot = _Plot(series, x, y)
    shapes, boxes, lines = [], [], []
    for one in series:
        places = [(plot.x(point.x), plot.y(point.y)) for point in one.points]
        boxes += [(left - 6, top - 6, left + 6, top + 6) for left, top in places]
        lines += _along(places)
        boxes += [(plot.x(p.x) - 2, plot.y(p.high), plot.x(p.x) + 2, plot.y(p.low)) for p in one.points]
        marks = "".join(map(plot.marker, one.points, [one.style] * len(places)))
        bars = "".join(map(plot.bar, one.points))
        shapes.append(f'<g class="c{one.style % COLOURS}">{_line(places, one.style, "join")}{bars}{marks}</g>')
    labels = [plot.label(point, boxes, lines) for one in series for point in one.points if point.label]
    return plot.svg(name, [*shapes, *labels])


def curves_chart(name: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Lines with the band around them, each with markers at places of its own."""
    plot = _Plot(series, x, y)
    shapes = []
    for number, one in enumerate(series):
        places = [(plot.x(point.x), plot.y(point.y)) for point in one.points]
        band = [(plot.x(point.x), plot.y(max(point.low, plot.low))) for point in one.points]
        band += [(plot.x(point.x), plot.y(min(point.high, plot.high))) for point in reversed(one.points)]
        area = f'<path class="band" d="{_path(band)}z"/>' if any(point.low < point.high for point in one.points) else ""
        parts = [(third + (number + 1) / (len(series) + 1)) / 3 for third in range(3)]
        marks = "".join(plot.marker(one.points[int(part * len(one.points))], one.style) for part in parts)
        title = f"<title>{escape(one.name)}</title>"
        shapes.append(f'<g class="c{one.style % COLOURS}">{title}{area}{_line(places, one.style, "curve")}{marks}</g>')
    return plot.svg(name, shapes)


def legend(names: Iterable[tuple[str, int]], lines: bool) -> str:
    """Names with their styles, as a list."""
    items = []
    for name, style in names:
        line = _line([(0, 8), (28, 8)], style, "curve") if lines else ""
        mark = f'<path class="mark" transform="translate(14 8)" d="{MARKERS[style % len(MARKERS)]}"/>'
        picture = f'<svg class="c{style % COLOURS}" viewBox="0 0 28 16" aria-hidden="true">{line}{mark}</svg>'
        items.append(f"<li>{picture}{escape(name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most that many multiples of a round number from low to high; low < high."""
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


class _Plot:
    """The area between the axes of a chart: where values lie in it, and what is drawn there."""

    def __init__(self, series: Sequence[Series], x: Axis, y: Axis) -> None:
        points = [point for one in series for point in one.points]
        self.series, self.axes = series, (x, y)
        ys = [point.y for point in points]
        room = 0.6 * (max(ys) - min(ys)) or math.inf  # wider intervals are cut, or points would lie on each other
        ys += [max(point.low, min(ys) - room) for point in points] + [min(point.high, max(ys) + room) for point in points]
        x_low, x_high = _wider([point.x for point in points] + list(x.ticks))
        self.low, high = _wider(ys)
        self.high = min(high, y.most)
        self.x_ticks = list(x.ticks) or round_ticks(x_low, x_high)
        self.y_ticks = round_ticks(self.low, self.high)
        self.x = _scale(x_low, x_high, LEFT, WIDTH - RIGHT)
        self.y = _scale(self.low, self.high, HEIGHT - BOTTOM, TOP)

    def marker(self, point: Point, style: int) -> str:
        where = f"translate({self.x(point.x):.1f} {self.y(point.y):.1f})"
        path = f'<path class="mark" transform="{where}" d="{MARKERS[style % len(MARKERS)]}">'
        return f"{path}<title>{escape(point.title)}</title></path>"

    def bar(self, point: Point) -> str:
        """The interval around a point, where it has one; an end that is cut has no cap."""
        if point.low == point.high:
            return ""
        at, low, high = self.x(point.x), self.y(max(point.low, self.low)), self.y(min(point.high, self.high))
        ends = [end for end, value in ((low, point.low), (high, point.high)) if self.low <= value <= self.high]
        caps = "".join(f"M{at - 4:.1f} {end:.1f}h8" for end in ends)
        return f'<path class="bar" d="M{at:.1f} {low:.1f}V{high:.1f}{caps}"/>'

    def label(self, point: Point, boxes: list[Box], lines: list[Box]) -> str:
        """A point's short words at the first place around it that is free, of lines too where there is one; nothing where none
        is, for hovering tells them."""
        at, top, width = self.x(point.x), self.y(point.y), LETTER * len(point.label)
        for taken, (anchor, dx, dy) in product(([*boxes, *lines], boxes), AROUND):
            left = at + dx - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
            box = (left, top + dy - LINE + 3, left + width, top + dy + 3)
            inside = LEFT < box[0] and box[2] < WIDTH and TOP - 8 < box[1] and box[3] < HEIGHT - BOTTOM
            if inside and not any(_meet(box, other) for other in taken):
                boxes.append(box)
                where = f'x="{at + dx:.1f}" y="{top + dy:.1f}" text-anchor="{anchor}"'
                return f'<text class="label" {where}>{escape(point.label)}</text>'
        return ""

    def svg(self, name: str, shapes: Sequence[str]) -> str:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        grid = "".join(f"M{LEFT} {self.y(tick):.1f}H{right}" for tick in self.y_ticks)
        words = [f'<text class="axis" x="{LEFT - 38}" y="13">{escape(self.axes[1].label)}</text>']
        words += [
            f'<text class="tick" x="{LEFT - 7}" y="{self.y(t) + 4:.1f}" text-anchor="end">{t:g}</text>' for t in self.y_ticks
        ]
        words += [
            f'<text class="tick" x="{self.x(t):.1f}" y="{bottom + 17}" text-anchor="middle">{t:g}</text>' for t in self.x_ticks
        ]
        where = f'x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle"'
        words.append(f'<text class="axis" {where}>{escape(self.axes[0].label)}</text>')
        base = f'<path class="base" d="M{LEFT} {bottom}H{right}"/>'
        alternative = escape(f"{name} {self._in_words()}")
        head = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alternative}">'
        return f'{head}<path class="rule" d="{grid}"/>{base}{"".join(words)}{"".join(shapes)}</svg>'

    def _in_words(self) -> str:
        """What the chart says to whoever does not see it: the first and last point of long series, all of short ones."""
        told = []
        for one in self.series:
            points = one.points if len(one.points) <= 12 else (one.points[0], one.points[-1])
            told.append(f"{one.name}: {'; '.join(point.title for point in points)}.")
        return " ".join(told)


def _wider(values: Sequence[float]) -> tuple[float, float]:
    """From the least to the largest, with some room."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) / 20 or 1.0
    return low - room, high + room


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    return lambda value: first + (value - low) / (high - low) * (last - first)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _line(places: Sequence[tuple[float, float]], style: int, kind: str) -> str:
    dashes = DASHES[style % len(DASHES)]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path class="{kind}"{dashed} d="{_path(places)}"/>'


def _along(places: Sequence[tuple[float, float]]) -> list[Box]:
    """Small boxes on the line that joins places."""
    found = []
    for (left, top), (right, bottom) in pairwise(places):
        steps = math.ceil(math.hypot(right - left, bottom - top) / 3)
        middles = [(left + (right - left) * i / steps, top + (bottom - top) * i / steps) for i in range(1, steps)]
        found += [(x - 1, y - 1, x + 1, y + 1) for x, y in middles]
    return found


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
