"""Which cells go on: rungs, what is known of others, and the process that all cells ask."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import Placement, Resources
from cluster.halving import Halving, Judge, Rungs, judge
from cluster.sweep import sweep
from tests.cluster import cells

HISTORIES = st.lists(st.lists(st.integers(0, 5).map(float), min_size=1, max_size=30), min_size=1, max_size=12)


def test_rungs_are_at_powers_of_the_reduction() -> None:
    """At 2 and 6 of 12, about the best third goes on: what is not less than two thirds of those before."""
    rungs = Rungs(Halving(2, 3, 12), {})
    assert rungs.should_continue("first", [9.0]) and rungs.should_continue("first", [9.0, 50.0])
    assert rungs.should_continue("better", [0.0, 60.0])
    assert not rungs.should_continue("between", [99.0, 55.0])
    assert rungs.should_continue("equal", [0.0, 60.0])
    assert rungs.should_continue("better", [0.0, 60.0, 0.0]), "no rung"
    assert rungs.should_continue("first", [9.0, 50.0, 0.0, 0.0, 0.0, 50.0])
    assert not rungs.should_continue("better", [0.0, 60.0, 0.0, 0.0, 0.0, 49.0])


@given(HISTORIES, st.integers(1, 4), st.integers(2, 4))
def test_the_best_so_far_goes_on(histories: list[list[float]], first: int, reduction: int) -> None:
    """And who is stopped is worse than another at that rung, and stays so."""
    rungs = Rungs(Halving(first, reduction, 40), {})
    at: dict[int, list[float]] = {}
    for key, scores in enumerate(histories):
        for time, score in enumerate(scores, 1):
            goes_on = rungs.should_continue(str(key), scores[:time])
            if time in {first * reduction**k for k in range(6)}:
                assert goes_on or score < max(at[time])
                at.setdefault(time, []).append(score)
            else:
                assert goes_on
            if not goes_on:
                assert not rungs.should_continue(str(key), scores[:time]), "another attempt hears the same"
                break


def test_what_is_known_of_others_counts() -> None:
    rungs = Rungs(Halving(2, 3, 12), {"finished": [10.0] * 12, "stopped": [1.0, 1.0], "never": []})
    assert not rungs.should_continue("worse", [9.0, 5.0])
    assert rungs.should_continue("as_good", [0.0, 10.0])
    assert rungs.should_continue("went_on_before", [0.0, 0.0, 0.0]), "it has passed its rung"
    assert not rungs.should_continue("before_a_rung", [0.0, 0.0, 0.0, 0.0, 0.0, 9.0])


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_cells_ask_from_their_own_processes(workers: int, resources: Resources, tmp_path: Path) -> None:
    if resources.cpus < workers:
        pytest.skip(f"needs {workers} CPUs")
    memory = cells.Memory()
    with judge(Halving(1, 2, 9), {"known": [5.0]}) as ask:
        values = {"good": (ask, "good", [6.0, 1.0]), "bad": (ask, "bad", [4.0, 0.0])}
        outcomes = sweep(cells.asking, values, Placement(workers), storage=tmp_path, observer=memory)
    assert all(outcome.error is None for outcome in outcomes.values())
    assert memory.of("good") == [{"should_continue": 1.0}] * 2
    assert memory.of("bad") == [{"should_continue": 0.0}] * 2
    assert isinstance(ask, Judge) and ask("bad", [0.0]), "a cell goes on where nobody answers"
