"""gamma as fused operators: the operators around the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import san
from san.nn.mapping import PairMaps
from tests.benchmarks.glue import Glue, count
from tests.benchmarks.traffic import as_on_a_gpu

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
