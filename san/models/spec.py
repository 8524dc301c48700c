"""What all models share: a record of numbers, and a trunk of stages under a classifier's head or used as a backbone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn


class Trunk(nn.Module):
    """Stem and stages of a network.

    Attributes:
        spec: the record that it was built from.
        in_channels: C of the images.
        channels: C of each map of `features`.
        reductions: side of the image over the side of each map.
    """

    spec: ModelSpec
    in_channels: int
    channels: tuple[int, ...]
    reductions: tuple[int, ...]

    def __init__(self, in_channels: int) -> None:
        check_count("in_channels", in_channels)
        super().__init__()
        self.in_channels = in_channels

    def features(self, x_N3HW: Tensor) -> tuple[Tensor, ...]:
        """The maps that the stages answer with, largest first."""
        raise NotImplementedError

    def parts(self) -> dict[str, list[nn.Module]]:
        """The modules that make up the stem, each stage and the head, by the names that tables print."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        """Classes that the head answers with; 0 without one, and of a backbone."""
        *_, head = self.parts().get("head", [None])
        return head.out_features if isinstance(head, nn.Linear) else 0

    def reset_classifier(self, num_classes: int) -> None:
        """Replaces the head by a fresh one for so many classes, and leaves the other weights as they are: for fine-tuning.

        Raises:
            ValueError: no classes, or a backbone.
        """
        check_count("num_classes", num_classes)
        if "head" not in self.parts():
            raise ValueError(
                f"{self.spec.name} was built with features_only=True and has no classifier; create it without features_only"
            )
        *_, old = self.parts()["head"]
        (name,) = (name for name, module in self.named_children() if module is old)
        weight = next(self.parameters())
        setattr(self, name, nn.Linear(self.channels[-1], num_classes, device=weight.device, dtype=weight.dtype))


MOST_CHANNELS, MOST_BLOCKS = 2**16, 1000
"""Of a stage. More are a slip of the pen, and end in torch's words on memory, or not at all."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(name: str, count: int) -> None:
    """Raises ValueError where it is no number of classes or channels."""
    if not _is_whole(count) or count < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {count!r}")


# What a field of a record may hold, by its annotation.
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a name"),
    "int": (_is_whole, "an integer"),
    "int | None": (lambda value: value is None or _is_whole(value), "an integer or None"),
    "float": (lambda value: _is_whole(value) or isinstance(value, float), "a number"),
    "tuple[int, ...]": (lambda value: isinstance(value, tuple) and all(map(_is_whole, value)), "a list of integers"),
}


RENAMED_FIELDS = {"stages": "num_stages", "width_factor": "width_mult", "share": "group_size"}
"""New name of each field that was renamed for version 0.1.0. `load_checkpoint` still reads files with the old names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model by numbers: a row of the registry.

    `num_stages` keeps only that many first stages, `width_mult` scales every width: a small profile uses both, so that each
    named variant still differs from the others as it does at full size.
    """

    name: str
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    num_stages: int | None = None
    width_mult: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            kind = str(field.type)
            assert kind in KINDS, (
                f"{type(self).__name__}.{field.name}: no row of KINDS for {kind!r}, only for {', '.join(KINDS)}"
            )
            holds, words = KINDS[kind]
            if not holds(getattr(self, field.name)):
                raise ValueError(f"{self.name}: {field.name} must be {words}, not {getattr(self, field.name)!r}")
        if len(self.depths) != len(self.widths):
            raise ValueError(f"{self.name}: {len(self.depths)} depths but {len(self.widths)} widths; give one per stage")
        if self.num_stages is not None and not 1 <= self.num_stages <= len(self.depths):
            raise ValueError(f"{self.name}: num_stages must be 1 to {len(self.depths)}, not {self.num_stages}")
        if not 0 < self.width_mult < math.inf:
            raise ValueError(f"{self.name}: width_mult must be positive, not {self.width_mult}")
        if max(self.scaled_widths(), default=0) > MOST_CHANNELS:
            raise ValueError(f"{self.name}: a stage may have at most {MOST_CHANNELS} channels, not {max(self.scaled_widths())}")
        if max(self.depths, default=0) > MOST_BLOCKS:
            raise ValueError(f"{self.name}: a stage may have at most {MOST_BLOCKS} blocks, not {max(self.depths)}")
        if not self.depths or min(self.depths) < 1 or min(self.scaled_widths()) < 1:
            shape = f"depths {self.depths} and widths {self.scaled_widths()}"
            raise ValueError(f"{self.name}: each stage needs at least one block and one channel, not {shape}")

    def kept_depths(self) -> tuple[int, ...]:
        """Blocks in each stage that is kept."""
        return self.depths[: self.num_stages]

    def scaled_widths(self) -> tuple[int, ...]:
        """Channels of each stage that is kept."""
        return tuple(int(width * self.width_mult) for width in self.widths[: self.num_stages])

    def check_input(self, size: int) -> None:
        """Raises ValueError where a square input of `size` pixels is too small for the model."""
        raise NotImplementedError

    def build(self, num_classes: int, in_channels: int = 3) -> Trunk:
        """The classifier with fresh weights, images [N, in_channels, H, W] to logits [N, num_classes].

        Raises:
            ValueError: no classes or channels, or numbers that do not fit together.
        """
        check_count("num_classes", num_classes)
        return self.build_classifier(num_classes, in_channels)

    def build_classifier(self, num_classes: int, in_channels: int) -> Trunk:
        """`build` for a number of classes that was checked."""
        raise NotImplementedError

    def build_backbone(self, in_channels: int = 3) -> Trunk:
        """The same without its head, images [N, in_channels, H, W] to `Trunk.features`; parameters keep their names."""
        raise NotImplementedError
