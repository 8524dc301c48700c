"""Loads the compiled kernels as torch operators and registers their fake kernels, derivatives and FLOP counts.

`cuda_ext/schemas.py` has the schemas. Backward passes are operators, too, so that they can be traced and tested.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuda_ext import schemas
from cuda_ext.build import CUDA_ARCHITECTURES, libraries, toolchains
from cuda_ext.build import load as load_kernels
from san.ops import definitions
from san.ops.footprint import check_footprint

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Like `torch.compiler.assume_constant_result`, but does not import the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def load() -> bool:
    """Loads the kernels once per process; returns whether the CPU kernels work.

    The operators always work on the meta device, so that parameters and FLOPs can be counted.
    """
    return "cpu" not in load_kernels()


def missing(device: str) -> str | None:
    """Why the kernels do not run on device type `cpu` or `cuda`, as a clause without a period; None if they do."""
    needed = divmod(int(CUDA_ARCHITECTURES[0]), 10)
    for gpu in range(torch.cuda.device_count() if device == "cuda" else 0):
        if (seen := torch.cuda.get_device_capability(gpu)) < needed:
            name = "this GPU" if torch.cuda.device_count() == 1 else f"GPU {gpu}"
            return "{} has compute capability {}.{}, but the kernels need {}.{} or higher".format(name, *seen, *needed)
    return load_kernels().get(device)


def describe() -> Iterator[str]:
    """One line for each compiler and for the kernels of each device type."""
    yield from (f"{name}: {found}" for name, found in toolchains().items())
    missing_parts = load_kernels()
    for part, path in libraries().items():
        yield (
            f"{part} kernels not available: {missing_parts[part]}"
            if part in missing_parts
            else f"{part} kernels run from {path}"
        )


@functools.cache
def runs_on(device: str) -> bool:
    """Whether the loaded kernels run on a device type; warns once if they do not run on the CPU or GPU."""
    if device not in ("cpu", "cuda"):
        return device == "meta"
    reason = missing(device)
    if reason is not None:
        where = "the CPU" if device == "cpu" else "the GPU"
        warnings.warn(f"san falls back to its slower reference operators on {where}: {reason}", stacklevel=2)
    return reason is None


def has(name: str, device: str) -> bool:
    """Whether the loaded kernels include an operator for a device type."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"san::{name}", device.upper())


def _unfolded(x: Tensor, kernel_size: int) -> Tensor:
    N, C, H, W = x.shape
    check_footprint(kernel_size, H, W)
    return x.new_empty(N, C, kernel_size**2, H * W)


def _folded(grad: Tensor, height: int, width: int, kernel_size: int) -> Tensor:
    return grad.new_empty(grad.shape[0], grad.shape[1], height, width)


def _register_unfold() -> None:
    ops = torch.ops.san
    torch.library.register_fake("san::unfold")(_unfolded)
    torch.library.register_fake("san::unfold_backward")(_folded)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel_size = inputs
        ctx.height, ctx.width = x.shape[2:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ops.unfold_backward(grad, ctx.height, ctx.width, ctx.kernel_size), None

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.kernel_size = inputs[3]

    def double_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ops.unfold(grad, ctx.kernel_size), None, None, None

    torch.library.register_autograd("san::unfold", backward, setup_context=setup)
    torch.library.register_autograd("san::unfold_backward", double_backward, setup_context=setup_backward)


def _register_subtraction() -> None:
    ops = torch.ops.san
    torch.library.register_fake("san::subtraction")(lambda phi, psi, kernel_size: _unfolded(phi, kernel_size))

    @torch.library.register_fake("san::subtraction_backward")
    def _(grad: Tensor, height: int, width: int, kernel_size: int) -> tuple[Tensor, Tensor]:
        return _folded(grad, height, width, kernel_size), _folded(grad, height, width, kernel_size)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        phi, _, ctx.kernel_size = inputs
        ctx.height, ctx.width = phi.shape[2:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_phi, grad_psi = ops.subtraction_backward(grad, ctx.height, ctx.width, ctx.kernel_size)
        return grad_phi, grad_psi, None

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kernel_size = inputs[3]

    def double_backward(ctx: Any, grad_phi: Tensor, grad_psi: Tensor) -> tuple[Tensor, None, None, None]:
        return ops.subtraction(grad_phi, grad_psi, ctx.kernel_size), None, None, None

    torch.library.register_autograd("san::subtraction", backward, setup_context=setup)
    torch.library.register_autograd("san::subtraction_backward", double_backward, setup_context=setup_backward)


def _register_dot() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::dot")
    def _(phi: Tensor, psi: Tensor, kernel_size: int, groups: int) -> Tensor:
        N, _, H, W = phi.shape
        check_footprint(kernel_size, H, W)
        return phi.new_empty(N, groups, kernel_size**2, H * W)

    @torch.library.register_fake("san::dot_backward")
    def _(grad: Tensor, phi: Tensor, psi: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
        return phi.new_empty(phi.shape), psi.new_empty(psi.shape)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        phi, psi, ctx.kernel_size, _ = inputs
        ctx.save_for_backward(phi, psi)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_phi, grad_psi = ops.dot_backward(grad, *ctx.saved_tensors, ctx.kernel_size)
        return grad_phi, grad_psi, None, None

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.kernel_size = inputs
        ctx.save_for_backward(*tensors)

    def double_backward(ctx: Any, to_phi: Tensor, to_psi: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        # The forward pass is linear in phi and in psi, so its derivatives are calls with one of them replaced.
        grad, phi, psi = ctx.saved_tensors
        k, groups = ctx.kernel_size, grad.shape[1]
        to_grad = ops.dot(to_phi, psi, k, groups) + ops.dot(phi, to_psi, k, groups)
        grad_phi, _ = ops.dot_backward(grad, phi, to_psi, k)
        _, grad_psi = ops.dot_backward(grad, to_phi, psi, k)
        return to_grad, grad_phi, grad_psi, None

    torch.library.register_autograd("san::dot", backward, setup_context=setup)
    torch.library.register_autograd("san::dot_backward", double_backward, setup_context=setup_backward)

    def flops(phi_shape: Any, psi_shape: Any, kernel_size: int, groups: int, *, out_shape: Any = None) -> int:
        """Two FLOPs per multiply-accumulate; none if every channel is its own group, which is an elementwise product."""
        N, R, H, W = phi_shape
        return 0 if groups == R else 2 * int(N * R * H * W * kernel_size**2)

    def flops_backward(grad_shape: Any, phi_shape: Any, psi_shape: Any, kernel_size: int, *, out_shape: Any = None) -> int:
        return 2 * flops(phi_shape, psi_shape, kernel_size, grad_shape[1])

    register_flop_formula(ops.dot)(flops)
    register_flop_formula(ops.dot_backward)(flops_backward)


def _register_aggregation() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::aggregation")
    def _(beta: Tensor, weight: Tensor, kernel_size: int) -> Tensor:
        check_footprint(kernel_size, *beta.shape[2:])
        return torch.empty_like(beta)

    @torch.library.register_fake("san::aggregation_backward")
    def _(grad: Tensor, beta: Tensor, weight: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
        return torch.empty_like(beta), torch.empty_like(weight)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        beta, weight, ctx.kernel_size = inputs
        ctx.save_for_backward(beta, weight)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_beta, grad_weight = ops.aggregation_backward(grad, *ctx.saved_tensors, ctx.kernel_size)
        return grad_beta, grad_weight, None

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.kernel_size = inputs
        ctx.save_for_backward(*tensors)

    def double_backward(ctx: Any, to_beta: Tensor, to_weight: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        # The forward pass is linear in beta and in weight, so its derivatives are calls with one of them replaced.
        grad, beta, weight = ctx.saved_tensors
        k = ctx.kernel_size
        to_grad = ops.aggregation(to_beta, weight, k) + ops.aggregation(beta, to_weight, k)
        grad_beta, _ = ops.aggregation_backward(grad, beta, to_weight, k)
        _, grad_weight = ops.aggregation_backward(grad, to_beta, weight, k)
        return to_grad, grad_beta, grad_weight, None

    torch.library.register_autograd("san::aggregation", backward, setup_context=setup)
    torch.library.register_autograd("san::aggregation_backward", double_backward, setup_context=setup_backward)

    def flops(beta_shape: Any, weight_shape: Any, kernel_size: int, *, out_shape: Any = None) -> int:
        """Two FLOPs per multiply-accumulate: one per value channel, pixel and footprint position."""
        N, C, H, W = beta_shape
        return 2 * int(N * C * H * W * kernel_size**2)

    def flops_backward(grad_shape: Any, beta_shape: Any, weight_shape: Any, kernel_size: int, *, out_shape: Any = None) -> int:
        return 2 * flops(beta_shape, weight_shape, kernel_size)

    register_flop_formula(ops.aggregation)(flops)
    register_flop_formula(ops.aggregation_backward)(flops_backward)


def _by_definition(
    define: Callable[..., Any], grads: Sequence[Tensor], inputs: Sequence[Tensor], *options: float
) -> tuple[Tensor | None, ...]:
    """Gradients of a fused operator that can be differentiated again, by autograd through its definition."""
    warnings.warn(
        "san: create_graph=True differentiates reference operators; they are slower and need more memory", stacklevel=3
    )
    views = [x.view_as(x) for x in inputs]  # so that gradients stop here if one input was computed from another
    wanted = [x for x in views if x.requires_grad]
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    outputs = define(*(x.to(wide) for x in views), *options)
    found = iter(torch.autograd.grad(outputs, wanted, [g.to(wide) for g in grads], create_graph=True, allow_unused=True))
    return tuple(next(found) if x.requires_grad else None for x in views)


def _like(tensors: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


def _register_pair_statistics() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::pair_statistics")
    def _(center: Tensor, around: Tensor, kernel_size: int, products: int) -> tuple[Tensor, Tensor]:
        check_footprint(kernel_size, *center.shape[1:3])
        return center.new_empty(center.shape[3]), center.new_empty(center.shape[3])

    @torch.library.register_fake("san::pair_statistics_backward")
    def _(grad_mean: Tensor, grad_var: Tensor, center: Tensor, around: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return _like((center, around))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        center, around, ctx.kernel_size, ctx.products = inputs
        ctx.save_for_backward(center, around, output[0])

    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            inputs, rest = ctx.saved_tensors[:2], (ctx.kernel_size, ctx.products)
            return *_by_definition(definitions.pair_statistics, (grad_mean, grad_var), inputs, *rest), None, None
        grads = ops.pair_statistics_backward(grad_mean, grad_var, *ctx.saved_tensors, ctx.kernel_size, ctx.products)
        return *grads, None, None

    torch.library.register_autograd("san::pair_statistics", backward, setup_context=setup)


def _register_pair_covariance() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::pair_covariance")
    def _(center: Tensor, around: Tensor, shift: Tensor, kernel_size: int, products: int, tf32: bool) -> tuple[Tensor, Tensor]:
        check_footprint(kernel_size, *center.shape[1:3])
        return shift.new_empty(shift.shape), shift.new_empty(len(shift), len(shift))

    @torch.library.register_fake("san::pair_covariance_backward")
    def _(grad_mean: Tensor, grad_covariance: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return _like(inputs[:3])

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.kernel_size, ctx.products, ctx.tf32 = inputs
        ctx.save_for_backward(*tensors, output[0])

    def backward(ctx: Any, grad_mean: Tensor, grad_covariance: Tensor) -> tuple[Tensor | None, ...]:
        rest = ctx.kernel_size, ctx.products, ctx.tf32
        if torch.is_grad_enabled():
            inputs = ctx.saved_tensors[:3]
            grads = _by_definition(definitions.pair_covariance, (grad_mean, grad_covariance), inputs, *rest[:2])
            return *grads, None, None, None
        return *ops.pair_covariance_backward(grad_mean, grad_covariance, *ctx.saved_tensors, *rest), None, None, None

    torch.library.register_autograd("san::pair_covariance", backward, setup_context=setup)


def _register_pair_weights() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::pair_weights")
    def _(center: Tensor, around: Tensor, shift1: Tensor, *rest: Any) -> Tensor:
        (N, H, W, _), weight2, kernel_size = center.shape, rest[2], rest[3]
        check_footprint(kernel_size, H, W)
        G, K, P = weight2.shape[0], kernel_size**2, H * W
        if center.device.type == "cuda":  # the lanes of a warp write neighboring weight channels
            return weight2.new_empty(N, P, K, G).permute(0, 3, 2, 1)
        return weight2.new_empty(N, G, K, P)

    @torch.library.register_fake("san::pair_weights_backward")
    def _(grad: Tensor, w: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return _like(inputs[:6])

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.kernel_size, ctx.products, ctx.tf32 = inputs
        ctx.save_for_backward(output, *tensors)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rest = ctx.kernel_size, ctx.products, ctx.tf32
        if torch.is_grad_enabled():
            return *_by_definition(definitions.pair_weights, (grad,), ctx.saved_tensors[1:], *rest[:2]), None, None, None
        return *ops.pair_weights_backward(grad, *ctx.saved_tensors, *rest), None, None, None

    torch.library.register_autograd("san::pair_weights", backward, setup_context=setup)

    def flops(center_shape: Any, around_shape: Any, shift1_shape: Any, *rest: Any, out_shape: Any = None) -> int:
        """Two FLOPs per multiply-accumulate of the mapping, the same number as for its separate layers."""
        (N, H, W, _), (E, d), _, (G, last), kernel_size = center_shape, *rest[:4]
        return 2 * int(N * H * W * kernel_size**2) * (E * d + G * last)

    def flops_backward(grad_shape: Any, w_shape: Any, *rest: Any, out_shape: Any = None) -> int:
        return 2 * flops(*rest)

    register_flop_formula(ops.pair_weights)(flops)
    register_flop_formula(ops.pair_weights_backward)(flops_backward)


def _register_patch_linear() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::patch_linear")
    def _(center: Tensor, around: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, kernel_size: int, tf32: bool) -> Tensor:
        N, H, W, _ = around.shape
        check_footprint(kernel_size, H, W)
        if around.device.type == "cuda":
            return around.new_empty(N, H, W, len(weight)).permute(0, 3, 1, 2)
        return around.new_empty(N, len(weight), H, W)

    @torch.library.register_fake("san::patch_linear_backward")
    def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return _like(inputs[:5])

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.kernel_size, ctx.tf32 = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return *_by_definition(definitions.patch_linear, (grad,), ctx.saved_tensors, ctx.kernel_size), None, None
        return *ops.patch_linear_backward(grad, *ctx.saved_tensors, ctx.kernel_size, ctx.tf32), None, None

    torch.library.register_autograd("san::patch_linear", backward, setup_context=setup)

    def flops(center_shape: Any, around_shape: Any, *rest: Any, out_shape: Any = None) -> int:
        """Two FLOPs per multiply-accumulate."""
        (N, H, W, _), (E, columns) = around_shape, rest[2]
        return 2 * int(N * H * W) * E * columns

    def flops_backward(grad_shape: Any, *rest: Any, out_shape: Any = None) -> int:
        return 2 * flops(*rest)

    register_flop_formula(ops.patch_linear)(flops)
    register_flop_formula(ops.patch_linear_backward)(flops_backward)


def _register_norm_relu() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::norm_relu")
    def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        statistics = (weight.new_empty(weight.shape, dtype=torch.float64) for _ in range(2))
        return x.new_empty(x.shape), *statistics

    @torch.library.register_fake("san::norm_relu_backward")
    def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return _like(inputs[:3])

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, mean, _, ctx.eps = inputs
        ctx.of_batch = mean is None
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, *output[1:])

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        inputs, rest = ctx.saved_tensors, (ctx.eps, ctx.of_batch)
        if torch.is_grad_enabled():
            return *_by_definition(definitions.norm_relu, (grad,), inputs, *rest)[:3], None, None, None
        return *ops.norm_relu_backward(grad, *inputs, *rest), None, None, None

    torch.library.register_autograd("san::norm_relu", backward, setup_context=setup)


# At import and not with the kernels, because `FlopCounterMode` copies the formulas when it is created.
schemas.define("san")
for _register in (
    _register_unfold,
    _register_subtraction,
    _register_dot,
    _register_aggregation,
    _register_pair_statistics,
    _register_pair_covariance,
    _register_pair_weights,
    _register_patch_linear,
    _register_norm_relu,
):
    _register()
