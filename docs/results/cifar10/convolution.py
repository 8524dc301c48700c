"""SAN10 with a convolution in place of attention, for `convolution.yaml`."""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

import san
from san.nn import SelfAttentionBlock


class Convolution(nn.Module):
    """The weighted sum of beta with learned constants as weights: a depthwise convolution. As in attention, value channel c
    uses weight channel c % G, and images are reflected at their borders."""

    def __init__(self, attention: san.PairwiseAttention) -> None:
        super().__init__()
        self.beta, self.value_channels = attention.beta, attention.value_channels
        G, k = attention.weight_channels, attention.footprint
        self.weight_G1kk = nn.Parameter(torch.empty(G, 1, k, k).uniform_(-1 / k, 1 / k))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        weight_M1kk = self.weight_G1kk.repeat(self.value_channels // len(self.weight_G1kk), 1, 1, 1)
        padded = pad(self.beta(x_NCHW), [weight_M1kk.shape[-1] // 2] * 4, mode="reflect")
        return conv2d(padded, weight_M1kk, groups=self.value_channels)


@san.register_model("san10_convolution")
def san10_convolution(num_classes: int, in_channels: int = 3, num_stages: int = 3, width_mult: float = 0.5) -> nn.Module:
    model = san.create_model(
        "san10_pairwise", num_classes, in_channels=in_channels, num_stages=num_stages, width_mult=width_mult
    )
    for block in model.modules():
        if isinstance(block, SelfAttentionBlock):
            block.attention = Convolution(block.attention)
    return model
