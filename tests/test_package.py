"""The package: a wheel holds every file that the code reads, and what is installed from it works without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest
import torch

from cuda_ext import build

ROOT = Path(__file__).parent.parent
PACKAGES = ("san", "cuda_ext", "pipelines", "cluster", "experiments")
TINY = "san.create_model('san10_pairwise', 10, num_stages=1, width_mult=0.5).eval()(torch.ones(1, 3, 8, 8)).shape"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: setuptools leaves folders behind, and takes files from those that it finds."""
    copy = tmp_path_factory.mktemp("project")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(copy / "dist"), str(copy))
    return next((copy / "dist").iterdir())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    _pip("install", "--target", str(folder), str(wheel))
    return folder


def _pip(command: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", command, "--no-deps", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _python(code: str, installed: Path, **environment: str) -> str:
    """What a program prints that sees the installed project and no checkout."""
    env = os.environ | {"PYTHONPATH": str(installed), "SAN_CUDA": "0"} | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=installed.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = {path.relative_to(ROOT).as_posix() for path in files if path.parent.name != "__pycache__"}
    assert {"cuda_ext/cpu/simd/vector.h", "cuda_ext/cuda/sums.cuh", "experiments/report/page/page.html"} < wanted
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist()), wanted - set(archive.namelist())


def test_an_installed_library_runs_and_finds_the_sources_of_its_kernels(installed: Path) -> None:
    code = f"import torch, san\nwith san.ops.backend('reference'): print({TINY})\nprint(san.__file__)"
    assert _python(code, installed).splitlines() == ["torch.Size([1, 10])", str(installed / "san" / "__init__.py")]
    code = "from cuda_ext import build; print(build.digest())"
    assert _python(code, installed) == build.digest()


def test_the_version_is_told_by_the_library_and_by_pip(installed: Path) -> None:
    code = "import san; from importlib.metadata import metadata; print(san.__version__, *metadata('san-attention').values())"
    version, *said = _python(code, installed).split()
    assert said.count(version) == 1 and re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert {"text/markdown", "SAN:", "https://arxiv.org/abs/2004.13621"} <= set(said)  # the README among them


@pytest.mark.parametrize("missing", ["click", "torch"])
def test_the_command_tells_what_to_install(missing: str, installed: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    code = "import sys; from importlib.metadata import entry_points; (san,) = entry_points(name='san'); sys.exit(san.load()())"
    env = {"PYTHONPATH": str(installed)}
    if missing == "torch":  # a package of the extra may have come with another one
        (tmp_path / "click").symlink_to(Path(click.__file__).parent)
        env["PYTHONPATH"] += f":{tmp_path}"
    python = environment / "bin" / "python"
    done = subprocess.run([python, "-c", code, "models"], env=env, capture_output=True, text=True)
    sentence = f"san: {missing} is missing; the command needs more than the library: pip install 'san-attention[experiments]'\n"
    assert (done.returncode, done.stderr) == (1, sentence)


@pytest.mark.long
def test_an_installed_library_builds_its_kernels(installed: Path, tmp_path: Path) -> None:
    code = f"import torch, san; from san.ops import library; print(library.load(), {TINY})"
    assert _python(code, installed, SAN_CACHE=str(tmp_path)) == f"True {torch.Size([1, 10])}"
    assert list(tmp_path.glob("*/cpu-*.so"))
