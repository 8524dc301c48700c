"""Counts what one attention layer runs besides its own kernels, in a training step (forward and backward) and in evaluation.

    python -m tests.benchmarks.glue

Columns: torch operators that compute something (no views, and no convolutions, which are part of any network), how many of
them convert types, how many copy a map or weights into another memory order, and the project's own operators. The layer is
that of stage 2 of SAN10 with four channels-last float32 maps, on meta tensors with all optimizations for GPUs.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented in torch's notes on extending; it has no other name

from tests.benchmarks.stages import KINDS, STAGES
from tests.benchmarks.tables import table
from tests.benchmarks.traffic import as_on_a_gpu

COPIES = ("clone", "copy_", "_to_copy")


class Glue(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self.own: Counter[str] = Counter()
        self.conversions = self.layout_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not any(isinstance(x, Tensor) for x in (out if isinstance(out, tuple | list) else (out,))):
            return out
        if func.namespace == "san":
            self.own[name] += 1
        elif not (func.is_view or name.startswith("convolution") or name.startswith("empty") or name.startswith("new_empty")):
            self.names[name] += 1
            if name in COPIES:
                self.count_copy(args[1] if name == "copy_" else args[0], out)
        return out

    def count_copy(self, source: Tensor, out: Tensor) -> None:
        self.conversions += source.dtype != out.dtype
        if source.dtype == out.dtype and source.shape == out.shape and source.stride() != out.stride() and out.dim() > 2:
            self.layout_copies += 1


def count(kind: str, training: bool, stage: str, batch: int) -> Glue:
    """Counts what one step runs."""
    channels, side, footprint = STAGES[stage]
    layer = KINDS[kind](channels, footprint).train(training)
    for role in ("phi", "psi", "beta"):  # with a hook, they run as convolutions, which are not counted
        layer.get_submodule(role).register_forward_hook(lambda *_: None)
    x = torch.randn(batch, channels, side, side).contiguous(memory_format=torch.channels_last).requires_grad_(training)
    grad = torch.randn_like(layer(x))
    with torch.set_grad_enabled(training), Glue() as glue:
        y = layer(x)
        if training:
            y.backward(grad)
    return glue


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for kind in KINDS:
        for training in (True, False):
            with as_on_a_gpu():
                glue = count(kind, training, "stage 2", 4)
            own = sum(glue.own.values())
            row = [kind, "training step" if training else "evaluation", sum(glue.names.values()), glue.conversions]
            rows.append([*row, glue.layout_copies, own])
    heads = ["layer", "mode", "torch operators", "type conversions", "layout copies", "own operators"]
    print(table("Glue of one attention layer, stage 2, batch size 4", heads, rows))


if __name__ == "__main__":
    main()
