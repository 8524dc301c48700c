"""Reports of a trial's progress."""

import math
import subprocess
import sys
from collections.abc import Mapping
from unittest.mock import Mock

import pytest
import torch

from experiments.config.config import PROJECT_DIR
from experiments.training import reporter, trainer
from experiments.training.checkpoint import best_in
from experiments.training.reporter import Throttle, Watchdog
from experiments.training.trainer import run_trial
from tests.experiments.conftest import OpenGrid, Place
from tests.experiments.drivers import PATIENCE
from tests.experiments.samples import Clock, without_times


def test_short_epochs_are_reported_only_at_their_end() -> None:
    clock = Clock()
    throttle = Throttle(10, clock)
    assert throttle.is_due(is_last_step=False)  # the first step
    throttle.step_done()
    for seconds, is_last_step, due in ((9, False, False), (0, True, False), (2, False, True), (0, True, True)):
        clock.now += seconds
        assert throttle.is_due(is_last_step) == due
    throttle.epoch_done()
    assert not throttle.is_due(is_last_step=False)
    clock.now += 8
    throttle.step_done()
    clock.now += 4  # the validation after a long epoch may take long too
    assert throttle.is_due(is_last_step=True)
    assert not throttle.is_due(is_last_step=False)


def test_reports_do_not_change_the_result(
    open_small_grid: OpenGrid, place: Place, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three epochs of four steps each, with a check and a report after each step, because all are slow, or almost none."""
    trial = open_small_grid(
        "recipe.epochs=3", "recipe.batch_size=50", "data.train_per_class=20", "checkpointing.check_every_n_steps=20"
    ).trials[1]
    found = []
    for seconds, between_checks in ((0.0, 1e-9), (float("inf"), 1e9)):
        monkeypatch.setattr(reporter, "SECONDS_BETWEEN_REPORTS", seconds)
        monkeypatch.setattr(trainer, "SECONDS_BETWEEN_CHECKS", between_checks)
        workspace, sent = place(f"{seconds}"), list[Mapping[str, float]]()
        weights = run_trial(workspace, trial, sent.append).state_dict()
        best = best_in(workspace.store, workspace.folder(trial))
        assert best is not None
        found.append((weights, without_times(best.history), [(report["epoch"], report.get("step")) for report in sent]))
    (weights, history, many), (same, same_history, few) = found
    assert many == [(epoch + (step is None), step) for epoch in range(3) for step in (1, 2, 3, 4, None)]
    assert few == [(0, 1), (1, None), (2, None), (3, None)]
    assert history == same_history
    for name, value in weights.items():
        assert torch.equal(value, same[name]), name


def test_watchdog_ends_a_worker_that_hangs() -> None:
    """In C code that keeps Python's lock."""
    script = """
import ctypes, sys
from experiments.training.reporter import Watchdog
with Watchdog(30, sys.stderr):
    pass
with Watchdog(1, sys.stderr):
    ctypes.PyDLL(None).sleep(100_000)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=PROJECT_DIR, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout") and 'File "<string>", line 7' in done.stderr


def test_every_step_starts_the_watchdog_again(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, clock = Mock(), Clock()
    monkeypatch.setattr(reporter, "faulthandler", timer)
    monkeypatch.setattr(reporter.time, "monotonic", clock)
    with Watchdog(60, sys.stderr) as watched:
        starts = [timer.dump_traceback_later.call_count]
        for seconds in (0.01, 1, 59):  # the first step is too short to start the timer
            clock.now += seconds
            watched.step_ended()
            starts.append(timer.dump_traceback_later.call_count)
        timer.cancel_dump_traceback_later.assert_not_called()
    timer.dump_traceback_later.assert_called_with(60, exit=True, file=sys.stderr)
    timer.cancel_dump_traceback_later.assert_called_once()
    assert starts == [1, 1, 2, 3]
    timer.reset_mock()
    with Watchdog(math.inf, sys.stderr) as watched:
        watched.step_ended()
    timer.dump_traceback_later.assert_not_called()
