"""Nodes that are lost and added during a sweep. The driver is a separate process, because the tests share a session."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.nodes import nodes

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
def test_trial_survives_two_lost_nodes_and_waits_for_a_third(tmp_path: Path) -> None:
    with nodes(head_cpus=0) as cluster:
        node = cluster.add()
        command = [sys.executable, "-m", "tests.cluster.nodes", "outlive", str(tmp_path), cluster.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            for _ in range(2):
                assert driver.stdout.readline().startswith("pid")
                cluster.kill(node)
                node = cluster.add()
            output = driver.stdout.read()
    assert driver.returncode == 0
    assert output.splitlines()[-1] == "3 starts, error None"


def test_workers_of_a_trial_share_a_node_and_trials_spread(tmp_path: Path) -> None:
    with nodes(head_cpus=0) as cluster:
        for _ in range(2):
            cluster.add(cpus=2)
        command = [sys.executable, "-m", "tests.cluster.nodes", "place", str(tmp_path), cluster.address]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    first, second = ({(tmp_path / f"{cell}-{rank}").read_text() for rank in range(2)} for cell in "ab")
    assert len(first) == len(second) == 1
    assert first != second
