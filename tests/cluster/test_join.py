"""Joining a cluster that others started. In a process of its own, because the tests share a session."""

import os
import subprocess
import sys

import pytest
import ray

from cluster import Resources
from cluster.session import session

JOIN = """
import sys
from cluster import ClusterError
from cluster.session import session
try:
    with session(*sys.argv[1:]) as resources:
        print(resources)
except ClusterError as error:
    print("refused:", error)
"""


def join(*arguments: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | variables
    command = [sys.executable, "-c", JOIN, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def address(resources: Resources) -> str:
    return str(ray.get_runtime_context().gcs_address)


def test_joins_by_address(address: str, resources: Resources) -> None:
    assert join(address) == repr(resources)


def test_joins_by_environment_and_leaves_the_cluster_alive(address: str, resources: Resources) -> None:
    assert join(RAY_ADDRESS=address) == repr(resources)
    with session() as still:
        assert still == resources


def test_refuses_an_address_where_nothing_answers() -> None:
    said = join("127.0.0.1:9")
    assert said.startswith("refused: no Ray cluster answers at '127.0.0.1:9'")
