"""Norms folded into convolutions, and ReLUs in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from san import ops
from san.nn.fusion import conv_norm, conv_norm_relu, norm_relu


def layers(dtype: torch.dtype = torch.float64, bias: bool = False) -> tuple[nn.Conv2d, nn.BatchNorm2d, Tensor]:
    """A strided convolution, a norm that has seen some images, and an input."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(6, 4, 3, 2, 1, groups=2, bias=bias), nn.BatchNorm2d(4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm(3 + 2 * torch.randn(8, 4, 5, 5))
    return conv.to(dtype).eval(), norm.to(dtype).eval(), torch.randn(2, 6, 9, 8, dtype=dtype)


def gradients(backend: ops.Backend, conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with ops.backend(backend):
        y = conv_norm_relu(conv, norm, x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *conv.parameters(), *norm.parameters()])]


@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"])
def test_a_folded_norm_changes_neither_result_nor_gradients(dtype: torch.dtype, allowed: float, bias: bool) -> None:
    for folded, plain in zip(
        gradients("auto", *layers(dtype, bias)), gradients("reference", *layers(dtype, bias)), strict=True
    ):
        torch.testing.assert_close(folded, plain, rtol=allowed, atol=allowed)


def test_a_folded_half_norm_errs_little_more_than_two_layers() -> None:
    conv, norm, x = layers(torch.bfloat16)
    exact = copy.deepcopy(norm).double()(copy.deepcopy(conv).double()(x.double()))
    folded, plain = conv_norm(conv, norm, x), norm(conv(x))
    assert (folded - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.parametrize("change", ["training", "a hook", "no running statistics", "another norm"])
def test_two_layers_run_where_folding_would_change_something(change: str) -> None:
    conv, norm, x = layers()
    other: nn.Module = norm
    called: list[str] = []
    if change == "training":
        norm.train()
    elif change == "a hook":
        conv.register_forward_hook(lambda *_: called.append("conv"))
    elif change == "no running statistics":
        other = nn.BatchNorm2d(4, track_running_stats=False).double().eval()
    else:
        other = nn.Identity()
    wanted = copy.deepcopy(other)(nn.Conv2d.forward(conv, x)).relu()
    torch.testing.assert_close(conv_norm_relu(conv, other, x), wanted, rtol=0, atol=0)
    assert called == (["conv"] if change == "a hook" else [])
    if change == "training":
        assert int(norm.num_batches_tracked) == 2


def test_relu_leaves_what_a_hook_has_kept() -> None:
    conv, norm, x = layers()
    kept: list[Tensor] = []
    norm.register_forward_hook(lambda module, inputs, output: kept.append(output))
    conv_norm_relu(conv, norm, x)
    norm_relu(norm, conv(x))
    assert all((seen < 0).any() for seen in kept) and len(kept) == 2


def test_relu_leaves_the_input_of_an_identity() -> None:
    x = -torch.ones(1, 2, 3, 3)
    assert (norm_relu(nn.Identity(), x) == 0).all() and (x == -1).all()
