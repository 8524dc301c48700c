"""A page to draw a figure on, in pixels from its top left corner, 700 wide; white, so that it reads on dark sites as well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Point = tuple[float, float]

WIDTH = 700  # pixels
PIXEL = 1 / 96  # inches
SMALL, NORMAL, LARGE, HUGE = 8.5, 10.0, 12.0, 16.0  # points; one is 4/3 pixels
LINE = 1.2  # points
INK, GREY, FAINT = "#222222", "#777777", "#DDDDDD"

# Letters are drawn as paths, so that a figure looks the same everywhere; the salt makes its ids the same each time.
matplotlib.rcParams.update(
    {"svg.hashsalt": "san", "svg.fonttype": "path", "font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans"}
)


def shade(value: float, limit: float, color: str) -> str:
    """White for zero, towards `color` for positive and towards grey for negative values."""
    share = min(abs(value) / limit, 1)
    red, green, blue = (1 - share * (1 - end) for end in to_rgb(color if value > 0 else GREY))
    return to_hex((red, green, blue))


def number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


class Page:
    """Shapes, words and vectors at places of the page; what is drawn later lies above."""

    def __init__(self, height: float) -> None:
        self.figure = Figure(figsize=(WIDTH * PIXEL, height * PIXEL), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")

    def save(self, path: Path) -> None:
        self.figure.savefig(path, metadata={"Date": None, "Creator": None})

    def text(
        self, x: float, y: float, words: str, size: float = NORMAL, color: str = INK, ha: str = "center", halo: str = ""
    ) -> None:
        """Words around (x, y), or to its left or right; a halo in the ground's colour keeps lines off them."""
        label = self.axes.text(x, y, words, fontsize=size, color=color, ha=ha, va="center", linespacing=1.35)
        if halo:
            label.set_path_effects([withStroke(linewidth=3, foreground=halo)])

    def line(self, *points: Point, color: str = INK, width: float = LINE, style: str = "-") -> None:
        xs, ys = zip(*points, strict=True)
        self.axes.plot(xs, ys, color=color, linewidth=width, linestyle=style, solid_capstyle="butt")

    def arrow(self, *points: Point, color: str = INK, width: float = LINE) -> None:
        """A line through the points with a head at the last."""
        self.line(*points[:-1], color=color, width=width)
        shape = {"arrowstyle": "-|>,head_length=0.4,head_width=0.2", "color": color, "linewidth": width}
        self.axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops={**shape, "shrinkA": 0, "shrinkB": 0})

    def disc(self, x: float, y: float, radius: float, fill: str, edge: str) -> None:
        self.axes.add_patch(Circle((x, y), radius, facecolor=fill, edgecolor=edge, linewidth=radius / 10, zorder=2.5))

    def rectangle(
        self, x: float, y: float, w: float, h: float, fill: str = "none", edge: str = INK, line: float = LINE
    ) -> None:
        """A rectangle whose top left corner is (x, y)."""
        self.axes.add_patch(Rectangle((x, y), w, h, facecolor=fill, edgecolor=edge, linewidth=line, joinstyle="miter"))

    def box(self, x: float, y: float, w: float, h: float, words: str, color: str = GREY) -> None:
        """A rounded box around (x, y) with words in it."""
        patch = FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=6", linewidth=1.6)
        patch.set(facecolor=shade(0.15, 1, color), edgecolor=color)
        self.axes.add_patch(patch)
        self.text(x, y, words)

    def grid(self, x: float, y: float, fills: Sequence[Sequence[str]], side: float) -> None:
        """A map of coloured pixels with its top left corner at (x, y)."""
        for row, colors in enumerate(fills):
            for column, fill in enumerate(colors):
                self.rectangle(x + column * side, y + row * side, side, side, fill, GREY, 0.7)

    def heat(
        self, x: float, y: float, values: Numbers, side: float, color: str, limit: float, digits: int | None = None
    ) -> None:
        """A map of numbers, shaded up to `limit` and, with `digits`, printed."""
        self.grid(x, y, [[shade(value, limit, color) for value in row] for row in values.tolist()], side)
        if digits is not None:
            for (row, column), value in np.ndenumerate(values):
                self.text(x + (column + 0.5) * side, y + (row + 0.5) * side, number(value, digits), SMALL)

    def bars(
        self,
        x: float,
        y: float,
        values: Numbers,
        colors: str | Sequence[str],
        pitch: float,
        unit: float,
        digits: int | None = None,
    ) -> None:
        """One bar per channel on a zero line at height y, `unit` pixels for 1; with `digits`, its number beyond its end."""
        colors = [colors] * len(values) if isinstance(colors, str) else colors
        for channel, (value, color) in enumerate(zip(values.tolist(), colors, strict=True)):
            self.rectangle(x + (channel + 0.1) * pitch, y, 0.8 * pitch, -value * unit, color, color, 0)
            if digits is not None:
                beyond = -10 if value >= 0 else 10
                self.text(x + (channel + 0.5) * pitch, y - value * unit + beyond, number(value, digits), SMALL)
        self.line((x, y), (x + pitch * len(values), y), width=0.8)
