"""What a case of the GPU check is: a function that yields rows of results, and how it is called in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]
PARTS = ("correctness", "cores", "models", "loader", "training")


class SkipCase(Exception):  # noqa: N818 - it is no error
    """The case cannot run here; the text says why."""


@dataclass(frozen=True)
class Settings:
    """What all cases get."""

    device: str
    """`cuda`, `cuda:1` or `cpu`."""
    small: bool
    """Small sizes and few repeats, for a CPU."""
    work: str
    """Folder for files that one case leaves for others."""
    authors: str | None = None
    """Checkout of hszhao/SAN, whose kernels are then timed too."""

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Case:
    """One process: checks or timings that belong together, so that the cost of starting Python and CUDA is paid once.

    A row is written as soon as it is yielded, so rows before a crash are kept. A row with `"passed": False` fails the case.
    """

    part: str
    name: str
    run: Callable[[Settings], Iterator[Row]]
    priority: int
    """Cases run in ascending order, across parts."""
    limit: float = 120.0
    """Seconds after which the process is killed."""

    @property
    def id(self) -> str:
        return f"{self.part}/{self.name}"
