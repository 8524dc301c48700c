"""BatchNorm and ReLU as one operator, against torch's two."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from san import ops
from san.nn.fusion import norm_relu
from san.ops import fused

LAST = torch.channels_last


def norm(channels: int, dtype: torch.dtype = torch.float64) -> nn.BatchNorm2d:
    """A BatchNorm that has been trained a little."""
    generator = torch.Generator().manual_seed(1)
    layer = nn.BatchNorm2d(channels).to(dtype)
    for tensor, low, high in ((layer.weight, -1.5, 1.5), (layer.bias, -1.0, 1.0), (layer.running_mean, -1.0, 1.0)):
        assert tensor is not None
        tensor.data.uniform_(low, high, generator=generator)
    assert layer.running_var is not None
    layer.running_var.uniform_(0.5, 2.0, generator=generator)
    return layer


def a_map(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).contiguous(memory_format=LAST).requires_grad_()


def results(layer: nn.BatchNorm2d, x: Tensor, backend: ops.Backend) -> list[Tensor]:
    """Output, gradients of input and parameters, and what is remembered."""
    with ops.backend(backend):
        y = norm_relu(layer, x)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(x.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad), *layer.buffers()]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 19, 1, 2), (3, 64, 33, 17), (600, 1, 2, 2)], ids=str)
def test_matches_reference(shape: tuple[int, ...], training: bool) -> None:
    layer = norm(shape[1]).train(training)
    x = a_map(*shape)
    for got, want in zip(results(copy.deepcopy(layer), x, "auto"), results(layer, x, "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errs_no_more_than_torch(dtype: torch.dtype, training: bool) -> None:
    x, layer = a_map(4, 24, 16, 16, dtype=dtype), norm(24, torch.float32).train(training)
    exact = results(copy.deepcopy(layer).double(), x.detach().double().requires_grad_(), "reference")[:2]
    ours, theirs = (results(copy.deepcopy(layer), x, backend)[:2] for backend in ("auto", "reference"))
    for got, plain, want in zip(ours, theirs, exact, strict=True):
        assert (got - want).norm() <= 2 * (plain - want).norm() + 1e-7 * want.norm()


def test_large_means_keep_their_variance() -> None:
    layer, x = norm(8, torch.float32).train(), a_map(4, 8, 16, 16, dtype=torch.float32).detach() + 1000
    norm_relu(layer, x)
    var = x.double().var((0, 2, 3))
    assert layer.running_var is not None
    torch.testing.assert_close(
        (layer.running_var - 0.9 * norm(8, torch.float32).running_var) / 0.1, var.float(), rtol=1e-3, atol=0
    )


def test_evaluation_in_place_equals_the_other() -> None:
    layer, x = norm(5).eval(), a_map(2, 5, 4, 3).detach()
    with torch.no_grad():
        y = norm_relu(layer, x)
        spent = x.clone(memory_format=torch.preserve_format)
        assert norm_relu(layer, spent, last_use=True).data_ptr() == spent.data_ptr()
    torch.testing.assert_close(spent, y, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["training", "with gradients"])
def test_last_use_keeps_what_backward_needs(mode: str) -> None:
    x = a_map(2, 5, 4, 3)
    before = x.detach().clone()
    norm_relu(norm(5).train(mode == "training"), x, last_use=True).sum().backward()
    assert torch.equal(x, before)


def test_nan_stays() -> None:
    x = a_map(2, 5, 4, 3).detach()
    x[0, 1, 0, 0] = torch.nan
    layer = norm(5).train()
    assert norm_relu(layer, x)[:, 1].isnan().all()
    assert layer.running_var is not None and layer.running_var[1].isnan()


@pytest.mark.parametrize("change", ["a map in torch's own layout", "a hook", "no affine", "SyncBatchNorm"])
def test_runs_as_two_where_it_must(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "norm_relu", None)
    layer: nn.Module = norm(5).eval()
    x = a_map(2, 5, 4, 3)
    if change == "a map in torch's own layout":
        x = x.detach().contiguous()
    elif change == "a hook":
        layer.register_forward_hook(lambda *_: None)
    elif change == "no affine":
        layer = nn.BatchNorm2d(5, affine=False, dtype=torch.float64).eval()
    else:
        layer = nn.SyncBatchNorm(5, dtype=torch.float64).eval()
    assert isinstance(layer, nn.BatchNorm2d | nn.SyncBatchNorm)
    torch.testing.assert_close(norm_relu(layer, x), layer(x).relu())


def test_results_do_not_depend_on_threads() -> None:
    x = a_map(4, 16, 40, 40, dtype=torch.float32)
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(results(norm(16, torch.float32).train(), x, "auto"))
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_opcheck_and_gradcheck(training: bool) -> None:
    layer, x = norm(3), a_map(2, 3, 4, 3).detach().permute(0, 2, 3, 1).contiguous().requires_grad_()
    assert layer.running_mean is not None and layer.running_var is not None
    arguments = (x, layer.weight, layer.bias, layer.running_mean, layer.running_var, training, 1e-5)
    with ops.backend("auto"):
        norm_relu(norm(3), a_map(1, 3, 2, 2))  # loads the operators
    torch.library.opcheck(torch.ops.san.norm_relu.default, arguments)
    plain = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
    torch.library.opcheck(torch.ops.san.norm_relu_backward.default, (torch.randn_like(plain[0]), *plain))
    torch.library.opcheck(torch.ops.san.norm_relu_.default, (*plain[:5], 1e-5))
    torch.autograd.gradcheck(lambda *a: torch.ops.san.norm_relu(*a, *arguments[3:])[0], arguments[:3])


def test_rejects_one_value_per_channel_in_training() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_relu(norm(3).train(), a_map(1, 3, 1, 1))


def test_statistics_do_not_hang_on_the_first_pixel() -> None:
    """It is unlike all others: squares of distances from it would cancel."""
    x = a_map(2, 4, 112, 112, dtype=torch.float32).detach()
    x[0, :, 0, 0] = 1000
    layer = norm(4, torch.float32)
    layer.momentum = 1.0
    norm_relu(layer, x)
    assert layer.running_var is not None
    wanted = x.double().var(dim=(0, 2, 3))
    assert ((layer.running_var - wanted) / wanted).abs().max() < 1e-6


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_large_means_change_nothing(training: bool) -> None:
    """They go before float32 rounds anything."""
    x = (a_map(2, 4, 12, 12, dtype=torch.float32).detach() + 1000).requires_grad_()
    layer, exact = norm(4, torch.float32).train(training), norm(4).train(training)
    for one in (layer, exact):
        one.running_mean = torch.full_like(one.weight, 1000.25)
    exact.load_state_dict(layer.state_dict())
    y, wanted = norm_relu(layer, x), norm_relu(exact, x.double())
    assert ((y - wanted).norm() / wanted.norm()).item() < (1e-4 if training else 1e-6)  # the batch's mean is rounded
