"""Successive halving: which trials continue. In `test_sweep.py`, workers ask the process that decides."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.halving import SuccessiveHalving

HISTORIES = st.lists(st.lists(st.integers(0, 5).map(float), min_size=1, max_size=30), min_size=1, max_size=12)


def test_rungs_are_at_powers_of_the_reduction() -> None:
    """At epochs 2 and 6 of 12, a trial continues if it is not worse than two thirds of the trials before it."""
    halving = SuccessiveHalving(2, 3, 12, {})
    assert halving.should_continue("first", [9.0]) and halving.should_continue("first", [9.0, 50.0])
    assert halving.should_continue("better", [0.0, 60.0])
    assert not halving.should_continue("between", [99.0, 55.0])
    assert halving.should_continue("equal", [0.0, 60.0])
    assert halving.should_continue("better", [0.0, 60.0, 0.0]), "no rung"
    assert halving.should_continue("first", [9.0, 50.0, 0.0, 0.0, 0.0, 50.0])
    assert not halving.should_continue("better", [0.0, 60.0, 0.0, 0.0, 0.0, 49.0])


@given(HISTORIES, st.integers(1, 4), st.integers(2, 4))
def test_best_trial_so_far_continues(histories: list[list[float]], first: int, reduction: int) -> None:
    """A stopped trial is worse than another trial at that rung, and stays stopped."""
    halving = SuccessiveHalving(first, reduction, 40, {})
    at: dict[int, list[float]] = {}
    for key, scores in enumerate(histories):
        for time, score in enumerate(scores, 1):
            continues = halving.should_continue(str(key), scores[:time])
            if time in {first * reduction**k for k in range(6)}:
                assert continues or score < max(at[time])
                at.setdefault(time, []).append(score)
            else:
                assert continues
            if not continues:
                assert not halving.should_continue(str(key), scores[:time]), "another attempt gets the same answer"
                break


def test_known_results_of_other_trials_count() -> None:
    halving = SuccessiveHalving(2, 3, 12, {"finished": [10.0] * 12, "stopped": [1.0, 1.0], "never": []})
    assert not halving.should_continue("worse", [9.0, 5.0])
    assert halving.should_continue("as_good", [0.0, 10.0])
    assert halving.should_continue("continued_before", [0.0, 0.0, 0.0]), "it is past its rung"
    assert not halving.should_continue("before_a_rung", [0.0, 0.0, 0.0, 0.0, 0.0, 9.0])
