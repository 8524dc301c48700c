"""Joining a cluster that others started, in separate processes, because the tests share a session."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

import cluster.session
from cluster import ClusterError, Node, Resources
from experiments.config.config import PROJECT_DIR
from tests.cluster.heads import ray_head
from tests.cluster.processes import kill_ray
from tests.experiments.drivers import PATIENCE, clean_environment

SWEEP = """
import sys
from cluster import Placement
from cluster.session import session
from cluster.sweep import sweep
from tests.cluster import functions
memory = functions.Memory()
with session() as resources:
    outcomes = sweep(functions.describing, {"trial": ""}, Placement(), storage=sys.argv[1], observer=memory)
print(resources, outcomes["trial"].error, [report["sees_gpus"] for report in memory.of("trial")])
"""


def run_script(script: str, *arguments: str, **variables: str) -> str:
    """Runs a script with these variables for Ray and no others; returns the last line of its output."""
    environment = clean_environment() | {"PYTHONPATH": str(PROJECT_DIR), **variables}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_driver_joins_a_cluster_that_others_started(tmp_path: Path) -> None:
    """And leaves it running. Trials without GPUs see none, although only a setting of the cluster would make Ray hide them."""
    with ray_head("--num-cpus=3", "--include-dashboard=false", environment={"CUDA_VISIBLE_DEVICES": "0,1"}) as head:
        resources = Resources((Node(3, 0),))
        assert run_script(SWEEP, str(tmp_path), RAY_ADDRESS=head.address) == f"{resources} None [0.0]"


def test_address_of_a_job_server_is_refused() -> None:
    with pytest.raises(ClusterError, match="is the address of a job server"):
        cluster.session._connect("http://head:8265")


WAIT = """
import sys, time
import cluster.supervision
from cluster.session import session
cluster.supervision._SECONDS_TO_RESPOND = 3.0
with session(sys.argv[1], [lambda: print("called")]):
    print("joined", flush=True)
    time.sleep(10_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_driver_ends_if_the_head_of_its_cluster_does_not_answer(by: int) -> None:
    with ray_head("--num-cpus=1", "--include-dashboard=false") as head:
        command = [sys.executable, "-u", "-c", WAIT, head.address]
        environment = clean_environment() | {"PYTHONPATH": str(PROJECT_DIR)}
        with subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True) as driver:
            try:
                assert driver.stdout is not None and driver.stdout.readline() == "joined\n"
                kill_ray("gcs_server", str(head.folder), by)
                said, errors = driver.communicate(timeout=PATIENCE)
            finally:
                driver.kill()
        if by == signal.SIGSTOP:  # so that it can end
            kill_ray("gcs_server", str(head.folder), signal.SIGCONT)
    assert (driver.returncode, said) == (os.EX_TEMPFAIL, "called\n"), errors
    assert errors.splitlines()[-1].startswith(f"san: the Ray head at {head.address} does not respond")
