"""Runs in a bucket that speaks the protocol of Amazon S3. The only file that imports boto3."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from experiments.errors import UserError
from experiments.runs.store import StorageError, Store, is_uri, retry
from san.choice import choices

T = TypeVar("T")

OPTIONS = ("endpoint_override", "region", "scheme", "tls_ca_file_path", "tls_verify_certificates")
"""Options after the `?` of a bucket's address; none of them is secret."""
CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, or the role of the machine"
REJECTED = re.compile("AccessDenied|AccessKey|Signature|Token|Credentials|Forbidden|^40[13]$")
"""Error codes of a store that does not accept the credentials."""
SECONDS_TO_CONNECT, SECONDS_TO_ANSWER = 5.0, 20.0
"""After these, a request fails; it is made twice."""
CONFLICT = ("PreconditionFailed", "ConditionalRequestConflict", "409", "412")
"""Error codes of a conditional put whose condition does not hold."""


@dataclass(frozen=True)
class S3Store(Store):
    """Everything below a prefix of a bucket; create it with `S3Store.parse`.

    Requires a store with conditional puts (`If-None-Match`), such as Amazon S3. Credentials come from the environment, the
    files or the roles of AWS.
    """

    address: str
    outage_timeout: float = 0.0
    """Seconds; see `with_outage_timeout`."""
    shared: ClassVar[bool] = False

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
            raise UserError(f"{uri}: unknown option {unknown[0]}; {choices('options', unknown[0], OPTIONS)}")
        query = f"?{urlencode(options, safe=':/')}" if options else ""
        return S3Store(f"s3://{parts.netloc}{parts.path.rstrip('/')}{query}")

    def __str__(self) -> str:
        return self.address

    @property
    def folder(self) -> Path:
        """Below `SAN_SCRATCH` or `~/.cache/san/runs`."""
        base = Path(os.environ.get("SAN_SCRATCH") or Path.home() / ".cache" / "san" / "runs")
        return base / hashlib.sha256(self.address.encode()).hexdigest()[:12]

    def uri(self, name: str) -> str:
        base, mark, options = self.address.partition("?")
        return f"{base}/{name}{mark}{options}"

    def with_outage_timeout(self, seconds: float) -> S3Store:
        return replace(self, outage_timeout=seconds)

    def check(self) -> None:
        self._once(lambda s3: s3.list_objects_v2(Bucket=self._bucket, Prefix=self._key(""), MaxKeys=1))

    def read(self, name: str) -> bytes | None:
        return self._ask(lambda s3: self._get(s3, name))

    def write(self, name: str, content: bytes) -> None:
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
        content = self._once(lambda s3: self._get(s3, path.relative_to(self.folder).as_posix()))
        if content is None:
            return path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    @contextmanager
    def claim(self, name: str, owner: bytes, take_over: bool) -> Iterator[None]:
        condition = {} if take_over or self.read(name) == owner else {"IfNoneMatch": "*"}
        try:
            self._ask(lambda s3: self._put(s3, name, owner, condition))
        except _ConflictError:
            if self.read(name) != owner:  # else the put had succeeded, but its answer was lost and the client repeated it
                raise FileExistsError(name) from None
        try:
            yield
        finally:
            with suppress(StorageError):  # the claim stays until somebody takes it over
                if self.read(name) == owner:
                    self.delete(name)

    def is_claimed(self, name: str) -> bool:
        return self.read(name) is not None

    def _get(self, s3: Any, name: str) -> bytes | None:
        if not self._key(name):
            return None
        try:
            content: bytes = s3.get_object(Bucket=self._bucket, Key=self._key(name))["Body"].read()
        except s3.exceptions.NoSuchKey:
            return None
        return content

    def _put(self, s3: Any, name: str, content: bytes, condition: Mapping[str, str] = {}) -> None:
        s3.put_object(Bucket=self._bucket, Key=self._key(name), Body=content, **condition)

    def _list(self, s3: Any, folder: str, delimiter: str = "") -> list[str]:
        root, prefix = self._key(""), self._key(folder)
        pages = s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{prefix}/" if prefix else "", Delimiter=delimiter
        )
        return sorted(each["Key"].removeprefix(f"{root}/") for page in pages for each in page.get("Contents", ()))

    @property
    def _bucket(self) -> str:
        return urlsplit(self.address).netloc

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (unquote(urlsplit(self.address).path).strip("/"), name)))

    def _ask(self, request: Callable[[Any], T]) -> T:
        return retry(lambda: self._once(request), self.outage_timeout)

    def _once(self, request: Callable[[Any], T]) -> T:
        """Calls `request` with boto3's client; turns its errors into ours."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return request(_client(self.address))
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code"))
            if code in CONFLICT:
                raise _ConflictError from None
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
        connect_timeout=SECONDS_TO_CONNECT,
        read_timeout=SECONDS_TO_ANSWER,
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
