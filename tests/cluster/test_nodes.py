"""Nodes that are lost and added during a sweep. The driver is a separate process, because the tests share a session."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.nodes import nodes

pytestmark = pytest.mark.slow


def test_trials_spread_over_nodes_and_wait_for_new_ones(tmp_path: Path) -> None:
    """The workers of a trial share a node. A trial survives two lost nodes; meanwhile, there is none."""
    with nodes(head_cpus=0) as cluster:
        first, second = cluster.add(cpus=2), cluster.add(cpus=2)
        driver = [sys.executable, "-m", "tests.cluster.nodes"]
        subprocess.run([*driver, "place", str(tmp_path), cluster.address], check=True, stdout=subprocess.DEVNULL)
        places = [{(tmp_path / f"{trial}-{rank}").read_text() for rank in range(2)} for trial in "ab"]
        assert [len(place) for place in places] == [1, 1] and places[0] != places[1]

        cluster.kill(first)
        with subprocess.Popen(
            [*driver, "outlive", str(tmp_path), cluster.address], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(2):
                assert process.stdout.readline().startswith("pid")
                cluster.kill(second)
                second = cluster.add()
            output = process.stdout.read()
    assert process.returncode == 0
    assert output.splitlines()[-1] == "3 starts, error None"
