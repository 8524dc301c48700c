"""The commit and the environment of a result."""

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest

from experiments.runs import provenance


def test_commit_of_a_checkout() -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    where = Path(provenance.__file__).parent
    head = subprocess.run(["git", "-C", where, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        pytest.skip("this copy of the project is not a git checkout")
    assert provenance.git_commit().removesuffix("-dirty") == head.stdout.strip()


def test_commit_of_a_copy_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy that is in no git checkout."""
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.git_commit() == "unknown"
    monkeypatch.setenv("SAN_GIT_COMMIT", "abc-dirty")
    assert provenance.git_commit() == "abc-dirty"


def test_environment_lists_hardware_and_packages() -> None:
    lines = provenance.environment().splitlines()
    assert f"torch=={importlib.metadata.version('torch')}" in lines
    assert any(" CPUs (" in line and " GiB of memory, " in line for line in lines[:4])
