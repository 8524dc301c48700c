"""Loads the compiled kernels as torch operators and registers their fake kernels, derivatives and FLOP counts.

`cuda_ext/schemas.py` has the schemas. Backward passes are operators, too, so that they can be traced and tested.
"""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.compiler.config
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cuda_ext import schemas
from cuda_ext.build import CUDA_ARCHITECTURES, gpu_refusal, libraries, toolchains
from cuda_ext.build import load as load_kernels
from san.ops import fused_reference, reference

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Like `torch.compiler.assume_constant_result`, but does not import the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def missing(device: str) -> str | None:
    """Why the kernels do not run on device type `cpu` or `cuda`, as a clause without a period; None if they do."""
    needed = divmod(int(CUDA_ARCHITECTURES[0]), 10)
    gpus = [torch.cuda.get_device_capability(gpu) for gpu in range(torch.cuda.device_count() if device == "cuda" else 0)]
    for gpu, seen in enumerate(gpus):
        if seen < needed:
            name = "this GPU" if len(gpus) == 1 else f"GPU {gpu}"
            return "{} has compute capability {}.{}, but the kernels need {}.{} or higher".format(name, *seen, *needed)
    return load_kernels().get(device) or next(filter(None, map(gpu_refusal, gpus)), None)


def describe() -> Iterator[str]:
    """One line for each compiler and for the kernels of each device type."""
    yield from (f"{name}: {toolchain}" for name, toolchain in toolchains().items())
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


Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator and its backward operator `NAME_backward`, which returns the gradients of all tensors."""

    name: str
    definition: Callable[..., Any]
    """In plain torch; derivatives of derivatives go through it."""
    fake: Callable[..., Any]
    """Uninitialized outputs for the arguments."""
    fake_backward: Callable[..., Any]
    backward_arguments: Callable[[Arguments, Arguments], Arguments]
    """The backward operator's arguments after the gradients, from the arguments and the saved outputs."""
    saved_outputs: tuple[int, ...] = ()
    saved_on_cpu: tuple[int, ...] | None = None
    """If a CPU needs fewer of them."""
    saved_instead: dict[int, int] = field(default_factory=dict)
    """Inputs whose places in `backward_arguments` and `definition` are taken by an output."""
    differentiable_outputs: int | None = None
    """How many outputs have gradients; None for all."""
    flops: Callable[..., int] | None = None
    """Two FLOPs per multiply-accumulate, from the arguments with shapes instead of tensors."""
    flops_backward: Callable[..., int] | None = None


def _unfolded(x: Tensor, kernel_size: int, channels: int | None = None) -> Tensor:
    N, C, H, W = x.shape
    return x.new_empty(N, C if channels is None else channels, kernel_size**2, H * W)


def _folded(grad: Tensor, height: int, width: int, kernel_size: int) -> Tensor:
    return grad.new_empty(grad.shape[0], grad.shape[1], height, width)


def _like(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


def is_channels_last(x: Tensor) -> bool:
    """Whether a map [N, C, H, W] is channels-last; it may be a slice of one with more channels. As in cuda_ext/check.h."""
    (N, C, H, W), pixel = x.shape, x.stride(3)
    is_image = x.stride(1) == 1 and pixel >= C and x.stride(2) == pixel * W and C > 1
    return is_image and (N == 1 or x.stride(0) == pixel * W * H)


def _in_map_format(beta: Tensor) -> Tensor:
    """An empty map like beta, which is channels-last if beta is, otherwise contiguous."""
    return torch.empty_like(beta, memory_format=torch.channels_last if is_channels_last(beta) else torch.contiguous_format)


def _aggregated_backward(grad: Tensor, beta: Tensor, weight: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    return _in_map_format(beta), torch.empty_like(weight) if weight.device.type == "cuda" else weight.new_empty(weight.shape)


def _patch_columns(center: Tensor, around: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    columns = center.shape[3] + around.shape[3] * kernel_size**2
    return around.new_empty(columns), around.new_empty(columns)


def _patch_linear(center: Tensor, around: Tensor, norm: Tensor, weight: Tensor, kernel_size: int, tf32: bool) -> Tensor:
    N, H, W, _ = around.shape
    if around.device.type == "cuda":
        return around.new_empty(N, H, W, len(weight)).permute(0, 3, 1, 2)
    return around.new_empty(N, len(weight), H, W)


def _attend_pairs(center: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    (N, H, W, _), (weight2, beta) = center.shape, arguments[4:6]
    return beta.new_empty(beta.shape), center.new_empty(N, 2, len(weight2), H * W)


def _attend_pairs_of_batch(center: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    (N, H, W, d), (weight2, beta) = center.shape, arguments[5:7]
    G, E = weight2.shape
    return beta.new_empty(beta.shape), *(center.new_empty(shape) for shape in ((E,), (E,), (N, 2, G, H * W), (d,), (d, d)))


def _attend_dot(phi: Tensor, psi: Tensor, scores: Tensor, beta: Tensor, kernel_size: int) -> tuple[Tensor, Tensor]:
    N, G, _, P = scores.shape
    return beta.new_empty(beta.shape), scores.new_empty(N, 2, G, P)


def _y_or(beta: Tensor, saved: Arguments) -> Tensor:
    """y, if it was saved with the softmax, otherwise beta, which CPUs accept in its place."""
    y: Tensor = saved[0] if len(saved) == 2 else beta
    return y


def _like_hidden(hidden: Tensor) -> Tensor:
    """An empty map [N, H, W, E], which CPU kernels store as [N, E, H, W]."""
    N, H, W, E = hidden.shape
    if hidden.device.type == "cuda":
        return hidden.new_empty(N, H, W, E)
    return hidden.new_empty(N, E, H, W).permute(0, 2, 3, 1)


def _pair_channels(center: Tensor, around: Tensor, kernel_size: int, products: int) -> tuple[Tensor, Tensor]:
    return center.new_empty(center.shape[3]), center.new_empty(center.shape[3])


def _pair_covariance(center: Tensor, around: Tensor, norm: Tensor, kernel_size: int, *rest: Any) -> tuple[Tensor, Tensor]:
    d = center.shape[3]
    return norm.new_empty(d), norm.new_empty(d, d)


def _norm_relu(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = (x.new_empty(x.shape[3], dtype=torch.float64) for _ in range(2))
    return x.new_empty(x.shape), mean, var


def _norm_add_relu_by_result(x_NHWC: Tensor, y_NHWC: Tensor, *rest: Any) -> Tensor:
    """A map with the derivatives of `norm_add_relu`, which depend on the sign of its result y, but not on the residual."""
    return fused_reference.norm_add_relu(x_NHWC, y_NHWC + torch.where(y_NHWC > 0, math.inf, -math.inf), *rest)


def _pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    N, H, W, C = x.shape
    y = x.new_empty(N, H // 2, W // 2, C)
    return y, y.new_empty(y.shape, dtype=torch.uint8)


def _stem(weight: Tensor, bias: Tensor, x: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    (N, H, W, _), C = x.shape, len(weight)
    y = x.new_empty(N, H // 2, W // 2, C, dtype=torch.bfloat16 if half else None)
    return y, y.new_empty(y.shape, dtype=torch.uint8)


def _stem_flops(weight: Any, bias: Any, x: Any, *rest: Any) -> int:
    return 2 * math.prod(x[:3]) * math.prod(weight)


def _dot_flops(phi: Any, psi: Any, kernel_size: int, groups: int) -> int:
    """Zero if every channel is its own group, which is an elementwise product."""
    N, R, H, W = phi
    return 0 if groups == R else 2 * int(N * R * H * W * kernel_size**2)


def _aggregation_flops(beta: Any, weight: Any, kernel_size: int) -> int:
    return 2 * math.prod(beta) * kernel_size**2


def _patch_linear_flops(center: Any, around: Any, norm: Any, weight: Any, *rest: Any) -> int:
    return 2 * math.prod(around[:3]) * math.prod(weight)


def _pair_mapping_flops(center: Any, around: Any, norm: Any, weight1: Any, shift2: Any, weight2: Any, *rest: Any) -> int:
    (N, H, W, _), (E, d), (G, last), kernel_size = center, weight1, weight2, rest[0]
    return 2 * int(N * H * W * kernel_size**2) * (E * d + G * last)


def _attend_pairs_flops(*arguments: Any) -> int:
    *mapping, beta, kernel_size = arguments[:8]
    return _pair_mapping_flops(*mapping, kernel_size) + _aggregation_flops(beta, None, kernel_size)


def _attend_pairs_of_batch_flops(*arguments: Any) -> int:
    return _attend_pairs_flops(*arguments[:5], *arguments[6:9])


def _attend_dot_flops(phi: Any, psi: Any, scores: Any, beta: Any, kernel_size: int) -> int:
    """Counts a score for every position of the footprint, as its definition does; those of rows and columns are counted
    where they are computed."""
    is_elementwise = scores[1] == phi[3]
    products = 0 if is_elementwise else 2 * kernel_size**2 - 2 * kernel_size
    return 2 * math.prod(phi) * products + _aggregation_flops(beta, None, kernel_size)


def _attend_patches_flops(hidden: Any, weight: Any, bias: Any, beta: Any, kernel_size: int, *rest: Any) -> int:
    return 2 * math.prod(hidden[:3]) * math.prod(weight) + _aggregation_flops(beta, None, kernel_size)


OPERATORS = (
    Operator(
        name="unfold",
        definition=reference.unfold,
        fake=_unfolded,
        fake_backward=_folded,
        backward_arguments=lambda inputs, _: (*inputs[0].shape[2:], inputs[1]),
    ),
    Operator(
        name="subtraction",
        definition=reference.subtraction,
        fake=lambda phi, psi, kernel_size: _unfolded(phi, kernel_size),
        fake_backward=lambda *arguments: (_folded(*arguments), _folded(*arguments)),
        backward_arguments=lambda inputs, _: (*inputs[0].shape[2:], inputs[2]),
    ),
    Operator(
        name="dot",
        definition=reference.dot,
        fake=lambda phi, psi, kernel_size, groups: _unfolded(phi, kernel_size, groups),
        fake_backward=lambda grad, phi, psi, kernel_size: _like((phi, psi)),
        backward_arguments=lambda inputs, _: inputs[:3],
        flops=_dot_flops,
        flops_backward=lambda grad, phi, psi, kernel_size: 2 * _dot_flops(phi, psi, kernel_size, grad[1]),
    ),
    Operator(
        name="aggregation",
        definition=reference.aggregation,
        fake=lambda beta, weight, kernel_size: _in_map_format(beta),
        fake_backward=_aggregated_backward,
        backward_arguments=lambda inputs, _: inputs,
        flops=_aggregation_flops,
        flops_backward=lambda grad, *inputs: 2 * _aggregation_flops(*inputs),
    ),
    Operator(
        name="norm_affine",
        definition=fused_reference.norm_affine,
        fake=lambda mean, *_: mean.new_empty(3, *mean.shape),
        fake_backward=lambda grad, var, *_: _like((var,) * 4),
        backward_arguments=lambda inputs, _: (inputs[1], inputs[2], inputs[4]),
    ),
    Operator(
        name="pair_statistics",
        definition=fused_reference.pair_statistics,
        fake=_pair_channels,
        fake_backward=lambda grad_mean, grad_var, center, around, *_: _like((center, around)),
        backward_arguments=lambda inputs, mean: (*inputs[:2], *mean, *inputs[2:]),
        saved_outputs=(0,),
    ),
    Operator(
        name="pair_covariance",
        definition=fused_reference.pair_covariance,
        fake=_pair_covariance,
        fake_backward=lambda grad_mean, grad_covariance, *inputs: _like(inputs[:3]),
        backward_arguments=lambda inputs, mean: (*inputs[:3], *mean, *inputs[3:]),
        saved_outputs=(0,),
    ),
    Operator(
        name="attend_pairs",
        definition=fused_reference.attend_pairs,
        fake=_attend_pairs,
        fake_backward=lambda grad, y, softmax, *inputs: _like(inputs[:7]),
        backward_arguments=lambda inputs, outputs: (_y_or(inputs[6], outputs), outputs[-1], *inputs),
        saved_outputs=(0, 1),
        saved_on_cpu=(1,),
        differentiable_outputs=1,
        flops=_attend_pairs_flops,
        flops_backward=lambda grad, y, softmax, *inputs: 2 * _attend_pairs_flops(*inputs),
    ),
    Operator(
        name="attend_pairs_of_batch",
        definition=fused_reference.attend_pairs_of_batch,
        fake=_attend_pairs_of_batch,
        fake_backward=lambda grad, y, softmax, mean, covariance, *inputs: _like(inputs[:8]),
        backward_arguments=lambda inputs, outputs: (*outputs, *inputs),
        saved_outputs=(0, 3, 4, 5),
        differentiable_outputs=1,
        flops=_attend_pairs_of_batch_flops,
        flops_backward=lambda grad, y, softmax, mean, covariance, *inputs: 2 * _attend_pairs_of_batch_flops(*inputs),
    ),
    Operator(
        name="patch_statistics",
        definition=fused_reference.patch_statistics,
        fake=_patch_columns,
        fake_backward=lambda grad_mean, grad_var, center, around, *_: _like((center, around)),
        backward_arguments=lambda inputs, mean: (*inputs[:2], *mean, *inputs[2:]),
        saved_outputs=(0,),
    ),
    Operator(
        name="patch_linear",
        definition=fused_reference.patch_linear,
        fake=_patch_linear,
        fake_backward=lambda grad, *inputs: _like(inputs[:4]),
        backward_arguments=lambda inputs, _: inputs,
        flops=_patch_linear_flops,
        flops_backward=lambda grad, *inputs: 2 * _patch_linear_flops(*inputs),
    ),
    Operator(
        name="attend_patches",
        definition=fused_reference.attend_patches,
        fake=lambda hidden, weight, bias, beta, *_: beta.new_empty(beta.shape),
        fake_backward=lambda grad, hidden, *rest: (_like_hidden(hidden), *_like(rest[:3])),
        backward_arguments=lambda inputs, _: inputs,
        flops=_attend_patches_flops,
        flops_backward=lambda grad, *inputs: 2 * _attend_patches_flops(*inputs),
    ),
    Operator(
        name="attend_dot",
        definition=fused_reference.attend_dot,
        fake=_attend_dot,
        fake_backward=lambda grad, y, softmax, *inputs: _like(inputs[:4]),
        backward_arguments=lambda inputs, outputs: (_y_or(inputs[3], outputs), outputs[-1], *inputs),
        saved_outputs=(0, 1),
        saved_on_cpu=(1,),
        differentiable_outputs=1,
        flops=_attend_dot_flops,
        flops_backward=lambda grad, y, softmax, *inputs: 2 * _attend_dot_flops(*inputs),
    ),
    Operator(
        name="norm_relu",
        definition=fused_reference.norm_relu,
        fake=_norm_relu,
        fake_backward=lambda grad, *inputs: _like(inputs[:3]),
        backward_arguments=lambda inputs, statistics: (*inputs[:3], *statistics, inputs[5], inputs[3] is None),
        saved_outputs=(1, 2),
        differentiable_outputs=1,
    ),
    Operator(
        name="norm_add_relu",
        definition=_norm_add_relu_by_result,
        fake=_norm_relu,
        fake_backward=lambda grad, *inputs: _like(inputs[:4]),
        backward_arguments=lambda inputs, statistics: (*inputs[:4], *statistics, inputs[6], inputs[4] is None),
        saved_outputs=(1, 2),
        saved_instead={1: 0},
        differentiable_outputs=1,
    ),
    Operator(
        name="max_pool",
        definition=fused_reference.max_pool,
        fake=_pooled,
        fake_backward=lambda grad, index, height, width: grad.new_empty(len(grad), height, width, grad.shape[3]),
        backward_arguments=lambda inputs, index: (*index, *inputs[0].shape[1:3]),
        saved_outputs=(1,),
        differentiable_outputs=1,
    ),
    Operator(
        name="stem",
        definition=fused_reference.stem,
        fake=_stem,
        fake_backward=lambda grad, index, x: (x.new_empty(grad.shape[3], x.shape[3]), x.new_empty(grad.shape[3])),
        backward_arguments=lambda inputs, index: (*index, inputs[2]),
        saved_outputs=(1,),
        differentiable_outputs=1,
        flops=_stem_flops,
        flops_backward=lambda grad, index, x: 2 * math.prod(x) * grad[3],
    ),
)
"""All differentiable operators."""


def _register(operator: Operator) -> None:
    names = operator.name, f"{operator.name}_backward"
    for name, fake, flops in zip(
        names, (operator.fake, operator.fake_backward), (operator.flops, operator.flops_backward), strict=True
    ):
        torch.library.register_fake(f"san::{name}")(fake)
        if flops is not None:
            _count(name, flops)
    torch.library.register_autograd(
        f"san::{names[0]}", functools.partial(_differentiate, operator), setup_context=functools.partial(_save, operator)
    )


def _save(operator: Operator, ctx: Any, inputs: Arguments, output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    if operator.differentiable_outputs is not None:
        ctx.mark_non_differentiable(*outputs[operator.differentiable_outputs :])
        ctx.set_materialize_grads(False)
    ctx.inputs = [Tensor if isinstance(x, Tensor) else x for x in inputs]
    saved = [outputs[index] for index in _saved(operator, outputs[0])]
    kept = [outputs[operator.saved_instead[at]] if at in operator.saved_instead else x for at, x in enumerate(inputs)]
    ctx.save_for_backward(*saved, *(x for x in kept if isinstance(x, Tensor)))


def _saved(operator: Operator, output: Tensor) -> tuple[int, ...]:
    on_cpu = operator.saved_on_cpu if output.device.type == "cpu" else None
    return operator.saved_outputs if on_cpu is None else on_cpu


def _differentiate(operator: Operator, ctx: Any, *grads: Tensor, added: Tensor | None = None) -> Arguments:
    """The gradients of an operator's inputs. `added`, which only `norm_relu` takes, is added to the first of them."""
    grads = grads[: operator.differentiable_outputs]
    if all(grad is None for grad in grads):
        return (None,) * len(ctx.inputs)
    saved = ctx.saved_tensors  # activation checkpointing allows one read
    count = len(saved) - sum(x is Tensor for x in ctx.inputs)
    outputs, tensors = saved[:count], iter(saved[count:])
    inputs = tuple(next(tensors) if x is Tensor else x for x in ctx.inputs)
    more = () if added is None else (added,)
    if torch.is_grad_enabled():  # create_graph=True
        first, *others = _by_definition(operator.definition, grads, inputs)
        return first if first is None or added is None else first + added, *others
    run_backward = getattr(torch.ops.san, f"{operator.name}_backward")
    gradients = run_backward(*grads, *operator.backward_arguments(inputs, outputs), *more)
    of_tensors = gradients if isinstance(gradients, tuple) else (gradients,)
    if any(ctx.needs_input_grad[len(of_tensors) :]):
        raise RuntimeError(f"san::{operator.name} has gradients of its first {len(of_tensors)} inputs only")
    without = (None,) * (len(inputs) - len(of_tensors))
    return (*(grad.to(x.dtype) for grad, x in zip(of_tensors, inputs, strict=False)), *without)


class NormReluBranch(torch.autograd.Function):
    """`norm_relu` at the start of a residual branch: x, y, mean and var, where the gradients of x are added in one kernel."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs = torch.ops.san.norm_relu(*inputs)
        _save(_NORM_RELU, ctx, inputs, outputs)
        return inputs[0], *outputs

    @staticmethod
    def backward(ctx: Any, of_residual: Tensor | None, of_y: Tensor | None, *_: None) -> Arguments:
        if of_y is None:
            return of_residual, *(None,) * (len(ctx.inputs) - 1)
        return _differentiate(_NORM_RELU, ctx, of_y, added=of_residual)


def _count(name: str, flops: Callable[..., int]) -> None:
    def count(*shapes: Any, out_shape: Any = None) -> int:
        return flops(*shapes)

    register_flop_formula(getattr(torch.ops.san, name))(count)


def _by_definition(define: Callable[..., Any], grads: Sequence[Tensor], inputs: Sequence[Any]) -> Arguments:
    """Gradients that can be differentiated again, by autograd through an operator's definition."""
    warnings.warn(
        "san: create_graph=True differentiates reference operators; they are slower and need more memory", stacklevel=3
    )
    # Views, so that gradients stop here if one input was computed from another.
    views = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
    wanted = [x for x in views if isinstance(x, Tensor) and x.requires_grad]
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    kind = inputs[0].device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        outputs = define(*(x.to(wide) if isinstance(x, Tensor) else x for x in views))
        wide_grads = [grad.to(wide) for grad in grads]
        gradients = iter(torch.autograd.grad(outputs, wanted, wide_grads, create_graph=True, allow_unused=True))
    return tuple(next(gradients) if isinstance(x, Tensor) and x.requires_grad else None for x in views)


def _tag_compiled_graphs() -> None:
    """Keeps torch.compile from reusing backward graphs that it stored on disk before this folder or the schemas changed.

    It finds stored graphs by their forward pass, in which an operator is only a name.
    """
    state = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(schemas.__file__)):
        state.update(path.read_bytes())
    torch.compiler.config.cache_key_tag += f"san-{state.hexdigest()[:16]}"


_NORM_RELU = next(operator for operator in OPERATORS if operator.name == "norm_relu")

# At import and not with the kernels, because `FlopCounterMode` copies the formulas when it is created.
schemas.define("san")
for _operator in OPERATORS:
    _register(_operator)
_tag_compiled_graphs()
torch.library.register_fake("san::track_statistics")(lambda *_: None)
