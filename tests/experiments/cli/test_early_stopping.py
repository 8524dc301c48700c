"""Early stopping: its settings, how a stopped trial ends, and how it resumes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.halving import Halving, Rungs
from cluster.session import available_cpus
from cluster.sweep import Observer
from experiments.cli.run import run
from experiments.grids.grid import Trial
from experiments.runner.job import Job, known_results, open_job
from experiments.runner.plan import plan, plan_in_words
from experiments.runs.summary import Epoch, summary_csv
from experiments.runs.workspace import Workspace
from experiments.tracking.listing import list_runs
from experiments.tracking.tracker import Tracker
from tests.experiments.conftest import TrainTrial
from tests.experiments.drivers import Driver
from tests.experiments.grids.test_grid import error_message, expand
from tests.experiments.processes import ended, reports, start
from tests.experiments.samples import EPOCH

SHORT = ("recipe.epochs=3", "recipe.batch_size=50", "data.train_per_class=20")
GRID = """
    question: Which is best?
    base: {{model: {{name: san10_pairwise}}, recipe: {{epochs: 9}}}}
    rows: [{{id: good, model: {{footprint: 3}}}}, {{id: bad, model: {{footprint: 5}}}}, {{id: fair}}]
    {last}
"""
STOPPING = "early_stopping: {grace_epochs: 1, reduction: 3}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "table: footprint, rows: [{id: pairwise_3, model: {name: resnet26}}], early_stopping: {grace_epochs: 1}",
            "early_stopping: cannot be combined with table 'footprint', which compares complete trainings; "
            "leave out `early_stopping` or `table`",
        ),
        (
            "product: {model.name: [resnet26], recipe.epochs: [4, 8]}, early_stopping: {grace_epochs: 1}",
            "early_stopping: requires the same recipe.epochs in every row, but the value is 4 in row "
            "nameresnet26-epochs4 and 8 in row nameresnet26-epochs8; use one value, or leave out early_stopping",
        ),
        (
            "rows: [{id: a, model: {name: resnet26}}], early_stopping: {grace_epochs: 18}",
            "early_stopping.grace_epochs: must be less than recipe.epochs=18, not 18",
        ),
        (
            "rows: [{id: a, model: {name: resnet26}}], early_stopping: {grace_epochs: 0, reduction: 1, metric: loss}",
            [
                "early_stopping.grace_epochs: should be greater than or equal to 1, not 0",
                "early_stopping.reduction: should be greater than or equal to 2, not 1",
                "early_stopping.metric: unknown key; allowed: grace_epochs, reduction",
            ],
        ),
    ],
)
def test_rejects_invalid_early_stopping(text: str, message: str | list[str], write_grid: Callable[[str], Path]) -> None:
    path = write_grid(f"{{question: q, {text}}}")
    messages = [message] if isinstance(message, str) else message
    assert error_message(lambda: expand(path)) == "\n".join(f"{path}: {line}" for line in messages)


def test_key_does_not_depend_on_early_stopping(write_grid: Callable[[str], Path]) -> None:
    plain = {row: trial.key for row, trial in expand(write_grid(GRID.format(last=""))).items()}
    stopping = {row: trial.key for row, trial in expand(write_grid(GRID.format(last=STOPPING))).items()}
    assert plain == stopping


def stop_after_two_epochs(key: str, top1: Sequence[float]) -> bool:
    assert all(0 <= value <= 100 for value in top1)
    return len(top1) < 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_stopped_trial_resumes_without_early_stopping(
    world: int, open_small_job: Callable[..., Job], place: Callable[[str], Workspace]
) -> None:
    """A stopped trial has its run and checkpoints, and frees its lock. Without early stopping, it trains the other epochs."""
    trial = open_small_job(*SHORT, f"placement.workers={world}").trials[1]
    workspace = place("here")
    tracker = Tracker(workspace.tracking_uri, trial.grid, trial.profile)
    assert ended(start(workspace, trial, world, should_continue=stop_after_two_epochs)) == [0] * world

    result = tracker.results()[trial.key]
    assert (result.finished, result.stopped_at) == (False, 2)
    assert Tracker(workspace.tracking_uri, trial.grid, "other").results().get(trial.key) is None, "only this grid stopped it"
    (listed,) = list_runs(workspace.tracking_uri, None)
    assert (listed.state, listed.epoch, listed.epochs) == ("stopped", 2, 3)
    for rank in range(world):
        last = reports(workspace, rank)[-1]
        assert (last["stopped"], last["epoch"], last["epochs"]) == (1, 2, 3)
    folder = workspace.checkpoints(trial)
    assert sorted(path.name for path in folder.glob("*.pt")) == [f"epoch-000{n}-step-0000000.pt" for n in (1, 2)]
    assert "stopped at epoch 2 of 3 by early stopping" in workspace.log(trial).read_text()
    with workspace.store.lock(f"locks/trials/{trial.key}", "busy", wait=0):
        pass

    assert ended(start(workspace, trial, world)) == [0] * world
    result = tracker.results()[trial.key]
    assert (result.finished, result.stopped_at) == (True, None)
    history = tracker.client.get_metric_history(result.run_id, "val/top1")
    assert sorted(metric.step for metric in history) == [0, 1, 2]
    assert "resuming from epoch-0002" in workspace.log(trial).read_text()


TOP1 = {"good": 60.0, "bad": 20.0, "fair": 55.0}


@pytest.fixture
def trained(replace_cluster: Callable[[TrainTrial], None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces training: each trial has its top-1 from `TOP1` after each epoch. Lists the trials that were trained."""
    names: list[str] = []

    @contextmanager
    def judge(halving: Halving, known: Mapping[str, Sequence[float]]) -> Iterator[Callable[..., bool]]:
        yield Rungs(halving, known).should_continue

    def train_trial(train: functools.partial[object], trial: Trial, observer: Observer) -> None:
        (workspace,), should_continue = train.args, train.keywords["should_continue"]
        names.append(trial.name)
        run = Tracker(workspace.tracking_uri, trial.grid, trial.profile).open(trial)
        history: list[Epoch] = []
        while len(history) < 9 and (
            should_continue is None or not history or should_continue(trial.key, [epoch.top1 for epoch in history])
        ):
            history.append(replace(EPOCH, epoch=len(history), top1=TOP1[trial.row]))
        ended = {epoch.epoch: 1_000 for epoch in history}
        workspace.checkpoints(trial).mkdir(parents=True, exist_ok=True)
        workspace.store.write(workspace.summary(trial), summary_csv(history, ended))
        run.log(history, ended)
        stopped = {} if len(history) == 9 else {"stopped": 1}
        observer.progress(trial.key, {"epoch": len(history), "epochs": 9} | stopped | history[-1].metrics())
        if stopped:
            run.stop(f"{trial.grid}-{trial.profile}", len(history))
        else:
            run.finish()

    monkeypatch.setattr("cluster.halving.judge", judge)
    replace_cluster(train_trial)
    return names


@pytest.mark.slow
def test_stopped_trials_are_trained_again_only_without_early_stopping(
    write_grid: Callable[..., Path], runs: Path, trained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def open_it(last: str, name: str = "which.yaml") -> Job:
        return open_job(write_grid(GRID.format(last=last), name), "digits", (), runs)

    stopping = open_it(STOPPING)
    assert run(stopping, None)
    assert trained == ["good", "bad", "fair"]  # the smallest first
    out, err = capsys.readouterr()
    assert "bad stopped at epoch 1 of 9 by early stopping, top-1 20.0 %, after " in err
    assert "trained 3 trials" in err
    assert "stopped early: bad, fair; to train these trials fully, remove early_stopping and run the grid again" in err
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith(("good", "bad", "fair"))}
    assert lines["bad"].split()[1] == "-" and lines["bad"].endswith("  stopped at epoch 1 of 9 by early stopping")
    assert lines["good"].split()[1] == "60.0" and lines["good"].endswith("  -")

    assert run(stopping, None)
    assert len(trained) == 3
    assert "3 trials, 1 already finished, 2 already stopped early, 0 to train" in capsys.readouterr().err
    cells = plan(stopping)
    assert {cell.row: (cell.finished, cell.stopped_at) for cell in cells} == {
        "good": (True, None),
        "bad": (False, 1),
        "fair": (False, 3),
    }
    assert plan_in_words(stopping, cells, None) == ["grid which, profile digits: 3 trials, 0 to train"]

    other = open_it(STOPPING, "other.yaml")  # another grid judges the stopped trials itself
    assert run(other, None)
    assert trained[3:] == ["bad", "fair"]
    assert known_results(stopping)[stopping.trials[1].key].stopped_at == 1

    assert run(open_it(""), None)
    assert trained[5:] == ["bad", "fair"]
    assert all(result.finished for result in known_results(stopping).values())
    assert run(stopping, None) and len(trained) == 7


@pytest.mark.slow
def test_grid_stops_the_trials_that_do_not_learn(write_grid: Callable[..., Path], tmp_path: Path) -> None:
    """Trains four trials, two at a time: two that learn, then two that do not."""
    path = write_grid("""
        question: Which learning rate?
        base: {model: {name: resnet26}, recipe: {epochs: 4, batch_size: 20}, data: {train_per_class: 40}}
        product: {recipe.lr: [0.1, 1e-9]}
        seeds: [0, 1]
        early_stopping: {grace_epochs: 2, reduction: 2}
    """)
    given = (f"placement.cpus={max(available_cpus() // 2, 1)}",)
    first = Driver(path, tmp_path / "runs", given)
    assert first.finish() == 0, first.said
    stopped = re.findall(r"\] (\S+) stopped at epoch 2 of 4 by early stopping", first.said)
    assert {"lr1e-9", "lr1e-9-seed1"} <= set(stopped), first.said
    assert len(stopped) <= 3, first.said  # one that learns stops if it reports after the other one and is worse
    assert f"stopped early: {', '.join(sorted(stopped))}" in first.said
    again = Driver(path, tmp_path / "runs", given)
    assert again.finish() == 0, again.said
    assert f"4 trials, {4 - len(stopped)} already finished, {len(stopped)} already stopped early, 0 to train" in again.said
