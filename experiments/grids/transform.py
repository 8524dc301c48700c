"""The transform that a trial's configuration describes."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.grids.config import DataConfig
from pipelines import Transform, TransformError


def transform(config: DataConfig) -> Transform:
    """What happens to an image before the model."""
    return Transform(
        size=config.size,
        resize=config.resize,
        crop_area=config.crop_area,
        crop_ratio=config.crop_ratio,
        flip=config.flip,
        mean=config.mean,
        std=config.std,
    )


def transform_mistakes(config: DataConfig) -> Iterator[tuple[str, str]]:
    """What keeps a transform from being made of values that are right alone, as (path of the key, what is wrong)."""
    try:
        transform(config)
    except TransformError as error:
        for field, what in error.fields.items():
            yield f"data.{field}", what
