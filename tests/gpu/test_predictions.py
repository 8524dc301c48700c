"""What the benchmarks compute without a GPU: bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from san.nn.norm import conv_norm
from tests.benchmarks.stages import KINDS
from tests.benchmarks.traffic import Traffic, as_on_a_gpu, step


@pytest.mark.parametrize(
    ("name", "training", "most"),
    [
        ("san10_pairwise", True, 20.6),
        ("san10_patchwise", True, 19.0),
        ("resnet26", True, 14.5),
        ("san10_pairwise", False, 7.7),
        ("san10_patchwise", False, 7.2),
        ("resnet26", False, 4.9),
    ],
)
def test_memory_traffic_outside_attention_has_not_grown(name: str, training: bool, most: float) -> None:
    """In GB, with 32 images."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        found = step(name, 32, training).bytes
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    assert sum(found.values()) - found["attention"] <= 1e9 * most


def test_folded_linear_layers_are_products_on_a_gpu() -> None:
    """cuDNN would add the bias in another pass."""
    with as_on_a_gpu(), Traffic() as traffic, torch.no_grad():
        conv, norm = nn.Conv2d(64, 32, 1, bias=False), nn.BatchNorm2d(32).eval()
        x_NCHW = torch.empty(4, 64, 56, 56).contiguous(memory_format=torch.channels_last)
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            conv_norm(conv, norm, x_NCHW)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
    maps = 4 * 4 * 56**2 * (64 + 32)  # bytes
    assert maps <= traffic.bytes["convolutions, products"] < 1.01 * maps


@pytest.mark.parametrize("kind", KINDS)
def test_attention_keeps_no_weights_on_a_gpu(kind: str) -> None:
    kept: list[int] = []
    with as_on_a_gpu(), saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):  # type: ignore[func-returns-value]
        x_NCHW = torch.empty(2, 256, 14, 14).contiguous(memory_format=torch.channels_last).requires_grad_()
        KINDS[kind](256, 7)(x_NCHW)
    assert 0 < max(kept) <= x_NCHW.numel() < 2 * 8 * 49 * 14**2
