"""The authors' attention, run from a checkout of github.com/hszhao/SAN, which is not part of this project.

Their kernels are compiled by CuPy, with functions that CuPy has since removed; here these get stand-ins.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from san.nn import PairwiseAttention
from tests.benchmarks.stages import Core
from tests.gpu.case import Settings


class Given(nn.Module):
    """Replaces a transformation by a fixed map, to exclude it from the time."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, _: Tensor) -> Tensor:
        return self.x


def attention(folder: str) -> Any:
    """The authors' module SAM."""
    cupy: Any = importlib.import_module("cupy")
    cupy.util = types.SimpleNamespace(memoize=cupy.memoize)
    cupy.cuda.compile_with_cache = lambda code: cupy.RawModule(code=code)
    sys.path.insert(0, folder)
    return importlib.import_module("model.san").SAM


def calls(core: Core, settings: Settings) -> dict[str, Callable[[], object]]:
    """Returns a training step and an evaluation of their module on the core's maps, contiguous and in float32."""
    assert settings.authors is not None
    C, kind = core.channels, 0 if isinstance(core.attention, PairwiseAttention) else 1
    module = attention(settings.authors)(kind, C, C // 16, C // 4, 8, core.footprint).cuda()
    maps = [x.detach().float().contiguous().requires_grad_() for x in (core.phi, core.psi, core.beta)]
    module.conv1, module.conv2, module.conv3 = (Given(x) for x in maps)
    wanted = [*maps, *(p for name, p in module.named_parameters() if "conv_w" in name)]
    grad = core.grad.float().contiguous()

    def forward() -> Tensor:
        with torch.device("cuda"):  # otherwise they would copy positions from the CPU, which CUDA graphs cannot record
            return module(maps[2])

    def train() -> None:
        module.train()
        torch.autograd.grad(forward(), wanted, grad)

    def evaluate() -> None:
        module.eval()
        with torch.no_grad():
            forward()

    return {"train": train, "eval": evaluate}
