"""The package: a wheel holds the library and every file that it reads, and an editable install also has the command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import click
import pytest
import torch

from cuda_ext import build

ROOT = Path(__file__).parent.parent
TOP_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "requirements.txt")
LIBRARY = ("san", "cuda_ext")
SYSTEM = ("pipelines", "cluster", "experiments")
TINY = "san.create_model('san10_pairwise', 10, num_stages=1, width_mult=0.5).eval()(torch.ones(1, 3, 8, 8)).shape"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, because setuptools leaves folders behind."""
    copy = tmp_path_factory.mktemp("project")
    for name in (*LIBRARY, *SYSTEM, "tests/golden"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in TOP_FILES:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def editable(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with an editable install of the clone and no other package."""
    folder = tmp_path_factory.mktemp("editable")
    code = f"""
from setuptools import build_meta
prepared = build_meta.prepare_metadata_for_build_editable("{folder}")  # like pip
build_meta.build_editable("{folder}", metadata_directory=f"{folder}/{{prepared}}")
"""
    subprocess.run([sys.executable, "-c", code], cwd=clone, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    _pip("install", "--target", str(packages), *map(str, folder.glob("*.whl")))
    return folder / "venv"


@pytest.fixture(scope="module")
def dist(editable: Path, clone: Path) -> Path:
    """The folder with wheel and source distribution, which are built after an editable install, as they often are."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(clone / "dist"), str(clone)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return clone / "dist"


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
    files = [path for name in LIBRARY for path in (ROOT / name).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in files if path.parent.name != "__pycache__"}


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_library_and_nothing_else(wheel: Path) -> None:
    wanted = package_files()
    assert {"cuda_ext/cpu/simd/vector.h", "cuda_ext/cuda/sums.cuh", "san/py.typed"} < wanted
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert wanted == {name for name in names if ".dist-info/" not in name}
    assert not [name for name in names if name.endswith("/entry_points.txt")]


@pytest.mark.slow
def test_a_source_distribution_holds_the_library_and_no_tests(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()} - {""}
    assert package_files() | set(TOP_FILES) <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*LIBRARY, *TOP_FILES, "PKG-INFO", "setup.cfg", "san_attention.egg-info"}


@pytest.mark.slow
def test_an_installed_library_runs_and_finds_the_sources_of_its_kernels(installed: Path) -> None:
    code = f"import torch, san\nwith san.ops.backend('reference'): print({TINY})\nprint(san.__file__)"
    assert _python(code, installed).splitlines() == ["torch.Size([1, 10])", str(installed / "san" / "__init__.py")]
    code = "from cuda_ext import build; print(build.digest())"
    assert _python(code, installed) == build.digest()


@pytest.mark.slow
def test_the_version_is_told_by_the_library_and_by_pip(installed: Path) -> None:
    code = "import san; from importlib.metadata import metadata; print(san.__version__, *metadata('san-attention').values())"
    version, *said = _python(code, installed).split()
    assert said.count(version) == 1 and re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert {"text/markdown", "SAN:", "https://arxiv.org/abs/2004.13621"} <= set(said)  # the README among them


def _command(editable: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `san` in the environment with the editable install."""
    code = "import sys; from importlib.metadata import entry_points; (san,) = entry_points(name='san'); sys.exit(san.load()())"
    return subprocess.run([editable / "bin/python", "-c", code, *arguments], env=environment, capture_output=True, text=True)


def test_the_command_of_an_editable_install_prints_its_help(editable: Path) -> None:
    done = _command(editable, "--help", PYTHONPATH=sysconfig.get_path("purelib"))
    assert done.returncode == 0 and "Usage: " in done.stdout, done.stderr


@pytest.mark.parametrize("missing", ["click", "torch"])
def test_the_command_tells_what_to_install(missing: str, editable: Path, tmp_path: Path) -> None:
    if missing == "torch":  # a package of the extra may have come with another one
        (tmp_path / "click").symlink_to(Path(click.__file__).parent)
    done = _command(editable, "models", PYTHONPATH=str(tmp_path))
    remedy = "install the command's dependencies with `pip install -e '.[experiments]'` in the clone"
    sentence = f"san: the package {missing} is not installed; {remedy}\n"
    assert (done.returncode, done.stderr) == (1, sentence)


@pytest.mark.slow
def test_an_installed_library_builds_its_kernels(installed: Path, tmp_path: Path) -> None:
    code = f"import torch, san; from san.ops import library; print(library.load(), {TINY})"
    assert _python(code, installed, SAN_CACHE=str(tmp_path)) == f"True {torch.Size([1, 10])}"
    assert list(tmp_path.glob("*/cpu-*.so"))
