"""The relation delta (sections 3.1 and 3.2), one row each. Add new relations here.

Shapes: phi, psi [N, R, H, W]; K footprint positions; P = H * W output positions. A pairwise relation returns d channels for
each pair (i, j), [N, d, K, P]; a patchwise relation returns d channels for each patch, [N, d, 1, P].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from san import ops
from san.nn.mapping import PairMaps
from san.ops.tracing import is_traced

Delta = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation: its number of channels and the function delta."""

    channels: Callable[[int, int], int]
    """d, from R relation channels and K footprint positions."""
    delta: Delta
    """(phi, psi, side of the footprint) to delta."""
    pairs: Callable[[Tensor, Tensor], PairMaps] | None = None
    """(phi, psi) to two maps whose difference or product is delta. Fused attention needs it; None if there are no such maps."""
    when_shared: Relation | None = None
    """The relation to use if phi and psi are the same transformation; None if it stays the same."""

    @property
    def is_added(self) -> bool:
        """Whether a user has registered it."""
        return not self.delta.__module__.startswith("san.")


def _pairs(phi_NRHW: Tensor, psi_NRHW: Tensor, footprint: int) -> Tensor:
    """[phi_i, psi_j]: [N, 2R, K, P]."""
    phi_NR1P = phi_NRHW.flatten(2).unsqueeze(2)
    return torch.cat((phi_NR1P.expand(-1, -1, footprint**2, -1), ops.unfold(psi_NRHW, footprint)), 1)


def _apart(phi_NRHW: Tensor, psi_NRHW: Tensor) -> PairMaps:
    """[phi, 0] and [0, -psi]: their difference is the concatenation."""
    zeros = torch.zeros_like(phi_NRHW)
    return PairMaps(torch.cat((phi_NRHW, zeros), 1), torch.cat((zeros, -psi_NRHW), 1))


def _patch(phi_NRHW: Tensor, psi_NRHW: Tensor, footprint: int) -> Tensor:
    """[psi_j for all j]: [N, R * K, 1, P]."""
    return ops.unfold(psi_NRHW, footprint).flatten(1, 2).unsqueeze(2)


def _center_and_patch(phi_NRHW: Tensor, psi_NRHW: Tensor, footprint: int) -> Tensor:
    """[phi_i, psi_j for all j]: [N, R * (K + 1), 1, P]."""
    phi_NR1P = phi_NRHW.flatten(2).unsqueeze(2)
    return torch.cat((phi_NR1P, _patch(phi_NRHW, psi_NRHW, footprint)), 1)


def _star(phi_NRHW: Tensor, psi_NRHW: Tensor, footprint: int) -> Tensor:
    """phi_i^T psi_j for all j: [N, K, 1, P]."""
    return ops.dot(phi_NRHW, psi_NRHW, footprint).transpose(1, 2)


def _clique(phi_NRHW: Tensor, psi_NRHW: Tensor, footprint: int) -> Tensor:
    """phi_j^T psi_k for all j and k: [N, K * K, 1, P]."""
    phi_NRKP, psi_NRKP = ops.unfold(phi_NRHW, footprint), ops.unfold(psi_NRHW, footprint)
    return torch.einsum("nrjp,nrkp->njkp", phi_NRKP, psi_NRKP).flatten(1, 2).unsqueeze(2)


PAIRWISE: dict[str, Relation] = {
    "summation": Relation(lambda R, K: R, ops.summation, lambda phi, psi: PairMaps(phi, -psi)),
    "subtraction": Relation(lambda R, K: R, ops.subtraction, PairMaps),
    "concatenation": Relation(lambda R, K: 2 * R, _pairs, _apart),
    "hadamard": Relation(lambda R, K: R, ops.hadamard, lambda phi, psi: PairMaps(phi, psi, products=phi.shape[1])),
    "dot": Relation(lambda R, K: 1, ops.dot),
}

PATCHWISE: dict[str, Relation] = {
    "star": Relation(lambda R, K: K, _star),
    "clique": Relation(lambda R, K: K * K, _clique),
    # If phi = psi, x_i would be in the vector twice.
    "concatenation": Relation(lambda R, K: R * (K + 1), _center_and_patch, when_shared=Relation(lambda R, K: R * K, _patch)),
}


def register_relation(
    name: str,
    channels: Callable[[int, int], int],
    *,
    patchwise: bool = False,
    pairs: Callable[[Tensor, Tensor], PairMaps] | None = None,
) -> Callable[[Delta], Delta]:
    """Decorator that adds a function as a relation, a row of `PAIRWISE` or `PATCHWISE`. It tries the function on a small map.

    The function receives phi and psi [N, R, H, W] and the side of the footprint. It returns [N, d, K, P] or, if `patchwise`,
    [N, d, 1, P].

    Args:
        name: value of `relation` in models and grids. A relation of your own with that name is replaced.
        channels: d, from R relation channels and K footprint positions.
        pairs: (phi, psi) to two maps whose difference or product is the relation, for fused attention.

    Raises:
        ValueError: a built-in relation has that name, or the function returns another number of channels.
    """
    registry = PATCHWISE if patchwise else PAIRWISE

    def register(function: Delta) -> Delta:
        if name in registry and not registry[name].is_added:
            raise ValueError(f"relation {name!r} is built in; choose another name")
        row = Relation(channels, function, pairs)
        map_NRHW = torch.empty(1, 16, 3, 3, device="meta")
        with ops.backend("reference"):
            compute(name, row, map_NRHW, map_NRHW, 3)
        registry[name] = row
        return function

    return register


def compute(name: str, row: Relation, phi_NRHW: Tensor, psi_NRHW: Tensor, footprint: int) -> Tensor:
    """The relation delta.

    Raises:
        ValueError: it does not have the channels that its row declares.
    """
    delta = row.delta(phi_NRHW, psi_NRHW, footprint)
    if is_traced(phi_NRHW):
        return delta
    declared = row.channels(phi_NRHW.shape[1], footprint**2)
    if delta.dim() != 4 or delta.shape[1] != declared:
        actual = f"{delta.shape[1]} channels" if delta.dim() == 4 else f"shape {list(delta.shape)}"
        raise ValueError(f"relation {name!r} returned {actual} but declares {declared}")
    return delta
