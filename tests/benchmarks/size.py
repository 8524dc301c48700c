"""Lines, files and long functions of each package: `python -m tests.benchmarks.size [FOLDER]`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGES = ("san", "pipelines", "cluster", "experiments", "cuda_ext", "tests")
LONG = 40
"""Lines of a function."""


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    print(f"| package | files | lines | functions over {LONG} lines |\n|---|---:|---:|---:|")
    for name in PACKAGES:
        kinds = ("py", "cpp", "h", "cu", "cuh", "c")
        files = [path for kind in kinds for path in (root / name).rglob(f"*.{kind}")]
        texts = {path: path.read_text(encoding="utf-8") for path in files}
        lines = sum(text.count("\n") for text in texts.values())
        long = sum(_long_functions(text) for path, text in texts.items() if path.suffix == ".py")
        print(f"| {name} | {len(files)} | {lines} | {long} |")


def _long_functions(text: str) -> int:
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum((node.end_lineno or 0) - node.lineno + 1 > LONG for node in functions)


if __name__ == "__main__":
    main()
