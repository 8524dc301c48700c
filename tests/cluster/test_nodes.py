"""Nodes that are lost under a cell, and others that come: a driver of its own, because the tests share a session."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.nodes import nodes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
@pytest.mark.parametrize("announced", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_cell_outlives_two_nodes_and_waits_for_a_third(announced: bool, tmp_path: Path) -> None:
    """With notice or without."""
    with nodes(head_cpus=0) as several:
        node = several.add()
        command = [sys.executable, "-m", "tests.cluster.nodes", "outlive", str(tmp_path), several.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            for _ in range(2):
                assert driver.stdout.readline().startswith("pid")
                if announced:
                    several.announce_loss(node, seconds=2)
                    time.sleep(2)
                several.kill(node)
                node = several.add()
            said = driver.stdout.read()
    assert driver.returncode == 0
    assert said.splitlines()[-1] == "3 starts, error None"


@pytest.mark.long
def test_a_cell_is_packed_into_a_node_and_cells_are_spread(tmp_path: Path) -> None:
    with nodes(head_cpus=0) as several:
        for _ in range(2):
            several.add(cpus=2)
        command = [sys.executable, "-m", "tests.cluster.nodes", "place", str(tmp_path), several.address]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    first, second = ({(tmp_path / f"{cell}-{rank}").read_text() for rank in range(2)} for cell in "ab")
    assert len(first) == len(second) == 1
    assert first != second
