"""The public operators: checked, differentiable, on any device, with a switch to the reference implementation.

Shapes as in `san/ops/reference.py`. All operators take float16, bfloat16, float32 and float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from san.ops import library, reference
from san.ops.footprint import check_footprint
from san.ops.tracing import is_traced, leaf

Backend = Literal["auto", "unfused", "reference"]
_backend: ContextVar[Backend] = ContextVar("san_backend", default="auto")


def backend(name: Backend) -> AbstractContextManager[None]:
    """Chooses the implementation of operators inside a `with` block. Threads that are started inside use `auto`.

    `auto` uses fused operators if possible, `unfused` a kernel for each operator, and `reference` plain torch code, which is
    the specification. The backward pass uses the implementation of the forward pass.

    Raises:
        ValueError: unknown name; raised by the call, not when the block is entered.
    """
    if name not in get_args(Backend):
        raise ValueError(f"the backend must be 'auto', 'unfused' or 'reference', not {name!r}")
    return _chosen(name)


def chosen_backend() -> Backend:
    """The implementation that `backend` has chosen here."""
    return _backend.get()


@contextmanager
def _chosen(name: Backend) -> Iterator[None]:
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


@leaf
def unfold(x_NCHW: Tensor, kernel_size: int) -> Tensor:
    """The values in the footprint of every pixel, [N, C, K, P], with reflection at the border.

    Raises:
        ValueError: `x_NCHW` is not a 4-d floating tensor, or the footprint does not fit its map.
    """
    _check_map(x_NCHW, "x")
    check_footprint(kernel_size, *x_NCHW.shape[2:])
    if _kernels_chosen(x_NCHW.device.type):
        return torch.ops.san.unfold(x_NCHW, kernel_size)
    return reference.unfold(x_NCHW, kernel_size)


@leaf
def subtraction(phi_NRHW: Tensor, psi_NRHW: Tensor, kernel_size: int) -> Tensor:
    """The subtraction relation phi_i - psi_j over the footprint, [N, R, K, P] (section 3.1).

    Raises:
        ValueError: shapes, dtypes or devices differ, or the footprint does not fit the map.
    """
    _check_pair(phi_NRHW, psi_NRHW, kernel_size)
    if _kernels_chosen(phi_NRHW.device.type):
        return torch.ops.san.subtraction(phi_NRHW, psi_NRHW, kernel_size)
    return reference.subtraction(phi_NRHW, psi_NRHW, kernel_size)


@leaf
def summation(phi_NRHW: Tensor, psi_NRHW: Tensor, kernel_size: int) -> Tensor:
    """The summation relation phi_i + psi_j over the footprint, [N, R, K, P] (section 3.1). Raises like `subtraction`."""
    _check_pair(phi_NRHW, psi_NRHW, kernel_size)
    return subtraction(phi_NRHW, -psi_NRHW, kernel_size)


@leaf
def hadamard(phi_NRHW: Tensor, psi_NRHW: Tensor, kernel_size: int) -> Tensor:
    """The Hadamard relation phi_i * psi_j over the footprint, [N, R, K, P] (section 3.1). Raises like `dot`."""
    _check_pair(phi_NRHW, psi_NRHW, kernel_size)
    return dot(phi_NRHW, psi_NRHW, kernel_size, groups=phi_NRHW.shape[1])


@leaf
def dot(phi_NRHW: Tensor, psi_NRHW: Tensor, kernel_size: int, groups: int = 1) -> Tensor:
    """The inner products phi_i^T psi_j over the footprint, [N, groups, K, P] (section 3.1); channel c is of group c % groups.

    Raises:
        ValueError: shapes, dtypes or devices differ, the footprint does not fit the map, or `groups` does not divide R.
    """
    _check_pair(phi_NRHW, psi_NRHW, kernel_size)
    if groups < 1 or phi_NRHW.shape[1] < 1 or phi_NRHW.shape[1] % groups != 0:
        raise ValueError(
            f"the number of channels of phi ({phi_NRHW.shape[1]}) must be a positive multiple of groups ({groups})"
        )
    if _kernels_chosen(phi_NRHW.device.type):
        return torch.ops.san.dot(phi_NRHW, psi_NRHW, kernel_size, groups)
    return reference.dot(phi_NRHW, psi_NRHW, kernel_size, groups)


@leaf
def aggregation(beta_NCHW: Tensor, weight_NGKP: Tensor, kernel_size: int) -> Tensor:
    """The weighted sum of values over the footprint, [N, C, H, W] (equations 2 and 4); channel c uses weight c % G.

    The result has beta's memory format, except under transforms of `torch.func`.

    Raises:
        ValueError: `weight_NGKP` does not fit `beta_NCHW` and the footprint, or the footprint does not fit the map.
    """
    _check_map(beta_NCHW, "beta")
    _check_alike(beta_NCHW, weight_NGKP, "beta", "weight")
    N, C, H, W = beta_NCHW.shape
    check_footprint(kernel_size, H, W)
    wanted = (N, kernel_size**2, H * W)
    shape = weight_NGKP.shape
    if weight_NGKP.dim() != 4 or (shape[0], shape[2], shape[3]) != wanted:
        raise ValueError(f"weight must have shape [N={N}, G, K={wanted[1]}, P={wanted[2]}] to match beta, not {list(shape)}")
    if shape[1] < 1 or C < 1 or C % shape[1] != 0:
        raise ValueError(
            f"the number of channels of beta ({C}) must be a positive multiple of the weight channels ({shape[1]})"
        )
    aggregate = torch.ops.san.aggregation if _kernels_chosen(beta_NCHW.device.type) else reference.aggregation
    y_NCHW: Tensor = aggregate(beta_NCHW, weight_NGKP, kernel_size)
    if _is_transformed():  # vmap knows no memory formats
        return y_NCHW
    return y_NCHW.contiguous(memory_format=torch.channels_last) if library.is_channels_last(beta_NCHW) else y_NCHW


def fuses(x: Tensor) -> bool:
    """Whether fused operators (`san.ops.fused`) run on maps like `x`."""
    return not is_traced(x) and _fusion_chosen(x.device.type)


@library.constant
def _fusion_chosen(device: str) -> bool:
    return _backend.get() == "auto" and device != "meta" and _kernels_chosen(device)


def _check_map(x: Tensor, name: str) -> None:
    if x.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions [N, C, H, W], not {list(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, not {x.dtype}")


def _check_pair(phi: Tensor, psi: Tensor, kernel_size: int) -> None:
    _check_map(phi, "phi")
    _check_map(psi, "psi")
    _check_alike(phi, psi, "phi", "psi")
    if phi.shape != psi.shape:
        raise ValueError(f"phi and psi must have the same shape, not {list(phi.shape)} and {list(psi.shape)}")
    check_footprint(kernel_size, *phi.shape[2:])


def _check_alike(a: Tensor, b: Tensor, a_name: str, b_name: str) -> None:
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(
            f"{a_name} and {b_name} must have the same dtype and device, "
            f"not {a.dtype} on {a.device} and {b.dtype} on {b.device}"
        )


@library.constant
def _kernels_chosen(device: str) -> bool:
    """Chooses between kernels and reference, for all operators. A compiled graph keeps the choice that was made while tracing.
    Exported and traced graphs must also run without `san`."""
    if torch.compiler.is_exporting() or torch._C._is_tracing() or _backend.get() == "reference" or _is_transformed():
        return False
    return library.runs_on(device)


@library.constant
def _is_transformed() -> bool:
    """Whether a transform of `torch.func` (`grad`, `vmap`, `jvp`, ...) or forward-mode differentiation is active.

    Only the reference supports them; the kernels have only reverse-mode derivatives.
    """
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
