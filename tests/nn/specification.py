"""The paper's formulas for attention in plain loops over pixels: slow, and independent of `san.ops`.

Source: Zhao, Jia, Koltun, CVPR 2020, section 3; for scalar attention Ramachandran et al., NeurIPS 2019, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from san.nn import PairwiseAttention, PatchwiseAttention, ScalarAttention, SelfAttention

Pixel = tuple[int, int]


def reflected(coordinate: int, size: int) -> int:
    """Reflects a coordinate at the border pixels into the range 0 to size - 1."""
    while not 0 <= coordinate < size:
        coordinate = -coordinate if coordinate < 0 else 2 * (size - 1) - coordinate
    return coordinate


def footprint(i: Pixel, side: int, height: int, width: int) -> list[Pixel]:
    """R(i), row by row."""
    reach = range(-(side // 2), side // 2 + 1)
    return [(reflected(i[0] + dy, height), reflected(i[1] + dx, width)) for dy in reach for dx in reach]


def pair(relation: str, phi_i: Tensor, psi_j: Tensor) -> Tensor:
    """delta(x_i, x_j), [N, d]."""
    if relation == "summation":
        return phi_i + psi_j
    if relation == "subtraction":
        return phi_i - psi_j
    if relation == "concatenation":
        return torch.cat((phi_i, psi_j), 1)
    if relation == "hadamard":
        return phi_i * psi_j
    assert relation == "dot"
    return (phi_i * psi_j).sum(1, keepdim=True)


def patch(relation: str, shared: bool, phi_i: Tensor, phi_js: list[Tensor], psi_js: list[Tensor]) -> Tensor:
    """delta(x_R(i)), [N, d]."""
    if relation == "star":
        return torch.stack([(phi_i * psi_j).sum(1) for psi_j in psi_js], 1)
    if relation == "clique":
        return torch.stack([(phi_j * psi_k).sum(1) for phi_j in phi_js for psi_k in psi_js], 1)
    assert relation == "concatenation"
    # Channels vary slowest, as in the released code: all places of channel 0, then of channel 1, ...
    places = torch.stack(psi_js, 2).flatten(1)
    return places if shared else torch.cat((phi_i, places), 1)


def gamma(layers: nn.Sequential, delta: Tensor) -> Tensor:
    """BatchNorm, ReLU, Linear, ... along the channels of [N, d, ...]; batch statistics in training mode."""
    x = delta.movedim(1, -1)
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d):
            over = tuple(range(x.dim() - 1))
            mean, variance = (
                (x.mean(over), x.var(over, correction=0)) if layer.training else (layer.running_mean, layer.running_var)
            )
            x = (x - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias
        elif isinstance(layer, nn.ReLU):
            x = x * (x > 0)
        else:
            assert isinstance(layer, nn.Conv2d)
            x = x @ layer.weight[:, :, 0, 0].T
            x = x if layer.bias is None else x + layer.bias
    return x.movedim(-1, 1)


def linear(layer: nn.Module, x_NCHW: Tensor) -> Tensor:
    assert isinstance(layer, nn.Conv2d) and layer.bias is not None
    return torch.einsum("nchw,oc->nohw", x_NCHW, layer.weight[:, :, 0, 0]) + layer.bias[:, None, None]


def attention(module: SelfAttention, x_NCHW: Tensor) -> Tensor:
    """y [N, M, H, W]."""
    N, _, H, W = x_NCHW.shape
    pixels = [(h, w) for h in range(H) for w in range(W)]
    around = {i: footprint(i, module.footprint, H, W) for i in pixels}
    phi, psi, beta = (linear(module.get_submodule(role), x_NCHW) for role in module.roles)

    if isinstance(module, PairwiseAttention):
        places = {i: [pair(module.relation, phi[:, :, *i], psi[:, :, *j]) for j in around[i]] for i in pixels}
        if module.position is not None:
            xy = {(h, w): torch.tensor([2 * w / (W - 1) - 1, 2 * h / (H - 1) - 1]).to(x_NCHW) for h, w in pixels}
            weight, bias = module.position.linear.weight[:, :, 0, 0], module.position.linear.bias
            p = {i: weight @ xy[i] + bias for i in pixels}
            for i in pixels:
                encoded = [p[i] - p[j] if module.position.encoding == "relative" else p[j] for j in around[i]]
                places[i] = [torch.cat((d, t.expand(N, 2)), 1) for d, t in zip(places[i], encoded, strict=True)]
        delta = torch.stack([torch.stack(places[i], 2) for i in pixels], 3)  # [N, d, K, P]
        alpha = gamma(module.gamma, delta).exp()
        alpha = alpha / alpha.sum(2, keepdim=True)
    elif isinstance(module, PatchwiseAttention):
        shared = module.roles[0] == module.roles[1]
        patches = [
            patch(
                module.relation, shared, phi[:, :, *i], [phi[:, :, *j] for j in around[i]], [psi[:, :, *j] for j in around[i]]
            )
            for i in pixels
        ]
        alpha = gamma(module.gamma, torch.stack(patches, 2)).unflatten(1, (module.weight_channels, -1))  # [N, G, K, P]
    else:
        assert isinstance(module, ScalarAttention)
        k, heads = module.footprint, module.weight_channels
        offsets = [torch.cat((module.rows[:, dy, 0], module.columns[:, 0, dx])) for dy in range(k) for dx in range(k)]
        scores = [
            [
                torch.stack([(phi[:, h::heads, *i] * (psi[:, h::heads, *j] + r[h::heads])).sum(1) for h in range(heads)], 1)
                for j, r in zip(around[i], offsets, strict=True)
            ]
            for i in pixels
        ]
        alpha = torch.stack([torch.stack(row, 2) for row in scores], 3).exp()
        alpha = alpha / alpha.sum(2, keepdim=True)

    G, M = alpha.shape[1], beta.shape[1]
    y = [
        torch.stack([sum(alpha[:, c % G, o, n] * beta[:, c, *j] for o, j in enumerate(around[i])) for c in range(M)], 1)
        for n, i in enumerate(pixels)
    ]
    return torch.stack(y, 2).unflatten(2, (H, W))
