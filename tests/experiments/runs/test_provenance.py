"""The commit and the environment of a result."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.runs import provenance


def test_commit_of_a_checkout() -> None:
    where = Path(provenance.__file__).parent
    head = subprocess.run(["git", "-C", where, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        pytest.skip("this copy of the project is not a git checkout")
    assert provenance.git_commit().removesuffix("-dirty") == head.stdout.strip()


@pytest.mark.parametrize(
    ("variables", "commit"), [({}, "unknown"), ({"SAN_GIT_COMMIT": "abc-dirty"}, "abc-dirty")], ids=["unknown", "variable"]
)
def test_commit_of_a_copy_comes_from_the_environment(variables: dict[str, str], commit: str, tmp_path: Path) -> None:
    (tmp_path / "experiments" / "runs").mkdir(parents=True)
    shutil.copy(provenance.__file__, tmp_path / "experiments" / "runs")
    program = "from experiments.runs.provenance import git_commit; print(git_commit())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == commit


def test_environment_lists_hardware_and_packages() -> None:
    lines = provenance.environment().splitlines()
    assert f"torch=={importlib.metadata.version('torch')}" in lines
    assert any(" CPUs (" in line and " GiB of memory, " in line for line in lines[:4])
