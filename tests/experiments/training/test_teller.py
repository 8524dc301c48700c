"""What the workers of a cell report, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace

import torch

from experiments.training import teller
from experiments.training.checkpoint import Checkpoint, Checkpoints
from experiments.training.job import Job
from experiments.training.teller import Pulse
from tests.experiments.processes import ended, reports, start, weights


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_pulse_of_short_epochs_is_their_end() -> None:
    clock = Clock()
    pulse = Pulse(10, clock)
    assert pulse.due(is_last_step=False)  # the first step
    pulse.told()
    for seconds, is_last_step, due in (
        (9, False, False),
        (0, True, False),
        (2, False, True),
        (0, True, True),
    ):
        clock.now += seconds
        assert pulse.due(is_last_step) == due
    pulse.epoch_told()
    assert not pulse.due(is_last_step=False)
    clock.now += 8
    pulse.told()
    clock.now += 4  # a long epoch is to be validated, which may take long too
    assert pulse.due(is_last_step=True)
    assert not pulse.due(is_last_step=False)


def always() -> None:
    teller.SECONDS_BETWEEN_REPORTS = 0.0


def never() -> None:
    teller.SECONDS_BETWEEN_REPORTS = float("inf")


def test_workers_tell_together_and_it_changes_no_bit(open_small_job: Callable[..., Job]) -> None:
    """Of three epochs of four steps, with a look after each step and a report after each look, or with hardly any."""
    job = open_small_job(
        "recipe.epochs=3", "recipe.batch_size=50", "data.train_per_class=20", "reliability.check_every_n_steps=1"
    )
    often = next(trial for trial in job.trials if trial.row == "resnet26_3")
    care = often.config.reliability.model_copy(update={"check_every_n_steps": 20})
    seldom = replace(often, config=often.config.model_copy(update={"reliability": care}))
    assert seldom.key == often.key
    quiet = replace(job.workspace, runs=job.workspace.runs / "quiet")
    assert ended(start(job.workspace, often, 2, body=always)) == [0, 0]
    assert ended(start(quiet, seldom, 2, body=never)) == [0, 0]
    for rank in (0, 1):
        told = [(report["epoch"], report.get("step")) for report in reports(job.workspace, rank)]
        assert told == [(epoch + (step is None), step) for epoch in range(3) for step in (1, 2, 3, 4, None)]
        assert [(report["epoch"], report.get("step")) for report in reports(quiet, rank)] == [
            (0, 1),
            (1, None),
            (2, None),
            (3, None),
        ]
        other = weights(quiet, rank)
        for name, value in weights(job.workspace, rank).items():
            assert torch.equal(value, other[name]), name
    histories = []
    for workspace in (job.workspace, quiet):
        path = Checkpoints(workspace.checkpoints(often), often.key, 2, 600).newest()
        assert path is not None
        histories.append(
            [astuple(replace(epoch, images_per_second=0.0, wait_share=0.0)) for epoch in Checkpoint.read(path).history]
        )
    assert histories[0] == histories[1]
