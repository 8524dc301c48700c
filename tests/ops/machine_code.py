"""Counts the instructions in the loops of compiled CUDA kernels: a test of their speed that needs no GPU.

An instruction of compute capability 9.0 has 16 bytes. The lowest 12 bits name the operation; a branch also holds its distance.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NVCC_FLAGS = ["-gencode=arch=compute_90,code=sm_90", "-no-compress"]
"""With them, nvcc writes object files that can be read here."""
BRANCH, TENSOR_CORE_PRODUCT, SPECIAL_FUNCTION = 0x947, 0x23C, 0x308
SIZE = 16


@dataclass(frozen=True)
class Loop:
    """A loop of a kernel."""

    instructions: int
    products: int
    """Instructions of tensor cores or, in a kernel without them, of powers and other special functions."""


def main_loops(path: Path) -> dict[str, Loop]:
    """The loop with the most products of each kernel in an object file, by the kernel's name."""
    found = {}
    for name, code in _kernels(path.read_bytes()):
        loops = list(_loops_with_products(code))
        if loops:
            found[name] = max(loops, key=lambda loop: (loop.products, loop.instructions))
    names = subprocess.run(["c++filt"], input="\n".join(found), capture_output=True, text=True, check=True).stdout.split("\n")
    return {_short(name): loop for name, loop in zip(names, found.values(), strict=False)}


def _short(name: str) -> str:
    """A demangled name without namespaces and parameters."""
    return re.sub(r"san::cuda::|\(anonymous namespace\)::|c10::|^void |\(.*", "", name)


def _kernels(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Mangled names and machine code of all kernels in the ELF files for GPUs within an object file."""
    nvidia_cuda = 190
    for match in re.finditer(b"\x7fELF\x02\x01", data):
        elf = data[match.start() :]
        if len(elf) < 64 or struct.unpack_from("<H", elf, 18)[0] != nvidia_cuda:
            continue
        (sections_at,) = struct.unpack_from("<Q", elf, 40)
        size, count, names_index = struct.unpack_from("<HHH", elf, 58)
        headers = [struct.unpack_from("<IIQQQQ", elf, sections_at + index * size) for index in range(count)]
        for name_at, _, _, _, offset, length in headers:
            start = headers[names_index][4] + name_at
            name = elf[start : elf.index(b"\0", start)].decode()
            if name.startswith(".text."):
                yield name.removeprefix(".text."), elf[offset : offset + length]


def _loops_with_products(code: bytes) -> Iterator[Loop]:
    """Those that contain no other one."""
    operations: list[int] = []
    loops: set[tuple[int, int]] = set()
    for at in range(0, len(code), SIZE):
        low, high = struct.unpack_from("<QQ", code, at)
        operations.append(low & 0xFFF)
        if low & 0xFFF == BRANCH:
            distance = (((low | high << 64) >> 34) & (2**48 - 1)) << 8 | (low >> 16) & 0xFF
            distance -= (distance >> 55) << 56  # it is signed
            target = at + SIZE + 4 * distance
            if 0 <= target < at:
                loops.add((target // SIZE, at // SIZE))
    counted = TENSOR_CORE_PRODUCT if TENSOR_CORE_PRODUCT in operations else SPECIAL_FUNCTION
    found = {(start, end): operations[start : end + 1].count(counted) for start, end in loops}
    found = {loop: products for loop, products in found.items() if products}
    for (start, end), products in found.items():
        if not any(start <= first and last <= end for first, last in found.keys() - {(start, end)}):
            yield Loop(end + 1 - start, products)
