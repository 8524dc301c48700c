"""Who may train what: one `san run` a grid, one a cell; on one machine by locks of files, over nodes by leases in a bucket."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from experiments.errors import UserError
from experiments.grids.grid import Trial
from experiments.runs import Lease, writer_in
from experiments.runs.address import PATIENCE
from experiments.runs.workspace import Workspace

if TYPE_CHECKING:
    from cluster.sweep import Observer, Outcome


class WhileClaimed:
    """A sweep's observer that ends it where another `san run` has taken its grid over."""

    def __init__(self, observer: Observer, claim: Lease) -> None:
        self.observer, self.claim = observer, claim

    def __getstate__(self) -> dict[str, object]:
        """Nothing: Ray writes down who observes a sweep, for a restart that never comes."""
        return {}

    def started(self, key: str) -> None:
        self.claim.require()
        self.observer.started(key)

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        self.claim.require()
        self.observer.progress(key, metrics)

    def finished(self, outcome: Outcome) -> None:
        self.claim.require()
        self.observer.finished(outcome)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Holds the grid for this process; the lock is gone with the process, however it ends."""
    with _opened(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{path}: another `san run` is training this grid; wait until that command ends, or stop it"
            ) from None
        yield


def _opened(path: Path, mode: Literal["w", "a"]) -> TextIO:
    """A file to lock, in a folder that is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, mode)
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); choose another folder with --runs") from None


@contextmanager
def in_turn(workspace: Workspace, name: str) -> Iterator[None]:
    """Waits until no other process is in here."""
    with _opened(workspace.runs / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if workspace.bucket is None:
            yield
            return
        writer = writer_in(workspace.runs / f"{name}.writer")
        with Lease(workspace.bucket, f"turns/{name}", f"the {name}", writer).held(seconds=PATIENCE):
            yield


@contextmanager
def claimed_cells(
    workspace: Workspace, grid: str, missing: Mapping[str, Trial]
) -> Iterator[tuple[dict[str, Trial], Lease | None]]:
    """Those of the cells that no other process is training, on this machine or, with a bucket, on any; nobody else gets them,
    nor the grid, until this is left. With a bucket comes the lease of the grid."""
    with _only_one(workspace.runs / f"{grid}.lock"), _claimed(workspace.runs / "cells.lock", missing) as free:
        if workspace.bucket is None:
            yield free, None
            return
        writer = writer_in(workspace.runs / f"{grid}.writer")
        lease = Lease(workspace.bucket, f"grids/{grid}", f"the grid {grid}", writer)
        with lease.held(seconds=0):
            with in_turn(workspace, "claims"):
                ours = lease.claim(free)
            yield {key: trial for key, trial in free.items() if key in ours}, lease


@contextmanager
def _claimed(path: Path, cells: Mapping[str, Trial]) -> Iterator[dict[str, Trial]]:
    """Those of the cells that no other process is training; nobody else gets them until this is left, however it ends.

    Grids share cells, so the lock of a grid is not enough. Each cell is one byte of the file, at the offset that is its key.
    """
    with _opened(path, "a") as lock:
        free = {}
        for key, trial in cells.items():
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key, 16))
            except (BlockingIOError, PermissionError):  # which of the two is up to the system
                continue
            free[key] = trial
        yield free
