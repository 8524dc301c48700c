"""Stores of each kind. The bucket is on an S3 server in another process."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.runs.bucket import S3Store
from experiments.runs.store import LocalStore, Store
from tests.experiments.servers import ObjectStore


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    running = ObjectStore(tmp_path_factory.mktemp("store") / "log")
    yield running
    running.end()


@pytest.fixture
def bucket(server: ObjectStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Store:
    """A bucket in which each test has a separate prefix."""
    for name, value in ObjectStore.KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SAN_SCRATCH", str(tmp_path / "scratch"))
    return S3Store.parse(server.uri(re.sub(r"\W+", "-", request.node.name)))


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "runs") if request.param == "folder" else request.getfixturevalue("bucket")
