"""Colours of the page, and where the words of its charts stand."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from experiments.report.chart import COLOURS, LETTER, Axis, Point, Series, points_chart
from experiments.report.page.document import TEMPLATE

Colour = NDArray[np.float64]
# What readers see of linear RGB who lack a kind of cones altogether (Machado, Oliveira, Fernandes, 2009, severity 1).
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
# From linear RGB to Oklab (Ottosson, 2020).
CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def seen(code: str, vision: Colour) -> Colour:
    """A colour in Oklab, times 100: of two that touch, a difference of 2 is just noticed."""
    values = np.array([int(code[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    found: Colour = 100 * OKLAB @ np.cbrt(CONES @ np.clip(vision @ linear, 0, 1))
    return found


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_are_told_apart_with_any_vision(theme: int, vision: str) -> None:
    """Those of the first three series, of which most charts have no more, better still; markers and dashes differ besides."""
    themes = re.findall(r":root \{\s*--ground.*?\}", TEMPLATE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(themes) == 2
    codes = [dict(re.findall(r"--(c\d): (#\w{6})", themes[theme]))[f"c{number}"] for number in range(COLOURS)]
    colours = [seen(code, VISIONS[vision]) for code in codes]
    apart = {pair: np.linalg.norm(colours[pair[0]] - colours[pair[1]]) for pair in combinations(range(COLOURS), 2)}
    assert min(apart.values()) > 8, min(apart, key=lambda pair: apart[pair])
    assert min(distance for pair, distance in apart.items() if max(pair) < 3) > 12


def test_labels_stand_beside_lines_where_there_is_room() -> None:
    """Beside a line that rises to the right, on the left."""
    points = [Point(place, place, place, place, f"p{place}", "") for place in range(4)]
    chart = points_chart("", [Series("a", 0, points)], Axis("x"), Axis("y"))
    labels = re.findall(r'<text class="label" x="(\S+)" y="(\S+)" text-anchor="(\w+)">', chart)
    (line,) = re.findall(r'<path class="join" d="M(.*?)"', chart)
    places = [tuple(map(float, place.split())) for place in line.split("L")]
    xs, ys = zip(*places, strict=True)
    assert len(labels) == 4
    for x, y, anchor in labels:
        left = float(x) - {"start": 0, "end": 2 * LETTER, "middle": LETTER}[anchor]
        middle = np.linspace(left, left + 2 * LETTER, 50)
        inside = (xs[0] <= middle) & (middle <= xs[-1])
        under = np.interp(middle, xs, ys)[inside]
        assert not np.any((float(y) - 10 < under) & (under < float(y)))
