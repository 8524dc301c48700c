"""Lists every text that `san` and the library show to a user, so that it can be reviewed without looking at the code.

    python -m tests.messages [PACKAGE ...] [--places]

One text per line, with `{}` for values filled in at run time: error messages, printed and logged lines, help of commands and
options, results of configuration checks, and descriptions of configuration keys. `--places` adds file and line.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("experiments", "cluster", "pipelines", "san", "cuda_ext")
PRINTING = {"echo", "say", "print", "info", "warning", "error", "warn", "command", "group", "option", "write", "fail", "join"}
"""Functions and methods whose texts are shown."""
CONFIGS = ("experiments/grids/config.py", "experiments/grids/grid.py")


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """A text and where it stands in the code."""

    file: str
    line: int
    text: str


def _text(node: ast.AST) -> str:
    """The text of a string, with `{}` for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _strings(node: ast.AST) -> Iterator[ast.AST]:
    """Every string below a node, an f-string as a whole."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        yield node
        return
    for below in ast.iter_child_nodes(node):
        yield from _strings(below)


def _is_shown(node: ast.AST) -> bool:
    """Whether the strings below a node reach the user: raised, printed, or returned and assigned on the way there."""
    if isinstance(node, ast.Raise | ast.Yield | ast.Return | ast.Assign | ast.AugAssign | ast.AnnAssign):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in PRINTING or name.endswith("Error") or name == "append"


def _documented(tree: ast.AST, is_config: bool) -> Iterator[ast.AST]:
    """Docstrings of click's commands, which are their help, and of the keys of a configuration."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            "command" in ast.unparse(one) or "group" in ast.unparse(one) for one in node.decorator_list
        ):
            yield from (part.value for part in node.body[:1] if isinstance(part, ast.Expr))
        if is_config and isinstance(node, ast.ClassDef):
            yield from (part.value for part in node.body if isinstance(part, ast.Expr))


def messages(packages: tuple[str, ...] = PACKAGES) -> list[Message]:
    """All texts of three words or more, each once, by file and line."""
    found: dict[str, Message] = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            file = str(path.relative_to(ROOT))
            nodes = [below for node in ast.walk(tree) if _is_shown(node) for below in _strings(node)]
            for node in [*nodes, *_documented(tree, file in CONFIGS)]:
                text = " ".join(_text(node).split())
                if text.count(" ") >= 2:
                    found.setdefault(text, Message(file, getattr(node, "lineno", 0), text))
    return sorted(found.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="List every text that a user may see.")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="only these folders")
    parser.add_argument("--places", action="store_true", help="add file and line")
    arguments = parser.parse_args()
    for message in messages(tuple(arguments.packages)):
        print(f"{message.file}:{message.line}: {message.text}" if arguments.places else message.text)
