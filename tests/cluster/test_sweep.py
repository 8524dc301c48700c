import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import ClusterError, Placement, Resources
from cluster.sweep import sweep
from tests.cluster import functions


@pytest.fixture
def memory(resources: Resources) -> functions.Memory:
    return functions.Memory()


def test_empty_sweep(tmp_path: Path) -> None:
    assert sweep(functions.timed, {}, Placement(), storage=tmp_path, observer=functions.Memory()) == {}


def test_two_trials_at_a_time(resources: Resources, memory: functions.Memory, tmp_path: Path) -> None:
    if resources.cpus < 2:
        pytest.skip("needs 2 CPUs")
    # Each takes half of the CPUs, so that two run at a time.
    values = dict.fromkeys("abcd", 3.0)
    outcomes = sweep(functions.timed, values, Placement(cpus=resources.cpus // 2), storage=tmp_path, observer=memory)
    assert list(outcomes) == list("abcd")
    assert all(outcome.error is None for outcome in outcomes.values())
    spans = {key: [report["time"] for report in memory.of(key)] for key in values}
    alive = [sum(begin <= at < end for begin, end in spans.values()) for at, _ in spans.values()]
    assert max(alive) == 2
    assert not memory.waits  # also while they start


def test_no_trial_starts_after_a_fatal_error(resources: Resources, memory: functions.Memory, tmp_path: Path) -> None:
    values = {"good": "well", "bad": "raises a final error", "never": "well"}
    alone = Placement(cpus=resources.cpus)
    with pytest.raises(ClusterError, match=r"^it is wrong$"):
        sweep(functions.ending, values, alone, storage=tmp_path, observer=memory, fatal=(ValueError,))
    assert memory.starts == ["good", "bad"]
    assert [(outcome.key, outcome.error) for outcome in memory.outcomes] == [("good", None), ("bad", "it is wrong")]


def test_dead_workers_are_retried(memory: functions.Memory, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    values = {"once": str(tmp_path / "marker"), "always": "/nowhere/marker"}
    outcomes = sweep(functions.dying, values, Placement(), storage=tmp_path / "s", observer=memory, retries=1)
    assert sorted(memory.starts) == ["always", "always", "once", "once"]
    assert memory.reports == [("once", {"survived": 1.0})]
    assert sorted(key for key, _ in memory.failures) == ["always", "once"]
    assert all("a worker process died without an exception" in reason for _, reason in memory.failures)
    assert outcomes["once"].error is None
    assert (outcomes["always"].error or "").startswith("a worker process died without an exception")
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


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_non_retryable_error_is_not_retried(
    workers: int, resources: Resources, memory: functions.Memory, tmp_path: Path
) -> None:
    if resources.cpus < workers:
        pytest.skip(f"needs {workers} CPUs")
    values = {"good": 3, "bad": 0}
    outcomes = sweep(
        functions.counting,
        values,
        Placement(workers),
        storage=tmp_path,
        observer=memory,
        retries=3,
        non_retryable=(ValueError,),
    )
    assert sorted(memory.starts) == ["bad", "good"]
    assert outcomes["good"].error is None
    assert outcomes["bad"].error == "nothing to count not even to one"
    assert "in counting" in outcomes["bad"].traceback
    assert memory.of("good") == [{"epoch": 0}, {"epoch": 1}, {"epoch": 2}] and memory.of("bad") == []
    assert {outcome.key: outcome for outcome in memory.outcomes} == outcomes


def test_environment_of_a_single_worker(memory: functions.Memory, tmp_path: Path) -> None:
    sweep(functions.describing, {"trial": os.getcwd()}, Placement(), storage=tmp_path, observer=memory)
    assert memory.of("trial") == [{"threads": 1.0, "ranked": 0.0, "same_folder": 1.0, "sees_gpus": 0.0}]


@pytest.mark.slow
def test_two_workers_reduce_and_fail(resources: Resources, memory: functions.Memory, tmp_path: Path) -> None:
    if resources.cpus < 2:
        pytest.skip("needs 2 CPUs")
    pair = Placement(workers=2)
    outcomes = sweep(functions.reducing, {"trial": 1.0}, pair, storage=tmp_path, observer=memory, retries=0)
    sums, *waited = memory.of("trial")
    assert sums == {"sum": 3.0, "workers": 2.0}
    assert waited[-1]["seconds"] < 20, "workers wait until Ray has received their reports"
    assert outcomes["trial"].error == "RuntimeError: rank one gives up"


OUT_OF_MEMORY = """
import os, sys
from pathlib import Path

memory = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
used = memory["MemTotal"] - memory["MemAvailable"]
os.environ["RAY_memory_usage_threshold"] = f"{(used + 2.5e6) / memory['MemTotal']:.3f}"
os.environ["RAY_memory_monitor_refresh_ms"] = "100"

from cluster import Placement
from cluster.sweep import sweep
from tests.cluster import functions

sweep(functions.growing, {"trial": 5}, Placement(), storage=sys.argv[1], observer=functions.Memory())
"""


@pytest.mark.slow
def test_memory_that_is_used_up_ends_the_sweep_with_a_message(tmp_path: Path) -> None:
    """By Ray's monitor, which ends a trial that takes 5 GB while 2.5 GB are free."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY, tmp_path], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("cluster.errors.LostError: a node's memory is used up")
