import math
import os
from pathlib import Path

import pytest
import ray
import ray.exceptions
import ray.tune

from cluster import ClusterError, Placement, Resources
from cluster.errors import LostError
from cluster.halving import on_the_head
from cluster.sweep import sweep
from tests.cluster import functions


@pytest.fixture
def memory(resources: Resources) -> functions.Memory:
    return functions.Memory()


def test_empty_sweep(tmp_path: Path) -> None:
    assert sweep(functions.counting, {}, Placement(), storage=tmp_path, observer=functions.Memory()) == {}


def test_two_trials_at_a_time(
    resources: Resources, memory: functions.Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes half of the CPUs. A trial ends only when it has seen another one, so two run at once, and no third."""
    if resources.cpus < 2:
        pytest.skip("needs 2 CPUs")
    monkeypatch.setattr("cluster.sweep._SECONDS_TO_START", math.inf)
    values = {key: (str(tmp_path), key, pair, os.getcwd()) for key, pair in zip("abcd", "badc", strict=True)}
    outcomes = sweep(functions.meeting, values, Placement(cpus=resources.cpus // 2), storage=tmp_path / "s", observer=memory)
    assert [(key, outcome.error) for key, outcome in outcomes.items()] == [(key, None) for key in "abcd"]
    assert max(memory.of(key)[0]["running"] for key in values) <= 2
    environment = {"threads": float(resources.cpus // 2), "ranked": 0.0, "same_folder": 1.0, "sees_gpus": 0.0}
    assert [memory.of(key)[1] for key in values] == [environment] * 4
    assert not memory.waits  # also while they start


def test_no_trial_starts_after_a_fatal_error(resources: Resources, memory: functions.Memory, tmp_path: Path) -> None:
    values = {"good": "well", "bad": "raises a final error", "never": "well"}
    alone = Placement(cpus=resources.cpus)
    with pytest.raises(ClusterError, match=r"^it is wrong$"):
        sweep(functions.ending, values, alone, storage=tmp_path, observer=memory, fatal=(ValueError,))
    assert memory.starts == ["good", "bad"]
    assert [(outcome.key, outcome.error) for outcome in memory.outcomes] == [("good", None), ("bad", "it is wrong")]


def test_dead_workers_and_no_final_errors_are_retried(
    memory: functions.Memory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {
        "once": (functions.dying, str(tmp_path / "marker")),
        "always": (functions.dying, "/nowhere/marker"),
        "good": (functions.counting, 3),
        "bad": (functions.counting, 0),
    }
    outcomes = sweep(
        functions.calling, values, Placement(), storage=tmp_path / "s", observer=memory, retries=1, non_retryable=(ValueError,)
    )
    assert sorted(memory.starts) == ["always", "always", "bad", "good", "once", "once"]
    assert memory.of("once") == [{"survived": 1.0}] and memory.of("always") == memory.of("bad") == []
    assert memory.of("good") == [{"epoch": 0}, {"epoch": 1}, {"epoch": 2}]
    assert sorted(key for key, _ in memory.failures) == ["always", "once"]
    assert all("a worker process died without an exception" in reason for _, reason in memory.failures)
    assert outcomes["once"].error is outcomes["good"].error is None
    assert (outcomes["always"].error or "").startswith("a worker process died without an exception")
    assert outcomes["bad"].error == "nothing to count not even to one"
    assert "in counting" in outcomes["bad"].traceback
    assert {outcome.key: outcome for outcome in memory.outcomes} == outcomes
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_process_is_reused_unless_a_trial_fails(resources: Resources, memory: functions.Memory, tmp_path: Path) -> None:
    ways = ["well", "well", "raises", "well", "raises a final error", "well", "dies", "well", "well"]
    values = {f"{number}": way for number, way in enumerate(ways)}
    alone = Placement(cpus=resources.cpus)  # one trial at a time
    outcomes = sweep(functions.ending, values, alone, storage=tmp_path, observer=memory, retries=0, non_retryable=(ValueError,))
    assert [outcome.error is None for outcome in outcomes.values()] == [way == "well" for way in ways]
    pids = [reports[0]["pid"] for reports in map(memory.of, values)]
    assert [pids.index(pid) for pid in pids] == [0, 0, 0, 3, 3, 3, 3, 7, 7]


@pytest.mark.slow
def test_two_workers_reduce_ask_and_fail(resources: Resources, memory: functions.Memory, tmp_path: Path) -> None:
    """They share a process group, ask whether to continue, and the error of one is that of the trial."""
    if resources.cpus < 2:
        pytest.skip("needs 2 CPUs")
    with on_the_head(1, 2, 9, {"known": [5.0]}) as ask:
        outcomes = sweep(
            functions.reducing, {"trial": ask}, Placement(2), storage=tmp_path, observer=memory, non_retryable=(ValueError,)
        )
    assert memory.of("trial") == [{"sum": 1.0, "workers": 2.0}, {"good": 1.0, "bad": 0.0}]
    assert memory.starts == ["trial"] and outcomes["trial"].error == "rank one gives up"
    assert "in reducing" in outcomes["trial"].traceback


def test_memory_that_is_used_up_ends_the_sweep_with_a_message(
    memory: functions.Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends a trial's process, and Tune raises an error with this cause."""

    def out_of_memory(tuner: ray.tune.Tuner) -> None:
        raise RuntimeError from ray.exceptions.OutOfMemoryError("out of memory")

    monkeypatch.setattr(ray.tune.Tuner, "fit", out_of_memory)
    with monkeypatch.context() as context, pytest.raises(LostError, match="a node's memory is used up"):
        context.setattr(ray, "shutdown", lambda: None)  # this session is for all tests
        sweep(functions.counting, {"trial": 1}, Placement(), storage=tmp_path, observer=memory)
