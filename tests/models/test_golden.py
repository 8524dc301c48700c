"""Our SAN10 reproduces the released code's numbers in float64: names, forward, gradients, running statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import san
from san.models.released import released_key
from tests.golden.fill import batch, fill

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads((GOLDEN / "san10_pairwise.json").read_text()) | dict(np.load(GOLDEN / "san10_pairwise.npz"))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    model = san.create_model("san10_pairwise")
    ours = model.state_dict()
    theirs = {released_key(key): value for key, value in ours.items()}
    fill(theirs)
    model.double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
    return model


@pytest.fixture(scope="module")
def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """One forward and backward in training mode, then a forward in evaluation mode."""
    images, labels = batch()
    model.train()
    logits = model(images.double())
    loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    loss.backward()
    model.eval()
    with torch.no_grad():
        return {"train_logits": logits.detach(), "loss": loss.detach(), "eval_logits": model(images.double())}


def test_state_dict_names_and_shapes(model: nn.Module, recorded: dict[str, Any]) -> None:
    ours = {released_key(key): list(value.shape) for key, value in model.state_dict().items()}
    assert ours == {key: list(shape) for key, shape in recorded["keys"].items()}


@pytest.mark.parametrize("name", ["train_logits", "loss", "eval_logits"])
def test_forward(name: str, trained: dict[str, torch.Tensor], recorded: dict[str, Any]) -> None:
    np.testing.assert_allclose(trained[name].numpy(), recorded[name], rtol=1e-9, atol=1e-9)


def test_gradients(model: nn.Module, trained: dict[str, torch.Tensor], recorded: dict[str, Any]) -> None:
    norms = {released_key(key): float(p.grad.norm()) for key, p in model.named_parameters() if p.grad is not None}
    assert norms.keys() == recorded["grad_norm"].keys()
    for key, norm in norms.items():
        # A bias in front of a BatchNorm or of the softmax has no gradient in theory.
        assert norm == pytest.approx(recorded["grad_norm"][key], rel=1e-9, abs=1e-10), key


def test_running_statistics(model: nn.Module, trained: dict[str, torch.Tensor], recorded: dict[str, Any]) -> None:
    norms = {released_key(key): float(b.norm()) for key, b in model.named_buffers() if "running" in key}
    assert norms.keys() == recorded["running"].keys()
    for key, norm in norms.items():
        assert norm == pytest.approx(recorded["running"][key], rel=1e-9), key
