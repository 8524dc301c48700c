"""Stochastic depth and activation checkpointing of residual blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def drop_path(y_NCHW: Tensor, rate: float, training: bool) -> Tensor:
    """Stochastic depth: in training, zeroes whole images with probability `rate` and scales the others by 1 / (1 - rate).

    Source: Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016 (doi:10.1007/978-3-319-46493-0_39).
    """
    if rate == 0 or not training:
        return y_NCHW
    kept_N = torch.rand(len(y_NCHW), device=y_NCHW.device) >= rate
    return y_NCHW * (kept_N / (1 - rate)).to(y_NCHW.dtype)[:, None, None, None]


def checkpointed(block: nn.Module, x_NCHW: Tensor) -> Tensor:
    """Calls a block, and recomputes its activations in the backward pass. Running statistics are updated only once."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _frozen_statistics(block)

    y_NCHW: Tensor = checkpoint(block, x_NCHW, use_reentrant=False, context_fn=contexts)
    return y_NCHW


class Blocks(nn.Sequential):
    """Residual blocks. If `checkpoints` is set, training recomputes their activations in the backward pass."""

    checkpoints = False

    def forward(self, x_NCHW: Tensor) -> Tensor:
        for block in self:
            x_NCHW = checkpointed(block, x_NCHW) if self.checkpoints and self.training else block(x_NCHW)
        return x_NCHW


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """BatchNorm uses the batch's statistics, but leaves running statistics as they are."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None]
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms if norm.num_batches_tracked is not None]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.copy_(count)
