"""Charts: readable labels, and PNG files."""

import dataclasses
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from experiments.config.expand import GRIDS_DIR
from experiments.config.grid import GridRequest
from experiments.report.plots import LETTER, LINE, WIDTH, Chart, Point, Series, save_plot, short_names, svg
from experiments.runner.grid_run import open_grid_run
from tests.experiments.conftest import OpenGrid
from tests.experiments.report.conftest import tabled


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100)), min_size=1, max_size=12, unique=True))
def test_labels_do_not_cover_each_other(places: list[tuple[float, float]]) -> None:
    points = [Point(x, y, y, y, f"p{number}", "") for number, (x, y) in enumerate(places)]
    chart = svg(Chart("", "", [Series("a", 0, points)], "x", "y"))
    labels = re.findall(r'<g class="label"><text style="text-anchor: (\w+).*?" x="(\S+)" y="(\S+)">(\w+)<', chart)
    assert labels[0][3] == "p0"
    boxes = []
    for anchor, x, y, text in labels:
        width = LETTER * len(text)
        left = float(x) - (width if anchor == "end" else 0)
        assert 0 < left and left + width < WIDTH + LETTER
        assert not any(left < right and start < left + width and abs(float(y) - at) < LINE - 1 for start, right, at in boxes)
        boxes.append((left, left + width, float(y)))


def test_draws_ours_next_to_the_paper(open_small_grid: OpenGrid, tmp_path: Path) -> None:
    grid_run, path = open_small_grid(), tmp_path / "plot.png"
    ours = tabled(grid_run, {"resnet26_3": 97.0, "pairwise_3": 96.0})
    lines = [dataclasses.replace(line, top1_half_width=0.5 if line.top1 else None) for line in ours]
    save_plot(grid_run.grid.plot, grid_run.trials, lines, "Title", path)
    with Image.open(path) as both:
        assert both.width > 1000  # two panels
        assert len(set(both.convert("RGB").getdata())) > 10  # not blank
    lines = [dataclasses.replace(line, paper_top1=None) for line in ours]
    save_plot(None, grid_run.trials, lines, "Title", path)
    with Image.open(path) as alone:
        assert alone.width < 1000


def test_plot_grows_with_the_number_of_rows(tmp_path: Path) -> None:
    heights = {}
    for name in ("position", "footprint"):
        grid_run = open_grid_run(GridRequest(GRIDS_DIR / f"{name}.yaml", "digits", (), tmp_path))
        lines = tabled(grid_run, {trial.row: 90.0 for trial in grid_run.trials})
        save_plot(None, grid_run.trials, lines, "Title", tmp_path / f"{name}.png")
        heights[len(lines)] = Image.open(tmp_path / f"{name}.png").height
    assert heights[13] - heights[3] > 10 * 30


def test_short_names_differ_between_rows() -> None:
    for ids, short in (
        (["san10_pairwise", "san15_pairwise", "san19_pairwise"], ["10", "15", "19"]),
        (["pairwise_3", "pairwise_11"], ["3", "11"]),
        (["pairwise_phi_eq_psi", "pairwise_distinct"], ["phi_eq_psi", "distinct"]),
        (["resnet26"], ["resnet26"]),
        (["a", "a_b"], ["a", "b"]),
    ):
        assert list(short_names(ids).values()) == short
