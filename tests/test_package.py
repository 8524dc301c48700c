"""The package: a wheel holds every file that the code reads, and what is installed from it works without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import click
import pytest
import torch

from cuda_ext import build

ROOT = Path(__file__).parent.parent
TOP_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "requirements.txt")
PACKAGES = ("san", "cuda_ext", "pipelines", "cluster", "experiments")
TINY = "san.create_model('san10_pairwise', 10, num_stages=1, width_mult=0.5).eval()(torch.ones(1, 3, 8, 8)).shape"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with wheel and source distribution, built in a copy, because setuptools leaves folders behind."""
    copy = tmp_path_factory.mktemp("project")
    for name in (*PACKAGES, "tests/golden"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in TOP_FILES:
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


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


def package_files() -> set[str]:
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in files if path.parent.name != "__pycache__"}


def test_a_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    wanted = package_files()
    assert {"cuda_ext/cpu/simd/vector.h", "cuda_ext/cuda/sums.cuh", "experiments/report/page.html"} < wanted
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist()), wanted - set(archive.namelist())


def test_a_source_distribution_holds_the_packages_and_no_tests(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()} - {""}
    assert package_files() | set(TOP_FILES) <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*PACKAGES, *TOP_FILES, "PKG-INFO", "setup.cfg", "san_attention.egg-info"}


def test_an_installed_command_prints_its_help(installed: Path) -> None:
    code = "import sys; from experiments.__main__ import main; sys.argv = ['san', '--help']; main()"
    assert _python(code, installed).startswith("Usage: san ")


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
    remedy = "install the command's dependencies with `pip install 'san-attention[experiments]'`"
    sentence = f"san: the package {missing} is not installed; {remedy}\n"
    assert (done.returncode, done.stderr) == (1, sentence)


@pytest.mark.slow
def test_an_installed_library_builds_its_kernels(installed: Path, tmp_path: Path) -> None:
    code = f"import torch, san; from san.ops import library; print(library.load(), {TINY})"
    assert _python(code, installed, SAN_CACHE=str(tmp_path)) == f"True {torch.Size([1, 10])}"
    assert list(tmp_path.glob("*/cpu-*.so"))
