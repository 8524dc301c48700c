"""Which process may train what: a grid and a cell are each trained by one process at a time, on one machine or on all nodes."""

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


def cell_lock(store: Store, key: str) -> AbstractContextManager[Lock]:
    """Held by the first worker of a cell, the only process that writes its checkpoints."""
    return store.lock(f"locks/cells/{key}", "another process is training this cell", OTHER_ENDS)


@contextmanager
def idle_cell(store: Store, key: str) -> Iterator[None]:
    """Inside the block, no process trains a cell or is about to.

    Raises:
        LockError: a process does.
    """
    busy = f"cell {key} is being trained"
    for name in store.names(GRIDS):
        if key in store.notes(name) and store.is_locked(name):
            raise LockError(f"{busy} or waits in a grid ({store.uri(name)}); wait until its `san run` ends, or stop it")
    with store.lock(f"locks/cells/{key}", busy, wait=1.0):
        yield


@contextmanager
def claimed_cells(store: Store, grid: str, missing: Mapping[str, Trial]) -> Iterator[tuple[dict[str, Trial], Lock]]:
    """Claims a grid, and those of its cells that no other `san run` has claimed, until the block ends.

    Yields these cells and the grid's lock. Grids can share cells, so each `san run` publishes its cells with its lock.

    Raises:
        LockError: another `san run` is training the grid.
    """
    own = f"{GRIDS}/{grid}"
    # One second: another process may be testing whether this lock is free.
    with store.lock(own, "another `san run` is training this grid", wait=1.0) as lock:
        with store.lock("locks/claims", "another `san run` is choosing its cells", PATIENCE):
            claimed = set(missing)
            for name in store.names(GRIDS):
                theirs = claimed.intersection(store.notes(name)) if name != own else set()
                if theirs and store.is_locked(name):
                    claimed -= theirs
            cells = {key: trial for key, trial in missing.items() if key in claimed}
            lock.publish(list(cells))
        yield cells, lock
