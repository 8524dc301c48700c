"""Creates the image transform of a trial's configuration."""

from __future__ import annotations

from experiments.grids.config import DataConfig
from pipelines import Transform


def transform(config: DataConfig) -> Transform:
    """The transform of a configuration."""
    return Transform(
        size=config.size,
        resize=config.resize,
        crop_area=config.crop_area,
        crop_ratio=config.crop_ratio,
        crop_padding=config.crop_padding,
        flip=config.flip,
        mean=config.mean,
        std=config.std,
    )
