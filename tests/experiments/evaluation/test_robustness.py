"""The protocols for rotation and attack, in grids and for single checkpoints.

The attack agrees with foolbox, stays exactly within its bound, and uses the right gradients.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cluster import Outcome
from cluster.errors import LostError
from experiments.cli.run import run
from experiments.config.grid import GridRequest
from experiments.errors import UserError
from experiments.evaluation.evaluate import LoadedModel, evaluation_loader, open_checkpoint, open_images
from experiments.evaluation.robustness import (
    MANIPULATIONS,
    PROTOCOLS,
    Attack,
    OnPixels,
    Rotation,
    Subject,
    predictions,
    subject_of,
    targets,
    within,
)
from experiments.report.data import grid_report
from experiments.runner import execute
from experiments.runner.grid_run import GridRun, known_results, open_grid_run
from experiments.runner.measure import MeasureProgress, MeasureTask, measure_trial
from experiments.runner.plan import plan, plan_in_words
from experiments.runs.store import LocalStore
from experiments.runs.workspace import Workspace
from experiments.training.checkpoint import last_of
from experiments.training.images import transform
from tests.experiments.conftest import Rejected, Trained, WriteGrid
from tests.experiments.samples import runs_of

LARGE = Attack(epsilon=64, step=32, steps=3)
"""Succeeds also on images for which an attack by 8 gray levels fails after two epochs of training."""


def opened(trained: Trained) -> LoadedModel:
    found = open_checkpoint(last_of(trained.folder, 2))
    found.model.requires_grad_(False)
    return found


def subject(trained: Trained, batch: int) -> Subject:
    found = opened(trained)
    return subject_of(found, open_images(found), batch)


def pixels_of(trained: Trained) -> tuple[OnPixels, Tensor, Tensor, Tensor]:
    """The trained network on pixels, the 120 images, their labels and their targets."""
    found = opened(trained)
    how = transform(found.config.data)
    plain = replace(how, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    (batch,) = evaluation_loader(found, open_images(found), plain, 120).epoch(0)
    wanted = targets(batch.labels_N.numpy(), 10, found.seed)
    return OnPixels(found.model, how).eval(), batch.images_NCHW, batch.labels_N, wanted


def test_batch_size_changes_results_only_by_rounding(trained: Trained) -> None:
    """In float32, batches of other sizes are summed in another order. This may change the class of an image and the signs of an
    attack's tiny gradients. In float64, rounding is too small for that."""
    found = opened(trained)
    found.model.double().register_forward_pre_hook(lambda model, inputs: (inputs[0].double(),))
    images = open_images(found)
    numbers = [LARGE(subject_of(found, images, batch)) for batch in (7, 64, 120)]
    assert numbers[0] == numbers[1] == numbers[2]


def source_of(name: str, row: int, column: int, last: int) -> tuple[int, int]:
    """Returns the original position of the pixel at (row, column)."""
    return {
        "none": (row, column),
        "rotate90": (last - column, row),
        "rotate180": (last - row, last - column),
        "rotate270": (column, last - row),
        "upside_down": (last - row, column),
    }[name]


@pytest.mark.parametrize(("name", "manipulate"), MANIPULATIONS.items())
def test_manipulations_move_pixels_exactly(name: str, manipulate: Callable[[torch.Tensor], torch.Tensor]) -> None:
    images_NCHW = np.random.default_rng(0).random((2, 3, 5, 5), dtype=np.float32)
    expected = np.empty_like(images_NCHW)
    for row in range(5):
        for column in range(5):
            y, x = source_of(name, row, column, last=4)
            expected[:, :, row, column] = images_NCHW[:, :, y, x]
    assert np.array_equal(manipulate(torch.from_numpy(images_NCHW)).numpy(), expected)


def test_rotation_measures_accuracy_on_rotated_images(trained: Trained) -> None:
    network, pixels, labels, _ = pixels_of(trained)
    answers = predictions(network, MANIPULATIONS["rotate90"](pixels))
    found = Rotation("rotate90")(subject(trained, 64))
    assert found["top1"] == pytest.approx(100 * (answers == labels).double().mean().item(), abs=1e-9)
    assert found["top5"] >= found["top1"]


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
def started(monkeypatch: pytest.MonkeyPatch, process_group: None) -> list[tuple[str, object]]:
    """The keys and values of the trials that are trained and measured."""
    begun: list[tuple[str, object]] = []
    sweep = execute.serial_sweep

    def recording(function: Callable[..., object], values: Mapping[str, Any], **options: Any) -> dict[str, Outcome]:
        begun.extend(values.items())
        return sweep(function, values, **options)

    monkeypatch.setattr(execute, "serial_sweep", recording)
    return begun


@pytest.fixture
def grid_run(write_grid: WriteGrid, runs: Path) -> GridRun:
    return open_grid_run(GridRequest(write_grid(GRID, "turned.yaml"), "digits", (), runs, serial=True))


def test_grid_measures_only_missing_conditions(
    grid_run: GridRun, started: list[tuple[str, object]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurements of a row are interrupted by the user, and then by the loss of all nodes."""
    progress = execute.MeasureProgress
    conditions = PROTOCOLS["rotation"].conditions
    ends: dict[str, type[BaseException]] = {"cw90": KeyboardInterrupt, "cw180": LostError}

    class Interrupted(progress):  # type: ignore[misc, valid-type]
        def progress(self, key: str, metrics: Mapping[str, float]) -> None:
            super().progress(key, metrics)
            if key == grid_run.trials[1].key:
                end = ends.get(self.tasks[key].conditions[int(metrics["condition"])].name)
                if end is not None:
                    raise end

    monkeypatch.setattr(execute, "MeasureProgress", Interrupted)
    keys = [trial.key for trial in grid_run.trials]
    for begun, end, left in ((2 * keys, KeyboardInterrupt, conditions[2:]), (keys[1:], LostError, conditions[3:])):
        started.clear()
        with pytest.raises(end):
            run(grid_run.request, None)
        assert sorted(key for key, _ in started) == sorted(begun)  # trained, then measured
        assert [run.info.status for run in runs_of(grid_run, "grid")] == ["KILLED"]
        unfinished = [cell for cell in grid_report(grid_run, known_results(grid_run)).measurements if cell.ours is None]
        assert {(cell.row, cell.condition) for cell in unfinished} == {("not_in_the_paper", each.name) for each in left}
        assert "robustness (`rotation`): 1 trial to measure" in plan_in_words(grid_run, plan(grid_run), None)[0]

    monkeypatch.setattr(execute, "MeasureProgress", progress)
    started.clear()
    capsys.readouterr()
    assert run(grid_run.request, None)
    (task,) = (value for _, value in started)
    assert isinstance(task, MeasureTask) and task.conditions == left
    out, err = capsys.readouterr()
    assert "1 trial to measure" in err and "not_in_the_paper cw270: top-1 " in err
    results = known_results(grid_run)
    metrics = {trial.row: results[trial.key].metrics for trial in grid_run.trials}
    found = {(cell.row, cell.condition, cell.number): cell for cell in grid_report(grid_run, results).measurements}
    for row in ("resnet26", "not_in_the_paper"):
        for number in ("top1", "top5"):
            assert found[row, "none", number].ours == metrics[row][f"val/{number}"]
        turned = found[row, "cw90", "top1"]
        assert turned.drop == found[row, "none", "top1"].ours - turned.ours
    assert (found["resnet26", "cw90", "top1"].paper, found["not_in_the_paper", "cw90", "top1"].paper) == (49.1, None)
    assert found["resnet26", "cw90", "top1"].difference is None  # digits are not the paper's data
    assert sum(line.startswith(("none", "cw", "upside_down")) for line in out.splitlines()) == 10

    started.clear()
    assert run(grid_run.request, None)
    assert started == []
    assert capsys.readouterr().out == out
    (run_of_grid,) = runs_of(grid_run, "grid")
    assert run_of_grid.info.status == "FINISHED"
    artifacts = [file.path for file in grid_run.tracker.client.list_artifacts(run_of_grid.info.run_id)]
    assert artifacts == ["report.html", "table.csv", "table.md"]


def test_lost_checkpoint_is_an_error_without_a_retry(trained: Trained, tmp_path: Path) -> None:
    workspace = Workspace(LocalStore(tmp_path), trained.grid_run.workspace.tracking_uri)
    task = MeasureTask(workspace, trained.trial, "run", PROTOCOLS["rotation"].conditions[:1], 2)
    with pytest.raises(UserError, match=rf"epoch-0002-step-0000000.pt: .* `san delete {trained.trial.key}`"):
        measure_trial(task, lambda metrics: None)


def test_reports_progress_within_a_condition(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.runner.measure.SECONDS_BETWEEN_LINES", 0.0)
    sent: list[Mapping[str, float]] = []
    grid_run = trained.grid_run
    clean, _, n4 = PROTOCOLS["attack"].conditions
    measure_trial(MeasureTask(grid_run.workspace, grid_run.trials[0], "run", (clean, n4), 2), sent.append)
    assert [metrics.get("done") for metrics in sent] == [64 / 120, 1.0, None] * 2
    assert [metrics["condition"] for metrics in sent] == [0, 0, 0, 1, 1, 1]
    assert set(sent[2]) == {"condition", "robustness/none/top1"}
    assert set(sent[5]) == {f"robustness/pgd-epsilon8-step2-n4/{number}" for number in ("success", "top1")} | {"condition"}


def test_repeated_measurements_of_a_retried_trial_count_once(grid_run: GridRun) -> None:
    conditions, kept, out = PROTOCOLS["rotation"].conditions[:2], [], io.StringIO()
    task = MeasureTask(grid_run.workspace, grid_run.trials[0], "run", conditions, 2)
    progress = MeasureProgress({"key": task}, lambda task, metrics: kept.append(metrics), out)
    for index in (0, 0, 1):
        progress.progress("key", {"condition": index, **conditions[index].metrics({"top1": 50.0, "top5": 90.0})})
    assert [re.search(r"(-?\d+) left", line)[1] for line in out.getvalue().splitlines()] == ["1", "1", "0"]  # type: ignore[index]
    assert len(kept) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data.root=/data"], "no checkpoint given"),
        (["{trial}", "{trial}"], "more than once"),
        (["{trial}", "none.pt"], "none.pt: "),
    ],
)
def test_rejects(arguments: list[str], words: str, trained: Trained, rejected: Rejected) -> None:
    filled = [argument.format(trial=trained.folder) for argument in arguments]
    message = rejected("robustness", *filled, "--runs", trained.grid_run.workspace.runs)
    assert message.startswith("san: ") and len(message.splitlines()) == 1
    assert words in message


def test_attack_matches_foolbox(trained: Trained) -> None:
    """Success and accuracy agree within one point (one of 120 images is 0.83 points), and almost all pixels are equal.

    Some pixels differ, because rounding can change the sign of a gradient that is almost zero.
    """
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed: it is in requirements.txt")
    network, pixels, labels, wanted = pixels_of(trained)
    how = transform(opened(trained).config.data)
    theirs = foolbox.PyTorchModel(
        network.network, bounds=(0, 1), device="cpu", preprocessing={"mean": how.mean, "std": how.std, "axis": -3}
    )
    steps = foolbox.attacks.LinfPGD(abs_stepsize=LARGE.step / 255, steps=LARGE.steps, random_start=False)
    goal = foolbox.criteria.TargetedMisclassification(wanted)
    found = steps.run(theirs, pixels, goal, epsilon=LARGE.epsilon / 255)
    ours = LARGE.attacked(network, pixels, wanted)
    assert ((ours - found).abs() > 1e-6).double().mean() < 1e-4
    for answer in (wanted, labels):
        agree = [100 * (predictions(network, images) == answer).double().mean().item() for images in (ours, found)]
        assert agree[0] == pytest.approx(agree[1], abs=1)
    assert (predictions(network, ours) == wanted).double().mean() > 0.3  # the attack has an effect


def test_attack_needs_a_second_class(trained: Trained) -> None:
    with pytest.raises(UserError, match="only one class"):
        LARGE(replace(subject(trained, 50), classes=1))


def test_success_and_accuracy_are_shares_of_all_images(trained: Trained) -> None:
    """In several batches; rounding can change the class of an image."""
    network, pixels, labels, wanted = pixels_of(trained)
    found = LARGE(subject(trained, 50))
    answers = predictions(network, LARGE.attacked(network, pixels, wanted))
    for name, right in (("success", wanted), ("top1", labels)):
        assert found[name] == pytest.approx(100 * (answers == right).double().mean().item(), abs=1)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    attack=st.builds(Attack, epsilon=st.integers(1, 255), step=st.integers(1, 255), steps=st.integers(1, 4)),
    levels=st.booleans(),
)
def test_attacked_pixels_stay_in_range_and_within_epsilon(seed: int, attack: Attack, levels: bool) -> None:
    """The check is exact, because differences of float32 are exact in float64."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(2, 3, 4, 4, generator=generator)
    pixels = (pixels * 255).round() * torch.tensor(1 / 255) if levels else pixels
    pixels[0, 0, 0] = torch.tensor([0.0, 1.0, 1e-30, 1 - 2**-24])
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    before = pixels.clone()
    after = attack.attacked(network.requires_grad_(False), pixels, torch.tensor([1, 4]))
    assert torch.equal(pixels, before)
    assert after.dtype == torch.float32 and not after.requires_grad
    assert after.min() >= 0 and after.max() <= 1
    assert (after.double() - pixels.double()).abs().max() <= attack.epsilon / 255


@given(pixel=st.floats(0, 1, width=32), epsilon=st.integers(1, 255))
def test_bound_is_as_wide_as_allowed(pixel: float, epsilon: int) -> None:
    pixels, bound = torch.tensor([pixel]), epsilon / 255
    for edge, end in zip(within(pixels, bound), (0.0, 1.0), strict=True):
        next_one = torch.nextafter(edge, torch.tensor([2 * end - 0.5]))
        assert edge == end or (next_one.double() - pixels.double()).abs() > bound


@given(classes=st.integers(2, 1000), seed=st.integers(0, 99), count=st.integers(1, 40), shorter=st.integers(1, 40))
def test_targets_differ_from_labels_and_depend_on_seed_and_place(classes: int, seed: int, count: int, shorter: int) -> None:
    labels = np.random.default_rng(seed).integers(0, classes, count)
    found = targets(labels, classes, seed)
    assert found.dtype == torch.int64
    assert ((found >= 0) & (found < classes) & (found != torch.from_numpy(labels))).all()
    assert torch.equal(found[:shorter], targets(labels[:shorter], classes, seed))


def test_targets_are_uniform_over_other_classes() -> None:
    labels = np.full(9000, 3)
    counts = torch.bincount(targets(labels, 10, 0), minlength=10)
    assert counts[3] == 0
    assert ((counts[counts > 0] - 1000).abs() < 150).all() and (counts > 0).sum() == 9
    assert not torch.equal(targets(labels, 10, 0), targets(labels, 10, 1))
