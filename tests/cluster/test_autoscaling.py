"""A sweep on a cluster with an autoscaler."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.autoscaling import autoscaling_head
from tests.experiments.drivers import PATIENCE


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
def test_autoscaler_adds_nodes_for_waiting_trials_and_removes_them(tmp_path: Path) -> None:
    """At most three nodes for four trials."""
    with autoscaling_head(most=3, idle_minutes=0.05, folder=tmp_path) as address:
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.cluster.autoscaling", str(tmp_path / "s"), address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        print(f"{time.monotonic() - began:.0f} s", done.stdout)
    assert done.returncode == 0, done.stderr
    before, after, idle = map(json.loads, done.stdout.splitlines())
    assert before == {"cpus": 0, "grows": True}
    assert after == {"nodes": 3, "errors": [None] * 4}
    assert idle == {"left": 0}
