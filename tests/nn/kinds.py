"""Attention modules for tests: one for each relation, position, mapping and transformation. Needs only torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention, SelfAttention
from san.nn.attention import TRANSFORMATIONS
from san.nn.mapping import MAPPINGS
from san.nn.position import POSITIONS
from san.nn.relation import PAIRWISE, PATCHWISE

REDUCTIONS = {"distinct": {}, "phi_eq_psi": {}, "phi_eq_psi_eq_beta": {"r1": 4, "r2": 4}}
CHANNELS = 64

KINDS: dict[str, Callable[..., SelfAttention]] = {}


def _kind(name: str, cls: type[SelfAttention], **fields: Any) -> None:
    KINDS[name] = lambda footprint, cls=cls, fields=fields: cls(CHANNELS, footprint, **fields)


for _relation in PAIRWISE:
    for _position in POSITIONS:
        _kind(f"pairwise-{_relation}-{_position}", PairwiseAttention, relation=_relation, position=_position)
for _relation in PATCHWISE:
    _kind(f"patchwise-{_relation}", PatchwiseAttention, relation=_relation)
for _name, _cls in (("pairwise", PairwiseAttention), ("patchwise", PatchwiseAttention)):
    for _mapping in MAPPINGS:
        for _transformation in TRANSFORMATIONS:
            if (_mapping, _transformation) == ("LRL", "distinct"):
                continue  # the default, which is above
            _kind(
                f"{_name}-{_mapping}-{_transformation}",
                _cls,
                mapping=_mapping,
                transformation=_transformation,
                **REDUCTIONS[_transformation],
            )
_kind("pairwise-wide-hidden-layer", PairwiseAttention, hidden_reduction=2)
_kind("scalar", ScalarAttention)
_kind("scalar-2-heads", ScalarAttention, heads=2)


def randomize(module: SelfAttention) -> None:
    """Gives every parameter and running statistic a random value, so that no term of the result vanishes."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if "running_var" in name else torch.randn_like(tensor) / 2)
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.bias.abs_()  # otherwise ReLU would set most of gamma's few hidden units to 0


def randomize_vectors(model: nn.Module) -> None:
    """Adds noise to all scales and biases.

    With a bias of 0, the sign of p_i - p_i = 0 before a ReLU and so its gradient would depend on rounding.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 10)


def made(kind: str, footprint: int, seed: int = 0) -> SelfAttention:
    """An attention module in float64 with random parameters and statistics."""
    torch.manual_seed(seed)
    module = KINDS[kind](footprint).double()
    randomize(module)
    with torch.no_grad():
        for role in dict.fromkeys(module.roles):
            module.get_submodule(role).get_parameter("weight").div_(4)  # otherwise the softmax would choose a single position
    return module


def gradients(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output and, for a fixed random cotangent, the gradients of the input and of all parameters."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], cotangent)]
