"""Cases of the GPU check: functions that yield rows of results and run in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]


class SkipCase(Exception):  # noqa: N818 - not an error
    """The case cannot run here; the text says why."""


@dataclass(frozen=True)
class Settings:
    """Options for all cases."""

    device: str
    """`cuda`, `cuda:1` or `cpu`."""
    work: str
    """Folder for files that cases share."""
    authors: str | None = None
    """Checkout of hszhao/SAN, to measure its kernels too."""
    photographs: str | None = None
    """Folder of JPEG photographs, instead of generated ones."""
    cifar10: str | None = None
    """CIFAR-10 as `san data prepare cifar10` writes it, or a part of it, instead of the digits."""

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def small(self) -> bool:
        """Small sizes and few repeats, because a CPU is slow."""
        return not self.on_gpu

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Case:
    """Checks or timings that share a process, because starting Python and CUDA takes long.

    A row is written as soon as it is yielded, so rows before a crash are kept. A row with `"passed": False` fails the case.
    """

    part: str
    name: str
    run: Callable[[Settings], Iterator[Row]]
    priority: int
    """Cases of all parts run in ascending order."""
    limit: float = 120.0
    """Seconds after which the process is killed."""

    @property
    def id(self) -> str:
        return f"{self.part}/{self.name}"
