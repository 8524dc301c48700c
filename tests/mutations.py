"""Breaks the code on purpose, one random place at a time, and reports whether the everyday tests notice.

    python -m tests.mutations --seed 1 --count 40

A mutation negates a condition, removes a statement or changes a number in a copy of the repository. The test files of the same
name run first. If they pass, the tests of the same folder and then all everyday tests follow, unless --quick is given.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("experiments", "pipelines", "cluster", "san")


def mutate(node: ast.AST) -> ast.AST | None:
    """The broken form of a condition, a statement or a number; None for other nodes."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return node
    if isinstance(node, ast.Assign | ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ast.Pass()
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ast.Constant(node.value + 1)
    return None


def places(tree: ast.Module) -> list[tuple[ast.AST, str, int | None]]:
    """Every node within a function that `mutate` can break: its parent, and the field and index that hold it."""
    found: list[tuple[ast.AST, str, int | None]] = []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for parent in {id(node): node for function in functions for node in ast.walk(function)}.values():
        for field, value in ast.iter_fields(parent):
            children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            can = (ast.If, ast.IfExp, ast.While, ast.Assign, ast.AugAssign, ast.Expr, ast.Constant)
            found += [(parent, field, at) for at, child in children if isinstance(child, can)]
    return found


def broken(source: str, rng: random.Random) -> tuple[str, str] | None:
    """A mutated file and what was changed; None if the chosen place cannot be broken."""
    tree = ast.parse(source)
    parent, field, at = rng.choice(places(tree) or [(tree, "body", 0)])
    holder = getattr(parent, field)
    node = holder if at is None else holder[at]
    before = f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node).splitlines()[0][:70]}"
    after = mutate(node)
    if after is None:
        return None
    if at is None:
        setattr(parent, field, after)
    else:
        holder[at] = after
    return ast.unparse(ast.fix_missing_locations(tree)), f"{before} -> {ast.unparse(after).splitlines()[0][:40]}"


def skipped(folder: str, names: list[str]) -> set[str]:
    """What a copy of the repository does not need: images, runs, caches and environments."""
    outputs = {"data", "runs", "site"} if Path(folder) == ROOT else set()
    return {name for name in names if name.startswith(".") or name in {"__pycache__", *outputs}}


def notices(copy: Path, where: list[Path]) -> bool:
    """Whether a test fails. Two processes are faster for folders only."""
    processes = "2" if where[0].is_dir() else "0"
    options = ["-q", "-x", "-n", processes, "-m", "not slow", "-p", "no:cacheprovider", "--ignore", "tests/clients"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, where)]
    done = subprocess.run(command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True)
    return done.returncode not in (0, 5)  # 5: no tests there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="run only the test files of the changed module")
    options = parser.parse_args()
    rng, tried, noticed = random.Random(options.seed), 0, 0
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    weights = [len(path.read_text()) for path in files]
    print("| file | mutation | noticed |\n|---|---|---|", flush=True)
    while tried < options.count:
        (path,) = rng.choices(files, weights)
        change = broken(path.read_text(), rng)
        if change is None:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            copy, name = Path(temporary) / "copy", path.relative_to(ROOT)
            shutil.copytree(ROOT, copy, ignore=skipped)
            (copy / name).write_text(change[0])
            tests = copy / "tests"
            folder = tests / (name.parent.relative_to("san") if name.parts[0] == "san" else name.parent)
            of_its_name = sorted(tests.rglob(f"test_{name.name}"))
            stages = [where for where in (of_its_name, [folder], [tests]) if where and where[0].exists()]
            found = any(notices(copy, where) for where in (stages[:1] if options.quick else stages))
        tried, noticed = tried + 1, noticed + found
        print(f"| `{name}` | `{change[1].replace('|', '/')}` | {'yes' if found else 'NO'} |", flush=True)
    print(f"\n{noticed} of {tried} mutations noticed, seed {options.seed}")


if __name__ == "__main__":
    main()
