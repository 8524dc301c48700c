"""SAN10 whose pairwise attention is a depthwise convolution when training starts, for `start.yaml`."""

import torch
from torch import Tensor, nn

import san


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@san.register_model("san10_start")
def san10_start(
    num_classes: int, in_channels: int = 3, scale: float = 1.0, num_stages: int = 3, width_mult: float = 0.5
) -> nn.Module:
    """SAN10 of `weights.py` without a softmax and with a constant for each position, whose first values are those of
    `convolution.py`. The rest of the weights, `scale` times gamma, is 0 at first, because the last layer of gamma is."""
    model = san.create_model(
        "san10_weights",
        num_classes,
        in_channels=in_channels,
        num_stages=num_stages,
        width_mult=width_mult,
        softmax=False,
        constant=True,
    )
    for layer in model.modules():
        if isinstance(layer, san.PairwiseAttention):
            nn.init.zeros_(layer.gamma[-1].weight)
            nn.init.zeros_(layer.gamma[-1].bias)
            layer.gamma.append(Scale(scale))
            with torch.no_grad():
                layer.constant_GK1.uniform_(-1 / layer.footprint, 1 / layer.footprint)
    return model
