"""Joining a cluster that others started. In a process of its own, because the tests share a session."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from cluster import Resources
from cluster.session import session
from tests.cluster.nodes import nodes

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


SEEN = """
import sys
from cluster import Placement
from cluster.session import session
from cluster.sweep import sweep
from tests.cluster import cells
memory = cells.Memory()
placement = Placement(int(sys.argv[3]))
with session(sys.argv[1]):
    outcomes = sweep(cells.describing, {"cell": ""}, placement, storage=sys.argv[2], observer=memory)
print(outcomes["cell"].error, [told["sees_gpus"] for told in memory.of("cell")])
"""


CELL = """
import sys
from cluster import Placement
from cluster.session import session
from cluster.sweep import sweep
from tests.cluster import cells
memory = cells.Memory()
with session(sys.argv[1]):
    outcomes = sweep(cells.counting, {"cell": 1}, Placement(), storage=sys.argv[2], observer=memory)
print(outcomes["cell"].error, len(memory.reports))
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


def test_a_token_does_no_harm_where_none_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have one for another cluster."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with nodes(head_cpus=1) as several:
        command = [sys.executable, "-c", CELL, several.address, str(tmp_path)]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
        environment |= {"RAY_AUTH_TOKEN": "0" * 64, "PYTHONPATH": "."}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["None 1"], done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_cells_without_gpus_see_none_of_a_cluster_that_others_started(workers: int, tmp_path: Path) -> None:
    """Ray hides GPUs from them only where the cluster was started with a setting for that."""
    with nodes(head_cpus=1) as several:
        several.add(cpus=workers, environment={"CUDA_VISIBLE_DEVICES": "0,1"})
        command = [sys.executable, "-c", SEEN, several.address, str(tmp_path), str(workers)]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["None [0.0]"], done.stderr


def test_refuses_the_address_of_a_job_server() -> None:
    assert join("http://head:8265").startswith(
        "refused: http://head:8265 is the address of a job server; submit to it with `san submit`"
    )


def test_refuses_an_address_where_nothing_answers() -> None:
    said = join("127.0.0.1:9")
    assert said.startswith("refused: no Ray cluster answers at '127.0.0.1:9'")
