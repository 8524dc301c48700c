"""`san report`: its files, messages and output formats."""

import re
import shutil
from pathlib import Path

import pytest

from experiments.config.config import PROJECT_DIR
from experiments.config.grid import GridRequest
from experiments.report.data import grid_report
from experiments.report.tables import caption
from experiments.report.write import print_report
from experiments.runner.grid_run import open_grid_run
from experiments.runner.plan import plan, plan_in_words
from tests.experiments.conftest import OpenGrid, Rejected, San, WriteGrid


def test_names_rows_that_are_missing_from_the_papers_table(
    write_grid: WriteGrid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "\n".join(f"  - {{id: {row}, model: {{name: resnet26}}}}" for row in ("resnet26_3", *"abcde"))
    path = write_grid(f"question: Which rows?\ntable: footprint\nrows:\n{rows}\n")
    grid_run = open_grid_run(GridRequest(path, "digits", (), tmp_path))
    print_report(grid_report(grid_run, {}))
    missing = "lacks a, b, c and 2 more rows"
    assert missing in capsys.readouterr().out
    assert missing in " ".join(plan_in_words(grid_run, plan(grid_run), None)[0])


def test_caption_names_all_lengths_of_training(write_grid: WriteGrid, tmp_path: Path) -> None:
    path = write_grid("question: q\nproduct: {recipe.epochs: [6, 3]}\nrows: [{id: a, model: {name: resnet26}}]")
    assert "3, 6 epochs" in caption(open_grid_run(GridRequest(path, "digits", (), tmp_path)))


def test_overrides_that_change_trials_are_part_of_the_names(write_grid: WriteGrid, tmp_path: Path) -> None:
    path = write_grid("question: q\nrows: [{id: a, model: {name: resnet26}}]")

    def title(*overrides: str) -> str:
        grid_run = open_grid_run(GridRequest(path, "digits", overrides, tmp_path))
        assert all((text in caption(grid_run)) == (text.split(".")[0] in ("data", "recipe")) for text in overrides)
        return grid_run.full_name

    plain, longest = title(), [f"data.mean=[0.{number:0120d}, 0.5, 0.5]" for number in (1, 2)]
    assert title("resources.workers=2", "engine.deterministic=true") == plain
    assert title("recipe.lr=0.2") == f"{plain}+recipe.lr=0.2" != title("recipe.lr=0.3")
    assert title(f"data.root={PROJECT_DIR}/data/digits") != plain
    assert title("recipe.lr=0.2", "data.flip=false") == title("data.flip=false", "recipe.lr=0.2")
    names = [title("data.mean=[0.5, 0.5, 0.5]"), title("data.mean=[0.5,0.5,0.5]"), *map(title, longest)]
    assert len(set(names)) == 4 and all(re.fullmatch(r"[A-Za-z0-9_.=,+-]{1,160}", name) for name in names)


def test_report_command_prints_every_format_writes_files_and_rejects_mistakes(
    finished_grid: OpenGrid, tmp_path: Path, run_san: San, rejected: Rejected
) -> None:
    """Formats other than text write no files, and neither does a mistake. The table is printed if no file can be written."""
    finished_grid()
    report = ("report", tmp_path / "invented.yaml", "--runs", tmp_path / "runs")
    for form, start in (("markdown", "| row | top-1 paper |"), ("latex", "\\begin{tabular}"), ("csv", "id,paper_top1,top1")):
        _, out, _ = run_san(*report, "--seeds", "2", "--format", form)
        assert out.startswith(start) and "pairwise" in out
    nowhere, page = tmp_path / "nowhere" / "page.html", tmp_path / "page.html"
    for mistake, words in (
        (("--html", nowhere), (f"{nowhere}: cannot write", "No such file")),
        (("--html", tmp_path), ("Is a directory",)),
        (("--format", "word"), ("'word'", "'latex'")),
        (("--html", page, "recipe.lr=0.01"), ("no finished trial", f"recipe.lr=0.01 --runs {tmp_path / 'runs'}`")),
    ):
        message = rejected(*report, *mistake)
        assert all(word in message for word in words), message
    folder = tmp_path / "runs" / "invented-digits"
    assert not folder.exists() and not page.exists()

    run_san(*report, "--seeds", "2")
    assert {path.name for path in folder.iterdir()} == {"table.md", "table.csv", "plot.png"}

    shutil.rmtree(folder)
    folder.write_text("a file")
    code, out, err = run_san(*report, "--seeds", "2")
    assert code == 1  # trials are missing
    assert "pairwise_3" in out and f"{folder}: cannot write the report (File exists)" in err
