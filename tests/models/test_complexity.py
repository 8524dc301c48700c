"""Parameters and FLOPs: counts on the meta device equal counts of real calls."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import san
from san import ops

ROOT = Path(__file__).parents[2]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet26": ("resnet26", {}),
    "resnet26 7x7": ("resnet26", {"footprint": 7}),
    "scalar": ("san10_scalar", {}),
    **{name: (name, {}) for name in ("san10_pairwise", "san10_patchwise")},
    **{f"pairwise {r}": ("san10_pairwise", {"relation": r}) for r in ("summation", "concatenation", "hadamard", "dot")},
    **{f"patchwise {r}": ("san10_patchwise", {"relation": r}) for r in ("star", "clique")},
    **{f"pairwise {p}": ("san10_pairwise", {"position": p}) for p in ("none", "absolute")},
    **{f"{kind} {m}": (f"san10_{kind}", {"mapping": m}) for kind in ("pairwise", "patchwise") for m in ("L", "LRLRL")},
    "pairwise hidden layer": ("san10_pairwise", {"hidden_reduction": 4}),
    **{f"{k} phi=psi": (f"san10_{k}", {"transformation": "phi_eq_psi"}) for k in ("pairwise", "patchwise")},
    **{
        f"{kind} phi=psi=beta": (f"san10_{kind}", {"transformation": "phi_eq_psi_eq_beta", "r1": 4})
        for kind in ("pairwise", "patchwise")
    },
}


class PaperFlops(TorchFunctionMode):
    """Counts the FLOPs of each call of a torch function by the paper's convention."""

    def __init__(self, scalar: bool) -> None:
        super().__init__()
        self.scalar = scalar
        self.total = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += self.cost(getattr(func, "__name__", ""), args, out)
        return out

    def cost(self, name: str, args: tuple[Any, ...], out: Any) -> int:
        match name:
            case "conv2d":
                image, weight, bias = args[:3]
                per_output = image.shape[1] * weight.shape[2] * weight.shape[3] + (bias is not None)
                return math.prod(out.shape) * per_output
            case "linear":  # the classifier; the released code does not count its bias
                return math.prod(out.shape) * args[0].shape[-1]
            case "batch_norm":
                return 2 * math.prod(out.shape)
            case "relu" | "relu_" | "sub":
                return math.prod(out.shape)
            case "max_pool2d" | "mean":
                return math.prod(args[0].shape)
            case "einsum":
                return self.product(*args, out)
        return 0

    def product(self, equation: str, left: Any, right: Any, out: Any) -> int:
        if equation == "ngkp,nsgkp->nsgp":  # aggregation
            return math.prod(out.shape) * left.shape[2]
        if equation == "nsgp,nsgkp->ngkp" and (self.scalar or left.shape[1] == 1):  # phi^T psi in groups
            return math.prod(out.shape) * left.shape[1]
        if equation == "nsgp,sgk->ngkp":  # scalar attention's phi^T r
            return math.prod(out.shape) * left.shape[1]
        return 0


@pytest.mark.parametrize("which", MODELS)
@torch.no_grad()
def test_counts_equal_those_of_a_forward_pass_and_stages_add_up(which: str) -> None:
    name, fields = MODELS[which]
    small = {"footprint": 3, "num_stages": 2 if fields else 5}  # the named models are counted whole
    fields = {"width_mult": 0.5} | ({} if name == "resnet26" else small) | fields
    model, size = san.create_model(name, 7, **fields).eval(), (96, 64)
    softmax = {torch.ops.aten._softmax: lambda shape, *args, **options: 5 * math.prod(shape)}
    with (
        ops.backend("reference"),
        PaperFlops(which == "scalar") as paper,
        FlopCounterMode(display=False, custom_mapping=softmax) as actual,
    ):
        model(torch.randn(1, 3, *size))
    counted = san.complexity(model, size)
    assert (counted.flops_paper, counted.flops_actual) == (paper.total, actual.get_total_flops())
    assert counted.params == sum(p.numel() for p in model.parameters())
    parts = ["stem", *[f"stage{i}" for i in range(1, fields.get("num_stages", 4) + 1)], "head"]
    assert [part.name for part in counted.stages] == parts
    for field in ("params", "flops_paper", "flops_actual"):
        assert sum(getattr(part, field) for part in counted.stages) == getattr(counted, field)
    assert all(min(dataclasses.astuple(part)[1:]) > 0 for part in counted.stages)


def test_torchs_counter_is_right_from_the_first_call_on() -> None:
    code = """
import torch, san
from torch.utils.flop_counter import FlopCounterMode
model, counts = san.create_model("san10_pairwise", num_stages=1).eval(), []
for _ in range(2):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 16, 16))
    counts.append(counter.get_total_flops())
assert counts[0] == counts[1], counts
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_other_modules_have_one_part() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1, bias=False), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3))
    counted = san.complexity(model, (5, 6))
    (part,) = counted.stages
    assert (part.name, part.params, part.flops_paper) == ("model", 86, 30 * 12 + 30 * 4 + 12 * 2 * 37)
    assert (counted.params, counted.flops_paper) == (part.params, part.flops_paper)


def test_transposed_convolutions_and_average_pooling() -> None:
    layers = torch.nn.ConvTranspose2d(3, 8, 2, 2, bias=False), torch.nn.AvgPool2d(2), torch.nn.AdaptiveAvgPool2d(2)
    assert san.complexity(torch.nn.Sequential(*layers), 4).flops_paper == 16 * 3 * 8 * 4 + 8 * 8 * 8 + 8 * 4 * 4


def test_weights_as_input_of_submodules() -> None:
    """Such as the class token of a transformer."""

    class Token(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.layer = torch.nn.Parameter(torch.zeros(1, 3)), torch.nn.Linear(3, 2)

        def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
            return self.layer(self.token.expand(len(x_NCHW), -1))

    assert san.complexity(Token(), 4).flops_paper == 2 * 3


def test_other_dtypes_and_input_channels() -> None:
    expected = san.complexity(san.create_model("resnet26", 7), 64)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert san.complexity(san.create_model("resnet26", 7).to(dtype), 64) == expected
    grey = san.create_model("resnet26", 7)
    grey.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    counted = san.complexity(grey, 64)
    assert expected.params - counted.params == 2 * 64 * 7 * 7
    assert expected.flops_paper - counted.flops_paper == 2 * 64 * 7 * 7 * 32 * 32


def test_modules_without_convolutions() -> None:
    assert san.complexity(nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 2)), 4).flops_paper == 2 * 3 * 4 * 4
    assert san.complexity(nn.Flatten(), 4).params == 0
