"""The sweep without Ray. The tests of `experiments` run whole grids with it."""

from bdb import BdbQuit

import pytest

from cluster import ClusterError
from cluster.serial import ReportFn, sweep
from tests.cluster.functions import Memory, counting


def test_trials_run_one_after_the_other_and_failures_are_not_retried() -> None:
    memory = Memory()
    outcomes = sweep(counting, {"good": 2, "bad": 0, "last": 1}, observer=memory, non_retryable=(ValueError,))
    assert memory.starts == ["good", "bad", "last"]
    assert memory.reports == [("good", {"epoch": 0}), ("good", {"epoch": 1}), ("last", {"epoch": 0})]
    assert list(outcomes.values()) == memory.outcomes
    assert [outcome.error for outcome in memory.outcomes] == [None, "nothing to count not even to one", None]
    assert "in counting" in outcomes["bad"].traceback
    assert sweep(counting, {"bad": 0}, observer=memory)["bad"].error == "ValueError: nothing to count not even to one"


def test_no_trial_starts_after_a_fatal_error() -> None:
    memory = Memory()
    with pytest.raises(ClusterError, match=r"^nothing to count not even to one$"):
        sweep(counting, {"bad": 0, "never": 1}, observer=memory, fatal=(ValueError,))
    assert memory.starts == ["bad"] == [outcome.key for outcome in memory.outcomes]


def test_no_trial_starts_after_an_interruption() -> None:
    memory, interrupted = Memory(), list[str]()

    def until_interrupted(value: str, report: ReportFn) -> None:
        interrupted.append(value)

    def until_debugger_is_left(value: str, report: ReportFn) -> None:
        interrupted.append(value)
        raise BdbQuit

    with pytest.raises(KeyboardInterrupt):
        sweep(until_debugger_is_left, {"first": "a", "never": "b"}, observer=memory)
    assert interrupted.pop() == "a" and interrupted == memory.outcomes == []
    with pytest.raises(KeyboardInterrupt):
        sweep(until_interrupted, {"first": "a", "never": "b"}, observer=memory, is_interrupted=lambda: bool(interrupted))
    assert interrupted == ["a"] and [outcome.error for outcome in memory.outcomes] == [None]
