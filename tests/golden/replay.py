"""Runs our SAN10 as the released code was run for the golden numbers, on any device, and compares. Needs torch and numpy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import san
from san.models.released import released_key
from tests.golden.fill import batch, draws_recorded_numbers, fill

GOLDEN = Path(__file__).parent
TOLERANCE = 1e-9 if draws_recorded_numbers() else 0.05
"""Where the inputs differ in the last bits, some ReLUs pass other gradients, and norms of gradients differ by 0.005."""
NO_GRADIENT = 0.1
"""A bias in front of a BatchNorm or of the softmax has no gradient in theory; norms below 0.1 may err by 1e-10."""


@dataclass(frozen=True)
class Replay:
    """What the model gave, under the released code's names."""

    shapes: dict[str, list[int]]
    outputs: dict[str, Tensor]
    grad_norm: dict[str, float]
    running: dict[str, float]


def recorded() -> dict[str, Any]:
    return json.loads((GOLDEN / "san10_pairwise.json").read_text()) | dict(np.load(GOLDEN / "san10_pairwise.npz"))


def replay(device: str) -> Replay:
    """One forward and backward in training mode, then a forward in evaluation mode, in float64."""
    model = san.create_model("san10_pairwise")
    fill({released_key(key): value for key, value in model.state_dict().items()})
    model.double().to(device)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
    images, labels = (x.to(device) for x in batch())
    logits = model.train()(images.double())
    loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    loss.backward()
    with torch.no_grad():
        outputs = {"train_logits": logits.detach(), "loss": loss.detach(), "eval_logits": model.eval()(images.double())}
    return Replay(
        {released_key(key): list(value.shape) for key, value in model.state_dict().items()},
        {name: value.cpu() for name, value in outputs.items()},
        {released_key(key): float(p.grad.norm()) for key, p in model.named_parameters() if p.grad is not None},
        {released_key(key): float(b.norm()) for key, b in model.named_buffers() if "running" in key},
    )


def errors(replayed: Replay) -> dict[str, float]:
    """The largest relative error of each kind of number; infinite where names differ."""
    wanted = recorded()
    found: dict[str, float] = {}
    for name, value in replayed.outputs.items():
        want = torch.as_tensor(wanted[name])
        found[name] = ((value - want).abs() / (1 + want.abs())).max().item()
    for name, norms, smallest in (("grad_norm", replayed.grad_norm, NO_GRADIENT), ("running", replayed.running, 0.0)):
        if norms.keys() != wanted[name].keys():
            found[name] = float("inf")
            continue
        found[name] = max(abs(norm - wanted[name][key]) / max(wanted[name][key], smallest) for key, norm in norms.items())
    return found
