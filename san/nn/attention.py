"""Self-attention over footprints: vector attention, pairwise and patchwise (sections 3.1 and 3.2), and scalar attention.

Shapes: N batch, C channels, R = C / r1 relation channels, M = C / r2 value channels, G weight channels, H W map, P = H * W
output positions, K = footprint^2 positions of a footprint. Value channel c uses weight channel c % G.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from san import ops
from san.choice import ChoiceError, ModelError, check_counts, choose
from san.nn.inputs import check_map, specialize
from san.nn.mapping import MAPPINGS, Gamma, PairMaps
from san.nn.norm import convolve_each, is_plain
from san.nn.position import CHANNELS, POSITIONS, Position
from san.nn.relation import PAIRWISE, PATCHWISE, Relation, compute
from san.ops import fused as kernels
from san.ops.footprint import check_side
from san.ops.functional import fuses
from san.ops.tracing import leaf

TRANSFORMATIONS: dict[str, tuple[str, str, str]] = {
    "distinct": ("phi", "psi", "beta"),
    "phi_eq_psi": ("phi", "phi", "beta"),
    "phi_eq_psi_eq_beta": ("beta", "beta", "beta"),
}
"""Which Linear layer serves as phi, as psi and as beta (table "transformation")."""


class SelfAttention(nn.Module):
    """Base of all kinds: the transformations phi, psi and beta, and the weighted sum of beta.

    Args:
        channels: C, a multiple of `r1` and of `r2`.
        footprint: side of the square footprint R(i) in pixels, odd.
        r1: C divided by the channels of phi and psi.
        r2: C divided by the channels of beta.
        transformation: which of phi, psi and beta share a Linear layer, a key of `TRANSFORMATIONS`.

    Raises:
        ValueError: an even footprint, `channels` is not a multiple of r1 and r2, or an unknown name.
    """

    def __init__(self, channels: int, footprint: int, r1: int, r2: int, transformation: str = "distinct") -> None:
        super().__init__()
        check_counts(channels=channels, footprint=footprint, r1=r1, r2=r2)
        check_side(footprint)
        if channels % r1 or channels % r2:
            raise ModelError(f"{channels} channels are not divisible by r1={r1} and by r2={r2}")
        self.footprint = footprint
        self.relation_channels = channels // r1
        self.value_channels = channels // r2
        self.transformation = transformation
        self.roles = choose("transformation", transformation, TRANSFORMATIONS)
        if self.roles[0] == "beta" and r1 != r2:
            sentence = f"transformation {transformation!r} needs r1 = r2 (the paper's 4), not r1={r1} and r2={r2}"
            raise ChoiceError("transformation", sentence)
        for role, width in (("phi", channels // r1), ("psi", channels // r1), ("beta", channels // r2)):
            if role in self.roles:
                self.add_module(role, nn.Conv2d(channels, width, 1))

    def transform(self, x_NCHW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """phi [N, R, H, W], psi [N, R, H, W] and beta [N, M, H, W]; each Linear layer runs once."""
        check_map(x_NCHW, self.get_submodule("beta"), "x")
        specialize(x_NCHW)
        layers = list(dict.fromkeys(self.roles))
        maps = dict(zip(layers, convolve_each([self.get_submodule(role) for role in layers], x_NCHW), strict=True))
        return maps[self.roles[0]], maps[self.roles[1]], maps[self.roles[2]]

    def attention_weights(self, phi_NRHW: Tensor, psi_NRHW: Tensor) -> Tensor:
        """The attention weights alpha, [N, G, K, P]."""
        raise NotImplementedError

    def weights(self, x_NCHW: Tensor) -> Tensor:
        """The attention weights alpha for an input, [N, G, K, P]."""
        phi, psi, _ = self.transform(x_NCHW)
        return self.attention_weights(phi, psi)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Maps [N, C, H, W] to [N, M, H, W].

        Raises:
            ValueError: the input does not match the module's channels, dtype or device, or is too small for the footprint.
        """
        return self.attend(*self.transform(x_NCHW))

    def attend(self, phi_NRHW: Tensor, psi_NRHW: Tensor, beta_NMHW: Tensor) -> Tensor:
        """The weighted sum of beta, [N, M, H, W]."""
        # Under autocast, the softmax returns float32 and beta is a half type.
        weight_NGKP = self.attention_weights(phi_NRHW, psi_NRHW).to(beta_NMHW.dtype)
        return ops.aggregation(beta_NMHW, weight_NGKP, self.footprint)


class VectorAttention(SelfAttention):
    """Attention weights gamma(delta) that differ between channels; groups of `group_size` value channels share one.

    Args:
        group_size: S, number of value channels that share a weight channel; G = M / S.
    """

    relation: str
    mapping: str

    def __init__(self, channels: int, footprint: int, r1: int, r2: int, group_size: int, transformation: str) -> None:
        super().__init__(channels, footprint, r1, r2, transformation)
        check_counts(group_size=group_size)
        if self.value_channels % group_size:
            raise ModelError(f"{self.value_channels} value channels (C / r2) are not divisible by group_size={group_size}")
        self.weight_channels = self.value_channels // group_size

    def extra_repr(self) -> str:
        named = f"relation={self.relation}, mapping={self.mapping}, transformation={self.transformation}"
        return f"footprint={self.footprint}, values={self.value_channels}, weights={self.weight_channels}, {named}"


class PairwiseAttention(VectorAttention):
    """y_i = sum_j softmax_j(gamma([delta(x_i, x_j), position])) * beta_j (equations 1 and 2).

    Args:
        hidden_reduction: C divided by the channels of gamma's hidden layers, which do not depend on r1; `L` has none.
        relation: delta, a key of `san.nn.relation.PAIRWISE`.
        mapping: layers of gamma, a key of `MAPPINGS`.
        position: encoding of the positions of i and j, a key of `POSITIONS`.
    """

    def __init__(
        self,
        channels: int,
        footprint: int = 7,
        *,
        r1: int = 16,
        r2: int = 4,
        group_size: int = 8,
        hidden_reduction: int = 16,
        relation: str = "subtraction",
        mapping: str = "LRL",
        transformation: str = "distinct",
        position: str = "relative",
    ) -> None:
        super().__init__(channels, footprint, r1, r2, group_size, transformation)
        check_counts(hidden_reduction=hidden_reduction)
        row = choose("relation", relation, PAIRWISE)
        self.relation, self.mapping = relation, mapping
        self.position = Position(position) if choose("position", position, POSITIONS) is not None else None
        hidden = choose("mapping", mapping, MAPPINGS).pairwise(channels // hidden_reduction)
        if hidden and channels % hidden_reduction:
            sentence = f"{channels} channels are not divisible by hidden_reduction={hidden_reduction}"
            raise ModelError(f"{sentence}, which mapping {mapping} requires")
        d = row.channels(self.relation_channels, footprint**2) + (CHANNELS if self.position is not None else 0)
        self.gamma = Gamma.of((d, *hidden, self.weight_channels))

    def attend(self, phi_NRHW: Tensor, psi_NRHW: Tensor, beta_NMHW: Tensor) -> Tensor:
        """The weighted sum of beta, [N, M, H, W], if possible without storing the weights."""
        maps = self._fused_maps(phi_NRHW, psi_NRHW, beta_NMHW) if _has_own_weights(self) else None
        if maps is None:
            return super().attend(phi_NRHW, psi_NRHW, beta_NMHW)
        return self.gamma.attend_pairs(maps, beta_NMHW, self.footprint)

    def attention_weights(self, phi_NRHW: Tensor, psi_NRHW: Tensor) -> Tensor:
        """Softmax over the footprint, [N, G, K, P]: the weights of a pixel sum to 1 in each weight channel."""
        relation_NdKP = compute(self.relation, PAIRWISE[self.relation], phi_NRHW, psi_NRHW, self.footprint)
        if self.position is not None:
            position_12KP = self.position(phi_NRHW, self.footprint)
            relation_NdKP = torch.cat((relation_NdKP, position_12KP.expand(phi_NRHW.shape[0], -1, -1, -1)), 1)
        return self.gamma(relation_NdKP).softmax(dim=2)

    def _fused_maps(self, phi_NRHW: Tensor, psi_NRHW: Tensor, beta_NMHW: Tensor) -> PairMaps | None:
        """What the fused operator reads, or None if it does not compute this relation and mapping."""
        pairs = PAIRWISE[self.relation].pairs
        is_usual = isinstance(self.gamma, Gamma) and (self.position is None or is_plain(self.position, Position))
        maps = pairs(phi_NRHW, psi_NRHW) if pairs is not None and is_usual else None
        if maps is None or not self.gamma.fuses_pairs(maps, beta_NMHW):
            return None
        return maps if self.position is None else self.position.appended_to(maps)

    def extra_repr(self) -> str:
        position = "none" if self.position is None else self.position.encoding
        return f"{super().extra_repr()}, position={position}"


class PatchwiseAttention(VectorAttention):
    """y_i = sum_j gamma(delta(patch))_j * beta_j (equations 4 and 5): the weights see the whole patch; no softmax.

    Args:
        relation: delta, a key of `san.nn.relation.PATCHWISE`.
        mapping: layers of gamma, a key of `MAPPINGS`.
    """

    def __init__(
        self,
        channels: int,
        footprint: int = 7,
        *,
        r1: int = 16,
        r2: int = 4,
        group_size: int = 8,
        relation: str = "concatenation",
        mapping: str = "LRL",
        transformation: str = "distinct",
    ) -> None:
        super().__init__(channels, footprint, r1, r2, group_size, transformation)
        choose("relation", relation, PATCHWISE)
        self.relation, self.mapping = relation, mapping
        K, R, G = footprint**2, self.relation_channels, self.weight_channels
        hidden = choose("mapping", mapping, MAPPINGS).patchwise(R, G)
        self.gamma = Gamma.of((self.row.channels(R, K), *hidden, K * G))

    @property
    def row(self) -> Relation:
        """The relation, which depends on whether phi and psi are the same transformation."""
        row = PATCHWISE[self.relation]
        is_shared = self.roles[0] == self.roles[1]
        return row.when_shared if is_shared and row.when_shared is not None else row

    def attend(self, phi_NRHW: Tensor, psi_NRHW: Tensor, beta_NMHW: Tensor) -> Tensor:
        """The weighted sum of beta, [N, M, H, W], if possible without storing the weights."""
        is_fused = _has_own_weights(self) and self._fuses(psi_NRHW)
        if not is_fused or not self.gamma.fuses_patch_values(beta_NMHW, self.footprint):
            return super().attend(phi_NRHW, psi_NRHW, beta_NMHW)
        return self.gamma.attend_patches(self._own(phi_NRHW), psi_NRHW, beta_NMHW, self.footprint)

    def attention_weights(self, phi_NRHW: Tensor, psi_NRHW: Tensor) -> Tensor:
        """One weight vector per position of the footprint, unbounded: [N, G, K, P]."""
        if self._fuses(psi_NRHW):
            return self.gamma.patch_weights(self._own(phi_NRHW), psi_NRHW, self.footprint)
        patch_Nd1P = compute(self.relation, self.row, phi_NRHW, psi_NRHW, self.footprint)
        return self.gamma(patch_Nd1P).unflatten(1, (self.weight_channels, self.footprint**2)).squeeze(3)

    def _fuses(self, psi_NRHW: Tensor) -> bool:
        """Whether the fused operators compute this relation and mapping."""
        return self.relation == "concatenation" and isinstance(self.gamma, Gamma) and self.gamma.fuses_patches(psi_NRHW)

    def _own(self, phi_NRHW: Tensor) -> Tensor:
        """The pixel's own channels in a patch: none if x_i, as part of its own footprint, is there already."""
        return phi_NRHW if self.row.when_shared is not None else phi_NRHW[:, :0]


class ScalarAttention(SelfAttention):
    """y_i = sum_j softmax_j(phi_i^T (psi_j + r_{j-i})) * beta_j in each head: stand-alone self-attention, the scalar baseline.

    One weight per head and pair. r is learned: half of its channels depend on the row of j - i, the other half on the column.
    Source: Ramachandran et al., "Stand-Alone Self-Attention in Vision Models", NeurIPS 2019 (arXiv:1906.05909), section 3.

    Args:
        heads: number of groups of channels; divides C / r1 and C / r2. C / r1 must also be even.
    """

    def __init__(self, channels: int, footprint: int = 7, *, r1: int = 4, r2: int = 4, heads: int = 8) -> None:
        super().__init__(channels, footprint, r1, r2)
        check_counts(heads=heads)
        R, M = self.relation_channels, self.value_channels
        if R % heads or M % heads or R % 2:
            raise ModelError(
                f"{R} relation channels and {M} value channels must be divisible by heads={heads} (the first also by 2)"
            )
        self.weight_channels = heads
        self.rows = nn.Parameter(torch.empty(R // 2, footprint, 1))
        self.columns = nn.Parameter(torch.empty(R // 2, 1, footprint))
        nn.init.normal_(self.rows, std=R**-0.5)
        nn.init.normal_(self.columns, std=R**-0.5)

    def attend(self, phi_NRHW: Tensor, psi_NRHW: Tensor, beta_NMHW: Tensor) -> Tensor:
        """The weighted sum of beta, [N, M, H, W], if possible without storing the weights; half types in float32."""
        if not _has_own_weights(self) or not self._fuses(beta_NMHW):
            return super().attend(phi_NRHW, psi_NRHW, beta_NMHW)
        rows, columns = self.rows.flatten(1), self.columns.flatten(1)
        wide = torch.promote_types(beta_NMHW.dtype, torch.float32)
        scores = _scores(phi_NRHW, torch.block_diag(rows, columns), self.weight_channels)
        phi, psi, scores, beta = (x.to(wide) for x in (phi_NRHW, psi_NRHW, scores, beta_NMHW))
        return kernels.attend_dot(phi, psi, scores, beta, self.footprint).to(beta_NMHW.dtype)

    def _fuses(self, beta_NMHW: Tensor) -> bool:
        """Whether `attend_dot` can run: on GPUs, heads have at most 64 channels, and maps are not float64."""
        if not fuses(beta_NMHW):
            return False
        most = max(self.relation_channels, self.value_channels) // self.weight_channels
        return not beta_NMHW.is_cuda or (most <= 64 and beta_NMHW.dtype != torch.float64)

    def attention_weights(self, phi_NRHW: Tensor, psi_NRHW: Tensor) -> Tensor:
        """Softmax over the footprint, [N, heads, K, P]."""
        content_NGKP = ops.dot(phi_NRHW, psi_NRHW, self.footprint, self.weight_channels)
        return (content_NGKP + _offset_scores(phi_NRHW, self.rows, self.columns, self.weight_channels)).softmax(dim=2)

    def extra_repr(self) -> str:
        return f"footprint={self.footprint}, values={self.value_channels}, heads={self.weight_channels}"


_OWN_WEIGHTS = tuple(kind.attention_weights for kind in (PairwiseAttention, PatchwiseAttention, ScalarAttention))


def _has_own_weights(layer: SelfAttention) -> bool:
    """Whether `attention_weights` is the one defined here and need not be called."""
    return "attention_weights" not in layer.__dict__ and type(layer).attention_weights in _OWN_WEIGHTS


@leaf
def _offset_scores(phi_NRHW: Tensor, rows: Tensor, columns: Tensor, heads: int) -> Tensor:
    """phi_i^T r_{j-i} in each head, [N, heads, K, P]."""
    k = rows.shape[1]
    return _scores(phi_NRHW, torch.cat((rows.expand(-1, k, k), columns.expand(-1, k, k))).flatten(1), heads)


def _scores(phi_NRHW: Tensor, offset_Rk: Tensor, heads: int) -> Tensor:
    """phi_i^T r for each column r of `offset` in each head, [N, heads, k, P]."""
    phi_NSGP, offset_SGk = phi_NRHW.flatten(2).unflatten(1, (-1, heads)), offset_Rk.unflatten(0, (-1, heads))
    return torch.einsum("nsgp,sgk->ngkp", phi_NSGP, offset_SGk.to(phi_NRHW.dtype))


def attention_weights(model: nn.Module, x_NCHW: Tensor) -> dict[str, Tensor]:
    """The attention weights alpha of every attention layer for an input: [N, G, K, P] by module name.

    Every layer computes its weights a second time from its input; the network itself runs as usual. The weights take G * K
    floats for every pixel of every map, so use small batches. The result is empty for a network without attention.

    Args:
        model: a module that contains `SelfAttention`, such as a model of `create_model`, in evaluation mode.
        x_NCHW: input of the model.

    Raises:
        ValueError: the network is in training mode, in which computing the weights would update running statistics.
    """
    if any(module.training for module in model.modules()):
        raise ValueError("attention_weights needs a model in evaluation mode; call model.eval() first")
    weights: dict[str, Tensor] = {}

    def watch(name: str, layer: SelfAttention) -> RemovableHandle:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            weights[name] = layer.weights(*inputs, **named)

        return layer.register_forward_pre_hook(keep, with_kwargs=True)

    watches = [watch(name, layer) for name, layer in model.named_modules() if isinstance(layer, SelfAttention)]
    try:
        # A compiled model would ignore the hooks. The compiler is slow to import.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            model(x_NCHW)
    finally:
        for handle in watches:
            handle.remove()
    return weights
