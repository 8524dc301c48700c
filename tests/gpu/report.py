"""Turns results of the GPU check into Markdown.

python -m tests.gpu.report RESULTS.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.benchmarks import tables
from tests.gpu.case import Row

MACHINE = ("gpu", "gpus", "memory_GiB", "driver", "cuda", "cpu", "cpus", "python", "torch", "commit", "date")


def report(records: Sequence[Row]) -> str:
    """Returns the tables of all measurements."""
    facts = machine(records)
    title = "" if facts.get("device") == "cuda" else "**Small test sizes: not a measurement.**\n\n"
    described = ", ".join(f"{key} {facts[key]}" for key in MACHINE if key in facts)
    timings = (
        *_cores(records),
        *_models(records),
        _kernels(records),
        _network(records),
        _tune(records),
        _limits(records),
        _loader(records),
    )
    parts = _status(records), *timings, _system(records), _troubles(records)
    return title + "\n\n".join([f"Machine: {described}.", *(part for part in parts if part)]) + "\n"


def machine(records: Sequence[Row]) -> Row:
    return next((row["machine"] for row in rows(records, "build") if "machine" in row), {})


def rows(records: Iterable[Row], part: str) -> Iterator[Row]:
    for record in records:
        if record["part"] == part:
            yield from record["rows"]


def table(title: str, heading: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    return tables.table(title, heading, lines).strip() if lines else ""


def ranged(values: Sequence[float] | None, digits: int = 2) -> str:
    """Returns median and range."""
    if not values:
        return "-"
    middle, low, high = (f"{x:.{digits}f}" for x in values)
    return f"{middle} ({low}-{high})"


def _status(records: Sequence[Row]) -> str:
    lines = []
    for part in dict.fromkeys(record["part"] for record in records):
        counts = Counter(record["status"] for record in records if record["part"] == part)
        checks = [row for row in rows(records, part) if "passed" in row]
        of_checks = f"{sum(row['passed'] for row in checks)} of {len(checks)}" if checks else "-"
        lines.append([part, ", ".join(f"{n} {status}" for status, n in counts.items()), of_checks])
    return table("Cases", ["part", "cases", "checks passed"], lines)


def _cores(records: Sequence[Row]) -> Iterator[str]:
    found = [row for row in rows(records, "cores") if "core" in row]
    for precision, mode in sorted({(row["precision"], row["mode"]) for row in found}):
        measured = [row for row in found if (row["precision"], row["mode"]) == (precision, mode)]
        every = {name for row in measured for name in (*row["times_ours"], *row["left_out"])}
        names = [name for name in ("unfused", "reference", "authors") if name in every]
        lines = []
        for row in measured:
            ours = row["ms"].get("fused")
            share = f"{row['roofline_ms'] / ours[0]:.0%}".replace("%", " %") if ours else row["left_out"].get("fused", "-")
            others = [row["left_out"].get(name) or ranged(row["times_ours"].get(name), 1) for name in names]
            roofline = f"{row['roofline_ms']:.3f} ({row['limit']})"
            peaks = ", ".join(f"{name} {MiB:.0f}" for name, MiB in row.get("peak_MiB", {}).items()) or "-"
            lines.append([f"{row['core']}, {row['stage']}", ranged(ours, 3), roofline, share, *others, peaks])
        batches = "/".join(sorted({str(row["batch"]) for row in measured}))
        heading = [
            "attention alone",
            "fused, ms",
            "roofline, ms",
            "of roofline",
            *(f"{name} / fused" for name in names),
            "peak MiB",
        ]
        yield table(f"{'Training' if mode == 'train' else 'Evaluation'}, {precision}, batch {batches}", heading, lines)


def _models(records: Sequence[Row]) -> Iterator[str]:
    for mode in ("train", "eval"):
        lines = []
        for row in rows(records, "models"):
            if row.get("mode") != mode:
                continue
            name, speeds = row["model"], row["images_per_s"]
            speed = row["left_out"].get(name) or ranged(speeds.get(name), 0)
            memory = row["peak_MiB"].get(name)
            yardstick = ranged(speeds.get("resnet26"), 0), ranged(row.get("times_resnet26"))
            lines.append([name, row["precision"], row["how"], speed, *yardstick, f"{memory:.0f}" if memory else "-"])
        heading = ["network", "precision", "how", "images/s", "ResNet26", "ratio to ResNet26", "peak MiB"]
        yield table("Training steps" if mode == "train" else "Evaluation of networks", heading, lines)


def _kernels(records: Sequence[Row]) -> str:
    """The two slowest kernels of each stage; the records have more."""
    lines = []
    for core, found in itertools.groupby(rows(records, "kernels"), lambda row: f"{row['kind']}, {row['stage']}"):
        for row in itertools.islice(found, 2):
            lines.append([core, f"`{row['kernel']}`", f"{row['launches']:g}", f"{row['ms']:.3f}"])
    return table("Slowest kernels of a training step", ["attention alone", "kernel", "launches", "ms"], lines)


def _network(records: Sequence[Row]) -> str:
    """Classes of kernels; the records also have the slowest kernels by name."""
    lines = []
    for row in rows(records, "network"):
        named = [row["network"], row["precision"]]
        if "class" in row:
            lines.append([*named, row["class"], f"{row['ms']:.2f}", f"{row['launches']:g}", row.get("TB_per_s", "-")])
        elif "variant" in row:
            lines.append([*named, f"whole step: {row['variant']}", ranged(row["ms"]), "-", "-"])
    return table("A training step of 32 images", ["network", "precision", "kernels", "ms", "launches", "TB/s"], lines)


def _tune(records: Sequence[Row]) -> str:
    """The fastest variant of each operator and size. Less than 1 is faster than the library."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows(records, "tune"):
        if row.get("times_ours"):
            found.setdefault((row["operator"], row["direction"], row["sizes"]), []).append(row)
    lines = []
    for key, variants in found.items():
        best = min(variants, key=lambda row: row["times_ours"][row["variant"]][0])
        lines.append([*key, ranged(best["ms"]["ours"], 3), best["variant"], ranged(best["times_ours"][best["variant"]])])
    heading = ["operator", "direction", "sizes", "ms", "fastest variant", "its time / ours"]
    return table("Other values of `cuda/tuning.h`, TF32", heading, lines)


def _limits(records: Sequence[Row]) -> str:
    lines = []
    for row in rows(records, "tune"):
        if "limit" in row:
            busy = max(row["busy"].values(), default=0.0)
            lines.append([row["kernel"], f"{row['metrics'].get('Duration', 0) / 1000:.1f}", row["limit"], f"{busy:.0f}%"])
    return table("What limits each kernel (`ncu`)", ["kernel", "µs", "limit", "busiest unit"], lines)


def _loader(records: Sequence[Row]) -> str:
    found = [row for row in rows(records, "loader") if "threads" in row]
    lines = [[row["mode"], row["decoder"], row["threads"], row["batch"], ranged(row["images_per_s"], 0)] for row in found]
    return table("Loading photographs", ["images", "decoded by", "threads", "batch", "images/s"], lines)


def _system(records: Sequence[Row]) -> str:
    lines = []
    for row in rows(records, "system"):
        numbers = {key: value for key, value in row.items() if key not in ("what", "trial", "said", "passed")}
        text = json.dumps(numbers).translate(str.maketrans("", "", '{}"')) or "-"
        lines.append([row.get("what") or row["trial"], {True: "passed", False: "failed"}.get(row.get("passed", ""), "-"), text])
    return table("The whole system", ["observation", "check", "numbers"], lines)


def _troubles(records: Sequence[Row]) -> str:
    bad = [record for record in records if record["status"] in ("failed", "crashed", "timeout")]
    lines = [[f"{r['part']}/{r['name']}", r["status"], _one_line(r["error"])] for r in bad]
    return table("Failed cases", ["case", "status", "error"], lines)


def _one_line(text: str) -> str:
    return text.splitlines()[0][:150].replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    print(report([json.loads(line) for line in options.results.read_text().splitlines()]))


if __name__ == "__main__":
    main()
