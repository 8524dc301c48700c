"""gamma as fused operators: what is computed once in evaluation, and the operators around the kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import san
from san import ops
from san.nn.mapping import PairMaps
from tests.benchmarks.glue import Glue, count
from tests.benchmarks.traffic import as_on_a_gpu

pytestmark = pytest.mark.every_isa

KINDS = {"pairwise": san.PairwiseAttention, "patchwise": san.PatchwiseAttention}
every_kind = pytest.mark.parametrize("kind", KINDS)


def layer(kind: str) -> tuple[san.PairwiseAttention | san.PatchwiseAttention, Tensor]:
    """A layer that has seen some images, in evaluation, and an input.

    The norm's bias is not 0: where p_i = p_j, rounding would decide whether the ReLU passes a gradient.
    """
    torch.manual_seed(0)
    attention = KINDS[kind](64, 3)
    nn.init.normal_(attention.gamma[0].bias)  # type: ignore[arg-type]
    x_NCHW = torch.randn(2, 64, 6, 5)
    attention(x_NCHW)
    return attention.eval(), x_NCHW


def train_a_step(attention: nn.Module, x_NCHW: Tensor) -> None:
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    attention(x_NCHW).square().sum().backward()
    optimizer.step()


def load(attention: nn.Module, x_NCHW: Tensor) -> None:
    attention.load_state_dict({name: 0.9 * x if x.is_floating_point() else x for name, x in attention.state_dict().items()})


def replace_data(attention: nn.Module, x_NCHW: Tensor) -> None:
    for parameter in attention.parameters():
        parameter.data = 0.9 * parameter.data


def change_a_running_mean(attention: nn.Module, x_NCHW: Tensor) -> None:
    attention.gamma[0].running_mean.add_(0.1)  # type: ignore[union-attr, operator, index]


def replace_a_norm(attention: nn.Module, x_NCHW: Tensor) -> None:
    attention.gamma[0] = nn.BatchNorm2d(attention.gamma[0].num_features).eval()  # type: ignore[operator, index]


def train_with_data(attention: nn.Module, x_NCHW: Tensor) -> None:
    """As some optimizers do: writes through `data` do not count as changes, so the training pass has to be noticed."""
    attention.train()(x_NCHW)
    for parameter in attention.parameters():
        parameter.data.mul_(0.9)
    attention.eval()


def train_frozen_norms_with_data(attention: nn.Module, x_NCHW: Tensor) -> None:
    attention(x_NCHW).square().sum().backward()  # in evaluation mode, with gradients
    for parameter in attention.parameters():
        parameter.data.mul_(0.9)


def recalibrate(attention: nn.Module, x_NCHW: Tensor) -> None:
    """torch's own BatchNorm changes running statistics without counting it as a write to them."""
    with torch.no_grad(), ops.backend("unfused"):
        attention.train()(3 * x_NCHW)
    attention.eval()


def change_eps(attention: nn.Module, x_NCHW: Tensor) -> None:
    attention.gamma[0].eps = 0.5  # type: ignore[union-attr, operator, index]


def move_positions(attention: nn.Module, x_NCHW: Tensor) -> None:
    if isinstance(attention, san.PairwiseAttention):
        attention.position.linear.register_forward_hook(lambda layer, inputs, output: output * 3)  # type: ignore[union-attr]
    else:
        change_eps(attention, x_NCHW)


CHANGES = (
    *(train_a_step, load, replace_data, change_a_running_mean, replace_a_norm, train_with_data),
    *(train_frozen_norms_with_data, recalibrate, change_eps, move_positions),
)


@every_kind
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_evaluation_notices_every_change(kind: str, change: Callable[[nn.Module, Tensor], None], mode: Any) -> None:
    attention, x_NCHW = layer(kind)
    with mode():
        before = attention(x_NCHW)
    change(attention, x_NCHW)
    with mode():
        ours = attention(x_NCHW)
        with ops.backend("reference"):
            theirs = attention(x_NCHW)
    assert not torch.allclose(before, ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_statistics_are_not_computed_in_half_types() -> None:
    """Neither would the variance of correlated channels be accurate, nor do the kernels take a mean of another type."""
    attention, x_NCHW = layer("pairwise")
    attention.train()
    with torch.autocast("cpu", dtype=torch.bfloat16), Products() as products:
        attention(x_NCHW)
    assert products.dtypes == {torch.float32}


class Products(TorchDispatchMode):
    """Collects the types of the square matrices in products, which only the statistics have: covariances."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[1].shape[0] == args[1].shape[1]:
            self.dtypes.add(args[1].dtype)
        return func(*args, **(kwargs or {}))


@every_kind
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_gradients_after_an_evaluation(kind: str, frozen: bool) -> None:
    attention, x_NCHW = layer(kind)
    attention.requires_grad_(not frozen)
    with torch.inference_mode():
        attention(x_NCHW)
    leaves = [x_NCHW.requires_grad_(), *([] if frozen else attention.parameters())]
    gradients = []
    for backend in ("auto", "reference"):
        with ops.backend(backend):  # type: ignore[arg-type]
            gradients.append(torch.autograd.grad(attention(x_NCHW).square().sum(), leaves))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@every_kind
def test_copies_do_not_share_what_is_computed_once(kind: str) -> None:
    attention, x_NCHW = layer(kind)
    with torch.no_grad():
        before = attention(x_NCHW)
        other = copy.deepcopy(attention)
        other.gamma[0].weight.mul_(2)  # type: ignore[operator, index]
        assert not torch.allclose(other(x_NCHW), before)
        torch.testing.assert_close(attention(x_NCHW), before, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "operators"), [("pairwise", 50), ("patchwise", 40)])
def test_few_operators_and_no_layout_copies(kind: str, operators: int) -> None:
    training, evaluation = (count(kind, mode, "stage 5", 2) for mode in (True, False))
    assert sum(training.names.values()) <= operators and sum(evaluation.names.values()) <= 7
    assert training.layout_copies == evaluation.layout_copies == training.conversions == evaluation.conversions == 0


@pytest.mark.parametrize("channels", [70, 71, 72])
def test_gpus_fuse_at_most_72_channels_with_the_position(channels: int) -> None:
    with as_on_a_gpu():
        attention = san.PairwiseAttention(16 * channels, group_size=4)
        phi = torch.empty(1, channels, 8, 8)
        assert attention.gamma.fuses_pairs(PairMaps(phi, phi), phi) == (channels == 70)


@every_kind
def test_training_runs_no_operator_that_raises_in_deterministic_mode(kind: str) -> None:
    """On CUDA, these raise under `torch.use_deterministic_algorithms(True)`, as its documentation lists."""
    raising = {"median", "nanmedian", "put_", "histc", "bincount", "kthvalue", "cumsum", "grid_sampler_2d"}
    raising |= {f"{name}_backward" for name in ("max_unpool2d", "reflection_pad2d", "adaptive_avg_pool2d")}
    attention, x_NCHW = layer(kind)
    attention.train()
    with Glue() as glue:
        attention(x_NCHW).sum().backward()
    assert "norm_affine_backward" in glue.own and not glue.names.keys() & raising
