"""The mapping gamma from a relation to attention weights (section 3.1 and table "mapping"), layer by layer or fused.

Fused, the first layers run as operators that never store the relation (`san.ops.fused`). They take each norm as a scale and a
shift. The statistics of the second norm of a pairwise gamma follow from the mean and covariance of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from san.nn.folding import kept
from san.nn.inputs import full_precision
from san.nn.norm import (
    affine_of,
    convolve,
    is_plain,
    is_pointwise,
    norm_relu,
    require_several,
    track,
    uses_batch,
    weight_and_bias,
)
from san.ops import fused as kernels
from san.ops.functional import fuses


class PairMaps(NamedTuple):
    """Maps [N, d, H, W]: delta is center_i * around_j in the first `products` channels, center_i - around_j in the others."""

    center: Tensor
    around: Tensor
    products: int = 0


@dataclass(frozen=True, slots=True)
class Mapping:
    """The widths of gamma's hidden layers."""

    pairwise: Callable[[int], tuple[int, ...]]
    """From the C / hidden_reduction hidden channels of a pairwise mapping."""
    patchwise: Callable[[int, int], tuple[int, ...]]
    """From R relation channels and G weight channels."""


MAPPINGS: dict[str, Mapping] = {
    "L": Mapping(lambda hidden: (), lambda R, G: ()),
    "LRL": Mapping(lambda hidden: (hidden,), lambda R, G: (G,)),
    "LRLRL": Mapping(lambda hidden: (hidden, hidden), lambda R, G: (R, G)),
}
"""By the paper's names: L is a Linear layer, R is a ReLU."""
MOST_CHANNELS = 72
"""Of the differences that are fused on a GPU. With the 130 of SAN's stage 5, one kernel per operator was twice as fast in
training and as fast in evaluation."""


class Gamma(nn.Sequential):
    """BatchNorm, ReLU, Linear for each step of `widths`; only the last Linear has a bias.

    Widths (d, G) give the paper's `L`, and (d, hidden, G) its default `LRL`. The input is [N, d, K, P] or [N, d, 1, P]; the
    Linear layers are 1x1 convolutions.
    """

    @classmethod
    def of(cls, widths: tuple[int, ...]) -> Gamma:
        """The layers between these widths."""
        last = len(widths) - 2
        layers: list[nn.Module] = []
        for step, (width_in, width_out) in enumerate(pairwise(widths)):
            layers += [nn.BatchNorm2d(width_in), nn.ReLU(), nn.Conv2d(width_in, width_out, 1, bias=step == last)]
        return cls(*layers)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """The layers in turn. Each BatchNorm and its ReLU run as one operator if they are ordinary layers."""
        if len(self) % 3:  # not those of `of`
            for layer in self:
                x_NCHW = layer(x_NCHW)
            return x_NCHW
        for at in range(0, len(self), 3):
            x_NCHW = convolve(self[at + 2], norm_relu(self[at], self[at + 1], x_NCHW))
        return x_NCHW

    def fuses_pairs(self, maps: PairMaps, beta_NMHW: Tensor) -> bool:
        """Whether `attend_pairs` can replace the layers and the aggregation; on GPUs, for LRL of float32 differences with few
        channels."""
        layers, x, last = len(self), maps.center, self[-1]
        if not fuses(x) or layers not in (3, 6) or not self._is_plain(layers) or x.numel() == 0:
            return False
        assert isinstance(last, nn.Conv2d)
        norm = self[0]  # has the channels of the position, too, which the maps still lack
        is_narrow = isinstance(norm, nn.BatchNorm2d) and norm.num_features <= MOST_CHANNELS
        is_usual = layers == 6 and maps.products == 0 and x.dtype != torch.float64 and is_narrow
        return not x.is_cuda or (is_usual and _fuses_values_on_gpu(last.out_channels, beta_NMHW))

    def fuses_patches(self, x_NRHW: Tensor) -> bool:
        """Whether `patch_weights` can replace the first norm, ReLU and Linear."""
        if not fuses(x_NRHW) or not self._is_plain(3) or len(self) % 3 or x_NRHW.numel() == 0:
            return False
        return not (x_NRHW.is_cuda and x_NRHW.dtype == torch.float64)

    def fuses_patch_values(self, beta_NMHW: Tensor, kernel_size: int) -> bool:
        """Whether `attend_patches` can replace the last Linear layer and the aggregation."""
        last = self[-1]
        if not fuses(beta_NMHW) or not self._is_plain(len(self)) or not isinstance(last, nn.Conv2d):
            return False
        if len(self) == 3 or last.bias is None:  # the only layer is part of `patch_linear`
            return False
        is_usual = last.weight.dtype == torch.float32 and last.in_channels <= 64
        return not beta_NMHW.is_cuda or (is_usual and _fuses_values_on_gpu(last.out_channels // kernel_size**2, beta_NMHW))

    def _is_plain(self, layers: int) -> bool:
        """Whether the first layers are those of `of` and need not be called."""
        types = (nn.BatchNorm2d, nn.ReLU, nn.Conv2d) * (layers // 3)
        if len(self) < layers or not all(is_plain(layer, kind) for layer, kind in zip(self, types, strict=False)):
            return False
        convolutions = [layer for layer in list(self)[:layers] if isinstance(layer, nn.Conv2d)]
        return is_plain(self, Gamma) and all(map(is_pointwise, convolutions))

    def attend_pairs(self, maps: PairMaps, beta_NMHW: Tensor, kernel_size: int) -> Tensor:
        """The weighted sum of beta with the softmax of gamma as weights, [N, M, H, W]. Requires `fuses_pairs`; updates running
        statistics. On CPUs, half types are computed in float32.

        Raises:
            ValueError: a norm needs batch statistics, but there is only one value per channel.
        """
        dtype = beta_NMHW.dtype
        maps = PairMaps(_dense(maps.center, dtype), _dense(maps.around, dtype), maps.products)
        norm2 = self[3] if len(self) == 6 else None
        if isinstance(norm2, nn.BatchNorm2d) and uses_batch(norm2) and _has_norm_inside(maps.center):
            return self._attend_pairs_of_batch(maps, norm2, beta_NMHW, kernel_size)
        values = beta_NMHW if beta_NMHW.is_cuda else beta_NMHW.to(maps.center.dtype)
        norm, weight1, shift2, weight2 = self._pair_mapping(maps, kernel_size, values.dtype)
        y_NMHW = kernels.attend_pairs(*maps[:2], norm, weight1, shift2, weight2, values, kernel_size, maps.products)
        return y_NMHW.to(dtype)

    def _attend_pairs_of_batch(self, maps: PairMaps, norm2: nn.BatchNorm2d, beta_NMHW: Tensor, kernel_size: int) -> Tensor:
        """The same on GPUs if the second norm uses the statistics of the batch."""
        assert maps.products == 0, "the operator has differences only"
        values = _values(maps, kernel_size)
        require_several(values)
        norm, linear, last = self._first_norm(maps, kernel_size), self[2], self[5]
        assert isinstance(linear, nn.Conv2d) and isinstance(last, nn.Conv2d)
        weight1, weight2 = (_matrix(layer).to(norm.dtype) for layer in (linear, last))
        weight, bias = (x.to(norm.dtype) for x in weight_and_bias(norm2, norm.dtype, norm.device))
        y_NMHW, mean, var = kernels.attend_pairs_of_batch(
            maps.center, maps.around, norm, weight1, weight, bias, weight2, beta_NMHW, kernel_size, norm2.eps
        )
        track(norm2, mean if linear.bias is None else mean + linear.bias, var, values)
        return y_NMHW

    def _pair_mapping(self, maps: PairMaps, kernel_size: int, to: torch.dtype) -> tuple[Tensor, ...]:
        """norm, weight1, shift2 and weight2 of `attend_pairs`."""

        def mapping() -> tuple[Tensor, ...]:
            return self._new_pair_mapping(maps, kernel_size, to)

        batch = any(isinstance(layer, nn.BatchNorm2d) and uses_batch(layer) for layer in self)
        return mapping() if batch else kept(self, maps.center, to, mapping)

    def _new_pair_mapping(self, maps: PairMaps, kernel_size: int, to: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same, computed. In evaluation, the result does not depend on the maps."""
        (center, around, products), wide = maps, maps.center.dtype
        norm, last = self._first_norm(maps, kernel_size), self[-1]
        assert isinstance(last, nn.Conv2d)
        weight2 = _matrix(last)
        if len(self) == 3:
            return norm, weight2.new_empty(0, 0, dtype=to), norm.new_empty(0), weight2.to(to)
        linear, norm2, values = self[2], self[3], _values(maps, kernel_size)
        assert isinstance(linear, nn.Conv2d) and isinstance(norm2, nn.BatchNorm2d)
        weight1, bias = linear.weight.flatten(1).to(wide), linear.bias

        def statistics() -> tuple[Tensor, Tensor]:
            mean, covariance = kernels.pair_covariance(center, around, norm, kernel_size, products)
            with full_precision(center.device.type):
                mean, var = torch.mv(weight1, mean), torch.mm(weight1, covariance).mul(weight1).sum(1)
            return mean if bias is None else mean + bias, var

        mean, scale, shift = affine_of(norm2, values, wide, statistics).unbind()
        if bias is not None:
            mean = mean - bias
        return norm, (weight1 * scale[:, None]).to(to), torch.addcmul(shift, mean, scale, value=-1), weight2.to(to)

    def _first_norm(self, maps: PairMaps, kernel_size: int) -> Tensor:
        """The affine form of the norm of the relation, [3, d]."""
        norm1, values = self[0], _values(maps, kernel_size)
        assert isinstance(norm1, nn.BatchNorm2d)
        center, around, products = maps
        return affine_of(norm1, values, center.dtype, lambda: kernels.pair_statistics(center, around, kernel_size, products))

    def patch_weights(self, center_NCHW: Tensor, around_NRHW: Tensor, kernel_size: int) -> Tensor:
        """gamma of every pixel's patch, [N, G, K, P]. Requires `fuses_patches`; the layers after the first Linear are called.

        Raises:
            ValueError: a norm needs batch statistics, but there is only one value per channel.
        """
        K = kernel_size**2
        u_NEHW = self._patch_layers(center_NCHW, around_NRHW, kernel_size, len(self))
        if u_NEHW.is_cuda and self._is_plain(len(self)):
            return u_NEHW.unflatten(1, (K, -1)).transpose(1, 2).flatten(3)
        return u_NEHW.unflatten(1, (-1, K)).flatten(3)

    def attend_patches(self, center_NCHW: Tensor, around_NRHW: Tensor, beta_NMHW: Tensor, kernel_size: int) -> Tensor:
        """The weighted sum of beta with the weights of `patch_weights`, [N, M, H, W]. Requires `fuses_patch_values`. On CPUs,
        half types are computed in float32."""
        u_NEHW, last = self._patch_layers(center_NCHW, around_NRHW, kernel_size, len(self) - 1), self[-1]
        assert isinstance(last, nn.Conv2d) and last.bias is not None
        wide = last.weight.dtype if beta_NMHW.is_cuda else torch.promote_types(beta_NMHW.dtype, torch.float32)
        values = beta_NMHW if beta_NMHW.is_cuda else beta_NMHW.to(wide)
        layer = last.weight.flatten(1).to(wide), last.bias.to(wide)
        return kernels.attend_patches(u_NEHW.to(wide), *layer, values, kernel_size).to(beta_NMHW.dtype)

    def _patch_layers(self, center_NCHW: Tensor, around_NRHW: Tensor, kernel_size: int, layers: int) -> Tensor:
        """The result of the first layers for every pixel's patch, [N, E, H, W]."""
        dtype, (N, _, H, W) = around_NRHW.dtype, around_NRHW.shape
        center, around = _dense(center_NCHW, dtype), _dense(around_NRHW, dtype)
        wide = around.dtype
        norm1, K = self[0], kernel_size**2
        assert isinstance(norm1, nn.BatchNorm2d)

        def affine() -> tuple[Tensor]:
            return (affine_of(norm1, N * H * W, wide, lambda: kernels.patch_statistics(center, around, kernel_size)),)

        (norm,) = affine() if uses_batch(norm1) else kept(norm1, center, None, affine)
        weight, bias = self._rows(2, K, around.is_cuda)
        u_NEHW = kernels.patch_linear(center, around, norm, weight.to(dtype if dtype.itemsize == 2 else wide), kernel_size)
        u_NEHW = (u_NEHW if bias is None else u_NEHW + bias[:, None, None]).to(dtype)
        for at in range(3, layers, 3):
            u_NEHW = norm_relu(self[at], self[at + 1], u_NEHW)
            if at + 2 < layers:
                u_NEHW = self._linear(at + 2, K, u_NEHW)
        return u_NEHW

    def _rows(self, at: int, K: int, is_cuda: bool) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a Linear layer. On a GPU, the last layer's rows, [G, K], are in the order in which the aggregation
        reads them, [K, G]."""
        linear = self[at]
        assert isinstance(linear, nn.Conv2d)
        weight, bias = linear.weight.flatten(1), linear.bias
        if not is_cuda or at + 1 < len(self) or not self._is_plain(len(self)):
            return weight, bias

        def reordered() -> tuple[Tensor, ...]:
            return tuple(x.unflatten(0, (-1, K)).transpose(0, 1).flatten(0, 1) for x in (weight, bias) if x is not None)

        weight, *rest = kept(linear, weight, K, reordered)
        return weight, rest[0] if rest else None

    def _linear(self, at: int, K: int, x_NCHW: Tensor) -> Tensor:
        """A Linear layer of gamma; on contiguous maps a matrix product, which is twice as fast as torch's convolution."""
        if not self._is_plain(len(self)):
            y_NCHW: Tensor = self[at](x_NCHW)
            return y_NCHW
        weight, bias = self._rows(at, K, x_NCHW.is_cuda)
        if bias is None or not x_NCHW.is_contiguous():
            return nn.functional.conv2d(x_NCHW, weight[:, :, None, None], bias)
        weight_N = weight.expand(len(x_NCHW), -1, -1)
        return torch.baddbmm(bias[:, None], weight_N, x_NCHW.flatten(2)).unflatten(2, x_NCHW.shape[2:])


def _values(maps: PairMaps, kernel_size: int) -> int:
    """The number of pairs."""
    return maps.center.numel() // maps.center.shape[1] * kernel_size**2


def _matrix(linear: nn.Conv2d) -> Tensor:
    """The weight of a 1x1 convolution. Its bias cancels in the norm or softmax that follows, but DDP expects its gradient,
    0."""
    weight = linear.weight.flatten(1)
    if linear.bias is not None and linear.bias.requires_grad and torch.is_grad_enabled():
        return weight.add(linear.bias[:, None], alpha=0)
    return weight


def _has_norm_inside(x: Tensor) -> bool:
    """Whether `attend_pairs_of_batch` runs on maps like `x`: only GPUs have it."""
    return fuses(x) and x.is_cuda


def _dense(x_NCHW: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return x_NCHW.to(wide).contiguous(memory_format=torch.channels_last)


def _fuses_values_on_gpu(weights: int, beta_NMHW: Tensor) -> bool:
    """Whether kernels for GPUs sum these values with `weights` weight channels."""
    return beta_NMHW.dtype != torch.float64 and beta_NMHW.shape[1] // weights <= 8
