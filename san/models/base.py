"""What all models share: a `ModelSpec`, which describes a model in numbers, and a `BaseModel`, which is built from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

MAX_CHANNELS, MAX_BLOCKS = 2**16, 1000
"""Largest sizes of a stage. Anything larger is a typing error, for which torch would run out of memory."""

RENAMED_FIELDS = {"stages": "num_stages", "width_factor": "width_mult", "share": "group_size"}
"""New name of each field that was renamed for version 0.1.0. `load_checkpoint` still reads files with the old names."""


class GlobalAveragePool(nn.Module):
    """[N, C, H, W] to [N, C]."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return x_NCHW.mean((2, 3))


class BaseModel(nn.Module):
    """A stem and stages, followed by average pooling and a Linear classifier unless the model is a backbone.

    Attributes:
        spec: description from which the model was built.
        in_channels: C of the images.
        channels: C of each map of `features`.
        reductions: side of the image divided by the side of each map.
    """

    classifier_name: ClassVar[str]
    """Name of the Linear classifier's module."""
    spec: ModelSpec
    in_channels: int
    channels: tuple[int, ...]
    reductions: tuple[int, ...]

    def __init__(self, spec: ModelSpec, in_channels: int) -> None:
        check_count("in_channels", in_channels)
        super().__init__()
        self.spec, self.in_channels = spec, in_channels

    def features(self, x_NCHW: Tensor) -> tuple[Tensor, ...]:
        """The feature map of each stage, largest first."""
        raise NotImplementedError

    def parts(self) -> dict[str, list[nn.Module]]:
        """The modules of the stem, of each stage and of the head, by the names that tables print."""
        raise NotImplementedError

    def forward(self, x_NCHW: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Images [N, in_channels, H, W] to logits [N, num_classes]; a backbone returns `features`.

        Raises:
            ValueError: the images have another shape, dtype or device than the model, or are too small for a footprint.
        """
        maps = self.features(x_NCHW)
        if self.classifier is None:
            return maps
        logits: Tensor = self.classifier(self.pool(maps[-1]))
        return logits

    @property
    def classifier(self) -> nn.Module | None:
        """The last layer; None for a backbone."""
        return self._modules.get(self.classifier_name)

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for a backbone, or if the classifier was replaced with something other than a Linear layer."""
        return self.classifier.out_features if isinstance(self.classifier, nn.Linear) else 0

    def reset_classifier(self, num_classes: int) -> None:
        """Replaces the classifier with a new one for `num_classes` classes, for fine-tuning. Other weights stay the same.

        Raises:
            ValueError: `num_classes` is not positive, or the model is a backbone.
        """
        check_count("num_classes", num_classes)
        if self.classifier is None:
            raise ValueError(
                f"{self.spec.name} was built with features_only=True and has no classifier; create it without features_only"
            )
        weight = next(self.parameters())
        setattr(self, self.classifier_name, nn.Linear(self.channels[-1], num_classes, device=weight.device, dtype=weight.dtype))

    def _add_head(self, num_classes: int | None) -> None:
        """Adds pooling and classifier, unless the model is a backbone."""
        if num_classes is not None:
            check_count("num_classes", num_classes)
            self.pool = GlobalAveragePool()
            self.add_module(self.classifier_name, nn.Linear(self.channels[-1], num_classes))

    def _head(self) -> dict[str, list[nn.Module]]:
        return {} if self.classifier is None else {"head": [self.pool, self.classifier]}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(name: str, count: object) -> None:
    """Raises ValueError unless `count` is a positive integer."""
    if not _is_integer(count) or count < 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be an integer of at least 1, not {count!r}")


# Which values a field of a spec may have, by its annotation.
FIELD_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a name"),
    "int": (_is_integer, "an integer"),
    "int | None": (lambda value: value is None or _is_integer(value), "an integer or None"),
    "float": (lambda value: _is_integer(value) or isinstance(value, float), "a number"),
    "tuple[int, ...]": (lambda value: isinstance(value, tuple) and all(map(_is_integer, value)), "a list of integers"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model in numbers: a row of the registry.

    `num_stages` keeps only the first stages, and `width_mult` scales all widths. Small profiles use both, so that the named
    variants differ from each other as they do at full size.
    """

    name: str
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    num_stages: int | None = None
    width_mult: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            is_valid, expected = FIELD_TYPES[str(field.type)]
            if not is_valid(getattr(self, field.name)):
                raise ValueError(f"{self.name}: {field.name} must be {expected}, not {getattr(self, field.name)!r}")
        if len(self.depths) != len(self.widths):
            raise ValueError(f"{self.name}: {len(self.depths)} depths but {len(self.widths)} widths; give one per stage")
        if self.num_stages is not None and not 1 <= self.num_stages <= len(self.depths):
            raise ValueError(f"{self.name}: num_stages must be 1 to {len(self.depths)}, not {self.num_stages}")
        if not 0 < self.width_mult < math.inf:
            raise ValueError(f"{self.name}: width_mult must be positive, not {self.width_mult}")
        if max(self.scaled_widths(), default=0) > MAX_CHANNELS:
            raise ValueError(f"{self.name}: a stage may have at most {MAX_CHANNELS} channels, not {max(self.scaled_widths())}")
        if max(self.depths, default=0) > MAX_BLOCKS:
            raise ValueError(f"{self.name}: a stage may have at most {MAX_BLOCKS} blocks, not {max(self.depths)}")
        if not self.depths or min(self.depths) < 1 or min(self.scaled_widths()) < 1:
            shape = f"depths {self.depths} and widths {self.scaled_widths()}"
            raise ValueError(f"{self.name}: each stage needs at least one block and one channel, not {shape}")

    def kept_depths(self) -> tuple[int, ...]:
        """Number of blocks of each stage that is kept."""
        return self.depths[: self.num_stages]

    def scaled_widths(self) -> tuple[int, ...]:
        """Number of channels of each stage that is kept."""
        return tuple(int(width * self.width_mult) for width in self.widths[: self.num_stages])

    def check_input(self, size: int) -> None:
        """Raises ValueError if images of `size` x `size` pixels are too small for the model."""
        raise NotImplementedError

    def build(self, num_classes: int | None, in_channels: int = 3) -> BaseModel:
        """The model with fresh weights; a backbone if `num_classes` is None.

        Raises:
            ValueError: a number of classes or channels is not positive, or the sizes of the spec do not fit together.
        """
        raise NotImplementedError
