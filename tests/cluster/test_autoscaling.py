"""A cluster that adds nodes for the cells that wait, and takes them back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.autoscaling import autoscaling_head


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
def test_cells_that_wait_bring_nodes_which_go_when_none_waits(tmp_path: Path) -> None:
    """Three nodes at most for four cells; nothing asks for them after the last."""
    with autoscaling_head(most=3, idle_minutes=0.05) as address:
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.cluster.autoscaling", str(tmp_path / "s"), address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        print(f"{time.monotonic() - began:.0f} s", done.stdout)
    assert done.returncode == 0, done.stderr
    before, after, idle = map(json.loads, done.stdout.splitlines())
    assert before == {"cpus": 0, "grows": True}
    assert after == {"nodes": 3, "errors": [None] * 4}
    assert idle == {"left": 0}
