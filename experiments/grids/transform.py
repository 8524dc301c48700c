"""Creates the image transform of a trial's configuration."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.grids.config import DataConfig
from pipelines import Transform, TransformError


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


def transform_errors(config: DataConfig) -> Iterator[tuple[str, str]]:
    """Values that are valid, but not in combination, as (path of the key, error)."""
    try:
        transform(config)
    except TransformError as error:
        for field, what in error.fields.items():
            yield f"data.{field}", what
