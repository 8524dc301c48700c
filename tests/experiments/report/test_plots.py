"""Charts: distinguishable colors, readable labels, and PNG files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from experiments.report.charts import save_plot, short_names
from experiments.report.plots import COLORS, LETTER, Chart, Point, Series, svg
from experiments.runner.job import Job, open_job
from tests.experiments.grids.test_grid import GRIDS
from tests.experiments.report.conftest import tabled

Color = NDArray[np.float64]


# Color blindness as a transformation of linear RGB (Machado, Oliveira, Fernandes, 2009, severity 1).
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


def oklab(code: str, vision: Color) -> Color:
    """A color in Oklab, times 100. For adjacent areas, a difference of 2 is just noticeable."""
    values = np.array([int(code[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    found: Color = 100 * OKLAB @ np.cbrt(CONES @ np.clip(vision @ linear, 0, 1))
    return found


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_color_blind_readers_can_distinguish_series(theme: int, vision: str) -> None:
    """The first three colors differ even more, because most charts have at most three series."""
    colors = [oklab(COLORS[f"c{number}"][theme], VISIONS[vision]) for number in range(7)]
    apart = {pair: np.linalg.norm(colors[pair[0]] - colors[pair[1]]) for pair in combinations(range(7), 2)}
    assert min(apart.values()) > 8, min(apart, key=lambda pair: apart[pair])
    assert min(distance for pair, distance in apart.items() if max(pair) < 3) > 12


def test_labels_avoid_lines() -> None:
    """Labels of a rising line are on its left."""
    points = [Point(place, place, place, place, f"p{place}", "") for place in range(4)]
    chart = svg(Chart("", "", [Series("a", 0, points)], "x", "y"))
    labels = re.findall(r'<g class="label"><text style="text-anchor: (\w+).*?" x="(\S+)" y="(\S+)">', chart)
    (line,) = re.findall(r'<g class="line"><path d="M (.*?)"', chart)
    places = [tuple(map(float, place.split())) for place in line.split(" L")]
    xs, ys = zip(*places, strict=True)
    assert len(labels) == 4
    for anchor, x, y in labels:
        left = float(x) - {"start": 0, "end": 2 * LETTER, "middle": LETTER}[anchor]
        middle = np.linspace(left, left + 2 * LETTER, 50)
        inside = (xs[0] <= middle) & (middle <= xs[-1])
        under = np.interp(middle, xs, ys)[inside]
        assert not np.any((float(y) - 10 < under) & (under < float(y)))


@pytest.mark.parametrize("is_plot", [True, False], ids=["plot", "rows"])
@pytest.mark.parametrize("has_paper", [True, False], ids=["with the paper", "alone"])
@pytest.mark.parametrize("half_width", [None, 0.5], ids=["one seed", "seeds"])
def test_draws_ours_next_to_the_paper(
    is_plot: bool, has_paper: bool, half_width: float | None, open_small_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = open_small_job()
    lines = tabled(job, {"resnet26_3": 97.0, "pairwise_3": 96.0})
    lines = [dataclasses.replace(line, top1_half_width=half_width if line.top1 else None) for line in lines]
    if not has_paper:
        lines = [dataclasses.replace(line, paper_top1=None) for line in lines]
    path = tmp_path / "plot.png"
    save_plot(job.grid.plot if is_plot else None, job.trials, lines, "Title", path)
    width, _ = png_size(path)
    assert path.stat().st_size > 10_000
    assert (width > 1000) == has_paper  # two panels


def test_plot_grows_with_the_number_of_rows(tmp_path: Path) -> None:
    heights = {}
    for name in ("position", "footprint"):
        (grid,) = (path for path in GRIDS if path.stem == name)
        job = open_job(grid, "digits", (), tmp_path)
        lines = tabled(job, {trial.row: 90.0 for trial in job.trials})
        save_plot(None, job.trials, lines, "Title", tmp_path / f"{name}.png")
        _, heights[len(lines)] = png_size(tmp_path / f"{name}.png")
    assert heights[13] - heights[3] > 10 * 30


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, from the header of the file."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


@pytest.mark.parametrize(
    ("ids", "short"),
    [
        (["san10_pairwise", "san15_pairwise", "san19_pairwise"], ["10", "15", "19"]),
        (["pairwise_3", "pairwise_11"], ["3", "11"]),
        (["pairwise_phi_eq_psi", "pairwise_distinct"], ["phi_eq_psi", "distinct"]),
        (["resnet26"], ["resnet26"]),
        (["a", "a_b"], ["a", "b"]),
    ],
)
def test_short_names_differ_between_rows(ids: list[str], short: list[str]) -> None:
    assert list(short_names(ids).values()) == short
