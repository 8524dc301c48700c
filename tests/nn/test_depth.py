"""Activation checkpointing of residual blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import san


def gradients(model: nn.Module, x_NCHW: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x_NCHW).square().sum(), list(model.parameters())))


@pytest.mark.parametrize("name", ["san10_pairwise", "san10_patchwise", "san10_scalar", "resnet26"])
def test_checkpoints_change_neither_gradients_nor_statistics(name: str) -> None:
    model = san.create_model(name, 5, num_stages=2, width_mult=0.5)
    saving, x_NCHW = copy.deepcopy(model), torch.randn(2, 3, 32, 32)
    saving.set_grad_checkpointing()
    buffers = dict(saving.named_buffers())
    torch.testing.assert_close(gradients(saving, x_NCHW), gradients(model, x_NCHW))
    torch.testing.assert_close(dict(saving.named_buffers()), dict(model.named_buffers()))
    assert all(buffer is buffers[key] for key, buffer in saving.named_buffers())
    total = saving(x_NCHW).square().sum()
    twice = [torch.autograd.grad(total, list(saving.parameters()), retain_graph=True) for _ in range(2)]
    torch.testing.assert_close(*twice)


def test_recomputation_has_the_backend_of_the_forward_pass() -> None:
    model, x_NCHW = san.create_model("san10_pairwise", 5, num_stages=2, width_mult=0.5), torch.randn(2, 3, 32, 32)
    model.set_grad_checkpointing()
    with san.ops.backend("reference"):
        total = model(x_NCHW).square().sum()
    total.backward()


def test_recomputation_counts_no_batch_of_synchronized_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # other tests leave a process group
    model = nn.SyncBatchNorm.convert_sync_batchnorm(san.create_model("resnet26", 5, num_stages=2, width_mult=0.5))
    model.set_grad_checkpointing()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert {int(norm.num_batches_tracked) for norm in model.modules() if isinstance(norm, nn.SyncBatchNorm)} == {1}
