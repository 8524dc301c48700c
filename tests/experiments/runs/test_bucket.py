"""Addresses and outages of buckets."""

import re

import pytest

import experiments.runs.bucket
from experiments.cli import submit
from experiments.config.grid import GridRequest
from experiments.errors import UserError
from experiments.runs import store
from experiments.runs.bucket import S3Store
from experiments.runs.store import StorageError
from experiments.runs.workspace import open_store, open_workspace
from tests.experiments.conftest import SMALL_GRID, Rejected
from tests.experiments.drivers import PATIENCE
from tests.experiments.servers import ObjectStore


@pytest.mark.parametrize(
    "uri",
    [
        "s3://ada:opensesame/prefix",
        "s3://ada:open/sesame@runs/prefix",
        "s3://runs/prefix?access_key=ada&secret_key=opensesame",
        "s3://runs/prefix?endpoint_override=http%3A%2F%2Fada%3Aopensesame%40host",
    ],
)
def test_rejects_an_address_with_a_password_without_printing_it(uri: str) -> None:
    for take in (open_store, lambda uri: submit.check(GridRequest(SMALL_GRID, runs=uri))):
        with pytest.raises(UserError, match="AWS_SECRET_ACCESS_KEY") as raised:
            take(uri)
        assert "sesame" not in str(raised.value)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gs://runs/prefix", "expected a folder or a bucket such as s3://bucket/prefix"),
        ("s3:///prefix", "s3:///prefix: the name of the bucket is missing"),
        ("s3://[runs/prefix", "not a valid address"),
        ("s3://runs/prefix?endpoint=http://host", "unknown option endpoint; did you mean `endpoint_override`?"),
    ],
)
def test_rejects_an_invalid_address(uri: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        open_store(uri)


def test_needs_a_tracking_server(bucket: S3Store) -> None:
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI"):
        open_workspace(bucket.address)


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "no such bucket"),
        ("away", "the store does not answer"),
        ("locked", "rejected the credentials; check AWS_ACCESS_KEY"),
    ],
)
def test_rejects_an_unusable_bucket_before_anything_starts(
    fault: str, message: str, server: ObjectStore, monkeypatch: pytest.MonkeyPatch, rejected: Rejected
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    address = server.uri("prefix", "nobodys" if fault == "missing" else "runs")
    if fault == "away":
        address = address.replace(server.address, "http://127.0.0.1:9")  # a port without a server
    server.refuse(fault == "locked")
    try:
        found = rejected("run", SMALL_GRID, "--runs", address)
    finally:
        server.refuse(wanted=False)
    assert found.startswith("san: s3://") and message in found and len(found.splitlines()) == 1


@pytest.mark.parametrize("fault", ["silent", "refusing"])
def test_requests_to_an_unavailable_store_are_repeated(
    fault: str, server: ObjectStore, bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is back after our first pause."""
    pauses: list[float] = []

    def recover(seconds: float) -> None:
        if seconds == store.PAUSE:
            pauses.append(seconds)
            server.resume() if fault == "silent" else server.refuse(wanted=False)

    monkeypatch.setattr(store.time, "sleep", recover)
    monkeypatch.setattr(experiments.runs.bucket, "SECONDS_TO_ANSWER", 0.5)
    server.stop() if fault == "silent" else server.refuse()
    bucket.with_outage_timeout(PATIENCE).write("a", b"content")
    assert pauses
    assert bucket.with_outage_timeout(PATIENCE).read("a") == b"content"


def test_outage_that_lasts_too_long_is_reported(server: ObjectStore, bucket: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAUSE", 0.01)
    server.refuse()
    try:
        with pytest.raises(StorageError, match=r"rejected the credentials.*gave up after 0 s"):
            bucket.with_outage_timeout(0.1).write("a", b"content")
    finally:
        server.refuse(wanted=False)
