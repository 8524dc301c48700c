"""The end of Ray."""

import subprocess
import sys

import pytest

from tests.experiments.drivers import PATIENCE

QUICK_CHECKS = """
import ray
from cluster import session, supervision

supervision._SECONDS_BETWEEN_CHECKS = 0.001
with session.session():
    ray.shutdown()  # as in a sweep that Ctrl-C interrupts
"""


@pytest.mark.slow
def test_end_of_ray_before_the_end_of_the_session_is_not_its_death() -> None:
    command = [sys.executable, "-c", QUICK_CHECKS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
