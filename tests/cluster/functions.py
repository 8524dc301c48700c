"""Functions for the trials of tests, and an observer that records events. Workers import them from here."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster import Outcome
from cluster.serial import ReportFn


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


def timed(seconds: float, report: ReportFn) -> None:
    """Reports the times of its start and end."""
    report({"time": time.time()})
    time.sleep(seconds)
    report({"time": time.time()})


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


def reducing(value: float, report: ReportFn) -> None:
    """Sums the ranks over all workers, then fails on rank 1."""
    import torch
    from torch import distributed

    total = torch.tensor([value + float(os.environ["RANK"])])
    distributed.all_reduce(total)
    report({"sum": total.item(), "workers": float(os.environ["WORLD_SIZE"])})
    began = time.monotonic()
    for _ in range(40):
        report({"seconds": time.monotonic() - began})
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank one gives up")
    distributed.barrier()


def asking(plan: tuple[Callable[[str, list[float]], bool], str, list[float]], report: ReportFn) -> None:
    """Each worker asks after each score whether to continue, and continues in any case."""
    judge, key, scores = plan
    for number in range(len(scores)):
        report({"should_continue": float(judge(key, scores[: number + 1]))})


class Shouting(Memory):
    """Prints every report, for the parent of this process."""

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        print("pid", int(metrics["pid"]), flush=True)


def growing(gigabytes: int, report: ReportFn) -> None:
    """Takes memory step by step."""
    report({"gigabytes": 0})
    taken = []
    for _ in range(10 * gigabytes):
        taken.append(b"x" * 10**8)
        time.sleep(0.1)
    report({"gigabytes": gigabytes})
