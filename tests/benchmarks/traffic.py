"""Counts the bytes that a step of each network reads and writes on a GPU, by kind of operator. Needs no GPU.

    python -m tests.benchmarks.traffic [--batch 32]

The step runs on meta tensors, which have shapes but no memory, with all optimizations for GPUs. An operator reads its
inputs and writes its outputs once; BatchNorm reads its input and its gradient twice, and cuDNN adds a bias in a pass of
its own. Kernels of attention read and write more than that, because they visit pairs several times and store
weights in backward. Caches are ignored.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import san
from san.ops import functional
from tests.benchmarks.tables import table

NAMES = ("san10_pairwise", "san10_patchwise", "resnet26")
# By the beginning of an operator's name; the others are elementwise.
KINDS = {
    **dict.fromkeys(("san.norm_relu", "san.norm_add_relu"), "norm"),
    **dict.fromkeys(("san.norm_affine", "san.track_statistics"), "small"),
    **dict.fromkeys(("san.max_pool", "san.stem"), "pooling, stem"),
    "san.": "attention",
    "aten.native_batch_norm": "norm",
    "aten.cudnn_batch_norm": "norm",
    "aten.convolution": "convolutions, products",
    **dict.fromkeys(("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"), "convolutions, products"),
    "aten.max_pool2d": "pooling, stem",
    **dict.fromkeys(("aten.sum", "aten.mean"), "sums"),
    **dict.fromkeys(("aten.cat", "aten.clone", "aten.copy", "aten._to_copy"), "copies"),
    "aten._foreach": "optimizer",
    **dict.fromkeys(("aten.zero", "aten.fill", "aten.new_zeros"), "fill"),
}
NO_KERNEL = ("_unsafe_view", "empty", "promote_types", "_record_function")
"""Parts of the names of operators that launch no kernel."""
SMALL = 2**20
"""Operators on fewer bytes are counted as `small`."""


class Traffic(TorchDispatchMode):
    """Adds up bytes and operators by kind, and the memory that is kept for the backward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[str, float] = defaultdict(float)
        self.operators: Counter[str] = Counter()
        self.kept: dict[int, Tensor] = {}

    def keep(self, x: Tensor) -> Tensor:
        """For `saved_tensors_hooks`; a slice keeps the whole tensor, and parameters exist anyway."""
        if not isinstance(x, torch.nn.Parameter):
            self.kept[x.untyped_storage()._cdata] = x
        return x

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if str(function).startswith("aten.convolution."):  # on meta tensors, it forgets the format
            result = result.contiguous(memory_format=torch.channels_last)
        # Only on meta tensors, autograd copies the gradients of parameters.
        is_copy_of_gradient = str(function) == "aten.clone.default" and not kwargs
        if not (function.is_view or is_copy_of_gradient or any(part in str(function) for part in NO_KERNEL)):
            self.count(str(function), list(tensors(args)), list(tensors(result)))
        return result

    def count(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        moved = float(sum(map(size, inputs + outputs)))
        if kind_of(name) == "norm":
            maps = [x for x in inputs if x.dim() == 4]
            moved += sum(map(size, maps[: 2 if "backward" in name else 1]))
        if name.startswith("aten.convolution.") and len(inputs) == 3:
            moved += 2 * size(outputs[0])
        kind = "small" if moved < SMALL else kind_of(name)
        self.bytes[kind] += moved
        self.operators[kind] += 1


def kind_of(operator: str) -> str:
    return next((kind for start, kind in KINDS.items() if operator.startswith(start)), "elementwise")


def tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors(value)


def size(x: Tensor) -> int:
    return x.numel() * x.element_size()


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """New tensors are meta tensors, for which networks choose their operators as on a GPU."""
    with (
        torch.device("meta"),
        patch.object(torch.Tensor, "is_cuda", True),
        patch.object(torch, "is_autocast_enabled", lambda *_: False),  # knows no meta tensors
        patch.object(functional, "_fusion_chosen", lambda *_: True),
    ):
        yield


def step(name: str, batch: int, training: bool) -> Traffic:
    """The traffic of a step."""
    with as_on_a_gpu():
        model = san.create_model(name).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = torch.empty(batch, 3, 224, 224).contiguous(memory_format=torch.channels_last)
        labels = torch.empty(batch, dtype=torch.int64)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=True)
        model.train(training)
        with Traffic() as traffic:
            if training:
                with torch.autograd.graph.saved_tensors_hooks(traffic.keep, lambda x: x):
                    loss = cross_entropy(model(images), labels)
                loss.backward()
                sgd.step()
            else:
                with torch.no_grad():
                    model(images)
    return traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as in `san run`
    for training in (True, False):
        found = {name: step(name, options.batch, training) for name in NAMES}
        kinds = sorted({kind for traffic in found.values() for kind in traffic.bytes})
        lines = [
            [kind, *(f"{traffic.bytes[kind] / 1e9:.2f} ({traffic.operators[kind]})" for traffic in found.values())]
            for kind in kinds
        ]
        lines.append(["sum", *(f"{sum(t.bytes.values()) / 1e9:.2f} ({sum(t.operators.values())})" for t in found.values())])
        if training:
            kept = [sum(x.untyped_storage().nbytes() for x in t.kept.values()) / 2**20 for t in found.values()]
            lines.append(["MiB kept for the backward pass", *(f"{mebibytes:.0f}" for mebibytes in kept)])
        title = f"{'Training' if training else 'Evaluation'}, batch {options.batch}: GB (operators)"
        print(table(title, ["kind", *NAMES], lines))


if __name__ == "__main__":
    main()
