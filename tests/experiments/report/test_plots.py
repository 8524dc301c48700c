"""Charts: the same for equal results, nothing is cut off, and PNG files."""

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageChops

from experiments.config.grid import GridRequest
from experiments.report.plots import Chart, Point, Series, save, save_plot, svg
from experiments.runner.grid_run import open_grid_run
from tests.experiments.conftest import OpenGrid
from tests.experiments.report.conftest import tabled


def chart(names: list[str]) -> Chart:
    """Crossing lines, one of whose points has a very wide interval."""
    series = [
        Series(name, number, [Point(x, 90 + number * x, 90 + number * x, 90.5 + number * x) for x in (1, 2, 3)])
        for number, name in enumerate(names)
    ]
    series[0] = dataclasses.replace(series[0], points=[Point(1, 90, -1000, 1000), Point(2, 91, 91, 91)])
    return Chart("A heading that is longer than the axes are wide, for example that of a profile", series, "x " * 50, "y")


def test_svg_is_the_same_for_equal_charts() -> None:
    first, *others = (svg(chart(["a", "b < c", "$^$"])) for _ in range(3))
    assert set(others) == {first} and "<dc:date>" not in first
    assert ElementTree.fromstring(first).tag.endswith("svg")


@pytest.mark.parametrize("length", [1, 25, 120])
def test_nothing_is_cut_off(length: int, tmp_path: Path) -> None:
    """Text across the border would leave ink on it."""
    names = [f"{number}{'ABCDE_fgh-' * 12}"[:length] for number in range(10)]
    for number in (1, 2):
        save([chart(names)] * number, "A long question? " * 8, tmp_path / "plot.png")
        whole = Image.open(tmp_path / "plot.png").convert("RGB")
        inked = ImageChops.difference(whole, Image.new("RGB", whole.size, "white")).getbbox()
        assert inked is not None and min(inked[:2]) > 0 and inked[2] < whole.width and inked[3] < whole.height


def test_draws_ours_next_to_the_paper(open_small_grid: OpenGrid, tmp_path: Path) -> None:
    grid_run, path = open_small_grid(), tmp_path / "plot.png"
    ours = tabled(grid_run, {"resnet26_3": 97.0, "pairwise_3": 96.0})
    lines = [dataclasses.replace(line, top1_half_width=0.5 if line.top1 else None) for line in ours]
    save_plot(grid_run.grid.plot, grid_run.trials, lines, "Is $^$ a question?", path)
    with Image.open(path) as both:
        assert both.width > 1000  # two panels
        assert len(set(both.convert("RGB").getdata())) > 10  # not blank
    lines = [dataclasses.replace(line, paper_top1=None) for line in ours]
    save_plot(None, grid_run.trials, lines, "Title", path)
    with Image.open(path) as alone:
        assert alone.width < 1000


def test_plot_grows_with_the_number_of_rows(tmp_path: Path) -> None:
    heights = {}
    for rows in (3, 13):
        path = tmp_path / f"{rows}.yaml"
        path.write_text(f"{{question: q, product: {{model.name: [resnet26], recipe.lr: {list(range(1, rows + 1))}}}}}")
        grid_run = open_grid_run(GridRequest(path, "digits", (), tmp_path))
        lines = tabled(grid_run, {trial.row: 90.0 for trial in grid_run.trials})
        save_plot(None, grid_run.trials, lines, "Title", path.with_suffix(".png"))
        heights[rows] = Image.open(path.with_suffix(".png")).height
    assert heights[13] - heights[3] > 10 * 30
