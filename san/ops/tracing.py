"""Support for `torch.fx.symbolic_trace`, in whose graphs our operators are functions that are not traced further."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.fx import Proxy

F = TypeVar("F", bound=Callable[..., Tensor])


def is_traced(x: object) -> bool:
    """Whether `torch.fx` traces a computation with `x`, so that its shape and dtype are unknown."""
    return isinstance(x, Proxy)


def leaf(function: F) -> F:
    """Makes a function of tensors a single node in the graphs of `torch.fx`."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        for x in (*arguments, *named.values()):
            if isinstance(x, Proxy):
                return x.tracer.create_proxy("call_function", call, arguments, named)
        return function(*arguments, **named)

    return call  # type: ignore[return-value]
