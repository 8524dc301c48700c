"""Imports go in one direction, and each heavy dependency is imported in one place."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("san", "cuda_ext", "pipelines", "cluster", "experiments")
ALLOWED = {
    "cuda_ext": set(),
    "san": {"cuda_ext"},
    "pipelines": {"cuda_ext"},
    "cluster": set(),
    "experiments": {"san", "pipelines", "cluster"},
}
ONLY_IN = {
    "nvidia": "pipelines/",
    "ray": "cluster/",
    "deepspeed": "experiments/training/engine.py",
    "mlflow": "experiments/tracking/",
    "click": "experiments/cli/",
    "sklearn": "pipelines/datasets/digits.py",
    "matplotlib": ("experiments/report/plots.py", "experiments/report/attention_plot.py"),
    "jinja2": "experiments/report/page.py",
    "pandas": ("experiments/report/tables.py", "experiments/__init__.py"),
    "rich": "experiments/runner/progress.py",
    "boto3": "experiments/runs/bucket.py",
    "botocore": "experiments/runs/bucket.py",
    "scipy": "experiments/report/interval.py",
    "timm": ("san/timm.py", "san/models/modules.py"),
    "huggingface_hub": "san/hub.py",
    "safetensors": "san/models/pretrained.py",
}
LAYERS = ("cli", "report", "runner", "evaluation", "training", "tracking", "runs", "paper", "config", "errors")
"""Packages of `experiments` from top to bottom; each imports only those below it."""
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def imported_names(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it, also for type checkers only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports."""
    return {name.split(".")[0] for name in imported_names(path)}


def upward_imports(path: Path) -> set[tuple[str, str]]:
    """Imports of a file in `experiments` from packages above its own."""
    place = path.relative_to(ROOT)
    layer = LAYERS.index(place.with_suffix("").parts[1])
    names = [name.split(".") for name in imported_names(path) if name.startswith("experiments.")]
    return {(place.as_posix(), name[1]) for name in names if LAYERS.index(name[1]) < layer}


def test_every_file_imports_only_packages_below() -> None:
    for path in FILES:
        place = path.relative_to(ROOT).as_posix()
        folder = place.split("/")[0]
        forbidden = (imported(path) & set(FOLDERS)) - ALLOWED[folder] - {folder}
        assert not forbidden, f"{place} imports {forbidden}"
        for package, only in ONLY_IN.items():
            assert package not in imported(path) or place.startswith(only), f"{place}: {package} belongs in {only}"


def test_packages_of_experiments_import_only_those_below() -> None:
    root = ROOT / "experiments"
    assert {path.name for path in root.iterdir() if path.name != "__pycache__"} == {
        *(f"{name}.py" for name in ("__init__", "__main__", "errors")),
        *LAYERS[:-1],
        "grids",  # YAML files only
    }
    assert not list((root / "grids").rglob("*.py"))
    files = [path for path in root.rglob("*.py") if not path.name.startswith("__") or path.parent != root]
    assert not set().union(*map(upward_imports, files))


def test_every_heavy_dependency_is_used() -> None:
    for package, only in ONLY_IN.items():
        allowed = [path for path in FILES if path.relative_to(ROOT).as_posix().startswith(only)]
        assert any(package in imported(path) for path in allowed), f"nothing in {only} imports {package}"


def test_import_san_needs_only_torch() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import san
ours = {"san", "cuda_ext", "torch"} | sys.stdlib_module_names
# torch imports these itself, some of them late
torchs = {"numpy", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "typing_extensions", "optree"}
torchs |= {"triton"}  # with CUDA
found = {name.split(".")[0] for name in set(sys.modules) - before} - ours - torchs - {"cython_runtime"}
found = {name for name in found if not name.startswith("_")}
assert not found, found
assert "torch._dynamo" not in sys.modules  # the compiler takes a second to import
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


HEAVY = {"ray.tune", "ray.train", "mlflow", "deepspeed", "nvidia", "matplotlib"}
"""Each of these packages would delay a command by a second or two."""


def imported_by(*command: str) -> set[str]:
    """Modules that a command has imported when it ends."""
    code = "import sys\nfrom experiments.cli.commands import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_no_more_than_it_needs() -> None:
    assert not imported_by("--help") & (HEAVY | {"torch", "ray", "pandas", "yaml"})


@pytest.mark.slow
def test_plan_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    assert not imported_by("plan", "tests/experiments/small.yaml", "--runs", str(tmp_path)) & HEAVY
