"""Activation checkpointing of residual blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import san
from san.nn.depth import Blocks, drop_path


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


def test_checkpoints_run_each_block_again() -> None:
    model, calls = san.create_model("resnet26", 5, num_stages=2, width_mult=0.5), 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    blocks = [block for stage in model.modules() if isinstance(stage, Blocks) for block in stage]
    for block in blocks:
        block.register_forward_pre_hook(count)
    for checkpoints in (False, True):
        model.set_grad_checkpointing(checkpoints)
        calls = 0
        gradients(model, torch.randn(2, 3, 32, 32))
        assert calls == (1 + checkpoints) * len(blocks)


def test_checkpoints_can_be_compiled() -> None:
    model, x_NCHW = san.create_model("san10_pairwise", 5, depths=(1,), widths=(32,)), torch.randn(2, 3, 8, 8)
    saving = copy.deepcopy(model)
    saving.set_grad_checkpointing()
    compiled = torch.compile(saving, backend="aot_eager")
    total = compiled(x_NCHW).square().sum()
    torch.testing.assert_close(list(torch.autograd.grad(total, list(saving.parameters()))), gradients(model, x_NCHW))
    torch.testing.assert_close(dict(saving.named_buffers()), dict(model.named_buffers()))


def test_stochastic_depth_drops_whole_images_and_scales_the_others() -> None:
    torch.manual_seed(0)
    x_NCHW = torch.rand(1000, 2, 1, 1) + 1
    factors = (drop_path(x_NCHW, 0.2, training=True) / x_NCHW).flatten(1)
    torch.testing.assert_close(factors[:, 0], factors[:, 1])
    torch.testing.assert_close(factors, 1.25 * (factors > 0))
    assert abs(factors.mean() - 1) < 0.1
    assert drop_path(x_NCHW, 0.2, training=False) is x_NCHW


@pytest.mark.parametrize("name", ["san10_pairwise", "resnet26"])
def test_stochastic_depth_changes_training(name: str) -> None:
    torch.manual_seed(0)
    model, x_NCHW = san.create_model(name, 5, num_stages=3, width_mult=0.5), torch.randn(8, 3, 48, 48)
    model.set_drop_rates(drop_path_rate=0.5)
    first, second = (model(x_NCHW) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(*(model.eval()(x_NCHW) for _ in range(2)))


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
