"""Which process may train what: a grid and a trial are each trained by one process at a time, on all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from experiments.grids.grid import Trial
from experiments.runs.retry import PATIENCE
from experiments.runs.store import Lock, LockError, Store

GRIDS = "locks/grids"
OTHER_ENDS = 300.0
"""Seconds within which a process ends that has lost its `san run`: Ray ends those of a disconnected node after 183 s."""


def mlflow_lock(store: Store) -> AbstractContextManager[Lock]:
    """Held while MLflow's experiments are created: two grids may be the first in a store."""
    return store.lock("locks/mlflow", "another process is preparing MLflow", PATIENCE)


def trial_lock(store: Store, key: str) -> AbstractContextManager[Lock]:
    """Held by the first worker of a trial, the only process that writes its checkpoints."""
    return store.lock(f"locks/trials/{key}", "another process is training this trial", OTHER_ENDS)


@contextmanager
def idle_trial(store: Store, key: str) -> Iterator[None]:
    """Inside the block, no process trains a trial or is about to.

    Raises:
        LockError: a process does.
    """
    busy = f"trial {key} is being trained"
    for name in store.names(GRIDS):
        if key in store.notes(name) and store.is_locked(name):
            raise LockError(f"{busy} or waits in a grid ({store.uri(name)}); wait until its `san run` ends, or stop it")
    with store.lock(f"locks/trials/{key}", busy, wait=1.0):
        yield


@contextmanager
def claimed_trials(store: Store, grid: str, missing: Mapping[str, Trial]) -> Iterator[tuple[dict[str, Trial], Lock]]:
    """Claims a grid, and those of its trials that no other `san run` has claimed, until the block ends.

    Yields these trials and the grid's lock. Grids can share trials, so each `san run` publishes its trials with its lock.

    Raises:
        LockError: another `san run` is training the grid.
    """
    own = f"{GRIDS}/{grid}"
    # One second: another process may be testing whether this lock is free.
    with store.lock(own, "another `san run` is training this grid", wait=1.0) as lock:
        with store.lock("locks/claims", "another `san run` is choosing its trials", PATIENCE):
            claimed = set(missing)
            for name in store.names(GRIDS):
                theirs = claimed.intersection(store.notes(name)) if name != own else set()
                if theirs and store.is_locked(name):
                    claimed -= theirs
            cells = {key: trial for key, trial in missing.items() if key in claimed}
            lock.publish(list(cells))
        yield cells, lock
