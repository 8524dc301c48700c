"""Who trains what: a grid is trained by one `san run` at a time, and a trial by one process.

Nothing expires. A new owner of a trial replaces the old one at once, and the old one stops before its next write.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from experiments.config.grid import Trial
from experiments.runs.store import ClaimedError, StorageError, Store, node_lock

GRIDS = "claims/grids"


@dataclass(frozen=True, slots=True)
class Claim:
    """A file of the store that names the owner of a grid or of a trial."""

    store: Store
    name: str
    content: bytes

    def check(self) -> None:
        """Raises `ClaimedError` if another process owns the grid or the trial now. Call it before each write."""
        now = self.store.read(self.name)
        if now != self.content:
            what = f"taken over by {_parsed(now)['owner']}" if now else "deleted"
            raise ClaimedError(f"{self.store.uri(self.name)}: {what}, so {this_process()} stops")

    def release(self) -> None:
        """Gives a grid up before this process ends without leaving `claimed_trials`: in a bucket, the claim would stay."""
        with suppress(StorageError):
            if self.store.read(self.name) == self.content:
                self.store.delete(self.name)


def this_process() -> str:
    """For people."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def claim_trial(store: Store, folder: str) -> Claim:
    """Makes this process the owner of the trial with these checkpoints, the only process that writes there."""
    owner = {"owner": this_process(), "token": uuid.uuid4().hex}
    claim = Claim(store, f"{folder}/owner.json", json.dumps(owner).encode())
    store.write(claim.name, claim.content)
    return claim


def require_idle(store: Store, key: str) -> None:
    """Raises `ClaimedError` if a `san run` trains a trial or is about to."""
    if (name := claim_of(store, key)) is not None:
        raise ClaimedError(f"trial {key} is being trained or waits in a grid ({name}); stop its `san run`, or wait for its end")


def claim_of(store: Store, key: str) -> str | None:
    """The address of the claim of a grid with this trial, if a `san run` has claimed one."""
    names = (name for name in store.names(GRIDS) if key in _parsed(store.read(name))["trials"] and store.is_claimed(name))
    return next(map(store.uri, names), None)


@contextmanager
def claimed_trials(
    store: Store, grid: str, missing: Mapping[str, Trial], take_over: bool = False
) -> Iterator[tuple[dict[str, Trial], Claim]]:
    """Claims a grid, and those of its trials that no other `san run` has claimed, until the block ends.

    Yields these trials and the claim. Grids can share trials, so each claim lists its trials.

    Raises:
        ClaimedError: another `san run` is training the grid. In a bucket, one that was killed counts too, unless `take_over`.
    """
    file, claimed = f"{GRIDS}/{grid}", set(missing)
    with ExitStack() as stack:
        with node_lock(store.folder, "claims"):  # several may start at the same time
            for name in store.names(GRIDS):
                theirs = claimed.intersection(_parsed(store.read(name))["trials"]) if name != file else set()
                if theirs and store.is_claimed(name):
                    claimed -= theirs
            trials = {key: trial for key, trial in missing.items() if key in claimed}
            before = _parsed(store.read(file))["owner"]
            claim = Claim(store, file, json.dumps({"owner": this_process(), "trials": [*trials]}).encode())
            try:
                stack.enter_context(store.claim(file, claim.content, take_over))
            except FileExistsError:
                remedy = "" if store.shared else "; if that process was killed, add --take-over"
                raise ClaimedError(
                    f"{store.uri(file)}: another `san run` is training this grid ({before}); wait until that process ends, or "
                    f"stop it, then run the same command again{remedy}"
                ) from None
        yield trials, claim


def _parsed(content: bytes | None) -> dict[str, Any]:
    try:
        written: dict[str, Any] = json.loads(content or b"{}")
    except ValueError:  # the rest of an interrupted write
        written = {}
    return {"owner": "unknown", "trials": []} | written


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A file in the store by which `san run` asks the trials of its grid to save their work and return."""

    store: Store
    grid: str

    def send(self) -> None:
        with suppress(StorageError):  # the trials then end without saving
            self.store.write(self._file, b"")

    def withdraw(self) -> None:
        with suppress(StorageError):
            self.store.delete(self._file)

    def __call__(self) -> bool:
        """Whether the request was sent."""
        with suppress(StorageError):
            return self.store.read(self._file) is not None
        return False

    @property
    def _file(self) -> str:
        return f"stops/{self.grid}"
