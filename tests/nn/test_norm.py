"""Norms folded into convolutions, in-place ReLUs, and layers that fused code must call."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import san
from san import ops
from san.nn.norm import (
    conv_norm,
    conv_norm_add_relu,
    conv_norm_relu,
    conv_norm_relu_pool,
    convolve,
    convolve_each,
    max_pool,
    norm_relu,
    norm_relu_branch,
)
from tests.benchmarks.glue import Glue


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
        y = conv_norm_relu(conv, norm, nn.ReLU(), x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *conv.parameters(), *norm.parameters()])]


@pytest.mark.every_isa
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("dtype, allowed", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"])
def test_folded_norm_keeps_results_and_gradients(dtype: torch.dtype, allowed: float, bias: bool) -> None:
    folded, plain = (gradients(backend, *layers(dtype, bias)) for backend in ("auto", "reference"))
    torch.testing.assert_close(folded, plain, rtol=allowed, atol=allowed)


def test_half_weights_that_folding_would_overflow_stay_finite() -> None:
    conv, norm, x = layers(torch.float16)
    norm.weight.data.fill_(300)
    norm.running_var.fill_(1e-7)  # type: ignore[union-attr]
    conv.weight.data.fill_(1)
    assert conv_norm(conv, norm, torch.zeros_like(x)).isfinite().all()
    with torch.autocast("cpu", torch.float16):
        assert conv_norm(conv.float(), norm.float(), torch.zeros_like(x).float()).isfinite().all()


def test_norm_is_not_folded_into_a_convolution_with_a_hook() -> None:
    conv, norm, x = layers()
    conv.register_forward_hook(lambda module, inputs, output: 2 * output)
    torch.testing.assert_close(conv_norm_relu(conv, norm, nn.ReLU(), x), norm(conv(x)).relu(), rtol=0, atol=0)


def change_nothing(model: nn.Module) -> None: ...


def remove(*names: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for norm in model.modules():
            for name in names if isinstance(norm, nn.BatchNorm2d) else ():
                setattr(norm, name, None)

    return change


def count_in_float32(model: nn.Module) -> None:
    """As after averaging checkpoints."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.num_batches_tracked = layer.get_buffer("num_batches_tracked").float()


def replace_forward(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.forward = lambda x, plain=layer.forward: 2 * plain(x)  # type: ignore[method-assign, misc]


@pytest.mark.parametrize("name", ["san10_pairwise", "san10_patchwise", "resnet26"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change_nothing, id="unchanged"),
        pytest.param(remove("bias"), id="no biases"),
        pytest.param(remove("running_mean", "running_var", "num_batches_tracked"), id="no running statistics"),
        pytest.param(remove("num_batches_tracked"), id="no counts"),
        pytest.param(count_in_float32, id="fractional counts"),
        pytest.param(replace_forward, id="replaced forward"),
    ],
)
def test_changed_layers_give_the_same_result_as_the_reference(
    change: Callable[[nn.Module], None], training: bool, name: str
) -> None:
    model = san.create_model(name, 5, num_stages=2, width_mult=0.5).double().train(training)
    change(model)
    x_NCHW = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    # With a replaced forward, a copy would call the layers of the original.
    expected = model if change is replace_forward else copy.deepcopy(model)
    with ops.backend("reference"):
        logits = expected(x_NCHW)
    torch.testing.assert_close(model(x_NCHW), logits, rtol=1e-8, atol=1e-8)
    for key, buffer in model.named_buffers():
        if change is not replace_forward:
            torch.testing.assert_close(buffer, expected.get_buffer(key), rtol=1e-8, atol=1e-8)


@pytest.mark.every_isa
@pytest.mark.parametrize("value", [1e4, 1e8, 1e30, math.inf, math.nan])
def test_huge_pixel_only_affects_pixels_whose_footprints_contain_it(value: float) -> None:
    attention = san.PairwiseAttention(64, 3).eval()
    x_NCHW = 2 + 0.1 * torch.randn(1, 64, 9, 9)
    changed = x_NCHW.clone()
    changed[0, 3, 4, 4] = value
    difference = (attention(changed) - attention(x_NCHW)).abs()
    difference[:, :, 3:6, 3:6] = 0
    assert difference.max() < 2e-5


def norm_and_map(**options: Any) -> tuple[nn.BatchNorm2d, Tensor]:
    """A norm with random parameters and a channels-last map."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm, (2 + torch.randn(3, 6, 5, 4)).contiguous(memory_format=torch.channels_last)


def fused_calls(norm: nn.Module, act: nn.Module, x_NCHW: Tensor) -> int:
    """How often norm_relu runs the operator. Checks that the result, gradients and buffers are those of the layers."""
    with Glue() as glue:
        assert_same_as_layers(lambda norm, x: norm_relu(norm, act, x), lambda norm, x: act(norm(x)), norm, x_NCHW)
    return glue.own["norm_relu"]


def assert_same_as_layers(
    ours: Callable[[nn.Module, Tensor], Tensor], layers: Callable[[nn.Module, Tensor], Tensor], norm: nn.Module, x_NCHW: Tensor
) -> None:
    """Compares results, gradients and buffers."""
    found: list[list[Tensor | None]] = []
    for compute in (ours, layers):
        own, leaf = copy.deepcopy(norm), x_NCHW.detach().clone().requires_grad_()
        y_NCHW = compute(own, leaf)
        y_NCHW.float().square().sum().backward()
        found.append([y_NCHW.detach(), leaf.grad, *(p.grad for p in own.parameters()), *own.buffers()])
    torch.testing.assert_close(*found)


all_uses = pytest.mark.parametrize("change", [None, "frozen statistics", "layout", "a hook", "unfused"])


@pytest.mark.every_isa
@all_uses
def test_start_of_a_residual_branch(change: str | None) -> None:
    norm, x_NCHW = norm_and_map()
    norm, x_NCHW = changed(norm, x_NCHW, change)

    def ours(norm: nn.Module, x_NCHW: Tensor) -> Tensor:
        with ops.backend("unfused" if change == "unfused" else "auto"):
            x_NCHW, y_NCHW = norm_relu_branch(norm, nn.ReLU(), x_NCHW)
        return x_NCHW * 2 + y_NCHW.sin()

    assert_same_as_layers(ours, lambda norm, x: x * 2 + norm(x).relu().sin(), norm, x_NCHW)


@pytest.mark.every_isa
@all_uses
def test_end_of_a_residual_branch(change: str | None) -> None:
    norm, x_NCHW = norm_and_map()
    norm, x_NCHW = changed(norm, x_NCHW, change)
    conv = nn.Conv2d(6, 6, 3, padding=1)

    def ours(norm: nn.Module, x_NCHW: Tensor) -> Tensor:
        with ops.backend("unfused" if change == "unfused" else "auto"):
            return conv_norm_add_relu(conv, norm, nn.ReLU(), x_NCHW, x_NCHW)

    assert_same_as_layers(ours, lambda norm, x: (norm(conv(x)) + x).relu(), norm, x_NCHW)


def changed(norm: nn.Module, x_NCHW: Tensor, change: str | None) -> tuple[nn.Module, Tensor]:
    if change == "a hook":
        norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    if change == "frozen statistics":
        norm(1 + x_NCHW)
    return norm.train(change != "frozen statistics"), x_NCHW.contiguous() if change == "layout" else x_NCHW


NORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "no parameters": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "cumulative": {"momentum": None},
    "momentum and eps": {"momentum": 0.3, "eps": 0.1},
}


@pytest.mark.every_isa
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("options", NORMS)
def test_norm_and_relu_run_in_one_operator(options: str, training: bool) -> None:
    norm, x_NCHW = norm_and_map(**NORMS[options])
    norm(1 + x_NCHW)
    assert fused_calls(norm.train(training), nn.ReLU(), x_NCHW) == 1


class Doubled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("change", ["layout", "float64", "bfloat16", "another norm", "another activation", "unfused"])
def test_other_layers_and_maps_run_one_by_one(change: str) -> None:
    norm, x_NCHW = norm_and_map()
    act: nn.Module = nn.ReLU()
    if change == "layout":
        x_NCHW = x_NCHW.contiguous()
    elif change in ("float64", "bfloat16"):
        norm, x_NCHW = norm.to(getattr(torch, change)), x_NCHW.to(getattr(torch, change))
    elif change == "another norm":
        norm.__class__ = Doubled
    elif change == "another activation":
        act = nn.GELU()
    with ops.backend("unfused" if change == "unfused" else "auto"):
        assert fused_calls(norm, act, x_NCHW) == 0


def test_a_single_value_per_channel_cannot_be_normalized() -> None:
    norm, x_NCHW = norm_and_map()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_relu(norm, nn.ReLU(), x_NCHW[:1, :, :1, :1])
    norm_relu(norm.eval(), nn.ReLU(), x_NCHW[:1, :, :1, :1])


@pytest.mark.every_isa
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
@pytest.mark.parametrize("images", [1, 3, 17])
def test_pointwise_convolution_as_a_matrix_product(images: int, bias: bool) -> None:
    conv = nn.Conv2d(6, 5, 1, bias=bias)
    x_NCHW = torch.randn(images, 6, 4, 3).contiguous(memory_format=torch.channels_last).requires_grad_()
    got, want = convolve(conv, x_NCHW), conv(x_NCHW)
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got, want)
    leaves = [x_NCHW, *conv.parameters()]
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaves) for y in (got, want)))


@pytest.mark.parametrize(
    "change", ["a hook", "3x3", "stride", "padding", "groups", "layout", "autocast", "no gradient", "subclass"]
)
def test_other_convolutions_are_called(change: str) -> None:
    options: dict[str, Any] = {
        "3x3": {"kernel_size": 3},
        "stride": {"stride": 2},
        "padding": {"padding": 1},
        "groups": {"groups": 2},
    }
    conv = nn.Conv2d(6, 4, **{"kernel_size": 1, **options.get(change, {})})
    x_NCHW = torch.randn(2, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    x_NCHW = x_NCHW.contiguous() if change == "layout" else x_NCHW
    called: list[nn.Module] = []
    if change == "a hook":
        conv.register_forward_hook(lambda module, inputs, output: called.append(module))
    if change == "subclass":
        conv.__class__ = type("Other", (nn.Conv2d,), {"forward": lambda self, x: 2 * nn.Conv2d.forward(self, x)})
    with torch.autocast("cpu", enabled=change == "autocast"), torch.set_grad_enabled(change != "no gradient"):
        torch.testing.assert_close(convolve(conv, x_NCHW), conv(x_NCHW), rtol=0, atol=0)
    assert len(called) == (2 if change == "a hook" else 0)


def stem(images: int = 3, mean: float = 0, deviation: float = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d, Tensor]:
    """Float64 layers as in SAN's stem, with weights that are float32 numbers, and images."""
    torch.manual_seed(1)
    conv, norm = nn.Conv2d(images, 16, 1, bias=False), nn.BatchNorm2d(16)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x_NCHW = (mean + deviation * torch.randn(4, images, 9, 10)).contiguous(memory_format=torch.channels_last)
    return conv.double(), norm.double(), x_NCHW.double()


def trained(conv: nn.Conv2d, norm: nn.BatchNorm2d, x_NCHW: Tensor, backend: ops.Backend = "auto") -> list[Tensor]:
    """Result, gradients and running statistics of one step in training, with gradients of the images."""
    conv, norm, x_NCHW = copy.deepcopy(conv), copy.deepcopy(norm), x_NCHW.clone().requires_grad_()
    with ops.backend(backend):
        y_NCHW = conv_norm(conv, norm, x_NCHW)
    return [y_NCHW, *gradients_of(y_NCHW, [x_NCHW, *conv.parameters(), *norm.parameters()]), *norm.buffers()]


def trained_with_pool(conv: nn.Conv2d, norm: nn.BatchNorm2d, x_NCHW: Tensor, backend: ops.Backend = "auto") -> list[Tensor]:
    """The same with ReLU and pool and without gradients of the images: one operator."""
    conv, norm = copy.deepcopy(conv), copy.deepcopy(norm)
    with ops.backend(backend):
        y_NCHW = conv_norm_relu_pool(conv, norm, nn.ReLU(), x_NCHW)
    return [y_NCHW, *gradients_of(y_NCHW, [*conv.parameters(), *norm.parameters()]), *norm.buffers()]


def gradients_of(y_NCHW: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    return torch.autograd.grad(y_NCHW, leaves, torch.randn(y_NCHW.shape).to(y_NCHW.dtype))


both_stems = pytest.mark.parametrize("step", [trained, trained_with_pool], ids=["map", "pooled map"])
Step = Callable[..., list[Tensor]]


@pytest.mark.every_isa
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tracks", [True, False], ids=["running statistics", "none"])
@pytest.mark.parametrize("images", [1, 3, 4])
def test_norm_of_the_stem_follows_from_the_images(images: int, tracks: bool, momentum: float | None) -> None:
    conv, norm, x_NCHW = stem(images)
    other = nn.BatchNorm2d(16, momentum=momentum, track_running_stats=tracks).double()
    other.load_state_dict(norm.state_dict(), strict=tracks)
    torch.testing.assert_close(trained(conv, other, x_NCHW), trained(conv, other, x_NCHW, "reference"), rtol=1e-9, atol=1e-9)


@pytest.mark.every_isa
@both_stems
@pytest.mark.parametrize("mean, deviation", [(0, 1), (1e3, 1e-2), (-1e5, 1)])
def test_stem_keeps_the_digits_of_images_with_a_large_mean(mean: float, deviation: float, step: Step) -> None:
    conv, norm, x_NCHW = stem(mean=mean, deviation=deviation)
    wanted = step(conv, norm, x_NCHW, "reference")
    found = step(conv.float(), norm.float(), x_NCHW.float())
    for x, exact in zip(found, wanted, strict=True):
        largest = float(exact.detach().abs().max())
        torch.testing.assert_close(x.double(), exact.double(), rtol=0, atol=1e-5 * largest)


@pytest.mark.every_isa
@both_stems
@pytest.mark.parametrize("scale, saturation", [(1, 0.01), (255, 0.01), (1, 0)])
def test_stem_keeps_the_digits_of_filters_for_colors(scale: float, saturation: float, step: Step) -> None:
    """The colors of photographs are nearly equal, those of grey images are equal, and these filters see mostly differences."""
    conv, norm, x_NCHW = stem()
    grey_N1HW, color_NCHW = torch.randn_like(x_NCHW[:, :1]), saturation * x_NCHW
    x_NCHW = (scale * (grey_N1HW + color_NCHW)).float().double().contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        conv.weight.sub_(conv.weight.mean(1, keepdim=True)).add_(1e-3).copy_(conv.weight.float())
    wanted = step(conv, norm, x_NCHW, "reference")
    found = step(conv.float(), norm.float(), x_NCHW.float())
    for x, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), exact.double(), rtol=0, atol=2e-6 * float(exact.detach().abs().max()))


@pytest.mark.every_isa
def test_statistics_of_the_stem_are_exact_under_autocast() -> None:
    conv, norm, x_NCHW = stem()
    *_, mean, var, count = trained(conv, norm, x_NCHW, "reference")
    with torch.autocast("cpu", torch.bfloat16):
        *_, ours_mean, ours_var, ours_count = trained(conv.float(), norm.float(), x_NCHW.float())
    torch.testing.assert_close((ours_mean.double(), ours_var.double(), ours_count), (mean, var, count), rtol=1e-6, atol=1e-6)


@pytest.mark.every_isa
def test_stem_of_bfloat16_is_as_exact_as_its_layers_one_by_one() -> None:
    conv, norm, x_NCHW = stem()
    exact = trained(conv, norm, x_NCHW, "reference")[0].detach()
    for model_is_half in (False, True):
        dtype = torch.bfloat16 if model_is_half else torch.float32
        errors = []
        for backend in ("auto", "reference"):
            with torch.autocast("cpu", torch.bfloat16, enabled=not model_is_half):
                y_NCHW = trained(conv.to(dtype), norm.to(dtype), x_NCHW.to(dtype), backend)[0]
            errors.append(float((y_NCHW.detach().double() - exact).square().mean().sqrt()))
        assert y_NCHW.dtype == torch.bfloat16
        assert errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize(
    "change", ["a hook on the convolution", "a hook on the norm", "3x3", "float16", "an empty batch", "SyncBatchNorm"]
)
def test_other_stems_run_one_by_one(change: str) -> None:
    conv, norm, x_NCHW = stem()
    if change == "3x3":
        conv = nn.Conv2d(3, 16, 3, bias=False).double()
    elif change == "float16":
        conv, norm, x_NCHW = conv.half(), norm.half(), x_NCHW.half()
    elif change == "an empty batch":
        x_NCHW = x_NCHW[:0]
    elif change == "SyncBatchNorm":  # trains on GPUs only
        norm = nn.SyncBatchNorm(16).double().eval()
    wanted, called = copy.deepcopy(norm)(conv(x_NCHW)), list[nn.Module]()
    if change.startswith("a hook"):
        hooked = conv if change.endswith("convolution") else norm
        hooked.register_forward_hook(lambda module, inputs, output: called.append(module))
    assert torch.equal(conv_norm(conv, norm, x_NCHW), wanted)
    assert len(called) == change.startswith("a hook")


def pooled_stem(change: str) -> tuple[list[str], Tensor, Tensor]:
    """The operators that the stem runs in this case, its result, and that of its layers in float64."""
    conv, norm, x_NCHW = stem()
    norm(x_NCHW.mean(1, keepdim=True).expand(-1, 16, -1, -1))
    norm.train(change != "evaluation")
    conv_norm_relu_pool(conv, norm, nn.ReLU(), x_NCHW)
    wanted = torch.nn.functional.max_pool2d(copy.deepcopy(norm)(conv(x_NCHW)).relu(), 2)
    conv, norm, x_NCHW = conv.float(), norm.float(), x_NCHW.float()
    x_NCHW = x_NCHW.contiguous() if change == "layout" else x_NCHW.requires_grad_(change == "gradients of images")
    if change == "a hook":
        norm.register_forward_hook(lambda *_: None)
    backend: ops.Backend = "unfused" if change == "unfused" else "auto"
    with Glue() as glue, ops.backend(backend), torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        y_NCHW = conv_norm_relu_pool(conv, norm, nn.ReLU(), x_NCHW)
    return pools(glue), y_NCHW, wanted


def pools(glue: Glue) -> list[str]:
    """The pools and stems that ran."""
    return [name for name in (*glue.own.elements(), *glue.names.elements()) if "pool" in name or "stem" in name]


TORCH_POOL = "max_pool2d_with_indices"


@pytest.mark.parametrize(
    "change, operator",
    [
        ("training", "stem"),
        ("evaluation", "stem"),
        ("layout", "stem"),
        ("gradients of images", "max_pool"),
        ("a hook", "max_pool"),
        ("autocast", TORCH_POOL),
        ("unfused", TORCH_POOL),
    ],
)
def test_stem_with_its_pool_is_one_operator(change: str, operator: str) -> None:
    operators, y_NCHW, wanted = pooled_stem(change)
    assert operators == [operator]
    most = 0.05 if change == "autocast" else 1e-5
    torch.testing.assert_close(y_NCHW.double(), wanted, rtol=most, atol=most)


@pytest.mark.every_isa
@pytest.mark.parametrize("shape, operator", [((2, 5, 6, 7), "max_pool"), ((0, 5, 4, 4), TORCH_POOL)])
def test_maps_are_pooled_in_one_operator(shape: tuple[int, ...], operator: str) -> None:
    x_NCHW = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    with Glue() as glue:
        found = max_pool(x_NCHW)
    assert pools(glue) == [operator]
    assert torch.equal(found, torch.nn.functional.max_pool2d(x_NCHW, 2))


@pytest.mark.every_isa
@pytest.mark.parametrize("images", [2, 16])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_convolutions_of_one_map_run_as_one_product(training: bool, images: int) -> None:
    torch.manual_seed(0)
    convs = [nn.Conv2d(8, channels, 1) for channels in (2, 1, 4)]
    x_NCHW = torch.randn(images, 8, 5, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    parameters = [x_NCHW, *(p for conv in convs for p in conv.parameters())]
    with torch.set_grad_enabled(training):
        found, wanted = convolve_each(convs, x_NCHW), [conv(x_NCHW) for conv in convs]
        torch.testing.assert_close(found, wanted)
    if training:
        assert all(y.stride(3) == 7 for y in found)
        gradients = (torch.autograd.grad(sum(y.square().sum() for y in ys), parameters) for ys in (found, wanted))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("change", ["a hook", "another layer", "no bias", "layout", "3x3", "an empty map"])
def test_other_convolutions_of_one_map_are_called(change: str) -> None:
    convs: list[nn.Module] = [nn.Conv2d(8, channels, 1, bias=change != "no bias") for channels in (2, 4)]
    x_NCHW = torch.randn(0 if change == "an empty map" else 2, 8, 5, 6)
    x_NCHW = x_NCHW if change == "layout" else x_NCHW.contiguous(memory_format=torch.channels_last)
    called: list[nn.Module] = []
    if change == "a hook":
        convs[0].register_forward_hook(lambda module, inputs, output: called.append(module))
    elif change == "another layer":
        convs[1] = nn.Identity()
    elif change == "3x3":
        convs[1] = nn.Conv2d(8, 4, 3)
    for y_NCHW, conv in zip(convolve_each(convs, x_NCHW), convs, strict=True):
        torch.testing.assert_close(y_NCHW, conv.forward(x_NCHW))
    assert len(called) == (change == "a hook")


def test_autograd_notices_updated_running_statistics() -> None:
    """A backward pass through running statistics that training has changed meanwhile would be wrong."""
    norm, x_NCHW = norm_and_map()
    y_NCHW = norm_relu(norm.eval(), nn.ReLU(), x_NCHW.requires_grad_())
    norm_relu(norm.train(), nn.ReLU(), x_NCHW)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y_NCHW.sum().backward()
