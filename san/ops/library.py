"""Makes the compiled kernels torch operators: loads them, and registers fake kernels, autograd and FLOP counts.

Schemas stand in `cuda_ext/schemas.py`. Forward and backward are both operators, so both can be traced and tested.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuda_ext.build import CUDA_ARCHITECTURES
from cuda_ext.build import load as load_kernels
from san.ops.footprint import check_footprint

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """What `torch.compiler.assume_constant_result` does, without importing the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def load() -> bool:
    """Loads the kernels once per process; returns whether those for the CPU run.

    The operators are known on the meta device in any case, so that models can be counted.
    """
    missing_parts = load_kernels()
    _register_unfold()
    _register_subtraction()
    _register_dot()
    _register_aggregation()
    _register_pairwise()
    _register_patchwise()
    _register_norm_relu()
    return "cpu" not in missing_parts


def missing(device: str) -> str | None:
    """Why the kernels do not run on device type `cpu` or `cuda`, as a clause without a final period; None where they run."""
    needed = divmod(int(CUDA_ARCHITECTURES[0]), 10)
    for gpu in range(torch.cuda.device_count() if device == "cuda" else 0):
        if (seen := torch.cuda.get_device_capability(gpu)) < needed:
            name = "this GPU" if torch.cuda.device_count() == 1 else f"GPU {gpu}"
            return "{} has compute capability {}.{}, but the kernels need {}.{} or higher".format(name, *seen, *needed)
    return load_kernels().get(device)


@functools.cache
def runs_on(device: str) -> bool:
    """Whether the loaded kernels run on a device type; warns once if those for the CPU or for GPUs do not."""
    if device not in ("cpu", "cuda"):
        return device == "meta"
    reason = missing(device)
    if reason is not None:
        where = "the CPU" if device == "cpu" else "the GPU"
        warnings.warn(f"san falls back to its slower reference operators on {where}: {reason}", stacklevel=2)
    return reason is None


def has(name: str, device: str) -> bool:
    """Whether the loaded kernels serve an operator on a device type that `runs_on`."""
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
        # Forward is linear in phi and in psi, so its derivatives are itself with one of them replaced.
        grad, phi, psi = ctx.saved_tensors
        k, groups = ctx.kernel_size, grad.shape[1]
        to_grad = ops.dot(to_phi, psi, k, groups) + ops.dot(phi, to_psi, k, groups)
        grad_phi, _ = ops.dot_backward(grad, phi, to_psi, k)
        _, grad_psi = ops.dot_backward(grad, to_phi, psi, k)
        return to_grad, grad_phi, grad_psi, None

    torch.library.register_autograd("san::dot", backward, setup_context=setup)
    torch.library.register_autograd("san::dot_backward", double_backward, setup_context=setup_backward)

    def flops(phi_shape: Any, psi_shape: Any, kernel_size: int, groups: int, *, out_shape: Any = None) -> int:
        """Two FLOPs per multiply-accumulate; none where every channel is its own group: that is elementwise."""
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
        return beta.new_empty(beta.shape)

    @torch.library.register_fake("san::aggregation_backward")
    def _(grad: Tensor, beta: Tensor, weight: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
        return beta.new_empty(beta.shape), weight.new_empty(weight.shape)

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
        # Forward is linear in beta and in weight, so its derivatives are itself with one of them replaced.
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


def _fused_outputs(beta: Tensor, gamma: tuple[Any, ...], extra_channels: int) -> tuple[Tensor, ...]:
    gain1, bias1, _, gain2, bias2, _ = gamma
    extra = gain1.new_empty(*beta.shape[:3], extra_channels)
    return beta.new_empty(beta.shape), extra, *(x.new_empty(x.shape) for x in (gain1, bias1, gain2, bias2))


def _refuse_second_derivative(name: str) -> None:
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f'san::{name} does not support second derivatives; run the model under san.ops.backend("unfused")')

    torch.library.register_autograd(f"san::{name}_backward", backward, setup_context=lambda ctx, inputs, output: None)


def _register_pairwise() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::pairwise")
    def _(center: Tensor, around: Tensor, beta: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        check_footprint(rest[11], *beta.shape[1:3])
        return _fused_outputs(beta, rest[:6], rest[5].shape[0])

    @torch.library.register_fake("san::pairwise_backward")
    def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in inputs[:9])

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.kernel_size, ctx.training, ctx.eps, ctx.tf32 = inputs
        _, logsumexp, *statistics = output
        ctx.save_for_backward(*tensors[:9], *statistics, logsumexp, tensors[9])
        ctx.mark_non_differentiable(logsumexp, *statistics)

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *saved, bias3 = ctx.saved_tensors
        grads = ops.pairwise_backward(grad, *saved, ctx.kernel_size, ctx.training, ctx.eps, ctx.tf32)
        return *grads, torch.zeros_like(bias3), *(None,) * 8

    torch.library.register_autograd("san::pairwise", backward, setup_context=setup)
    _refuse_second_derivative("pairwise")

    def flops(center_shape: Any, around_shape: Any, beta_shape: Any, *rest: Any, out_shape: Any = None) -> int:
        """Two FLOPs per multiply-accumulate of gamma's products and of the aggregation, as of the operators that it fuses."""
        N, H, W, M = beta_shape
        (E, d), G = rest[2], rest[5][0]
        return 2 * int(N * H * W * rest[11] ** 2) * (d * E + E * G + M)

    def flops_backward(grad_shape: Any, *rest: Any, out_shape: Any = None) -> int:
        return 2 * flops(*rest[:3], *rest[3:9], *(None,) * 5, rest[14])

    register_flop_formula(ops.pairwise)(flops)
    register_flop_formula(ops.pairwise_backward)(flops_backward)


def _register_patchwise() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::patchwise")
    def _(center: Tensor, around: Tensor, beta: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        check_footprint(rest[11], *beta.shape[1:3])
        return _fused_outputs(beta, rest[:6], rest[2].shape[0])

    @torch.library.register_fake("san::patchwise_backward")
    def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in inputs[:10])

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.kernel_size, ctx.training, ctx.eps, ctx.tf32 = inputs
        _, hidden, *statistics = output
        ctx.save_for_backward(*tensors[:10], *statistics, hidden)
        ctx.mark_non_differentiable(hidden, *statistics)

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grads = ops.patchwise_backward(grad, *ctx.saved_tensors, ctx.kernel_size, ctx.training, ctx.eps, ctx.tf32)
        return *grads, *(None,) * 8

    torch.library.register_autograd("san::patchwise", backward, setup_context=setup)
    _refuse_second_derivative("patchwise")

    def flops(center_shape: Any, around_shape: Any, beta_shape: Any, *rest: Any, out_shape: Any = None) -> int:
        """Two FLOPs per multiply-accumulate of gamma's products and of the aggregation, as of the operators that it fuses."""
        N, H, W, M = beta_shape
        (E, d), (outputs, _), k = rest[2], rest[5], rest[11]
        return 2 * int(N * H * W) * (d * E + E * outputs + k**2 * M)

    def flops_backward(grad_shape: Any, *rest: Any, out_shape: Any = None) -> int:
        return 2 * flops(*rest[:3], *rest[3:9], *(None,) * 5, rest[15])

    register_flop_formula(ops.patchwise)(flops)
    register_flop_formula(ops.patchwise_backward)(flops_backward)


def _register_norm_relu() -> None:
    ops = torch.ops.san

    @torch.library.register_fake("san::norm_relu")
    def _(x: Tensor, gain: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return x.new_empty(x.shape), gain.new_empty(gain.shape), bias.new_empty(bias.shape)

    @torch.library.register_fake("san::norm_relu_")
    def _(*inputs: Any) -> None:
        pass

    @torch.library.register_fake("san::norm_relu_backward")
    def _(grad: Tensor, x: Tensor, gain: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return x.new_empty(x.shape), gain.new_empty(gain.shape), bias.new_empty(bias.shape)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, gain, bias, _, _, ctx.training, ctx.eps = inputs
        ctx.save_for_backward(x, gain, bias, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return *ops.norm_relu_backward(grad, *ctx.saved_tensors, ctx.training, ctx.eps), None, None, None, None

    torch.library.register_autograd("san::norm_relu", backward, setup_context=setup)
    _refuse_second_derivative("norm_relu")
