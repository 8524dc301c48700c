"""Joining a cluster that others started. In a separate process, because the tests share a session."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from cluster import Resources
from cluster.session import session
from experiments.grids.config import PROJECT_DIR
from tests.cluster.nodes import nodes
from tests.experiments.drivers import PATIENCE

JOIN = """
import sys
from cluster import ClusterError
from cluster.session import session
try:
    with session(*sys.argv[1:]) as resources:
        print(repr(resources))
except ClusterError as error:
    print("refused:", error)
"""


SWEEP = """
import sys
from cluster import Placement
from cluster.session import session
from cluster.sweep import sweep
from tests.cluster import functions
memory = functions.Memory()
placement = Placement(int(sys.argv[3]))
with session(sys.argv[1]):
    outcomes = sweep(functions.describing, {"trial": ""}, placement, storage=sys.argv[2], observer=memory)
print(outcomes["trial"].error, [report["sees_gpus"] for report in memory.of("trial")])
"""


def run_script(script: str, *arguments: str, **variables: str) -> str:
    """Runs a script without RAY_ADDRESS; returns the last line of its output."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(PROJECT_DIR), **variables}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def address(resources: Resources) -> str:
    return str(ray.get_runtime_context().gcs_address)


def test_joins_by_address_or_environment_and_leaves_the_cluster_running(address: str, resources: Resources) -> None:
    assert run_script(JOIN, address) == repr(resources)
    assert run_script(JOIN, RAY_ADDRESS=address) == repr(resources)
    with session() as still:
        assert still == resources
    assert ray.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_trials_without_gpus_see_none(workers: int, tmp_path: Path) -> None:
    """On a cluster that others started, Ray hides GPUs from trials only with a setting of that cluster."""
    with nodes(head_cpus=1) as cluster:
        cluster.add(cpus=workers, environment={"CUDA_VISIBLE_DEVICES": "0,1"})
        assert run_script(SWEEP, cluster.address, str(tmp_path), str(workers)) == "None [0.0]"


def test_rejects_the_address_of_a_job_server() -> None:
    assert run_script(JOIN, "http://head:8265").startswith("refused: http://head:8265 is the address of a job server")
