"""Where a result comes from: the project's commit, hardware, packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

COMMIT_VARIABLE = "SAN_GIT_COMMIT"
"""What a job's copy of the project is a copy of; it is no checkout itself."""


def git_commit() -> str:
    """Commit of the project, and `-dirty` where files differ from it; outside a checkout what `SAN_GIT_COMMIT` says, else
    `unknown`."""
    where = ["git", "-C", str(Path(__file__).parent)]
    command = [*where, "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git here
        return _told()
    return done.stdout.strip() if done.returncode == 0 else _told()


def _told() -> str:
    return os.environ.get(COMMIT_VARIABLE, "unknown")


def environment() -> str:
    """Hardware, Python and package versions, as text."""
    packages = sorted(f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions())
    return "\n".join([f"python {platform.python_version()}", platform.platform(), machine(), "", *packages, ""])


def machine() -> str:
    """Processors, memory and GPUs of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} CPUs ({_processor()}), {memory:.0f} GiB of memory, {_gpus()}"


def versions() -> str:
    """Of Python and of the packages that a result depends on most; `environment` has them all."""
    wanted = re.compile("torch|deepspeed|ray|nvidia-dali-.*")
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    packages = [f"{name} {found[name]}" for name in sorted(found) if wanted.fullmatch(name)]
    return ", ".join([f"python {platform.python_version()}", *packages])


def _processor() -> str:
    """Linux tells it nowhere else."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> str:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
