"""Zero-shot accuracy on images that are rotated by 90, 180 and 270 degrees clockwise or flipped upside down.

Training does not rotate images. Preprocessed squares are rotated, so no pixel is interpolated or comes into view. Upside down
is a flip about the horizontal axis, as in the paper: rows change places, columns do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.evaluation.evaluate import LoadedModel, evaluate_checkpoint
from experiments.evaluation.protocol import Condition, Ended, Numbers, Protocol
from experiments.grids.transform import transform
from pipelines import Dataset


@dataclass(frozen=True, slots=True)
class Rotation:
    """Measures accuracy on images after one of the `MANIPULATIONS` in `pipelines.transform`."""

    manipulation: str

    def __call__(self, opened: LoadedModel, images: Dataset, batch: int, ended: Ended) -> Numbers:
        turned = replace(transform(opened.config.data), manipulation=self.manipulation)
        evaluation = evaluate_checkpoint(opened, images, turned, ended, batch)
        return {"top1": evaluation.top1, "top5": evaluation.top5}


def _condition(name: str, manipulation: str) -> Condition:
    return Condition(name, manipulation, ("top1", "top5"), Rotation(manipulation))


PROTOCOL = Protocol(
    conditions=(
        _condition("none", "none"),
        _condition("cw90", "rotate90"),
        _condition("cw180", "rotate180"),
        _condition("cw270", "rotate270"),
        _condition("upside_down", "upside_down"),
    ),
    caption="Zero-shot accuracy on images rotated clockwise (cw) or flipped upside down. "
    "Drop: percentage points lost compared with `none`.",
)
