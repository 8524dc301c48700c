"""Runs the tests with clients and writes the table of docs/results/clients.md: `python -m tests.clients [ITEM ...]`.

With items, such as `1 6`, only their rows are renewed. Item 5 installs environments with torch for other versions of Python,
which takes some GB and half an hour; it runs only if it is named.
"""

from __future__ import annotations

import re
import subprocess
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
CLI = "tests/experiments/cli/test_"
TORCH = "2.13.0"
EXPORT = "tests/models/test_export.py::test_"
GRID = "tests/experiments/grids/test_grid.py::test_"
PAGES = "tests/docs/test_guides.py::test_a_page_does_what_it_says"
RELATION = "tests/nn/test_attention.py::test_a_new_relation_"


@dataclass(frozen=True)
class Row:
    """An item of the table: what is shown, the packages whose versions are printed, and the tests.

    Instead of tests, there may be values of PYTHON for `make test-torch`.
    """

    what: str
    tests: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("torch",)
    pythons: tuple[str, ...] = ()


ROWS = {
    "1": Row("timm: registry and model protocol", ("tests/clients/test_timm.py",), ("timm",)),
    "2a": Row("feature extraction, feature pyramid, Faster R-CNN", ("tests/clients/test_torchvision.py",), ("torchvision",)),
    "2b": Row("attribution methods", ("tests/clients/test_captum.py",), ("captum",)),
    "2c": Row("`torch.fx.symbolic_trace`", ("tests/models/test_tracing.py",)),
    "3a": Row("`torch.export` with any height and width", (f"{EXPORT}exports_without_our_operators_for_any_size",)),
    "3b": Row(
        "ONNX with any height and width",
        (f"{EXPORT}onnxruntime_gives_the_same_numbers_at_any_size",),
        ("onnxruntime", "onnxscript"),
    ),
    "3c": Row(
        "`torch.jit.trace` and the older ONNX exporter",
        (f"{EXPORT}traces_and_legacy_onnx_files_need_no_kernels",),
        ("torch", "onnxruntime"),
    ),
    "3d": Row("AOTInductor package on the CPU", (f"{EXPORT}an_aot_inductor_package_takes_any_size",)),
    "4": Row(
        "a wheel without a compiler; `san doctor`",
        ("tests/test_wheel.py", f"{CLI}commands.py::test_doctor_shows_which_kernels_run"),
    ),
    "5": Row("Python 3.12 and 3.13", pythons=("python3.12", "python3.13")),
    "6": Row("sharing weights", ("tests/clients/test_hub.py",), ("huggingface_hub", "safetensors")),
    "7a": Row("gradient penalties", ("tests/ops/test_fused_modules.py::test_gradient_penalty_equals_the_reference",)),
    "7b": Row("torch's FLOP counter", ("tests/models/test_complexity.py",)),
    "8": Row(
        "your own images; fine-tuning",
        (f"{PAGES}[docs/start/own-images.md]", f"{PAGES}[docs/guides/fine-tuning.md]"),
        ("torch", "nvidia-dali-cuda120", "deepspeed"),
    ),
    "9": Row(
        "training loop, Lightning, Faster R-CNN, ONNX Runtime", ("tests/clients/test_guides.py",), ("lightning", "torchvision")
    ),
    "10": Row(
        "tables of custom grids",
        ("tests/experiments/report/test_tables.py", f"{CLI}ui.py::test_mlflow_shows_the_columns_and_the_table_of_a_grid"),
        ("mlflow",),
    ),
    "11": Row(
        "`san.register_relation`",
        (
            f"{RELATION}is_one_row",
            f"{RELATION}returns_the_channels_that_it_declares",
            "tests/experiments/grids/test_custom_code.py",
        ),
    ),
    "12": Row(
        "`san plan` writes nothing",
        (
            f"{CLI}commands.py::test_plan_lists_the_cheapest_cells_first_and_writes_nothing",
            f"{CLI}commands.py::test_plan_leaves_no_file_behind",
            f"{GRID}folder_source_needs_a_root",
        ),
        ("ray",),
    ),
    "13": Row(
        "suggestions in error messages",
        (
            f"{CLI}commands.py::test_rejects",
            f"{CLI}commands.py::test_grid_can_be_given_by_name",
            f"{GRID}rejects_every_mistake_at_once",
            "tests/models/test_registry.py::test_error_for_small_images_names_the_stage_and_the_smallest_input",
        ),
        ("click", "pydantic"),
    ),
    "14": Row(
        "managing runs",
        (
            "tests/experiments/tracking/test_deletion.py",
            f"{CLI}commands.py::test_only_selects_rows",
            f"{CLI}commands.py::test_shells_complete_commands",
            f"{CLI}end_to_end.py::test_grid_resumes_after_kill_and_interrupt",
        ),
        ("mlflow", "ray"),
    ),
    "15": Row("interactive attention in Chromium", ("tests/experiments/report/test_attention_page.py",)),
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
        nodes = (
            node
            for node in self.outcomes
            if f"{node}[".startswith(tuple(f"{test}{end}" for test in row.tests for end in ("[", "::")))
        )
        counts = Counter(self.outcomes[node] for node in nodes)
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "not run"


def lines(results: dict[str, str], before: dict[str, str]) -> Iterator[str]:
    """The rows of the table; those without a new result keep their text."""
    for item, row in ROWS.items():
        if item in results:
            clients = ", ".join(row.pythons or (f"{package} {_version(package)}" for package in row.packages))
            tests = ", ".join(f"`{test}`" for test in dict.fromkeys(test.partition("::")[0] for test in row.tests))
            tests = tests or f"`python -m tests.clients {item}`"
            yield f"| {item} | {row.what} | {clients} | {results[item]}, {datetime.now(UTC):%Y-%m-%d} | {tests} |"
        else:
            yield before.get(item, f"| {item} | {row.what} | | not run | |")


def library(python: str) -> str:
    """Runs the library's tests with another version of Python. Returns their last line, such as "9 passed"."""
    run = subprocess.run(
        ["make", "test-torch", f"TORCH={TORCH}", f"PYTHON={python}"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    print(run.stdout)
    summary = re.search(r"(\d+ \w+(, \d+ \w+)*) in [\d.]+s", run.stdout)
    return f"{python[len('python') :]}: {summary[1] if summary else f'exit code {run.returncode}'}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def main(items: list[str]) -> int:
    """Runs the tests of some items, by default all but those of other versions of Python, and writes their rows."""
    unknown = set(items) - ROWS.keys()
    if unknown:
        raise SystemExit(f"no item {', '.join(sorted(unknown))}; choose from: {', '.join(ROWS)}")
    items = items or [item for item, row in ROWS.items() if row.tests]
    recorder, code = Recorder(), 0
    tests = list(dict.fromkeys(test for item in items for test in ROWS[item].tests))
    if tests:
        code = pytest.main(["-q", *tests], plugins=[recorder])
    results = {item: "; ".join(map(library, ROWS[item].pythons)) or recorder.of(ROWS[item]) for item in items}
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    before = {line.split("|")[1].strip(): line for line in text[start:end].splitlines()}
    table = HEAD + "\n".join(lines(results, before)) + "\n"
    PAGE.write_text(text[:start] + table + text[end:], encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
