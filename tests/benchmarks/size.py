"""Lines, files and long functions (Python and C++) of each package: `python -m tests.benchmarks.size [FOLDER]`."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

PACKAGES = ("san", "pipelines", "cluster", "experiments", "cuda_ext", "tests")
LONG = 40
"""Lines of a function."""


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    print(f"| package | files | lines | functions over {LONG} lines | longest function |\n|---|---:|---:|---:|---:|")
    for name in PACKAGES:
        kinds = ("py", "cpp", "h", "cu", "cuh", "c")
        files = [path for kind in kinds for path in (root / name).rglob(f"*.{kind}")]
        texts = {path: path.read_text(encoding="utf-8") for path in files}
        lines = sum(text.count("\n") for text in texts.values())
        functions = [n for path, text in texts.items() for n in (_python if path.suffix == ".py" else _cpp)(text)]
        print(f"| {name} | {len(files)} | {lines} | {sum(n > LONG for n in functions)} | {max(functions, default=0)} |")


def _python(text: str) -> list[int]:
    """Lines of each function."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(node.end_lineno or 0) - node.lineno + 1 for node in functions]


def _cpp(text: str) -> list[int]:
    """Lines of each function: of each block whose head has parentheses, outside of other functions."""
    code = re.sub(r"//.*|^#(?:.*\\\n)*.*|\"(?:\\.|[^\"\n])*\"", "", text, flags=re.M)
    lengths, blocks, head = list[int](), list[tuple[bool, int]](), 0
    for mark in re.finditer(r"[;{}]", code):
        at = mark.start()
        if mark[0] == "{":
            first = head + len(code[head:at]) - len(code[head:at].lstrip())
            inside = any(is_function for is_function, _ in blocks)
            blocks.append((not inside and "(" in code[head:at], first))
        elif mark[0] == "}":
            is_function, first = blocks.pop()
            lengths += [code.count("\n", first, at) + 1] if is_function else []
        head = at + 1
    return lengths


if __name__ == "__main__":
    main()
