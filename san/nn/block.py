"""The self-attention block (section 3.3, figure "Our self-attention block")."""

from __future__ import annotations

from torch import Tensor, nn

from san.nn.attention import SelfAttention
from san.nn.depth import drop_path
from san.nn.norm import convolve, norm_relu, norm_relu_branch


class SelfAttentionBlock(nn.Module):
    """Residual block: BN, ReLU, attention, BN, ReLU, Linear back to C channels, + identity. Keeps [N, C, H, W].

    `drop_path_rate` is the probability with which training skips the block for an image.
    """

    drop_path_rate = 0.0

    def __init__(self, channels: int, attention: SelfAttention) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.attention = attention
        self.norm2 = nn.BatchNorm2d(attention.value_channels)
        self.relu2 = nn.ReLU()
        self.linear = nn.Conv2d(attention.value_channels, channels, 1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x_NCHW, y_NCHW = norm_relu_branch(self.norm1, self.relu1, x_NCHW)
        y_NMHW = self.attention(y_NCHW)
        y_NCHW = convolve(self.linear, norm_relu(self.norm2, self.relu2, y_NMHW))
        return x_NCHW + drop_path(y_NCHW, self.drop_path_rate, self.training)
