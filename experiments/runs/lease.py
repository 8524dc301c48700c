"""The right to write something in a bucket, for one process among all nodes.

S3 has no locks, but it shows a put to whoever lists after it. So a process that wants a lease puts an object `asks-<writer>`,
lists, and goes back where it sees that another asks or holds: of two that ask at a time at least one sees the other. Where it
sees nobody it puts `holds-<writer>`, and again every `RENEWAL` seconds. A lease that was not renewed for `LIFE` seconds,
by the store's clock, is stale: the next one that asks removes it. Its old holder sees that, the next time it renews, and stops.

What is left open: a holder that stands still between looking at its lease and writing, for so long that another has taken it,
still writes that one object.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.errors import UserError
from experiments.runs.bucket import Bucket, StorageError, patiently

_log = logging.getLogger(__name__)

LIFE = 60.0
"""Seconds for which a lease that is not renewed is respected."""
RENEWAL = 15.0
"""Seconds from one renewal to the next."""


class LeaseError(UserError):
    """Another process holds the lease."""


def who() -> str:
    """This process, for people."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def writer_in(path: Path) -> str:
    """The name under which this node asks for one lease, kept in a file that the caller alone writes: a process that was killed
    here is followed by the next one at once, and by those elsewhere when its lease is stale."""
    node = socket.gethostname()  # nodes may share their home
    with suppress(OSError):
        if name := path.read_text(encoding="ascii").strip():
            return f"{node}-{name}"
    name = uuid.uuid4().hex[:12]
    path.write_text(name, encoding="ascii")
    return f"{node}-{name}"


class Lease:
    """One lease, of whoever holds it.

    Args:
        bucket: where it is kept.
        name: of what may be written, such as `cells/<key>`.
        what: the same for people, such as `the cell san10_3`.
        writer: `writer_in` a file of this node's.
    """

    def __init__(self, bucket: Bucket, name: str, what: str, writer: str) -> None:
        self.bucket, self.folder, self.what, self.writer = bucket, f"leases/{name}", what, writer
        self.claimed: list[str] = []
        self._asks, self._holds = f"{self.folder}/asks-{writer}", f"{self.folder}/holds-{writer}"
        self._renewed = 0.0
        self._lost: LeaseError | None = None
        self._renewing = threading.Lock()
        self._left = threading.Event()

    @contextmanager
    def held(self, seconds: float, away: float = 0.0) -> Iterator[Lease]:
        """Inside, this process has the lease, as far as `renew` tells. Waits so long for a holder that is alive, and for one
        that is not until its lease is stale; and `away` for a store that does not answer.

        Raises:
            LeaseError: the other one is still there.
            StorageError: the store cannot be used.
        """
        patiently(lambda: self._take(seconds), away)
        thread = threading.Thread(target=self._keep, name=self.folder, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._left.set()
            thread.join()
            with suppress(StorageError):  # it will be stale
                self.bucket.remove(self._holds)

    def renew(self) -> None:
        """Makes sure that we still have it, before something is written.

        Raises:
            LeaseError: another process has taken it.
            StorageError: the store cannot be used.
        """
        with self._renewing:
            if self._lost is None:
                self._renew()
            self.require()

    def require(self) -> None:
        """Raises `LeaseError` where it is known that another process has taken it; asks nobody."""
        if self._lost is not None:
            raise self._lost

    def claim(self, keys: Iterable[str]) -> set[str]:
        """Of these, the ones that no lease beside this one has claimed; they are ours as long as we have the lease. To be
        called by one process at a time, among all nodes.

        Raises: as `renew`.
        """
        self.renew()
        beside = self.bucket.names(self.folder.rpartition("/")[0])
        free = set(keys)
        for name in beside:
            if _is_holder(name) and name != self._holds and _is_fresh(name, beside, self._holds):
                free -= set(self._read(name)[1:])
        self.claimed = sorted(free)
        self.renew()
        return free

    def _read(self, holder: str) -> list[str]:
        """Who that is, and what it has claimed."""
        try:
            content = self.bucket.get(holder)
        except StorageError:  # it may have been replaced or removed while it was read
            content = self.bucket.get(holder)
        return (content or b"another process").decode().split("\n")

    def _renew(self) -> None:
        found = self.bucket.names(self.folder)
        if self._holds not in found or any(_is_holder(name) and name != self._holds for name in found):
            return self._lose()
        if time.monotonic() - self._renewed < LIFE / 2:
            return self._put()
        while (other := self._try()) is not None:  # it is about to be stale, and others may be about to take it
            if _is_holder(other):
                return self._lose()
            time.sleep(_pause())

    def _lose(self) -> None:
        self._lost = LeaseError(
            f"{self.bucket}: another process took over {self.what}, because this process ({who()}) did not renew its lease "
            f"for {LIFE:.0f} s; this process stops"
        )

    def _put(self) -> None:
        before = time.monotonic()
        self.bucket.put(self._holds, "\n".join([who(), *self.claimed]).encode())
        self._renewed = before

    def _keep(self) -> None:
        while not self._left.wait(RENEWAL):
            try:
                self.renew()
            except LeaseError:  # whoever is about to write is told
                return
            except StorageError:  # away; the one who writes waits for it
                continue

    def _take(self, seconds: float) -> None:
        start = time.monotonic()
        seen: dict[str, float] = {}
        while (other := self._try()) is not None:
            renewed = self.bucket.names(self.folder).get(other)
            if _is_holder(other) and renewed is not None:
                note = self._read(other)[0]
                if not seen:
                    _log.warning(
                        "%s is locked by %s; waiting until that process ends, or %.0f s if the process died",
                        self.what,
                        note,
                        LIFE,
                    )
                if time.monotonic() - start < seconds:
                    seen[other] = renewed
                elif renewed > seen.setdefault(other, renewed):  # it is alive now, and was not only so at first
                    raise LeaseError(
                        f"{self.bucket}: another process is working on {self.what} ({note}); "
                        "wait until that process ends, or stop it, "
                        "then rerun the same command"
                    )
            time.sleep(_pause())

    def _try(self) -> str | None:
        """Takes it where nobody else has it or asks for it; else the object of that one."""
        start = time.monotonic()
        self.bucket.put(self._asks, b"")
        try:
            found = self.bucket.names(self.folder)
            others = {name: put for name, put in found.items() if name not in (self._asks, self._holds)}
            fresh = [name for name in others if _is_fresh(name, found, self._asks)]
            if fresh:
                return max(fresh)  # one that holds, before one that asks
            for name in others:
                self.bucket.remove(name)
            if time.monotonic() - start > LIFE / 2:  # nobody need respect what was asked so long ago
                return self._asks
            self._put()
            return None
        finally:
            self.bucket.remove(self._asks)


def _is_fresh(name: str, found: Mapping[str, float], just_put: str) -> bool:
    """Whether a lease is to be respected: both moments are of the store's clock."""
    return found.get(just_put, 0.0) - found[name] <= LIFE


def _is_holder(name: str) -> bool:
    return name.rpartition("/")[2].startswith("holds-")


def _pause() -> float:
    """Two that ask at the same time do not do so for ever."""
    return LIFE / 60 * random.Random(uuid.uuid4().int).uniform(0.5, 1.5)
