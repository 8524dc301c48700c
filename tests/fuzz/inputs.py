"""Hypothesis strategies for malformed inputs: random values, and valid files with random changes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "~", "../..", "s3://", "\0", "\x1b[31m", "<script>", "1e999", "nan", "{}", "resnet26", "7"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def changed_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """A file with overwritten, inserted and removed bytes."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["overwrite", "insert", "remove", "cut off"])):
            case "overwrite":
                patch = draw(st.binary(min_size=1, max_size=8))
                content[place : place + len(patch)] = patch
            case "insert":
                content[place:place] = draw(st.binary(min_size=1, max_size=64))
            case "remove":
                del content[place : place + draw(st.integers(1, 64))]
            case "cut off":
                del content[place:]
    return bytes(content)


@st.composite
def changed_value(draw: st.DrawFn, valid: Any, others: st.SearchStrategy[Any] = VALUES) -> Any:
    """A nested value in which some parts were replaced, removed, renamed or added."""
    if isinstance(valid, dict) and valid and draw(st.booleans()):
        changed = dict(valid)
        key = draw(st.sampled_from(sorted(changed, key=str)))
        match draw(st.sampled_from(["change", "remove", "rename", "add"])):
            case "change":
                changed[key] = draw(changed_value(changed[key], others))
            case "remove":
                del changed[key]
            case "rename":
                changed[draw(st.text(max_size=12))] = changed.pop(key)
            case "add":
                changed[draw(st.text(max_size=12))] = draw(others)
        return changed
    if isinstance(valid, list | tuple) and valid and draw(st.booleans()):
        place = draw(st.integers(0, len(valid) - 1))
        return [*valid[:place], draw(changed_value(valid[place], others)), *valid[place + 1 :]]
    return draw(others)


def yaml_text(valid: Any) -> st.SearchStrategy[bytes]:
    """YAML of a changed value, or changed bytes of the valid YAML."""
    text = yaml.safe_dump(valid).encode()
    dumped = changed_value(valid).map(lambda value: yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "replace"))
    return dumped | changed_bytes(text) | st.binary(max_size=200)


TENSORS = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 5), max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)


def torch_file(valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A file of `torch.save`: a changed value, or changed bytes."""
    return changed_value(valid, VALUES | TENSORS).map(saved) | changed_bytes(saved(valid))


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Call:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def code_in_a_pickle(path: str) -> st.SearchStrategy[bytes]:
    """Files that would create `path` if they were unpickled."""
    payload = st.sampled_from([Call(open, path, "w"), Call(eval, f"open({path!r}, 'w')"), Call(exec, f"open({path!r}, 'w')")])
    places = (
        payload | payload.map(lambda call: {"state_dict": call}) | payload.map(lambda call: {"state_dict": {"fc.bias": call}})
    )
    return places.map(saved) | places.map(pickle.dumps)
