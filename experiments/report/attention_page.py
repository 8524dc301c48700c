"""The attention weights of all layers and pixels as one interactive HTML page that needs no network."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.errors import UserError
from experiments.evaluation.attention import Attention, Floats
from experiments.report import plots
from experiments.report.attention_plot import color_tables
from experiments.report.html import templates


def save_page(networks: Sequence[Mapping[str, Attention]], layer: str, path: Path) -> None:
    """Writes the page, which shows the networks next to each other and starts with one layer.

    Args:
        networks: attention of all pixels, by name of the layer.

    Raises:
        UserError: the file cannot be written.
    """
    first = networks[0][layer]
    data = {
        "size": len(first.image_HW3),
        "image": base64.b64encode((255 * first.image_HW3).round().astype(np.uint8).tobytes()).decode(),
        "colors": color_tables(),
        "networks": [_network(list(layers.values())) for layers in networks],
    }
    title = " and ".join(layers[next(iter(layers))].model for layers in networks)
    page = templates().get_template("attention.html")
    try:
        path.write_text(page.render(colors=plots.COLORS, title=title, picture=first.picture, layer=layer, data=data))
    except OSError as error:
        raise UserError(f"{path}: cannot write this file ({error.strerror}); choose another file with --html") from None


def _network(layers: Sequence[Attention]) -> dict[str, Any]:
    return {"model": layers[0].model, "prediction": layers[0].prediction, "layers": [_layer(layer) for layer in layers]}


def _layer(attention: Attention) -> dict[str, Any]:
    """Weights are stored as [pixel, channel, position], one byte each."""
    codes = _codes(attention).transpose(2, 0, 1)
    return {
        "name": attention.layer,
        "kind": attention.kind,
        "channel": attention.channel,
        "channels": len(attention.weight_GKn),
        "footprint": attention.footprint,
        "reduction": attention.reduction,
        "side": attention.map[0],
        "limit": attention.limit,
        "signed": attention.is_signed,
        "weights": base64.b64encode(zlib.compress(np.ascontiguousarray(codes).tobytes(), 6)).decode(),
    }


def _codes(attention: Attention) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Signed weights as 0 to 254 in steps of equal size; others as 0 to 255 on a square-root scale, like their colors."""
    share: Floats = attention.weight_GKn / attention.limit
    scaled = 127 + 127 * share if attention.is_signed else 255 * np.sqrt(share)
    return scaled.round().astype(np.uint8)
