"""`python -m cuda_ext.wheel FOLDER` builds a wheel that contains the CPU kernels, so that using it needs no compiler.

torch's stable ABI makes one wheel serve Python 3.11 and torch 2.11 and later. It contains the kernels for CPUs with and without
AVX2 and AVX-512. It needs the glibc of the machine that built it, or a later one.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

from cuda_ext.build import PREBUILT, SOURCE_DIR, Toolchain, build


def main() -> None:
    """Builds the wheel and prints its path. Nothing is left in the source folder."""
    folder = Path(sys.argv[1]).resolve()
    PREBUILT.mkdir()
    try:
        for part in ("cpu", "resample"):
            build(part, PREBUILT / f"{part}.so", Toolchain.find())
        tag = ["--python-tag", "py3", "--plat-name", f"linux_{platform.machine()}", "--dist-dir", str(folder)]
        command = [sys.executable, "setup.py", "-q", "bdist_wheel", *tag, "--bdist-dir", str(PREBUILT / "build")]
        subprocess.run(command, cwd=SOURCE_DIR.parent, check=True)
    finally:
        shutil.rmtree(PREBUILT)
    print(max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime))


if __name__ == "__main__":
    main()
