"""`torch.fx` traces models symbolically, with our operators as leaf functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import symbolic_trace
from torch.fx.experimental.optimization import fuse

import san

VARIANTS: dict[str, dict[str, Any]] = {
    "pairwise": {"name": "san10_pairwise"},
    "pairwise, absolute": {"name": "san10_pairwise", "relation": "concatenation", "position": "absolute"},
    "patchwise": {"name": "san10_patchwise"},
    "patchwise star": {"name": "san10_patchwise", "relation": "star"},
    "scalar": {"name": "san10_scalar"},
    "resnet": {"name": "resnet26"},
}


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS.keys())
def test_traced_model_gives_the_same_logits_and_trains(spec: dict[str, Any]) -> None:
    model = san.create_model(num_classes=10, width_mult=0.5, num_stages=2, **spec).eval()
    traced = symbolic_trace(model)
    for height, width in ((32, 32), (40, 34)):
        x_NCHW = torch.randn(2, 3, height, width)
        torch.testing.assert_close(traced(x_NCHW), model(x_NCHW))
        torch.testing.assert_close(fuse(traced)(x_NCHW), model(x_NCHW), rtol=1e-4, atol=1e-5)
    trained = symbolic_trace(model.train())
    trained(x_NCHW).sum().backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())


def test_operators_take_keyword_arguments() -> None:
    x_NCHW = torch.randn(1, 2, 4, 4)
    traced = symbolic_trace(lambda x: san.ops.unfold(x_NCHW=x, kernel_size=3))  # type: ignore[arg-type]
    assert torch.equal(traced(x_NCHW), san.ops.unfold(x_NCHW, 3))
