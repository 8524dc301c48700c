"""Stochastic depth and activation checkpointing of residual blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from san.ops.functional import backend, chosen_backend


def drop_path(y_NCHW: Tensor, rate: float, training: bool) -> Tensor:
    """Stochastic depth: in training, zeroes whole images with probability `rate` and scales the others by 1 / (1 - rate).

    Source: Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016 (doi:10.1007/978-3-319-46493-0_39).
    """
    if rate == 0 or not training:
        return y_NCHW
    kept_N = torch.rand(len(y_NCHW), device=y_NCHW.device) >= rate
    return y_NCHW * (kept_N / (1 - rate)).to(y_NCHW.dtype)[:, None, None, None]


class Blocks(nn.Sequential):
    """Residual blocks. If `checkpoints` is set, training recomputes their activations in the backward pass, without updating
    running statistics a second time."""

    checkpoints = False

    def forward(self, x_NCHW: Tensor) -> Tensor:
        for block in self:
            if not self.checkpoints or not self.training:
                x_NCHW = block(x_NCHW)
            elif torch.compiler.is_compiling():  # which updates running statistics once, and has no contexts
                x_NCHW = checkpoint(block, x_NCHW, use_reentrant=False)
            else:
                x_NCHW = checkpoint(block, x_NCHW, use_reentrant=False, context_fn=partial(_contexts, block))
        return x_NCHW


class _Recomputation(AbstractContextManager[None]):
    """Inside the block, operators have the implementation of the forward pass, also in a thread of autograd, and BatchNorm uses
    the batch's statistics, but leaves running statistics as they are. It can be entered again, because each backward pass
    recomputes the activations."""

    def __init__(self, block: nn.Module) -> None:
        self.norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
        self.backend, self.before = chosen_backend(), ExitStack()

    def __enter__(self) -> None:
        self.before.enter_context(backend(self.backend))
        for norm in self.norms:
            momentum, count = norm.momentum, norm.num_batches_tracked
            self.before.callback(setattr, norm, "momentum", momentum)
            self.before.callback(setattr, norm, "num_batches_tracked", count)
            # SyncBatchNorm needs something to count with.
            norm.momentum, norm.num_batches_tracked = 0.0, None if count is None else count.clone()

    def __exit__(self, *error: object) -> None:
        self.before.close()


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the forward pass and of each recomputation."""
    return nullcontext(), _Recomputation(block)
