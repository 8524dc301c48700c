"""Where runs are stored: a folder that all nodes share (`LocalStore`), or a bucket (`S3Store`), behind one interface.

`retry` repeats a request to a bucket or a tracking server that is away for a while.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from filelock import FileLock, Timeout

from experiments.errors import UnavailableError, UserError

_log = logging.getLogger(__name__)
T = TypeVar("T")


class StorageError(UnavailableError):
    """The store cannot be used."""


class ClaimedError(UserError):
    """Another process owns a grid or a trial."""


class Store(Protocol):
    """Files by name; a name is a relative path such as `checkpoints/0123456789ab/summary.csv`.

    All methods raise `StorageError` if the store cannot be used.
    """

    shared: ClassVar[bool]
    """Whether `folder` is the same for all nodes."""

    @property
    def folder(self) -> Path:
        """Folder in which this node works: the store itself, or scratch space."""

    def uri(self, name: str) -> str:
        """Path or address of a file, for people."""

    def with_outage_timeout(self, seconds: float) -> Store:
        """The same store; if it is a bucket that is away, `read`, `write`, `delete` and `names` retry for up to `seconds`."""
        return self

    def check(self) -> None:
        """Makes sure that the store exists and can be read. A folder is created when it is needed."""

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None if there is no such file."""

    def write(self, name: str, content: bytes) -> None:
        """Writes a file completely or not at all."""

    def delete(self, name: str) -> None:
        """Deletes a file if it exists."""

    def delete_folder(self, folder: str) -> None:
        """Deletes all files below a folder."""

    def names(self, folder: str) -> list[str]:
        """Sorted names of the files in a folder, without those in its subfolders."""

    def upload(self, path: Path) -> None:
        """Copies a file below `folder` into the store, unless `folder` is the store."""

    def download(self, path: Path) -> None:
        """Copies a file of the store to its path below `folder`; what the store does not have is not there afterwards."""

    def claim(self, name: str, owner: bytes, take_over: bool) -> AbstractContextManager[None]:
        """Inside the block, no other process can claim `name`, and the file contains `owner`.

        In a folder, a claim ends with its process. In a bucket, a killed process leaves its claim, which `take_over` replaces.

        Raises:
            FileExistsError: another process has claimed it.
        """

    def is_claimed(self, name: str) -> bool:
        """Whether a process has claimed `name`."""


def is_uri(address: str | Path) -> bool:
    return "://" in str(address)


def atomic_write(path: Path, content: bytes) -> None:
    """Replaces a file; a kill or a power failure at any moment leaves either the old or the new file."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # makes the rename durable
    finally:
        os.close(descriptor)


def node_lock(folder: Path, name: str) -> FileLock:
    """A lock among the processes that share a folder; it ends with its process."""
    path = folder / "locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); choose another folder with --runs") from None
    return FileLock(path)


@dataclass(frozen=True)
class LocalStore(Store):
    """A folder, on one machine or shared by all nodes."""

    root: Path
    shared: ClassVar[bool] = True

    @property
    def folder(self) -> Path:
        return self.root

    def uri(self, name: str) -> str:
        return str(self.folder / name)

    def check(self) -> None:
        """Does nothing: the folder is created when it is needed."""

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._failure(name, "read", error) from None

    def write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, content)
        except OSError as error:
            raise self._failure(name, "write", error) from None

    def delete(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._failure(name, "delete", error) from None

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self.folder / folder, ignore_errors=True)

    def names(self, folder: str) -> list[str]:
        try:
            files = [path for path in (self.folder / folder).iterdir() if not path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._failure(folder, "read", error) from None
        return sorted(path.relative_to(self.folder).as_posix() for path in files)

    def upload(self, path: Path) -> None:
        """Does nothing: the file is in the store already."""

    def download(self, path: Path) -> None:
        """Does nothing: the file is in its place already."""

    @contextmanager
    def claim(self, name: str, owner: bytes, take_over: bool) -> Iterator[None]:
        lock = node_lock(self.folder, name)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise FileExistsError(name) from None
        try:
            self.write(name, owner)
            yield
        finally:
            lock.release()

    def is_claimed(self, name: str) -> bool:
        try:
            with node_lock(self.folder, name).acquire(blocking=False):
                return False
        except Timeout:
            return True

    def _failure(self, name: str, what: str, error: OSError) -> StorageError:
        return StorageError(f"{self.uri(name)}: cannot {what} ({error.strerror}); check the disk, then run the command again")


OUTAGE_TIMEOUT = 120.0
"""Seconds for which the end of a trial or of a grid waits for a server that is away."""
PAUSE = 2.0
"""Seconds between two attempts."""


def retry(request: Callable[[], T], seconds: float | None = None) -> T:
    """Returns the result of `request`, which is repeated for up to `seconds` (default: `OUTAGE_TIMEOUT`) while it raises
    `UnavailableError`.

    Raises:
        UnavailableError: the last attempt failed too.
    """
    seconds = OUTAGE_TIMEOUT if seconds is None else seconds
    limit, warned = time.monotonic() + seconds, False
    while True:
        try:
            return request()
        except UnavailableError as error:
            if seconds == 0:
                raise
            if time.monotonic() > limit:
                raise type(error)(f"{error}; gave up after {seconds:.0f} s") from None
            if not warned:
                _log.warning("%s; retrying for up to %.0f s", error, seconds)
            warned = True
            time.sleep(PAUSE)
