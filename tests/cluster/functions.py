"""Functions for the trials of tests, and an observer that records events. Workers import them from here."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import Outcome, ReportFn


@dataclass(slots=True)
class Memory:
    """An observer that records all events."""

    starts: list[str] = field(default_factory=list)
    reports: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def started(self, key: str) -> None:
        self.starts.append(key)

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        self.reports.append((key, dict(metrics)))

    def failed(self, key: str, reason: str) -> None:
        self.failures.append((key, reason))

    def finished(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)

    def of(self, key: str) -> list[dict[str, float]]:
        return [metrics for reported, metrics in self.reports if reported == key]


def meeting(plan: tuple[str, str, str, str], report: ReportFn) -> None:
    """Reports how many trials run, then its environment. Ends when the other trial of its pair has started, too."""
    folder, key, other, current_folder = plan
    running = Path(folder, f"{key}.running")
    running.touch()
    report({"running": len(list(Path(folder).glob("*.running")))})
    describing(current_folder, report)
    while not any(Path(folder, f"{other}.{state}").exists() for state in ("running", "done")):
        time.sleep(0.02)
    running.rename(running.with_suffix(".done"))


def calling(call: tuple[Callable[[Any, ReportFn], None], Any], report: ReportFn) -> None:
    """Calls another function of this file."""
    function, value = call
    function(value, report)


def counting(last: int, report: ReportFn) -> None:
    for epoch in range(last):
        report({"epoch": epoch})
    if last == 0:
        raise ValueError("nothing to count\nnot even to one")


def dying(marker: str, report: ReportFn) -> None:
    """Dies without an exception unless the marker exists; creates the marker if its folder exists."""
    if not Path(marker).exists():
        if Path(marker).parent.exists():
            Path(marker).touch()
        os._exit(3)
    report({"survived": 1.0})


def ending(how: str, report: ReportFn) -> None:
    """Reports its process, then succeeds, fails, fails without a retry, or kills its process."""
    report({"pid": os.getpid()})
    if how == "raises":
        raise RuntimeError("it breaks")
    if how == "raises a final error":
        raise ValueError("it is wrong")
    if how == "dies":
        os._exit(3)


def describing(value: str, report: ReportFn) -> None:
    """Reports the environment of a worker."""
    report(
        {
            "threads": float(os.environ["OMP_NUM_THREADS"]),
            "ranked": float("RANK" in os.environ),
            "same_folder": float(os.getcwd() == value),
            "sees_gpus": float(os.environ.get("CUDA_VISIBLE_DEVICES") != ""),
        }
    )


def reducing(ask: Callable[[str, list[float]], bool], report: ReportFn) -> None:
    """Sums the ranks over all workers, asks whether two trials continue, then fails on rank 1."""
    import torch
    from torch import distributed

    total = torch.tensor([float(os.environ["RANK"])])
    distributed.all_reduce(total)
    report({"sum": total.item(), "workers": float(os.environ["WORLD_SIZE"])})
    report({"good": float(ask("good", [6.0])), "bad": float(ask("bad", [4.0]))})
    if os.environ["RANK"] == "1":
        raise ValueError("rank one gives up")
    distributed.barrier()


class Shouting(Memory):
    """Prints every report, for the parent of this process."""

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        print("pid", int(metrics["pid"]), flush=True)
