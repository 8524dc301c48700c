"""SAN10 whose attention weights are changed in one respect, for `weights.yaml`."""

from functools import partial

import torch
from torch import Tensor, nn

import san


@san.register_model("san10_weights")
def san10_weights(
    num_classes: int,
    in_channels: int = 3,
    kind: str = "pairwise",
    softmax: bool = True,
    constant: bool = False,
    num_stages: int = 3,
    width_mult: float = 0.5,
) -> nn.Module:
    """Attention weights with or without a softmax over the footprint, and with or without a learned constant for each weight
    channel and position of the footprint: the bias that gamma's last layer has in patchwise attention."""
    model = san.create_model(
        f"san10_{kind}", num_classes, in_channels=in_channels, num_stages=num_stages, width_mult=width_mult
    )
    for layer in model.modules():
        if isinstance(layer, san.PatchwiseAttention):
            if not constant:
                layer.gamma[-1].register_parameter("bias", None)
            layer.attention_weights = partial(_patchwise, layer, softmax)
        if isinstance(layer, san.PairwiseAttention):
            if constant:
                bound = layer.gamma[-1].in_channels ** -0.5  # as in a 1x1 convolution
                shape = layer.weight_channels, layer.footprint**2, 1
                layer.constant_GK1 = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
            layer.attention_weights = partial(_pairwise, layer, softmax)
    return model


def _patchwise(layer: san.PatchwiseAttention, softmax: bool, phi_NRHW: Tensor, psi_NRHW: Tensor) -> Tensor:
    weight_NGKP = san.PatchwiseAttention.attention_weights(layer, phi_NRHW, psi_NRHW)
    return weight_NGKP.softmax(2) if softmax else weight_NGKP


def _pairwise(layer: san.PairwiseAttention, softmax: bool, phi_NRHW: Tensor, psi_NRHW: Tensor) -> Tensor:
    """Of the default relation and position."""
    relation_NRKP = san.ops.subtraction(phi_NRHW, psi_NRHW, layer.footprint)
    position_12KP = layer.position(phi_NRHW, layer.footprint)
    weight_NGKP = layer.gamma(torch.cat((relation_NRKP, position_12KP.expand(len(phi_NRHW), -1, -1, -1)), 1))
    if hasattr(layer, "constant_GK1"):
        weight_NGKP = weight_NGKP + layer.constant_GK1
    return weight_NGKP.softmax(2) if softmax else weight_NGKP
