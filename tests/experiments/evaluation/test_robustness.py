"""Rotation and attack as protocols: each number is right, kept as it comes, and beside the paper's."""

from __future__ import annotations

import csv
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import san
from cluster import Node, Resources
from cluster.sweep import Outcome
from experiments.cli import main
from experiments.cli import run as grids
from experiments.cli.run import run
from experiments.errors import UserError
from experiments.evaluation import evaluate
from experiments.evaluation.attack import predictions
from experiments.evaluation.cells import Work, measure
from experiments.evaluation.evaluate import Opened, evaluate_checkpoint, open_checkpoint, open_images
from experiments.evaluation.memory import MOST, bytes_kept, first_batch
from experiments.evaluation.protocol import Condition, measured
from experiments.evaluation.protocols import PROTOCOLS
from experiments.evaluation.rotation import Turned
from experiments.grids.config import PROJECT_DIR
from experiments.grids.paper import paper_numbers
from experiments.grids.transform import transform
from experiments.report import robustness as table
from experiments.report.answer import measured as measured_metrics
from experiments.report.answer import note, robustness_of
from experiments.runs.store import LocalStore
from experiments.runs.workspace import Workspace
from experiments.tracking import Result
from experiments.training.job import Job, known_results, open_job
from pipelines.transform import MANIPULATIONS
from tests.experiments.conftest import Trained
from tests.experiments.evaluation.test_attack import ATTACKS, opened, pixels_of

GRIDS = PROJECT_DIR / "experiments" / "grids"


@pytest.mark.parametrize("measure", [Turned("rotate90"), Turned("none"), *ATTACKS], ids=str)
def test_batches_do_not_matter(measure: Callable[..., dict[str, float]], trained: Trained) -> None:
    found = opened(trained)
    images = open_images(found)
    numbers = [measure(found, images, batch, lambda: None) for batch in (7, 64, 120)]
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.mark.parametrize("manipulation", MANIPULATIONS)
def test_turned_is_the_accuracy_on_turned_images(manipulation: str, trained: Trained) -> None:
    network, pixels, labels, _ = pixels_of(trained)
    answers = predictions(network, MANIPULATIONS[manipulation](pixels))
    found = Turned(manipulation)(opened(trained), open_images(opened(trained)), 64, lambda: None)
    assert found["top1"] == pytest.approx(100 * (answers == labels).double().mean().item(), abs=1e-9)
    assert found["top5"] >= found["top1"]


def test_undisturbed_is_the_trials_validation(trained: Trained) -> None:
    metrics = trained.job.tracker.results()[trained.job.trials[0].key].metrics
    for protocol in PROTOCOLS.values():
        numbers = protocol.conditions[0].measure(opened(trained), open_images(opened(trained)), 64, lambda: None)
        assert (numbers["top1"], numbers["top5"]) == (metrics["val/top1"], metrics["val/top5"])


def shown(name: str, images: int, batch: int) -> nullcontext[Callable[[], None]]:
    return nullcontext(lambda: None)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=str
)
@pytest.mark.parametrize("fits", [10, 0])
def test_batches_are_halved_where_memory_does_not_suffice(
    error: Exception, fits: int, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def greedy(opened: Opened, images: object, batch: int, ended: object) -> dict[str, float]:
        tried.append(batch)
        if batch > fits:
            raise error
        return {"top1": 1.0}

    found = opened(trained)
    conditions = [Condition(name, name, ("top1",), greedy) for name in ("first", "second")]
    took = measured(found, open_images(found), conditions, shown)
    if fits == 0:
        with pytest.raises(UserError, match=r"first: not enough memory for a single image; use a machine with more memory$"):
            list(took)
        return
    assert [numbers for _, numbers in took] == [{"top1": 1.0}] * 2
    assert tried == [64, 32, 16, 8, 8]
    assert "first: not enough memory for batches of 16 images; continuing with 8" in caplog.text


def test_other_errors_are_raised_as_they_are(trained: Trained) -> None:
    def broken(*_: object) -> dict[str, float]:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        list(measured(opened(trained), open_images(opened(trained)), [Condition("a", "a", ("top1",), broken)], shown))


def test_the_first_batch_is_what_memory_holds(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 7, 1), nn.Sigmoid(), nn.Conv2d(7, 2, 1)).requires_grad_(False)
    kept = bytes_kept(model, 10, torch.device("cpu"))
    assert kept == 4 * (3 + 7) * 10 * 10  # the image and the sigmoid's result
    found = opened(trained)
    assert first_batch(found.model, found.config) == MOST["cpu"]
    image = bytes_kept(found.model, 24, torch.device("cpu"))
    monkeypatch.setattr("experiments.evaluation.memory.free_memory", lambda: 60 * image)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert first_batch(found.model, found.config) == 10  # half of it, three times what an image keeps
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    assert first_batch(found.model, found.config) == 2
    monkeypatch.setattr("experiments.evaluation.memory.free_memory", lambda: 0)
    assert first_batch(found.model, found.config) == 1


@pytest.mark.parametrize(("limit", "free"), [("max", 1000), ("700", 500), ("5000", 1000), ("100", 0)])
def test_a_containers_limit_counts(limit: str, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.evaluation import memory

    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("200\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    assert memory.free_memory() == free


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_papers_table_has_every_number_and_row(name: Any, tmp_path: Path) -> None:
    job = open_job(GRIDS / f"{name}.yaml", "imagenet", ("data.source=synthetic",), tmp_path)
    assert job.grid.robustness == job.grid.table == name
    columns = [f"{c.name}_{number}" for c in PROTOCOLS[name].conditions for number in c.numbers]
    paper = paper_numbers(name)
    assert list(paper) == [row.id for row in job.grid.rows]
    assert all(list(numbers) == columns for numbers in paper.values())


def test_the_papers_drops_are_those_that_it_prints() -> None:
    cells = table.cells(PROTOCOLS["rotation"], {"san19_pairwise": []}, paper_numbers("rotation"))
    drops = {(cell.condition, cell.number): cell.paper_drop for cell in cells}
    assert drops["none", "top1"] is None
    assert drops["cw180", "top1"] == pytest.approx(18.9)
    assert drops["upside_down", "top5"] == pytest.approx(13.0)


def test_a_drop_is_of_the_seeds_that_have_both_numbers() -> None:
    seeds = [
        {"none": {"top1": 30.0, "top5": 80.0}, "cw90": {"top1": 20.0, "top5": 70.0}},
        {"none": {"top1": 80.0, "top5": 99.0}},
    ]
    cells = table.cells(PROTOCOLS["rotation"], {"row": seeds})
    found = {(cell.condition, cell.number): cell for cell in cells}
    assert (found["none", "top1"].ours, found["cw90", "top1"].ours, found["cw90", "top1"].drop) == (55.0, 20.0, 10.0)
    lines = [line.split() for line in table.as_text(cells).splitlines()]
    assert [line[-1] for line in lines if line[0] in ("condition", "none", "cw90", "cw180")] == ["seeds", "2", "1", "0"]


def test_a_drop_of_several_seeds_has_an_interval_of_its_own() -> None:
    """By the differences seed by seed: here they are alike, though the seeds are not."""
    seeds = [
        {"none": {"top1": 60.0 + base, "top5": 90.0}, "cw90": {"top1": 40.0 + base - more, "top5": 80.0}}
        for base, more in ((0.0, 1.0), (10.0, 0.0), (20.0, 2.0))
    ]
    cells = table.cells(PROTOCOLS["rotation"], {"row": seeds, "other": seeds[:1]})
    found = {(cell.row, cell.condition, cell.number): cell for cell in cells}
    turned = found["row", "cw90", "top1"]
    assert (turned.drop, turned.drop_half_width) == pytest.approx((21.0, 4.302653 / 3**0.5))
    assert turned.half_width is not None and turned.half_width > 20
    assert found["row", "none", "top1"].drop_half_width is None
    assert found["other", "cw90", "top1"].drop_half_width is None

    told = f"{turned.ours:.1f} ± {turned.half_width:.1f}", "21.0 ± 2.5"
    lines = {form: table.FORMS[form](cells).splitlines() for form in table.FORMS}
    (line,) = (line for line in lines["text"] if line.split()[:2] == ["cw90", "row"])
    assert told[0] in line and told[1] in line
    assert f"| cw90 | row | {told[0]} | {told[1]} |" in "\n".join(lines["markdown"])
    assert r"cw90 & row & {} & {} & ".format(*(text.replace("±", r"$\pm$") for text in told)) in "\n".join(lines["latex"])
    (number,) = (
        row for row in csv.DictReader(lines["csv"]) if (row["condition"], row["row"], row["number"]) == ("cw90", "row", "top1")
    )
    assert (float(number["drop"]), float(number["drop_half_width"])) == (turned.drop, turned.drop_half_width)


GRID = """
    question: Does it turn?
    table: rotation
    robustness: rotation
    base: {data: {split: val-split, val_split_per_class: 4, train_per_class: 6}, recipe: {epochs: 1, batch_size: 30}}
    rows:
      - {id: resnet26, model: {name: resnet26}}
      - {id: not_in_the_paper, model: {name: san10_pairwise, footprint: 3}}
"""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, process_group: None) -> list[tuple[str, object]]:
    """A cluster that is this process; what it was given, as key and value. What a cell reports after `limit` is not heard."""
    given: list[tuple[str, object]] = []

    @contextmanager
    def session(address: str | None) -> Iterator[Resources]:
        yield Resources((Node(cpus=2, gpus=0),))

    def sweep(
        function: Callable[..., object], values: Mapping[str, object], placement: object, *, observer: Any, **_: object
    ) -> dict[str, Outcome]:
        for key, value in values.items():
            given.append((key, value))
            observer.started(key)
            function(value, functools.partial(observer.progress, key))
            observer.finished(Outcome(key))
        return {key: Outcome(key) for key in values}

    monkeypatch.setattr("cluster.session.session", session)
    monkeypatch.setattr("cluster.sweep.sweep", sweep)
    return given


@pytest.fixture
def job(write_grid: Callable[[str, str], Path], tmp_path: Path, empty_database: Path) -> Job:
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(empty_database, runs / "mlflow.db")
    return open_job(write_grid(GRID, "turned.yaml"), "digits", (), runs)


def test_a_grid_trains_measures_what_is_missing_and_then_only_prints(
    job: Job, here: list[tuple[str, object]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = grids.Watch

    class Interrupted(watch):  # type: ignore[misc, valid-type]
        def progress(self, key: str, metrics: Mapping[str, float]) -> None:
            super().progress(key, metrics)
            if key == job.trials[1].key and metrics["condition"] == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(grids, "Watch", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(job, None)
    assert sorted(key for key, _ in here) == sorted(2 * [trial.key for trial in job.trials])  # trained, then measured
    unfinished = [cell for cell in robustness_of(job, known_results(job)) if cell.ours is None]
    assert {(cell.row, cell.condition) for cell in unfinished} == {
        ("not_in_the_paper", condition) for condition in ("cw180", "cw270", "upside_down")
    }

    monkeypatch.setattr(grids, "Watch", watch)
    here.clear()
    capsys.readouterr()
    assert run(job, None)
    (work,) = (value for _, value in here)
    assert isinstance(work, Work) and work.missing == ("cw180", "cw270", "upside_down")
    out, err = capsys.readouterr()
    assert "robustness (rotation): 1 cells to measure, 1 at a time, 1 worker with 1 CPU per cell" in err
    assert "] not_in_the_paper cw180: top-1 " in err
    results = known_results(job)
    metrics = {trial.row: results[trial.key].metrics for trial in job.trials}
    found = {(cell.row, cell.condition, cell.number): cell for cell in robustness_of(job, results)}
    for row in ("resnet26", "not_in_the_paper"):
        assert found[row, "none", "top1"].ours == metrics[row]["val/top1"]
        turned = found[row, "cw90", "top1"]
        assert turned.drop == found[row, "none", "top1"].ours - turned.ours
    assert (found["resnet26", "cw90", "top1"].paper, found["not_in_the_paper", "cw90", "top1"].paper) == (49.1, None)
    assert found["resnet26", "cw90", "top1"].difference is None  # digits are not the paper's data
    heading = out.splitlines()[3].split("  ")
    assert [word.strip() for word in heading if word] == [
        *("condition", "row", "top-1 paper", "top-1 ours", "drop paper", "drop ours"),
        *("top-5 paper", "top-5 ours", "drop paper", "drop ours"),
    ]  # fmt: skip
    assert len(out.splitlines()) == 5 + 10 + 1

    here.clear()
    assert run(job, None)
    assert here == []
    assert capsys.readouterr().out == out
    run_of_grid = job.tracker.client.search_runs(
        [job.tracker.client.get_experiment_by_name("turned").experiment_id], "tags.`san.role` = 'grid'"
    )[0]
    assert run_of_grid.info.status == "FINISHED"
    artifacts = [file.path for file in job.tracker.client.list_artifacts(run_of_grid.info.run_id)]
    assert artifacts == ["report.html", "table.csv", "table.md"]


def test_mlflows_page_has_a_column_for_each_condition(job: Job) -> None:
    job.tracker.prepare(job.grid, job.workspace.runs / "artifacts")
    job.tracker.describe("", measured_metrics(job))
    experiment = job.tracker.client.get_experiment_by_name(job.name)
    assert experiment is not None
    columns = json.loads(experiment.tags["mlflow.sharedViewState.grid"])["columnOrder"]
    turned = [f"metrics.`robustness/{condition.key}/top1`" for condition in PROTOCOLS["rotation"].conditions[1:]]
    first = columns.index(turned[0])
    assert columns[first : first + len(turned)] == turned
    assert columns.index("metrics.`val/top1`") < first < columns.index("params.`model.name`")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_mlflows_description_has_all_conditions_and_rows(name: Any, tmp_path: Path) -> None:
    """Of the paper's grids with several seeds, which are another grid's cells."""
    job = open_job(GRIDS / f"{name}.yaml", "digits", (), tmp_path, seeds=2)
    names = [
        metric
        for condition in PROTOCOLS[name].conditions
        for metric in condition.metrics(dict.fromkeys(condition.numbers, 0.0))
    ]
    results = {
        trial.key: Result(
            "run",
            True,
            dict.fromkeys([*names, "val/top1", "val/top5"], 40.0 + 9 * trial.seed),
            tags={"san.grid": "comparison"},
            experiment_id="1234567890",
        )
        for trial in job.trials
    }
    told = note(job, results)
    assert "18 of 18 in [comparison](#/experiments/1234567890/" in told
    for condition in PROTOCOLS[name].conditions:
        for row in job.grid.rows:
            assert f"| {condition.name}&nbsp; | {row.id}&nbsp; | " in told


def test_a_cell_without_its_checkpoint_is_a_sentence(job: Job, trained: Trained, tmp_path: Path) -> None:
    workspace = Workspace(LocalStore(tmp_path), trained.job.workspace.tracking_uri)
    work = Work(workspace, trained.job.trials[0], "run", "rotation", ("none",))
    with pytest.raises(UserError, match=r"epoch-0002-step-0000000.pt: cannot read this file \(No such file or directory\)"):
        measure(work, lambda metrics: None)


def test_a_cell_tells_on_the_way(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.evaluation.cells.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("experiments.evaluation.protocol.first_batch", lambda model, config: 60)
    told: list[Mapping[str, float]] = []
    job = trained.job
    measure(Work(job.workspace, job.trials[0], "run", "attack", ("clean", "n4")), told.append)
    assert [metrics.get("done") for metrics in told] == [0.5, 1.0, None] * 2
    assert [metrics["condition"] for metrics in told] == [0, 0, 0, 1, 1, 1]
    assert set(told[2]) == {"condition", "robustness/none/top1"}
    assert set(told[5]) == {f"robustness/pgd-epsilon8-step2-n4/{number}" for number in ("success", "top1")} | {"condition"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_command_takes_keys_runs_of_mlflow_and_registered_models(
    protocol: Any, trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = trained.job.tracker.results()[trained.job.trials[0].key].run_id
    arguments = [run_id, trained.folder.name, "models:/small-digits-pairwise_3/1", "--protocol", protocol]
    monkeypatch.setattr(sys, "argv", ["san", "robustness", *arguments, "--runs", str(trained.job.workspace.runs), "--json"])
    main()
    out, err = capsys.readouterr()
    cells = json.loads(out)
    by_row = {row: [{**cell, "row": ""} for cell in cells if cell["row"] == row] for row in arguments[:3]}
    assert by_row[run_id] == by_row[trained.folder.name] == by_row[arguments[2]]
    assert len(by_row[run_id]) == sum(len(condition.numbers) for condition in PROTOCOLS[protocol].conditions)
    assert len(err.splitlines()) == 3 * len(PROTOCOLS[protocol].conditions)


def test_the_command_takes_a_file_of_the_authors(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "released.pth"
    san.save_released_checkpoint(trained.best.model(), file)
    told = ["model.name=san10_pairwise", "model.footprint=3", "data.split=val-split", "data.val_split_per_class=12"]
    monkeypatch.setattr(sys, "argv", ["san", "robustness", str(file), *told, "--profile", "digits"])
    main()
    out, _ = capsys.readouterr()
    wanted = evaluate_checkpoint(
        open_checkpoint(trained.folder), open_images(opened(trained)), transform(opened(trained).config.data)
    )
    none = next(line.split() for line in out.splitlines() if line.startswith("none"))
    assert none == ["none", str(file), f"{wanted.top1:.1f}", "-", f"{wanted.top5:.1f}", "-"]


def test_a_profile_is_for_what_tells_no_data(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial and a file of its weights, beside each other."""
    file = tmp_path / "weights.pt"
    san.save_checkpoint(trained.best.model(), file)
    both = [str(trained.folder), str(file), "data.split=val-split", "data.val_split_per_class=2"]
    monkeypatch.setattr(sys, "argv", ["san", "robustness", *both, "--profile", "digits", "--json"])
    main()
    found = json.loads(capsys.readouterr().out)
    of_trial, of_file = ([cell["ours"] for cell in found if cell["row"] == name] for name in both[:2])
    assert of_trial == of_file and len(of_trial) == 10


@pytest.mark.parametrize(
    "told", [["model.name=san10_pairwise", "model.footprint=3"], ["model={name: san10_pairwise, footprint: 3}"]], ids=len
)
def test_overrides_of_the_model_are_for_the_authors_files(
    told: list[str], trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial, a file of its weights and one in the authors' form, beside each other; the first two tell their model."""
    names = [str(trained.folder), str(tmp_path / "ours.pt"), str(tmp_path / "authors.pth")]
    san.save_checkpoint(trained.best.model(), names[1])
    san.save_released_checkpoint(trained.best.model(), names[2])
    overrides = [*told, "data.split=val-split", "data.val_split_per_class=2"]
    monkeypatch.setattr(sys, "argv", ["san", "robustness", *names, *overrides, "--profile", "digits", "--json"])
    main()
    found = json.loads(capsys.readouterr().out)
    of_trial, of_ours, of_authors = ([cell["ours"] for cell in found if cell["row"] == name] for name in names)
    assert of_trial == of_ours == of_authors and len(of_trial) == 10


def weights(trained: Trained, tmp: Path) -> str:
    san.save_checkpoint(trained.best.model(), tmp / "weights.pt")
    return str(tmp / "weights.pt")


MISTAKES: dict[str, tuple[Callable[[Trained, Path], list[str]], str]] = {
    "a model where all tell theirs": (
        lambda trained, tmp: [weights(trained, tmp), str(trained.folder), "model.footprint=3", "--profile", "digits"],
        "weights.pt: this checkpoint already stores its model; leave out model.footprint",
    ),
    "a profile where all tell their data": (
        lambda trained, _: [str(trained.folder), "--profile", "digits"], "this checkpoint stores its own preprocessing; ",
    ),
    "no checkpoint": (lambda *_: ["data.root=/data"], "no checkpoint given; expected a file or folder"),
    "no file": (lambda _, tmp: [str(tmp / "none.pt")], "none.pt: cannot read this file (No such file or directory)"),
    "a text": (lambda _, tmp: [str(GRIDS / "rotation.yaml")], "not a file written by torch.save, or damaged"),
    "no such run": (lambda *_: [32 * "0"], f"{32 * '0'}: MLflow at sqlite:///"),
    "no such model": (lambda *_: ["models:/none/1"], "models:/none/1: MLflow at sqlite:///"),
    "no such key": (lambda *_: [12 * "0"], "000000000000: no such file, and no cell with this key in "),
    "one twice": (lambda trained, _: [str(trained.folder)] * 2, "given more than once; give each checkpoint once"),
    "no such split": (lambda trained, _: [str(trained.folder), "--split", "test"], "has no folder test/"),
    "another number of classes": (
        lambda trained, tmp: [str(trained.folder), *images(tmp, 3)], "the model has 10 classes, but ",
    ),
    "a split without images": (
        lambda trained, tmp: [str(trained.folder), *images(tmp, 10, each=0)], ": 10 class folders without an image",
    ),
    "the second is no checkpoint": (
        lambda trained, tmp: [str(trained.folder), str(tmp / "none.pt")], "none.pt: cannot read this file",
    ),
}  # fmt: skip


def images(folder: Path, classes: int, each: int = 1) -> list[str]:
    for label in range(classes):
        (folder / "images" / "val" / f"class{label}").mkdir(parents=True)
        for number in range(each):
            (folder / "images" / "val" / f"class{label}" / f"{number}.png").write_bytes(b"never decoded here")
    return ["data.source=folder", f"data.root={folder / 'images'}", "--split", "val"]


@pytest.mark.parametrize("what", MISTAKES)
def test_rejects(
    what: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, sentence = MISTAKES[what]
    runs = ["--runs", str(trained.job.workspace.runs)]
    monkeypatch.setattr(sys, "argv", ["san", "robustness", *arguments(trained, tmp_path), *runs])
    with pytest.raises(SystemExit, match="2"):
        main()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("san: ") and len(err.splitlines()) == 1
    assert sentence in err


def test_rejects_an_unknown_protocol_in_a_grid(write_grid: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_grid("{question: q, robustness: noise, rows: [{id: a, model: {name: resnet26}}]}")
    with pytest.raises(UserError, match=r"robustness: must be 'rotation' or 'attack', not 'noise'"):
        open_job(path, "digits", (), tmp_path)


def test_a_log_names_what_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "SECONDS_BETWEEN_LINES", 0.0)
    with evaluate.shown(5, 2, "net cw90") as ended:
        ended()
    assert capsys.readouterr().err == "[   0 s] net cw90: 1 of 3 batches\n"
