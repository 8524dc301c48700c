"""Provenance of results: the project's commit, hardware and package versions."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

COMMIT_VARIABLE = "SAN_GIT_COMMIT"
"""Commit of a job's copy of the project, which is not a git checkout."""


def git_commit() -> str:
    """Commit of the project, with `-dirty` if files have changed. Outside a checkout, `SAN_GIT_COMMIT` or `unknown`."""
    where = ["git", "-C", str(Path(__file__).parent)]
    command = [*where, "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        commit = done.stdout.strip() if done.returncode == 0 else ""
    except OSError:  # git is not installed
        commit = ""
    return commit or os.environ.get(COMMIT_VARIABLE, "unknown")


def environment() -> str:
    """Describes hardware, Python and all packages."""
    packages = sorted(f"{name}=={version}" for name, version in _packages().items())
    return "\n".join([f"python {platform.python_version()}", platform.platform(), machine(), "", *packages, ""])


def machine() -> str:
    """Describes this machine's CPUs, memory and GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} CPUs ({_processor()}), {memory:.0f} GiB of memory, {_gpus()}"


def versions() -> str:
    """Versions of Python and of the packages that affect results most."""
    wanted = re.compile("torch|deepspeed|ray|nvidia-dali-.*")
    packages = [f"{name} {version}" for name, version in sorted(_packages().items()) if wanted.fullmatch(name)]
    return ", ".join([f"python {platform.python_version()}", *packages])


@functools.cache
def _packages() -> dict[str, str]:
    """Versions of the installed packages. Read once, because it takes a tenth of a second."""
    found = importlib.metadata.distributions()
    return {name: d.version for d in found if (name := d.metadata["Name"])}  # an interrupted installation has none


def _processor() -> str:
    """Name of the CPU model."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> str:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
