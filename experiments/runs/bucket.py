"""A bucket of an S3-compatible store, by its URI; the only file that imports pyarrow.

Credentials come from the environment or from the files and roles of AWS, as pyarrow looks for them; none may stand in the URI.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from experiments.errors import UserError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_log = logging.getLogger(__name__)
T = TypeVar("T")

OPTIONS = ("endpoint_override", "region", "scheme", "tls_ca_file_path", "tls_verify_certificates")
"""What may follow the `?` of a URI: nothing that is secret."""
CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, or the role of the machine"
REFUSED = re.compile("ACCESS_DENIED|ACCESS_KEY|SIGNATURE|TOKEN|CREDENTIALS|HTTP status 40[13]")
"""In what the store says to credentials that it does not take."""
PAUSE = 2.0
"""Seconds before a store that is away is asked again."""


class StorageError(UserError):
    """The bucket cannot be used, now or as it is addressed."""


def patiently(ask: Callable[[], T], seconds: float) -> T:
    """What a store answers that may be away for so long.

    Raises:
        StorageError: it was away for longer.
    """
    limit, told = time.monotonic() + seconds, False
    while True:
        try:
            return ask()
        except StorageError as error:
            if seconds == 0:
                raise
            if time.monotonic() > limit:
                raise StorageError(f"{error}; gave up after {seconds:.0f} s") from None
            if not told:
                _log.warning("%s; retrying for up to %.0f s", error, seconds)
            told = True
            time.sleep(PAUSE)


def is_uri(place: str | Path) -> bool:
    """Whether this is meant as a URI and not as a folder."""
    return "://" in str(place)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything below one prefix of one bucket. `Bucket.parse` makes one; names of objects are relative to the prefix.

    Every method that asks the store raises `StorageError` where it refuses or does not answer; pyarrow's client has tried for
    some seconds then.
    """

    uri: str

    @staticmethod
    def parse(uri: str) -> Bucket:
        """Checks a URI such as `s3://bucket/prefix?endpoint_override=http://host:9000`; asks nobody.

        Raises:
            UserError: it is none, or may hold a secret. The text does not repeat such a URI, for it is printed and kept.
        """
        try:
            parts = urlsplit(uri)
        except ValueError as error:  # brackets that are no IPv6 address
            raise UserError(
                f"{uri}: not a valid address ({error}); expected s3://bucket/prefix?endpoint_override=http://host:9000"
            ) from None
        kind = uri.partition("://")[0]
        if kind != "s3":
            raise UserError(
                f"{kind}://...: runs cannot be stored here; expected a folder or a bucket such as s3://bucket/prefix"
            )
        options = parse_qsl(parts.query, keep_blank_values=True)
        secret = any(re.search("key|secret|token|passw", name.lower()) for name, _ in options)
        if secret or "@" in unquote(uri) or ":" in parts.netloc:
            raise UserError(
                "s3://...: this address contains a key or password, which would be printed and stored; remove the "
                f"credentials from the address and put them in {CREDENTIALS}"
            )
        if not parts.netloc or parts.fragment:
            raise UserError(
                f"{uri}: the name of the bucket is missing; expected s3://bucket/prefix?endpoint_override=http://host:9000"
            )
        if unknown := [name for name, _ in options if name not in OPTIONS]:
            raise UserError(f"{uri}: unknown option {unknown[0]}; choose from {', '.join(OPTIONS)}")
        query = f"?{urlencode(options, safe=':/')}" if options else ""
        return Bucket(f"s3://{parts.netloc}{parts.path.rstrip('/')}{query}")

    def __str__(self) -> str:
        return self.uri

    def below(self, name: str) -> str:
        """The URI of an object or of a prefix below this one."""
        place, mark, options = self.uri.partition("?")
        return f"{place}/{name}{mark}{options}"

    def folder(self, name: str) -> Bucket:
        """What is below a prefix, as a bucket."""
        return Bucket(self.below(name))

    def split(self) -> tuple[Bucket, str]:
        """The bucket one level up, and what this one is called there; the empty name at the top."""
        place, mark, options = self.uri.partition("?")
        above, _, name = place.rpartition("/")
        return (Bucket(f"{above}{mark}{options}"), name) if above != "s3:/" else (self, "")

    @property
    def scratch(self) -> Path:
        """The folder of this node in which it works on what is kept there: below `SAN_SCRATCH`, else `~/.cache/san/runs`."""
        base = Path(os.environ.get("SAN_SCRATCH", Path.home() / ".cache" / "san" / "runs"))
        return base / hashlib.sha256(self.uri.encode()).hexdigest()[:12]

    def check(self) -> None:
        """Asks once whether the bucket is there and may be read."""
        self._infos("", recursive=False)

    def put(self, name: str, content: bytes) -> None:
        """Keeps an object; it is there whole or not at all, in place of one of that name."""
        with self._asking() as (files, prefix):
            # Written at once: what is closed, even by an interrupt, is whole.
            stream = files.open_output_stream(f"{prefix}/{name}")
            stream.write(content)
            stream.close()

    def get(self, name: str) -> bytes | None:
        """An object's content, None where there is none."""
        try:
            with self._asking() as (files, prefix), files.open_input_file(f"{prefix}/{name}") as stream:
                return bytes(stream.readall())
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> dict[str, float]:
        """The objects below a folder, however deep, with the moments at which they were put: seconds by the store's clock."""
        start = len(self._prefix) + 1
        infos = self._infos(folder, recursive=True)
        return {info.path[start:]: info.mtime_ns / 1e9 for info in infos if info.is_file}

    def remove(self, name: str) -> None:
        """Nothing happens where there is no such object."""
        try:
            with self._asking() as (files, prefix):
                files.delete_file(f"{prefix}/{name}")
        except FileNotFoundError:
            pass

    def remove_folder(self, folder: str) -> None:
        """With all that is in it."""
        try:
            with self._asking() as (files, prefix):
                files.delete_dir(f"{prefix}/{folder}")
        except FileNotFoundError:
            pass

    @property
    def _prefix(self) -> str:
        parts = urlsplit(self.uri)
        return unquote(f"{parts.netloc}{parts.path}")

    def _infos(self, folder: str, recursive: bool) -> list[Any]:
        from pyarrow.fs import FileSelector

        try:
            with self._asking() as (files, prefix):
                found: list[Any] = files.get_file_info(FileSelector(f"{prefix}/{folder}".rstrip("/"), recursive=recursive))
        except FileNotFoundError:  # nothing has been put there
            return []
        return found

    @contextmanager
    def _asking(self) -> Iterator[tuple[FileSystem, str]]:
        """The file system and our prefix in it; says in a sentence what goes wrong."""
        try:
            yield _opened(self.uri), self._prefix
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise StorageError(self._sentence(" ".join(str(error).split()))) from None

    def _sentence(self, said: str) -> str:
        if "NO_SUCH_BUCKET" in said:
            return f"{self}: no such bucket; create the bucket or correct the name"
        if REFUSED.search(said):
            return f"{self}: the store rejected the credentials; check {CREDENTIALS}"
        if "NETWORK_CONNECTION" in said:
            reason = said.partition("operation: ")[2].partition("; Details")[0]
            return f"{self}: the store does not answer ({reason}); check the address and that the server is running"
        return f"{self}: request failed: {said[:300]}"


@functools.cache
def _opened(uri: str) -> FileSystem:
    from pyarrow.fs import FileSystem

    mark = "&" if "?" in uri else "?"
    # A small object is put in one request, instead of three.
    files, _ = FileSystem.from_uri(f"{uri}{mark}allow_delayed_open=true")
    return files
