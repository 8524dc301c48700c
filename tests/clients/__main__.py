"""Runs the tests with clients and writes the table of docs/results/clients.md: `python -m tests.clients [ITEM ...]`.

With items, such as `1 6`, only their rows are renewed. Items of the system are shown by everyday tests, which are not run here.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/results/clients.md"
BEGIN, END = "<!-- clients: written by `python -m tests.clients` -->\n\n", "\n<!-- /clients -->"
HEAD = "| item | what | client | result | tests |\n|---|---|---|---|---|\n"
EXPORT = "tests/models/test_export.py::test_"
FUSED = "tests/ops/test_fused_modules.py::test_"


@dataclass(frozen=True)
class Row:
    """An item of the table: what is shown, the packages whose versions are printed, and the tests."""

    what: str
    packages: tuple[str, ...] = ("torch",)
    tests: tuple[str, ...] = ()
    command: str = ""
    """Shows the item in place of tests that are run here."""


ROWS = {
    "1": Row("timm: registry and model protocol", ("timm",), ("tests/clients/test_timm.py",)),
    "2a": Row("feature extraction, feature pyramid, Faster R-CNN", ("torchvision",), ("tests/clients/test_torchvision.py",)),
    "2b": Row("attribution methods", ("captum",), ("tests/clients/test_captum.py",)),
    "2c": Row("`torch.fx.symbolic_trace`", tests=("tests/models/test_tracing.py",)),
    "3a": Row("`torch.export` with any height and width", tests=(f"{EXPORT}exports_without_our_operators_for_any_size",)),
    "3b": Row(
        "ONNX with any height and width",
        ("onnxruntime", "onnxscript"),
        (f"{EXPORT}onnxruntime_gives_the_same_numbers_at_any_size",),
    ),
    "3c": Row(
        "`torch.jit.trace` and the older ONNX exporter",
        ("torch", "onnxruntime"),
        (f"{EXPORT}traces_and_legacy_onnx_files_need_no_kernels",),
    ),
    "3d": Row("AOTInductor package on the CPU", tests=(f"{EXPORT}an_aot_inductor_package_takes_any_size",)),
    "4": Row("a wheel without a compiler", command="`tests/test_wheel.py`"),
    "5": Row("Python 3.12 and 3.13", command="`make test-torch TORCH=2.13.0 PYTHON=python3.13`"),
    "6": Row("sharing weights", ("huggingface_hub", "safetensors"), ("tests/clients/test_hub.py",)),
    "7a": Row("gradient penalties", tests=(f"{FUSED}gradient_penalty_equals_the_reference",)),
    "7b": Row("torch's FLOP counter", tests=("tests/models/test_complexity.py",)),
    "8": Row("your own images", command="`tests/docs/test_guides.py`"),
    "9": Row("training loop, Lightning, Faster R-CNN", ("lightning", "torchvision"), ("tests/clients/test_guides.py",)),
    "10": Row("tables of custom grids", command="`tests/experiments/report/test_tables.py`"),
    "11": Row(
        "`san.register_relation`",
        tests=(
            "tests/nn/test_attention.py::test_a_new_relation_is_one_row",
            "tests/nn/test_attention.py::test_a_new_relation_returns_the_channels_that_it_declares",
            "tests/experiments/grids/test_custom_code.py",
        ),
    ),
    "12": Row("`san plan` writes nothing", command="`tests/experiments/cli/test_commands.py`"),
    "13": Row("suggestions in error messages", command="`tests/experiments/grids/test_config.py`"),
    "14": Row("managing runs", command="`tests/experiments/cli/test_run.py`"),
    "15": Row("interactive attention", command="`tests/experiments/report/test_attention_page.py`"),
}


class Recorder:
    """Counts the outcomes of tests; a pytest plugin."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the worst outcome of setup, call and teardown."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def of(self, row: Row) -> str:
        """Such as "9 passed"."""
        counts = Counter(outcome for node, outcome in self.outcomes.items() if re.split(r"\[", node)[0].startswith(row.tests))
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "not run"


def lines(items: list[str], recorder: Recorder, before: dict[str, str]) -> Iterator[str]:
    """The rows of the table; those that were not run keep their text."""
    for item, row in ROWS.items():
        if not row.tests:
            yield f"| {item} | {row.what} | | see the tests | {row.command} |"
        elif item in items:
            clients = ", ".join(f"{package} {_version(package)}" for package in row.packages)
            tests = ", ".join(f"`{test}`" for test in dict.fromkeys(test.partition("::")[0] for test in row.tests))
            yield f"| {item} | {row.what} | {clients} | {recorder.of(row)}, {datetime.now(UTC):%Y-%m-%d} | {tests} |"
        else:
            yield before.get(item, f"| {item} | {row.what} | | not run | |")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def main(items: list[str]) -> int:
    """Runs the tests of some items, all by default, and writes their rows. Returns pytest's exit code."""
    unknown = set(items) - {item for item, row in ROWS.items() if row.tests}
    if unknown:
        raise SystemExit(f"no tests for item {', '.join(sorted(unknown))}; choose from: {', '.join(ROWS)}")
    items = items or [item for item, row in ROWS.items() if row.tests]
    recorder = Recorder()
    code = pytest.main(["-q", *dict.fromkeys(test for item in items for test in ROWS[item].tests)], plugins=[recorder])
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    before = {line.split("|")[1].strip(): line for line in text[start:end].splitlines()}
    table = HEAD + "\n".join(lines(items, recorder, before)) + "\n"
    PAGE.write_text(text[:start] + table + text[end:], encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
