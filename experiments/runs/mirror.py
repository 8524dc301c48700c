"""A cell's folder on the node that trains it, and its copy in a bucket, from which any other node goes on."""

from __future__ import annotations

import uuid
from pathlib import Path

from experiments.errors import UserError
from experiments.runs.bucket import Bucket, StorageError, patiently
from experiments.runs.lease import Lease, who

OF_THE_NODE = ("lock", "writer")
"""Files that only this node has a use for."""


class Mirror:
    """The bucket has what counts, and the folder what is not there yet.

    Args:
        folder: of one cell, on this node; only its first worker uses it.
        bucket, name: where the copy is.
        lease: that of the cell; the copy is written while we hold it, and no longer.
        seconds: for which a store that is away is tried again.
    """

    def __init__(self, folder: Path, bucket: Bucket, name: str, lease: Lease, seconds: float) -> None:
        self.folder, self.bucket, self.name, self.lease, self.seconds = folder, bucket, name, lease, seconds
        self._there: dict[str, tuple[int, int] | None] = {}
        """Names in the bucket, each with size and time of the local file that is known to have the same content."""

    def bring(self) -> None:
        """Makes the folder what the copy is. Checkpoints that the copy lacks stay where they continue its last one: this node
        could not send them. Any others are of an earlier attempt, which went on elsewhere.

        Raises:
            StorageError: the store cannot be used, and was not to be for `seconds`.
            UserError: the folder cannot be written.
        """
        patiently(self._bring, self.seconds)

    def _bring(self) -> None:
        there = [name.rpartition("/")[2] for name in self.bucket.names(self.name)]
        newest = max((name for name in there if _is_checkpoint(name)), default="")
        continues = not newest
        try:
            for name in there:
                content = self.bucket.get(f"{self.name}/{name}")
                path = self.folder / name
                if content is None:
                    continue
                if path.exists() and path.read_bytes() == content:
                    continues |= name == newest
                else:
                    partial = self.folder / f"{uuid.uuid4().hex}.partial"
                    partial.write_bytes(content)
                    partial.replace(path)
                self._there[name] = _state(path)
            for path in self.folder.glob("epoch-*.pt"):
                if path.name not in there and (path.name < newest or not continues):
                    path.unlink()
        except OSError as error:
            raise UserError(f"{self.folder}: cannot write to this folder ({error.strerror}); check the disk") from None

    def send(self) -> None:
        """Makes the copy what the folder is: first what is new, then what is to be gone.

        Raises:
            LeaseError: another process has taken the cell over; nothing was written.
            StorageError: the store cannot be used, and was not to be for `seconds`; the folder stays as it is.
        """
        try:
            patiently(self._send, self.seconds)
        except StorageError as error:
            newest = max(self.folder.glob("epoch-*.pt"), default=None)
            stays = f"; {newest} is kept on this node ({who()})" if newest else ""
            raise StorageError(f"{error}{stays}; repair the store, then rerun the same command to resume") from None

    def _send(self) -> None:
        self.lease.renew()
        here = {path.name: path for path in sorted(self.folder.iterdir()) if _is_kept(path.name)}
        for name, path in here.items():
            state = _state(path)
            if self._there.get(name) != state:
                self.bucket.put(f"{self.name}/{name}", path.read_bytes())
                self._there[name] = state
        for name in self._there.keys() - here.keys():
            self.bucket.remove(f"{self.name}/{name}")
            del self._there[name]

    def clear(self) -> None:
        """Empties the folder when the cell is done, lest the node's disk fill with finished cells."""
        for path in self.folder.iterdir():
            if path.name not in OF_THE_NODE:
                path.unlink()


def _is_checkpoint(name: str) -> bool:
    return name.startswith("epoch-") and name.endswith(".pt")


def _is_kept(name: str) -> bool:
    return name not in OF_THE_NODE and not name.endswith(".partial")


def _state(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns
