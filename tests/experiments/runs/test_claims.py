"""A grid has one `san run`, and a trial has one process that writes."""

from pathlib import Path

import pytest

from experiments.runs import claims
from experiments.runs.bucket import S3Store
from experiments.runs.claims import StopRequest, claim_trial, claimed_trials, require_idle
from experiments.runs.store import ClaimedError, Store
from experiments.training.checkpoint import Checkpoints
from tests.experiments.conftest import OpenGrid
from tests.experiments.samples import of_step


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, claims are made as by another process."""
    monkeypatch.setattr(claims, "this_process", lambda: "another host, process 1")


def test_new_owner_of_a_trial_replaces_the_old_one_which_writes_nothing_more(store: Store) -> None:
    first, second = (Checkpoints(store, "checkpoints/abc", "abc", 2, 600) for _ in range(2))
    first.load()
    first.save(of_step(1))
    assert second.load() is not None
    with pytest.raises(ClaimedError, match=r"taken over by .*, process"):
        first.save(of_step(2, value=1.0))
    second.save(of_step(2))
    assert Checkpoints(store, "checkpoints/abc", "abc", 2, 600).load() is not None


def test_owner_of_a_deleted_trial_stops(store: Store) -> None:
    claim = claim_trial(store, "checkpoints/abc")
    store.delete_folder("checkpoints/abc")
    with pytest.raises(ClaimedError, match="deleted"):
        claim.check()


def test_grids_share_trials_but_train_each_once(
    store: Store, open_small_grid: OpenGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = {trial.key: trial for trial in open_small_grid().trials}
    first, *others = trials
    with claimed_trials(store, "small-digits", {first: trials[first]}) as (claimed, claim):
        claim.check()
        assert list(claimed) == [first]
        with pytest.raises(ClaimedError, match="is being trained or waits"):
            require_idle(store, first)
        another_process(monkeypatch)
        with pytest.raises(ClaimedError, match=r"small-digits.*another `san run` is training this grid"):
            with claimed_trials(store, "small-digits", trials):
                pass
        with claimed_trials(store, "other-digits", trials) as (claimed, _):
            assert list(claimed) == others
    require_idle(store, first)
    with pytest.raises(FileExistsError, match="by the trials"), claimed_trials(store, "other-digits", trials) as (claimed, _):
        assert claimed == trials
        raise FileExistsError("by the trials")


def test_trials_are_asked_to_stop_until_the_request_is_withdrawn(store: Store) -> None:
    asked, other = StopRequest(store, "small-digits"), StopRequest(store, "other-digits")
    asked.send()
    assert asked() and not other()
    asked.withdraw()
    assert not asked()


def test_killed_run_in_a_folder_leaves_no_claim(store: Store, tmp_path: Path) -> None:
    """In a bucket, its claim stays until it is taken over."""
    store.write("claims/grids/small-digits", b'{"owner": "host, process 1", "trials": ["abc"]}')
    if store.shared:
        with claimed_trials(store, "small-digits", {}):
            pass
    else:
        with pytest.raises(ClaimedError, match=r"host, process 1.*--take-over"), claimed_trials(store, "small-digits", {}):
            pass
        with claimed_trials(store, "small-digits", {}, take_over=True) as (_, claim):
            claim.check()


def test_run_whose_grid_was_taken_over_stops(bucket: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed_trials(bucket, "small-digits", {}) as (_, old):
        another_process(monkeypatch)
        with claimed_trials(bucket, "small-digits", {}, take_over=True) as (_, new):
            with pytest.raises(ClaimedError, match="taken over"):
                old.check()
            new.check()
        assert not bucket.is_claimed("claims/grids/small-digits")


def test_run_can_give_its_grid_up_before_it_ends(bucket: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed_trials(bucket, "small-digits", {}) as (_, old):
        old.release()
        another_process(monkeypatch)
        with claimed_trials(bucket, "small-digits", {}) as (_, new):
            old.release()
            new.check()
