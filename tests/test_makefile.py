"""What the Makefile would run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _commands(target: str) -> list[str]:
    """The commands in a checkout without an environment, also when these tests were themselves started by `make`."""
    make = ["make", "--dry-run", "--always-make", target, "VENV=.venv-of-nobody"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_deepspeed_is_installed_without_looking_for_a_cuda_toolkit() -> None:
    commands = "\n".join(_commands(".venv-of-nobody/.installed")).replace("\\\n", "")
    (install,) = [command for command in commands.splitlines() if "-r requirements.txt" in command]
    assert "DS_IGNORE_CUDA_DETECTION=1" in install


def test_the_gpu_check_runs_in_the_projects_environment() -> None:
    assert _commands("gpu-check")[-1].startswith(".venv-of-nobody/bin/python -m tests.gpu --device cuda")
