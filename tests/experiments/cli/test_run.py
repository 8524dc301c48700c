"""`san run` and `san study` from plan to table, in this process, with a training that only writes results."""

import csv
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from torch import nn

import san
from cluster import Node, Observer, Outcome, ReportFn, Resources
from cluster.errors import LostError
from experiments.cli.run import run, study
from experiments.config.config import GRIDS_DIR, PROJECT_DIR
from experiments.config.expand import expand, grid_path
from experiments.config.grid import GridRequest, Trial
from experiments.errors import UserError
from experiments.paper.tables import paper_claims, paper_rows, table_names
from experiments.report.data import table_rows
from experiments.runner import execute
from experiments.runner.grid_run import GridRun, known_results, open_grid_run
from experiments.runner.measure import MeasureTask
from experiments.runner.plan import Estimator, plan, plan_in_words
from experiments.runner.progress import duration
from experiments.runs import store
from experiments.runs.claims import claimed_trials
from experiments.runs.workspace import Workspace
from experiments.tracking import TrackerError
from experiments.tracking.tracker import Tracker
from san.models.registry import VARIANTS
from tests.experiments.conftest import OpenGrid, San, WriteGrid
from tests.experiments.samples import EPOCH, runs_of

EQUAL_ROWS = """
    question: Is it the same?
    rows:
      - {id: plain, model: {name: san10_pairwise}}
      - {id: other, model: {name: san10_pairwise, footprint: 5}}
      - {id: written_out, model: {name: san10_pairwise, footprint: 7, relation: subtraction}}
"""


@pytest.fixture
def open_text(write_grid: WriteGrid, runs: Path) -> OpenGrid:
    """Opens a grid run on the text of a grid."""

    def open_it(text: str, name: str = "first", *overrides: str) -> GridRun:
        return open_grid_run(GridRequest(write_grid(text, f"{name}.yaml"), "digits", overrides, runs, serial=True))

    return open_it


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces training: each trial is finished at once, with its number as top-1. Lists the trials as `grid/name`."""
    names: list[str] = []

    def train_trial(workspace: Workspace, trial: Trial, report: ReportFn, **_: object) -> None:
        names.append(f"{trial.grid}/{trial.name}")
        tracked = Tracker(workspace.tracking_uri, trial.grid, trial.profile).open(trial)
        tracked.log([replace(EPOCH, top1=float(len(names)))])
        tracked.add({"summary/images_per_second": 100.0, "summary/training_hours": 0.1})
        tracked.finish()

    monkeypatch.setattr(execute, "run_trial", train_trial)
    return names


@pytest.fixture
def plain_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the page and the plot of a grid by empty files."""
    monkeypatch.setattr("experiments.report.write.render", lambda report: "")
    monkeypatch.setattr("experiments.report.write.save_plot", lambda *arguments: arguments[-1].touch())


@pytest.mark.usefixtures("plain_report")
def test_equal_trials_are_trained_once(open_text: OpenGrid, trained: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Equal rows of a grid, rows of another grid, and all rows when the command is repeated."""
    grid_run = open_text(EQUAL_ROWS)
    assert run(grid_run.request, None)
    assert trained == ["first/other", "first/plain"]
    out, err = capsys.readouterr()
    assert "3 trials, 1 identical to another trial, 2 to train" in err
    lines = table_rows(grid_run, known_results(grid_run))
    assert [(line.top1, line.paper_top1) for line in lines] == [(2.0, None), (1.0, None), (2.0, None)]
    assert "Is it the same?" in out and "top-1 paper" not in out
    shown = [line.split()[:2] for line in out.splitlines()[-4:-1]]
    assert shown == [["plain", "2.0"], ["other", "1.0"], ["written_out", "2.0"]]
    assert run(grid_run.request, None)
    assert "3 trials, 3 already finished, 0 to train" in capsys.readouterr().err

    second = open_text("{question: q, product: {model.name: [san10_pairwise], model.footprint: [5, 3]}}", "second")
    assert [trial.finished for trial in plan(second)] == [True, False]
    assert run(second.request, None)
    assert trained[2:] == ["second/namesan10_pairwise-footprint3"]
    assert [line.top1 for line in table_rows(second, known_results(second))] == [1.0, 3.0]


@pytest.mark.usefixtures("plain_report", "trained")
def test_names_of_files_and_folders_may_have_any_characters(write_grid: WriteGrid, tmp_path: Path) -> None:
    (profile := tmp_path / 'bob\'s "own".yaml').write_text("extends: digits")
    grid, runs = write_grid(EQUAL_ROWS, 'bob\'s "grid".yaml'), tmp_path / "50%41?#ö"
    grid_run = open_grid_run(GridRequest(grid, str(profile), (), runs, serial=True))
    assert run(grid_run.request, None)
    assert all(trial.finished for trial in plan(grid_run)) and (runs / "mlflow.db").exists()


def reported_in_mlflow(grid_run: GridRun) -> tuple[str, dict[str, str]]:
    """The state of a grid's parent run, and the text of its files by name."""
    (parent,) = runs_of(grid_run, "grid")
    folder = Path(parent.info.artifact_uri.removeprefix("file://"))
    return parent.info.status, {
        path.relative_to(folder).as_posix(): path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    }


def test_report_in_mlflow_is_current(open_text: OpenGrid, trained: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has results that another grid or version has changed."""
    grid_run = open_text("{question: q, rows: [{id: a, model: {name: resnet26}}, {id: b, model: {name: resnet38}}]}")
    before: list[str] = []
    train = execute.run_trial

    def recording(*arguments: Any, **options: Any) -> None:
        before.append(reported_in_mlflow(grid_run)[0])
        train(*arguments, **options)

    monkeypatch.setattr(execute, "run_trial", recording)
    assert run(replace(grid_run.request, only=("a",)), None)
    assert reported_in_mlflow(grid_run)[0] == "FINISHED"
    assert run(grid_run.request, None)
    assert before == ["RUNNING", "RUNNING"]
    status, files = reported_in_mlflow(grid_run)
    assert status == "FINISHED" and "| b | 2.0 |" in files["table.md"]

    result = grid_run.tracker.results()[grid_run.trials[1].key]
    grid_run.tracker.client.log_metric(result.run_id, "val/top1", 77.0, step=1)
    assert run(grid_run.request, None)
    status, files = reported_in_mlflow(grid_run)
    assert status == "FINISHED" and "| b | 77.0 |" in files["table.md"] and "77.0" in files["report.html"]

    locks = grid_run.workspace.runs / "locks"
    shutil.rmtree(locks)
    locks.touch()  # as if the folder could not be written; who may only read it gets the table
    assert run(grid_run.request, None)


@pytest.mark.usefixtures("plain_report")
def test_grid_with_other_overrides_has_its_own_report_and_claim(open_text: OpenGrid, trained: list[str]) -> None:
    text = "{question: q, rows: [{id: a, model: {name: resnet26}}]}"
    plain, changed = open_text(text), open_text(text, "first", "recipe.lr=0.3")
    with claimed_trials(plain.workspace.store, plain.full_name, {trial.key: trial for trial in plain.trials}):
        assert run(changed.request, None)
    assert run(plain.request, None)
    _, files = reported_in_mlflow(plain)
    assert "| a | 1.0 |" in files["recipe.lr=0.3/table.md"] and "| a | 2.0 |" in files["table.md"]


@pytest.mark.parametrize("kind", ["resnet", "wise"])
def test_rough_estimates_fit_the_measured_speeds(kind: str, runs: Path) -> None:
    """The median over rows of the study on CIFAR-10, because some of its trials shared their cores."""
    study_file = PROJECT_DIR / "docs" / "results" / "cifar10" / "trials.csv"
    measured = {line["trial"]: float(line["images_per_second"]) for line in csv.DictReader(study_file.open())}
    ratios = []
    for grid in ("footprint", "relation"):
        for row, config in expand(GridRequest(grid_path(grid), "cifar10"), table_names()).configs.items():
            if f"{grid}/{row}" in measured and kind in row:
                trial = Trial(grid, "cifar10", row, 0, config, "")
                seconds = 3600 * Estimator([]).hours(trial, 100_000, 0).wall / config.recipe.epochs
                ratios.append(100_000 / seconds / measured[f"{grid}/{row}"])
    assert 0.5 < statistics.median(ratios) < 2


def test_plan_estimates_hours_from_similar_finished_runs(open_text: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.runner.plan.this_machine", lambda: Resources((Node(2, 0),)))
    finish_at_speed(open_text("{question: q, rows: [{id: trial, model: {name: san10_pairwise}}]}"), 100.0)
    brief = "{id: brief, model: {name: san10_pairwise, footprint: 5}, recipe: {lr: 0.3}}"
    finish_at_speed(open_text(f"{{question: q, rows: [{brief}]}}", "brief"), 1.0, hours=0.001)
    rows = [
        "{id: trial}",
        "{id: longer, recipe: {epochs: 36, lr: 0.1}}",
        "{id: equal, recipe: {epochs: 36, lr: 0.1}}",
        "{id: other, model: {footprint: 5}}",
    ]
    grid_run = open_text(f"{{question: q, base: {{model: {{name: san10_pairwise}}}}, rows: [{', '.join(rows)}]}}", "second")
    planned = plan(grid_run)
    assert [trial.finished for trial in planned] == [True, False, False, False]
    done, longer, equal, other = (
        {each.row: each.hours for each in planned}[row] for row in ("trial", "longer", "equal", "other")
    )
    assert longer is not None and other is not None and done is equal is None
    start, validation = 2, 0.25 * 360  # seconds; images, as if they were training images
    assert longer.wall == pytest.approx((start + 36 * (1437 + validation) / 100) / 3600)
    assert [trial.equal_to for trial in planned if trial.row == "equal"] == ["longer"]
    assert (longer.cpu, longer.gpu, longer.is_rough, other.is_rough) == (longer.wall, 0, False, True)

    lines, can_run = plan_in_words(grid_run, planned, None)
    assert can_run
    assert "1,437 training and 360 validation images of 24x24 pixels, 10 classes: 0, 1, 2, ...): 4 trials, 2 to" in lines[0]
    wall = max((longer.wall + other.wall) / 2, longer.wall, other.wall)
    assert f" {duration(3600 * wall)} with 2 trials at a time" in lines[-1]
    assert f"CPU time {duration(3600 * (longer.cpu + other.cpu))}" in lines[-1]


def test_plan_adds_the_start_of_several_workers(open_text: OpenGrid) -> None:
    one = "{question: q, rows: [{id: a, model: {name: resnet26}}]}"
    alone, pair = (plan(open_text(one, f"of{n}", f"resources.workers={n}"))[0].hours for n in (1, 2))
    assert alone is not None and pair is not None
    assert 3600 * pair.wall == pytest.approx(2 + 15 + (3600 * alone.wall - 2) / 2)


def test_plan_shows_sizes_and_names_rows_of_another_size(open_text: OpenGrid) -> None:
    rows = ["{id: a}", "{id: b, model: {relation: dot}}", "{id: wide, model: {width_mult: 1}}"]
    grid_run = open_text(f"{{question: q, base: {{model: {{name: san10_pairwise}}}}, rows: [{', '.join(rows)}]}}")
    planned = plan(grid_run)
    sizes = {trial.row: trial.params for trial in planned}
    assert sizes["wide"] > 2 * sizes["a"] > 0
    assert any(line.endswith("in parameters or FLOPs: wide") for line in plan_in_words(grid_run, planned, None)[0])


def brightest(num_classes: int, in_channels: int = 3) -> nn.Module:
    """A model without an operation that the paper's convention counts."""
    pad = nn.ConstantPad1d((0, num_classes - in_channels), 0.0)
    return nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.PReLU(), pad)


def test_plan_of_a_model_whose_operations_are_not_counted(open_text: OpenGrid) -> None:
    with patch.dict(VARIANTS):
        san.register_model("brightest")(brightest)
        grid_run = open_text("{question: q, rows: [{id: a, model: {name: brightest}}, {id: ours, model: {name: resnet26}}]}")
        planned = plan(grid_run)
        assert {trial.row: trial.flops == 0 for trial in planned} == {"a": True, "ours": False}
        assert plan_in_words(grid_run, planned, None)[1]


def test_plan_of_trials_that_do_not_fit_fails(open_text: OpenGrid) -> None:
    grid_run = open_text("{question: q, rows: [{id: a, model: {name: resnet26}}]}", "g", "resources.cpus=100000")
    lines, can_run = plan_in_words(grid_run, plan(grid_run), None)
    assert not can_run and any("cannot run here" in line for line in lines)


def finish_at_speed(grid_run: GridRun, images_per_second: float, hours: float = 1.0) -> None:
    """Marks the only trial of a grid as finished, trained at this speed for so long."""
    (trial,) = grid_run.trials
    grid_run.tracker.prepare(grid_run.grid, grid_run.workspace.runs / "artifacts")
    tracked = grid_run.tracker.open(trial)
    tracked.describe(trial, san.Complexity(1, 2, 3, ()))
    tracked.add({"summary/images_per_second": images_per_second, "summary/training_hours": hours})
    tracked.finish()


@pytest.mark.usefixtures("plain_report")
def test_cheapest_trials_start_first(open_text: OpenGrid, trained: list[str]) -> None:
    """The cost is estimated from measured speeds, or from FLOPs, images and epochs."""
    rows = [
        "{id: large}",
        "{id: small, model: {footprint: 3}}",
        "{id: small_and_long, model: {footprint: 3}, recipe: {epochs: 36}}",
        "{id: few_images, data: {train_per_class: 8}}",
        "{id: as_small, model: {footprint: 3}, recipe: {lr: 0.3}}",
    ]
    text = f"{{question: q, base: {{model: {{name: san10_pairwise}}}}, rows: [{', '.join(rows)}]}}"
    grid_run = open_text(text)
    planned = [trial.row for trial in plan(grid_run)]
    assert planned == ["few_images", "small", "as_small", "large", "small_and_long"]

    # A finished run shows that small trials are slow.
    small = "{id: small, model: {name: san10_pairwise, footprint: 3}, recipe: {lr: 1}}"
    finish_at_speed(open_text(f"{{question: q, rows: [{small}]}}", "measured"), 1.0)
    planned = [trial.row for trial in plan(grid_run)]
    assert planned == ["few_images", "large", "small", "as_small", "small_and_long"]

    assert run(grid_run.request, None)
    assert trained == [f"first/{row}" for row in planned]
    assert [trial.row for trial in plan(grid_run)] == [trial.row for trial in grid_run.trials]


@pytest.mark.usefixtures("plain_report")
def test_trial_that_another_command_trains_is_skipped(
    open_text: OpenGrid, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    grid_run = open_text(EQUAL_ROWS)
    plain = grid_run.trials[0]
    with claimed_trials(grid_run.workspace.store, "other-digits", {plain.key: plain}):
        assert not run(grid_run.request, None)
    assert trained == ["first/other"]
    err = capsys.readouterr().err
    assert "skipped, because another `san run` uses the same trials (" in err and "other-digits): plain" in err
    assert "trained 1 trial in " in err
    assert "not finished: plain, written_out; to resume, run `" in err
    assert run(grid_run.request, None)
    assert trained == ["first/other", "first/plain"]


@pytest.mark.usefixtures("trained", "plain_report")
def test_run_that_loses_its_trials_can_be_repeated(open_text: OpenGrid, run_san: San, monkeypatch: pytest.MonkeyPatch) -> None:
    grid_run = open_text(EQUAL_ROWS)
    command = "run", grid_run.request.grid, "--serial", "--runs", grid_run.workspace.runs
    with monkeypatch.context() as context:
        context.setattr(execute, "serial_sweep", Mock(side_effect=LostError("no memory is left")))
        code, _, err = run_san(*command)
    assert (code, err.splitlines()[-1]) == (1, "san: no memory is left")
    assert [parent.info.status for parent in runs_of(grid_run, "grid")] == ["KILLED"]
    assert run_san(*command)[0] == 0


@pytest.mark.usefixtures("plain_report")
def test_failures_before_an_interruption_are_kept(open_text: OpenGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    grid_run = open_text("{question: q, rows: [{id: a, model: {name: resnet26}}]}")

    def sweep(function: object, values: dict[str, Trial], *, observer: Observer, **_: object) -> None:
        observer.finished(Outcome(next(iter(values)), "it broke", "where it broke"))
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "serial_sweep", sweep)
    with pytest.raises(KeyboardInterrupt):
        run(grid_run.request, None)
    (failed,) = runs_of(grid_run, "trial")
    assert (failed.info.status, failed.data.tags["san.error"]) == ("FAILED", "it broke")
    (file,) = (grid_run.workspace.runs / "failures").iterdir()
    assert file.read_text() == "where it broke"


@pytest.mark.parametrize("is_back", [True, False])
def test_reports_failed_trials_and_results_that_mlflow_did_not_accept(
    is_back: bool, open_text: OpenGrid, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow was away when the other trial ended, and is back, or still away, when the grid ends."""
    grid_run = open_text(EQUAL_ROWS)

    def train(workspace: Workspace, trial: Trial, report: ReportFn, **_: object) -> None:
        if not is_back:
            (workspace.runs / "mlflow.db").write_bytes(b"not a database" * 100)
        if trial.row == "other":
            raise RuntimeError("it broke")

    monkeypatch.setattr(execute, "run_trial", train)
    monkeypatch.setattr(store, "OUTAGE_TIMEOUT", 0.1)
    monkeypatch.setattr(store, "PAUSE", 0.01)
    if is_back:
        assert not run(grid_run.request, None)
        err = capsys.readouterr().err
        assert "trained 1 of 2 trials in " in err and "; failed: other\n" in err
        assert "\nplain: trained, but MLflow" in err
    else:
        with pytest.raises(TrackerError, match=r"MLflow at .*\ntrained trials are kept"):
            run(grid_run.request, None)


@pytest.mark.usefixtures("plain_report")
def test_study_trains_every_trial_once_and_writes_its_page(
    trained: list[str], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of its grids, which share a row. The results are also known on another machine that has the files."""
    claims = {table: paper_claims()[table] for table in ("mapping", "rotation", "attack")}
    monkeypatch.setattr("experiments.cli.run.paper_claims", lambda: claims)
    measured: list[str] = []

    def measure(task: MeasureTask, report: ReportFn) -> None:
        measured.append(f"{task.trial.grid}/{task.trial.name}")
        for index, condition in enumerate(task.conditions):
            report({"condition": float(index), **condition.metrics(dict.fromkeys(condition.numbers, 10.0))})

    monkeypatch.setattr(execute, "measure_trial", measure)
    page, kept = tmp_path / "docs" / "page.md", tmp_path / "docs" / "kept.csv"
    request = GridRequest(GRIDS_DIR, runs=runs, seeds=2, serial=True)
    assert not study(request, None, page, kept, trains=False) and not trained
    with pytest.raises(UserError, match="--serial and --address"):
        study(request, "10.0.0.1:6379", page, kept)
    assert study(request, None, page, kept)
    assert len(trained) == len(set(trained)) == 2 * (len(paper_rows("mapping")) + 1), "SAN10 of the paper is in all grids"
    assert len(measured) == len(set(measured)) == 2 * 2 * 3
    text = " ".join(page.read_text().split())
    assert "trains on 1,437 images of" in text and "validated on 360" in text
    files = {"page.md", "study-mapping.png", "kept.csv", "kept-robustness.csv"}
    assert {path.name for path in page.parent.iterdir()} == files
    before, count = page.read_text(), (len(trained), len(measured))
    robust = page.parent / "kept-robustness.csv"
    lines = robust.read_text().splitlines(keepends=True)
    robust.write_text("".join(lines[:-1]))
    elsewhere = replace(request, runs=tmp_path / "without measurements")
    assert not study(elsewhere, None, page, kept, trains=False), "one network is not measured"
    robust.write_text("".join(lines))
    assert study(replace(request, runs=tmp_path / "another machine"), None, page, kept)
    assert (len(trained), len(measured)) == count and page.read_text() == before


@pytest.mark.parametrize(
    ("page", "kept", "words"),
    [
        ("folder", "kept.csv", "folder: cannot write"),
        ("file/page.md", "kept.csv", "page.md: cannot write"),
        ("page.md", "other.csv", "other-robustness.csv: expected"),
        ("page.md", "blocked.csv", "blocked-robustness.csv: cannot write"),
    ],
)
def test_study_checks_its_files_before_training(page: str, kept: str, words: str, trained: list[str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "other-robustness.csv").write_text("name,age\n")
    (tmp_path / "blocked-robustness.csv").mkdir()
    with pytest.raises(UserError, match=words):
        study(GridRequest(GRIDS_DIR, runs=tmp_path / "runs", seeds=2), None, tmp_path / page, tmp_path / kept)
    assert not trained
