"""Where runs are stored: a folder that all nodes share (`LocalStore`), or a bucket (`S3Store`), behind one interface.

To support another object store, add a class with the methods of `Store` and a row in `STORES`. This is the only file that
imports boto3.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from experiments.errors import UnavailableError, UserError
from experiments.runs.retry import retry

_log = logging.getLogger(__name__)
T = TypeVar("T")

OPTIONS = ("endpoint_override", "region", "scheme", "tls_ca_file_path", "tls_verify_certificates")
"""Options after the `?` of a bucket's address; none of them is secret."""
CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, or the role of the machine"
REJECTED = re.compile("AccessDenied|AccessKey|Signature|Token|Credentials|Forbidden|^40[13]$")
"""Error codes of a store that does not accept the credentials."""
CONFLICT = ("PreconditionFailed", "ConditionalRequestConflict", "409", "412")
"""Error codes of a conditional put whose condition does not hold."""
LIFE = 60.0
"""Seconds without a renewal after which a lock in a bucket may be taken over."""
RENEWAL = 15.0
"""Seconds between two renewals."""
POLL = 1.0
"""Seconds between two looks at a lock of another process."""


class StorageError(UnavailableError):
    """The store cannot be used."""


class LockError(UserError):
    """Another process owns the lock."""


class Lock:
    """A lock that this process owns. File locks last as long as the process; locks in a bucket can be lost."""

    continued: bool = True
    """Whether no other node can have owned the lock since this node owned it last."""

    def check(self) -> None:
        """Raises `LockError` if another process has taken the lock over. Call it before writing what the lock protects."""

    def raise_if_lost(self) -> None:
        """Raises `LockError` if `check` would, as far as that is known already; makes no request."""

    def publish(self, notes: Sequence[str]) -> None:
        """Makes `notes` readable for other processes through `Store.notes`."""


class Store(Protocol):
    """Files by name; a name is a relative path such as `checkpoints/0123456789ab/summary.csv`.

    All methods raise `StorageError` if the store cannot be used.
    """

    shared: ClassVar[bool]
    """Whether `folder` is the same for all nodes."""
    remedy: ClassVar[str]
    """What to do if a file cannot be written, for messages."""

    @property
    def folder(self) -> Path:
        """Folder in which this node works: the store itself, or scratch space."""

    def uri(self, name: str) -> str:
        """Path or address of a file, for people."""

    def patient(self, seconds: float) -> Store:
        """The same store; if it is a bucket that is away, `read`, `write`, `delete` and `names` retry for up to `seconds`."""
        return self

    def check(self) -> None:
        """Makes sure that the store exists and can be read. A folder is created when it is needed."""

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None if there is no such file."""

    def write(self, name: str, content: bytes) -> None:
        """Writes a file completely or not at all. A file that a bucket does not accept is kept on this node."""

    def delete(self, name: str) -> None:
        """Deletes a file if it exists."""

    def delete_folder(self, folder: str) -> None:
        """Deletes all files below a folder."""

    def names(self, folder: str) -> list[str]:
        """Sorted names of the files in a folder, without those in its subfolders."""

    def upload(self, path: Path) -> None:
        """Copies a file below `folder` into the store, unless `folder` is the store."""

    def download(self, path: Path) -> None:
        """Copies a file of the store to its path below `folder`, if it is not there yet."""

    def recover(self, folder: str, lock: Lock) -> None:
        """Creates a folder and cleans up after the last owner of its lock, who may have been killed."""

    def lock(self, name: str, busy: str, wait: float) -> AbstractContextManager[Lock]:
        """Inside the block, this process owns a lock. The lock of a dead process is taken over.

        Args:
            name: of the lock's file.
            busy: for messages, for example "another process is training this trial".
            wait: seconds to wait for an owner that is alive.

        Raises:
            LockError: the owner is still alive.
        """

    def is_locked(self, name: str) -> bool:
        """Whether a living process owns a lock. If its owner is dead, it takes `LIFE` seconds to find out."""

    def notes(self, name: str) -> list[str]:
        """What the owner of a lock has published."""
        return _Owner.parse(self.read(name)).notes


def open_store(place: str | Path) -> Store:
    """The store in a folder or at an address such as `s3://bucket/prefix`; makes no request.

    Raises:
        UserError: the address is not valid or contains a password.
    """
    if not is_uri(place):
        return LocalStore(Path(place).resolve())
    kind = str(place).partition("://")[0]
    if kind not in STORES:
        raise UserError(f"{kind}://...: runs cannot be stored here; expected a folder or a bucket such as s3://bucket/prefix")
    return STORES[kind](str(place))


def is_uri(place: str | Path) -> bool:
    return "://" in str(place)


def atomic_write(path: Path, content: bytes) -> None:
    """Replaces a file; a kill or a power failure at any moment leaves either the old or the new file."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        # The folder is not created here: after a disk was unmounted, its mount point must not be filled.
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


@dataclass(frozen=True)
class LocalStore(Store):
    """A folder, on one machine or shared by all nodes."""

    root: Path
    shared: ClassVar[bool] = True
    remedy: ClassVar[str] = "check the disk"

    @property
    def folder(self) -> Path:
        return self.root

    def uri(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(
                f"{self.uri(name)}: cannot read ({error.strerror}); check the disk, then run the command again"
            ) from None

    def write(self, name: str, content: bytes) -> None:
        try:
            atomic_write(self.folder / name, content)
        except OSError as error:
            raise StorageError(f"{self.uri(name)}: cannot write ({error.strerror})") from None

    def delete(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self.uri(name)}: cannot delete ({error.strerror})") from None

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self.folder / folder, ignore_errors=True)

    def names(self, folder: str) -> list[str]:
        place = self.folder / folder
        try:
            return sorted(path.relative_to(self.folder).as_posix() for path in place.iterdir() if not path.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(f"{place}: cannot read ({error.strerror}); check the disk, then run the command again") from None

    def check(self) -> None:
        """The folder is created when it is needed."""

    def upload(self, path: Path) -> None:
        """The file is in the store already."""

    def download(self, path: Path) -> None:
        """The file is in its place already."""

    def recover(self, folder: str, lock: Lock) -> None:
        try:
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
            for partial in (self.folder / folder).glob("*.partial"):
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self.uri(folder)}: cannot write to this folder ({error.strerror})") from None

    @contextmanager
    def lock(self, name: str, busy: str, wait: float) -> Iterator[Lock]:
        with _locked_file(self.folder / name, busy, wait) as file:
            lock = _FileLock(file)
            lock.publish(())
            yield lock

    def is_locked(self, name: str) -> bool:
        try:
            with open(self.folder / name) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


@dataclass(frozen=True, slots=True)
class _Owner:
    """Content of a lock's file."""

    who: str = "unknown"
    """Host and process, for people."""
    node: str = ""
    """Random name of the owner's node."""
    renewals: int = 0
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def parse(content: bytes | None) -> _Owner:
        try:
            return _Owner(**json.loads(content or b"{}"))
        except (ValueError, TypeError):  # it is being written at this moment
            return _Owner()

    def as_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def who() -> str:
    """This process, for people."""
    return f"{socket.gethostname()}, process {os.getpid()}"


@contextmanager
def _locked_file(path: Path, busy: str, wait: float) -> Iterator[FileIO]:
    """Opens a file that only one process can have open here; the kernel releases the lock when the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b", buffering=0)  # a buffer that cannot be written would fail again when the file is closed
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); choose another folder with --runs") from None
    with file:
        limit, warned = time.monotonic() + wait, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                _wait_or_give_up(str(path), busy, _Owner.parse(file.read()), wait, time.monotonic() > limit, warned)
                warned = True
                time.sleep(0.1)
        yield file


def _wait_or_give_up(place: str, busy: str, owner: _Owner, wait: float, give_up: bool, warned: bool) -> None:
    if give_up:
        raise LockError(
            f"{place}: {busy} ({owner.who}); wait until that process ends, or stop it, then run the same command again"
        )
    if not warned:
        _log.warning("%s: %s (%s); waiting up to %.0f s for that process", place, busy, owner.who, wait)


class _FileLock(Lock):
    def __init__(self, file: FileIO) -> None:
        self.file = file

    def publish(self, notes: Sequence[str]) -> None:
        _rewrite(self.file, _Owner(who(), notes=list(notes)))


def _rewrite(file: FileIO, owner: _Owner) -> None:
    """In place: a new file would not be locked."""
    try:
        file.truncate(0)
        file.write(owner.as_bytes())
    except OSError as error:
        raise StorageError(f"{file.name}: cannot write this file ({error.strerror}); {LocalStore.remedy}") from None


@dataclass(frozen=True)
class S3Store(Store):
    """Everything below a prefix of a bucket; create it with `S3Store.parse`.

    Requires a store with conditional puts (`If-None-Match`, `If-Match`), such as Amazon S3. Credentials come from the
    environment, the files or the roles of AWS.
    """

    address: str
    patience: float = 0.0
    """Seconds; see `patient`."""
    shared: ClassVar[bool] = False
    remedy: ClassVar[str] = "check the bucket"

    @staticmethod
    def parse(uri: str) -> S3Store:
        """Checks an address such as `s3://bucket/prefix?endpoint_override=http://host:9000`; makes no request.

        Raises:
            UserError: the address is not valid or contains a password, which the message does not repeat.
        """
        try:
            parts = urlsplit(uri)
        except ValueError as error:  # brackets that are not an IPv6 address
            raise UserError(
                f"{uri}: not a valid address ({error}); expected s3://bucket/prefix?endpoint_override=http://host:9000"
            ) from None
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
        return S3Store(f"s3://{parts.netloc}{parts.path.rstrip('/')}{query}")

    def __str__(self) -> str:
        return self.address

    @property
    def folder(self) -> Path:
        """Below `SAN_SCRATCH` or `~/.cache/san/runs`."""
        base = Path(os.environ.get("SAN_SCRATCH", Path.home() / ".cache" / "san" / "runs"))
        return base / hashlib.sha256(self.address.encode()).hexdigest()[:12]

    def uri(self, name: str) -> str:
        place, mark, options = self.address.partition("?")
        return f"{place}/{name}{mark}{options}"

    def patient(self, seconds: float) -> S3Store:
        return replace(self, patience=seconds)

    def check(self) -> None:
        self._once(lambda s3: s3.list_objects_v2(Bucket=self._bucket, Prefix=self._key(""), MaxKeys=1))

    def read(self, name: str) -> bytes | None:
        found = self._ask(lambda s3: self._get(s3, name))
        return found[0] if found else None

    def write(self, name: str, content: bytes) -> None:
        try:
            self._once(lambda s3: self._put(s3, name, content))
        except StorageError as error:
            with self._kept_on_this_node(name, content):
                if self.patience == 0:
                    raise error
                self._ask(lambda s3: self._put(s3, name, content))

    def delete(self, name: str) -> None:
        self._ask(lambda s3: s3.delete_object(Bucket=self._bucket, Key=self._key(name)))

    def delete_folder(self, folder: str) -> None:
        for name in self._ask(lambda s3: self._list(s3, folder)):
            self.delete(name)

    def names(self, folder: str) -> list[str]:
        names = self._ask(lambda s3: self._list(s3, folder, delimiter="/"))
        return [name for name in names if not name.endswith("/")]  # Ray creates empty objects for folders

    def upload(self, path: Path) -> None:
        content = path.read_bytes()
        self._once(lambda s3: self._put(s3, path.relative_to(self.folder).as_posix(), content))

    def download(self, path: Path) -> None:
        if path.exists():
            return
        found = self._once(lambda s3: self._get(s3, path.relative_to(self.folder).as_posix()))
        if found:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(found[0])

    def recover(self, folder: str, lock: Lock) -> None:
        """Uploads the files that the store did not accept from this node, unless another node may have written since."""
        for path in sorted((self.folder / folder).glob("*")):
            if lock.continued and path.suffix != ".partial":
                self._ask(partial(self._put, name=f"{folder}/{path.name}", content=path.read_bytes()))
            path.unlink()

    @contextmanager
    def lock(self, name: str, busy: str, wait: float) -> Iterator[Lock]:
        # The file lock excludes other processes on this node; its owner knows that an earlier owner on this node is dead.
        with _locked_file(self.folder / name, busy, wait) as file:
            file.seek(0)
            owner = _Owner(who(), _Owner.parse(file.read()).node or uuid.uuid4().hex)
            _rewrite(file, owner)
            lock = _ObjectLock(self, name, owner)
            retry(lambda: lock.acquire(busy, wait), self.patience)
            with lock.renewed():
                yield lock

    def is_locked(self, name: str) -> bool:
        seen, since = None, time.monotonic()
        while found := self._ask(lambda s3: self._get(s3, name)):
            if seen is not None and found[1] != seen:
                return True
            if time.monotonic() - since > LIFE:
                return False
            seen = found[1]
            time.sleep(POLL)
        return False

    def put_if(self, name: str, content: bytes, etag: str | None) -> str | None:
        """Writes an object if the present one has this ETag, or if there is none, without one. Returns the new ETag, or None if
        the condition does not hold."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            return str(self._once(lambda s3: self._put(s3, name, content, condition)))
        except (_ConflictError, FileNotFoundError):
            return None

    def get(self, name: str) -> tuple[bytes, str] | None:
        """Content and ETag of an object, or None if there is none; does not retry."""
        return self._once(lambda s3: self._get(s3, name))

    def _get(self, s3: Any, name: str) -> tuple[bytes, str] | None:
        if not self._key(name):
            return None
        try:
            answer = s3.get_object(Bucket=self._bucket, Key=self._key(name))
        except s3.exceptions.NoSuchKey:
            return None
        return answer["Body"].read(), answer["ETag"]

    def _put(self, s3: Any, name: str, content: bytes, condition: Mapping[str, str] = {}) -> str:
        return str(s3.put_object(Bucket=self._bucket, Key=self._key(name), Body=content, **condition)["ETag"])

    def _list(self, s3: Any, folder: str, delimiter: str = "") -> list[str]:
        own, prefix = self._key(""), self._key(folder)
        pages = s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{prefix}/" if prefix else "", Delimiter=delimiter
        )
        return sorted(each["Key"].removeprefix(f"{own}/") for page in pages for each in page.get("Contents", ()))

    @contextmanager
    def _kept_on_this_node(self, name: str, content: bytes) -> Iterator[None]:
        """Keeps a file on this node, where `recover` finds it, unless the block succeeds."""
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, content)
        except OSError as error:
            raise StorageError(f"{path}: cannot write ({error.strerror})") from None
        try:
            yield
        except StorageError as error:
            raise StorageError(f"{error}; {path} is kept on this node ({who()})") from None
        path.unlink()

    @property
    def _bucket(self) -> str:
        return urlsplit(self.address).netloc

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (unquote(urlsplit(self.address).path).strip("/"), name)))

    def _ask(self, request: Callable[[Any], T]) -> T:
        return retry(lambda: self._once(request), self.patience)

    def _once(self, request: Callable[[Any], T]) -> T:
        """Calls `request` with boto3's client; turns its errors into ours."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return request(_client(self.address))
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code"))
            if code in CONFLICT:
                raise _ConflictError from None
            if code in ("NoSuchKey", "404"):
                raise FileNotFoundError from None
            raise StorageError(self._explain(code, str(error))) from None
        except (BotoCoreError, OSError, ValueError) as error:
            raise StorageError(self._explain(type(error).__name__, str(error))) from None

    def _explain(self, code: str, text: str) -> str:
        if code == "NoSuchBucket":
            return f"{self}: no such bucket; create the bucket or correct the name"
        if REJECTED.search(code):
            return f"{self}: the store rejected the credentials; check {CREDENTIALS}"
        if re.search("Connect|Timeout|HTTPClient", code):
            return f"{self}: the store does not answer ({text}); check the address and that the server is running"
        return f"{self}: request failed: {' '.join(text.split())[:300]}"


class _ConflictError(Exception):
    """The condition of a conditional put does not hold."""


@cache
def _client(address: str) -> Any:
    import boto3
    from botocore.config import Config

    options = dict(parse_qsl(urlsplit(address).query))
    scheme, endpoint = options.get("scheme", "https"), options.get("endpoint_override")
    if endpoint and not is_uri(endpoint):
        endpoint = f"{scheme}://{endpoint}"
    verify = options.get("tls_verify_certificates", "true").lower() not in ("false", "0")
    config = Config(
        connect_timeout=5,
        read_timeout=20,
        retries={"mode": "standard", "total_max_attempts": 2},
        s3={"addressing_style": "path"} if endpoint else {},
        # Stores other than Amazon's may not know newer kinds of checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=options.get("region"),
        use_ssl=scheme != "http",
        verify=options.get("tls_ca_file_path") if verify else False,
        config=config,
    )


class _ObjectLock(Lock):
    """A lock of `S3Store`: an object that its owner replaces again and again, on condition that it is still the owner's.

    Another process may replace the object if its ETag has not changed for `LIFE` seconds, measured by that process. The clocks
    of the nodes and of the store do not matter.
    """

    def __init__(self, store: S3Store, name: str, owner: _Owner) -> None:
        self.store, self.name, self.owner = store, name, owner
        self.continued = False
        self._etag: str | None = None
        self._lost: LockError | None = None
        self._mutex, self._released = threading.Lock(), threading.Event()

    def acquire(self, busy: str, wait: float) -> None:
        start = since = time.monotonic()
        seen: str | None = None
        while True:
            found, now = self.store.get(self.name), time.monotonic()
            owner, etag = (_Owner.parse(found[0]), found[1]) if found else (_Owner(), None)
            # An owner on this node is dead, or it would have the file's lock.
            self.continued = owner.node == self.owner.node
            is_free = found is None or self.continued or (etag == seen and now - since > LIFE)
            if is_free and self._put(etag):
                return self._require_conditional_puts()
            if found is not None and etag != seen:
                renewed = seen is not None
                _wait_or_give_up(self.store.uri(self.name), busy, owner, wait, renewed and now - start >= wait, renewed)
                seen, since = etag, now
            time.sleep(POLL)

    def check(self) -> None:
        retry(self._renew, self.store.patience)

    def raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def publish(self, notes: Sequence[str]) -> None:
        self.owner = replace(self.owner, notes=list(notes))
        self.check()

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renews the lock in a thread; releases it at the end."""
        thread = threading.Thread(target=self._renew_regularly, name=self.name, daemon=True)
        thread.start()
        release = True
        try:
            yield
        except StorageError:
            release = False  # the next process on this node continues, with what the store did not accept
            raise
        finally:
            self._released.set()
            thread.join()
            if release:
                with suppress(StorageError, LockError):  # it expires
                    self._renew()
                    self.store.delete(self.name)

    def _renew_regularly(self) -> None:
        while not self._released.wait(RENEWAL):
            with suppress(StorageError):  # the store is away, but the lock may still be ours when it is back
                try:
                    self._renew()
                except LockError:  # reported by `check` and `raise_if_lost`
                    return

    def _renew(self) -> None:
        with self._mutex:
            if self._lost is None and not self._put(self._etag):
                self._lost = LockError(
                    f"{self.store.uri(self.name)}: another process took over this lock, because this process ({who()}) did "
                    f"not renew the lock for {LIFE:.0f} s; this process stops"
                )
            self.raise_if_lost()

    def _put(self, etag: str | None) -> bool:
        """Replaces the object if it has this ETag; returns whether this process is its owner now."""
        self.owner = replace(self.owner, renewals=self.owner.renewals + 1)
        put = self.store.put_if(self.name, self.owner.as_bytes(), etag)
        if put is None and (found := self.store.get(self.name)) and found[0] == self.owner.as_bytes():
            put = found[1]  # the request had succeeded, but its answer was lost and the client repeated it
        self._etag = put or self._etag
        return put is not None

    def _require_conditional_puts(self) -> None:
        if self.store.put_if(self.name, self.owner.as_bytes(), None) is not None:
            raise UserError(
                f"{self.store}: this store ignores the condition of a put (If-None-Match), so two processes could write the "
                "same trial; choose a store that supports conditional puts"
            )


STORES: dict[str, Callable[[str], Store]] = {"s3": S3Store.parse}
"""Opens the address of a bucket, by scheme."""
