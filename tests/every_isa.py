"""Runs the tests marked `every_isa` once for each smaller instruction set of this processor: `python -m tests.every_isa`.

PyTorch, oneDNN and our kernels choose other code on other processors, and its results differ in the last bits. These tests must
pass with all of them. The usual run of the tests covers the largest instruction set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
SETTINGS = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "SAN_CPU": "v3"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "SAN_CPU": "baseline"},
}


def instruction_sets() -> list[str]:
    """Those of this processor, the largest first; none if it is no x86."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    needed = {"AVX-512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "AVX2": {"avx2"}, "SSE": {"sse4_1"}}
    return [name for name, wanted in needed.items() if wanted <= flags]


def start(instructions: str) -> subprocess.Popen[str]:
    files = sorted(path for path in TESTS.rglob("test_*.py") if "pytest.mark.every_isa" in path.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "every_isa and not slow", *map(str, files)]
    # They run side by side, and so with one thread each.
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | SETTINGS[instructions]
    return subprocess.Popen(
        command, cwd=TESTS.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def main() -> None:
    available = instruction_sets()
    running = {instructions: start(instructions) for instructions in available[1:]}
    failed = False
    for instructions, process in running.items():
        output, _ = process.communicate()
        failed |= process.returncode != 0
        if process.returncode != 0:
            print(output)
        variables = " ".join(f"{name}={value}" for name, value in SETTINGS[instructions].items())
        *lines, last = output.strip().splitlines()
        print(f"{instructions} ({variables}): {last}", *(line for line in lines if line.startswith("SKIPPED ")), sep="\n")
    if missing := [name for name in ("AVX-512", *SETTINGS) if name not in available]:
        print(f"not tested: {', '.join(missing)}, which this {'' if available else 'non-x86 '}processor lacks")
    sys.exit(failed)


if __name__ == "__main__":
    main()
