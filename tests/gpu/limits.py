"""What limits each kernel of attention, by the hardware counters that Nsight Compute (`ncu`) reads.

`ncu` runs the case `launches`, in which each operator runs forward and backward once in each of SAN10's stages, with TF32, and
prints the counters of each launch. A kernel is limited by the unit that is busiest, if it is busy for 60% of the time or more,
otherwise by latency; the row then has ncu's explanation. `python -m tests.gpu --out DIR --case tune/limits --report` runs only
this.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.gpu.build import kernels
from tests.gpu.case import Case, Row, Settings, SkipCase
from tests.gpu.correctness import fused_operators, stages_of
from tests.ops import cases

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")
UNITS = {
    "instruction issue": "Issue Slots Busy",
    "an arithmetic pipeline": "SM Busy",
    "L1 and shared memory": "L1/TEX Cache Throughput",
    "L2": "L2 Cache Throughput",
    "memory bandwidth": "DRAM Throughput",
}
"""ncu's metric of each unit, in percent."""
BUSY = 60.0


def launches(settings: Settings) -> Iterator[Row]:
    """Runs each operator of attention once in each stage."""
    for operator in fused_operators(settings):
        for stage in stages_of(operator, settings):
            tensors = tuple(x.float().to(settings.device) for x in cases.sample(operator, stage))
            found = cases.run_kernels(operator, tensors, stage, kernels(settings), tf32=True)
            yield {"operator": operator, "sizes": str(stage), "passed": all(bool(x.isfinite().all()) for x in found)}


def limits(settings: Settings) -> Iterator[Row]:
    """The limit of each kernel in `launches`."""
    program = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if not settings.on_gpu or program is None:
        raise SkipCase("needs a GPU" if program else "needs Nsight Compute (ncu)")
    table = Path(settings.work, "ncu.csv")
    command = [program, "--csv", "--page", "details", "--log-file", str(table), "--clock-control", "none"]
    command += ["--print-units", "base"]  # ns
    command += ["--target-processes", "all", "--kernel-name", "regex:attend|gradient|gram|patch_linear|statistics|sums"]
    command += [part for section in SECTIONS for part in ("--section", section)]
    case = [
        sys.executable,
        "-m",
        "tests.gpu.child",
        settings.to_json(),
        "tune/launches",
        str(Path(settings.work, "launches.jsonl")),
    ]
    done = subprocess.run([*command, *case], capture_output=True, text=True)
    if re.search("ERR_NVGPUCTRPERM|LibraryNotLoaded", done.stdout + done.stderr):
        raise SkipCase("the counters cannot be read on this machine")
    if done.returncode or not table.exists():
        raise RuntimeError(f"ncu failed: {(done.stderr or done.stdout)[-1000:]}")
    yield from by_kernel(table.read_text(errors="replace").splitlines())


def by_kernel(lines: Iterable[str]) -> Iterator[Row]:
    """One row for each launch, from the CSV that ncu prints."""
    metrics: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        launch = row["ID"], row["Kernel Name"]
        if row.get("Rule Description"):
            reasons[launch].append(row["Rule Description"])
        elif row["Metric Value"]:
            value = row["Metric Value"].replace(",", "")
            if re.fullmatch(r"[-+.\d]+(e[-+]\d+)?", value):
                metrics[launch][row["Metric Name"]] = float(value)
    for launch, values in metrics.items():
        busy = {unit: values[metric] for unit, metric in UNITS.items() if metric in values}
        unit = max(busy, key=busy.__getitem__, default=None)
        is_busy = unit is not None and busy[unit] >= BUSY
        why = [] if is_busy else [reason for reason in reasons[launch] if "stall" in reason]
        yield {
            "kernel": launch[1],
            "limit": unit if is_busy else "latency",
            "busy": busy,
            "metrics": values,
            "why": why,
        }


ALL = [Case("tune", "launches", launches, 90), Case("tune", "limits", limits, 71, 240)]
