"""Models with hooks, and with other layers in place of norms."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import san
from san import ops
from tests.nn.kinds import gradients, randomize_vectors

NAMES = ["san10_pairwise", "san10_patchwise", "san10_scalar", "resnet26"]
every_model = pytest.mark.parametrize("name", NAMES)
every_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
IMAGES = torch.randn(2, 3, 16, 18, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = san.create_model(name, 10, num_stages=2 if name == "resnet26" else 1, width_mult=0.5).double()
    randomize_vectors(model)
    return model


def norms(model: nn.Module) -> Iterator[str]:
    return (name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d))


class Identity(nn.Module):
    """Replaces a norm. Returns the input itself, a view or a copy."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Tensor:
        return {"input": x, "view": x.view_as(x), "copy": x.clone()}[self.result]


@every_model
@pytest.mark.parametrize("result", ["input", "view"])
@torch.no_grad()
def test_input_of_a_replaced_norm_is_not_overwritten(name: str, result: str) -> None:
    """A block adds this input to its result later."""
    plain = made(name).eval()
    for norm in norms(plain):
        logits = {}
        for returned in (result, "copy"):
            model = copy.deepcopy(plain)
            model.set_submodule(norm, Identity(returned))
            logits[returned] = model(IMAGES)
        torch.testing.assert_close(logits[result], logits["copy"], rtol=0, atol=0, msg=norm)


@every_model
@every_mode
@torch.no_grad()
def test_outputs_kept_by_hooks_are_not_overwritten(name: str, training: bool) -> None:
    model, kept = made(name).train(training), []

    def keep(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        kept.append((type(layer).__name__, output, output.clone()))

    for layer in model.modules():
        layer.register_forward_hook(keep)
    model(IMAGES)
    assert {"BatchNorm2d", "Conv2d"} <= {layer for layer, *_ in kept}
    assert not [layer for layer, output, then in kept if not torch.equal(output, then)]


@every_model
def test_backward_hooks_do_not_change_results(name: str) -> None:
    model = made(name)
    plain = copy.deepcopy(model)
    wanted = gradients(plain, plain, IMAGES)
    seen: set[str] = set()
    for part, layer in model.named_modules():
        layer.register_full_backward_hook(lambda *_, part=part: seen.add(part))  # type: ignore[misc]
    torch.testing.assert_close(gradients(model, model, IMAGES), wanted, rtol=1e-9, atol=1e-9)
    assert seen >= set(norms(model))


@pytest.mark.parametrize("name", ["san10_pairwise", "san10_patchwise"])
def test_children_in_turn_give_the_maps_of_the_stages(name: str) -> None:
    """As tools extract features. A hook on the first stage sees the stem's whole map."""
    model = san.create_model(name, 10, num_stages=2, width_mult=0.5).eval()
    x_NCHW = torch.randn(2, 3, 64, 64)
    wanted = model.features(x_NCHW)
    for child, expected in (
        ("stem", None),
        ("stem_norm", None),
        ("stem_relu", None),
        *zip(model.stage_names, wanted, strict=True),
    ):
        x_NCHW = model.get_submodule(child)(x_NCHW)
        if expected is not None:
            torch.testing.assert_close(x_NCHW, expected)
    seen: list[torch.Size] = []
    model.get_submodule("stage1").register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    model.features(torch.zeros(2, 3, 64, 64))
    assert [shape[2] for shape in seen] == [64]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("layers", [(), (nn.Identity,), (nn.Identity, nn.ReLU), (nn.ReLU, nn.Identity, nn.ReLU)], ids=len)
def test_identity_of_a_block_may_have_other_layers(layers: tuple[type[nn.Module], ...], training: bool) -> None:
    model = san.create_model("resnet26", 5, num_stages=3, width_mult=0.25).train(training)
    model.get_submodule("layer2")[1].downsample = nn.Sequential(*(layer() for layer in layers))  # type: ignore[index,union-attr]
    x_NCHW = torch.randn(2, 3, 32, 32)
    with ops.backend("reference"):
        expected = copy.deepcopy(model)(x_NCHW)
    torch.testing.assert_close(model(x_NCHW), expected, rtol=1e-4, atol=1e-4)
