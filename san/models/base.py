"""What all models share: a `ModelSpec`, which describes a model in numbers, and a `BaseModel`, which is built from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import dropout

from san.choice import ModelError, check_counts, is_integer
from san.nn.depth import Blocks

MAX_CHANNELS, MAX_BLOCKS = 2**16, 1000
"""Largest sizes of a stage. Anything larger is a typing error, for which torch would run out of memory."""


class GlobalAveragePool(nn.Module):
    """[N, C, H, W] to [N, C]."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return x_NCHW.mean((2, 3))


NO_CLASSIFIER = "{name} was built with features_only=True and has no classifier; create it without features_only"


class BaseModel(nn.Module):
    """A stem and stages, followed by average pooling and a Linear classifier unless the model is a backbone.

    Implements the protocol of timm's models, so that timm's tools work with it (see `san.timm`).

    Attributes:
        spec: description from which the model was built.
        in_channels: C of the images.
        channels: C of each map of `features`.
        reductions: side of the image divided by the side of each map.
        stage_names: name of the module of each stage.
        drop_rate: probability with which training drops a channel before the classifier.
        pretrained_cfg: of a trained model, as in timm, the size, mean and std of its images and its classes (`label_names`).
    """

    classifier_name: ClassVar[str]
    """Name of the Linear classifier's module."""
    spec: ModelSpec
    in_channels: int
    channels: tuple[int, ...]
    reductions: tuple[int, ...]
    stage_names: list[str]
    drop_rate = 0.0
    pretrained_cfg: dict[str, Any]

    def __init__(self, spec: ModelSpec, in_channels: int) -> None:
        check_counts(in_channels=in_channels)
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
        return maps if self.classifier is None else self.forward_head(maps[-1])

    def forward_features(self, x_NCHW: Tensor) -> Tensor:
        """The last feature map."""
        return self.features(x_NCHW)[-1]

    def forward_head(self, x_NCHW: Tensor, pre_logits: bool = False) -> Tensor:
        """Pools the last feature map and classifies it, unless `pre_logits` is set: [N, num_features] or [N, num_classes]."""
        if self.classifier is None:
            raise ValueError(NO_CLASSIFIER.format(name=self.spec.name))
        x_NC: Tensor = self.pool(x_NCHW)
        if self.drop_rate > 0:
            x_NC = dropout(x_NC, self.drop_rate, self.training)
        return x_NC if pre_logits else self.classifier(x_NC)

    def forward_intermediates(
        self,
        x_NCHW: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps of `features` with these indices (the last n for an integer, all for None), and the last map before them.

        All maps are computed, normalized and in the format NCHW, so `norm` and `stop_early` have no effect.

        Raises:
            ValueError: another `output_fmt`, or an index that does not exist.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', not {output_fmt!r}")
        count = len(self.channels)
        wanted = (
            range(count) if indices is None else range(max(count - indices, 0), count) if isinstance(indices, int) else indices
        )
        if not all(-count <= index < count for index in wanted):
            raise ValueError(f"indices must be between {-count} and {count - 1}, not {list(wanted)}")
        maps = self.features(x_NCHW)
        chosen = [maps[index] for index in wanted]
        return chosen if intermediates_only else (maps[-1], chosen)

    @property
    def classifier(self) -> nn.Module | None:
        """The last layer; None for a backbone."""
        return self._modules.get(self.classifier_name)

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for a backbone, or if the classifier was replaced with something other than a Linear layer."""
        return self.classifier.out_features if isinstance(self.classifier, nn.Linear) else 0

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier with a new one for fine-tuning. Other weights stay the same.

        With 0 classes, the model returns the pooled features, [N, num_features].

        Raises:
            ValueError: `num_classes` is negative, `global_pool` is neither "avg" nor None, or the model is a backbone.
        """
        if self.classifier is None:
            raise ValueError(NO_CLASSIFIER.format(name=self.spec.name))
        if global_pool not in (None, "avg"):
            raise ValueError(f"global_pool must be 'avg', not {global_pool!r}")
        weight = next(self.parameters())
        self.add_module(
            self.classifier_name, self._new_classifier(num_classes).to(weight.device, weight.dtype).train(self.training)
        )
        if known := getattr(self, "pretrained_cfg", None):  # not with the names of the old classes
            self.pretrained_cfg = {key: value for key, value in known.items() if key not in ("num_classes", "label_names")}

    def get_classifier(self) -> nn.Module | None:
        """The last layer; None for a backbone."""
        return self.classifier

    @property
    def num_features(self) -> int:
        """Channels of the last feature map."""
        return self.channels[-1]

    head_hidden_size = num_features

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Channels, reduction and module name of each map of `features`."""
        modules = [*self.parts()["stem"][:1], *map(self.get_submodule, self.stage_names)][-len(self.channels) :]
        names = {module: name for name, module in self.named_modules()}
        rows = zip(self.channels, self.reductions, modules, strict=True)
        return [{"num_chs": channels, "reduction": side, "module": names[module]} for channels, side, module in rows]

    def set_drop_rates(self, drop_rate: float = 0.0, drop_path_rate: float = 0.0) -> None:
        """Sets dropout before the classifier, and stochastic depth that grows linearly to `drop_path_rate` in the last block.

        Raises:
            ValueError: a rate is not in [0, 1).
        """
        for name, rate in (("drop_rate", drop_rate), ("drop_path_rate", drop_path_rate)):
            if not 0 <= rate < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {rate}")
        self.drop_rate = drop_rate
        blocks = [block for module in self.modules() if isinstance(module, Blocks) for block in module]
        for number, block in enumerate(blocks):
            block.drop_path_rate = drop_path_rate * number / max(len(blocks) - 1, 1)  # type: ignore[assignment]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes the blocks' activations in the backward pass, which saves memory. Running statistics are updated once."""
        for module in self.modules():
            if isinstance(module, Blocks):
                module.checkpoints = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that assign parameters to the stem and to stages or blocks, for timm's layer-wise learning rates."""
        stage = self.stage_names[0].rstrip("1")  # stage1 or layer1
        inside = rf"^{stage}(\d+)\.(?:blocks\.)?(\d+)"
        coarse_blocks = rf"^{stage}(\d+)"
        stem = rf"^(?!{stage}\d|{self.classifier_name}\.)"
        return {"stem": stem, "blocks": coarse_blocks if coarse else [(inside, None), (coarse_blocks, (0,))]}

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay: none, as in the paper."""
        return set()

    def _new_classifier(self, num_classes: int) -> nn.Module:
        if num_classes == 0 and not isinstance(num_classes, bool):
            return nn.Identity()
        check_counts(num_classes=num_classes)
        return nn.Linear(self.channels[-1], num_classes)

    def _add_head(self, num_classes: int | None) -> None:
        """Adds pooling and classifier, unless the model is a backbone."""
        if num_classes is not None:
            self.pool = GlobalAveragePool()
            self.add_module(self.classifier_name, self._new_classifier(num_classes))

    def _head(self) -> dict[str, list[nn.Module]]:
        return {} if self.classifier is None else {"head": [self.pool, self.classifier]}


# Which values a field of a spec may have, by its annotation.
FIELD_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a name"),
    "int": (is_integer, "an integer"),
    "int | None": (lambda value: value is None or is_integer(value), "an integer or None"),
    "float": (lambda value: is_integer(value) or isinstance(value, float), "a number"),
    "tuple[int, ...]": (lambda value: isinstance(value, tuple) and all(map(is_integer, value)), "a list of integers"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A row of the registry: the name of a model and its settings, from which it is built."""

    name: str

    def check_input(self, size: int) -> None:
        """Raises ValueError if images of `size` x `size` pixels are too small for the model."""
        raise NotImplementedError

    def build(self, num_classes: int | None, in_channels: int = 3) -> BaseModel:
        """The model with fresh weights; a backbone if `num_classes` is None.

        Raises:
            ValueError: a number of classes or channels is not positive, or the sizes of the spec do not fit together.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSpec(ModelSpec):
    """A network with stages in numbers.

    `num_stages` keeps only the first stages, so that the side of the map is halved so many times: 5 is a full SAN and a full
    ResNet. `width_mult` scales all widths. Small profiles use both, so that the named variants differ from each other as they
    do at full size.
    """

    stem_halvings: ClassVar[int] = 0
    """How often the side of the map is halved besides once per stage."""
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    num_stages: int | None = None
    width_mult: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            is_valid, expected = FIELD_TYPES[str(field.type)]
            if not is_valid(getattr(self, field.name)):
                raise ModelError(f"{self.name}: {field.name} must be {expected}, not {getattr(self, field.name)!r}")
        if len(self.depths) != len(self.widths):
            raise ModelError(f"{self.name}: {len(self.depths)} depths but {len(self.widths)} widths; give one per stage")
        least, most = self.stem_halvings + 1, self.stem_halvings + len(self.depths)
        if self.num_stages is not None and not least <= self.num_stages <= most:
            raise ModelError(f"{self.name}: num_stages must be {least} to {most}, not {self.num_stages}")
        if not 0 < self.width_mult < math.inf:
            raise ModelError(f"{self.name}: width_mult must be positive, not {self.width_mult}")
        if max(self.scaled_widths(), default=0) > MAX_CHANNELS:
            raise ModelError(f"{self.name}: a stage may have at most {MAX_CHANNELS} channels, not {max(self.scaled_widths())}")
        if max(self.depths, default=0) > MAX_BLOCKS:
            raise ModelError(f"{self.name}: a stage may have at most {MAX_BLOCKS} blocks, not {max(self.depths)}")
        if not self.depths or min(self.depths) < 1 or min(self.scaled_widths()) < 1:
            shape = f"depths {self.depths} and widths {self.scaled_widths()}"
            raise ModelError(f"{self.name}: each stage needs at least one block and one channel, not {shape}")

    def kept_depths(self) -> tuple[int, ...]:
        """Number of blocks of each stage that is kept."""
        return self.depths[: self._kept()]

    def scaled_widths(self) -> tuple[int, ...]:
        """Number of channels of each stage that is kept."""
        return tuple(int(width * self.width_mult) for width in self.widths[: self._kept()])

    def _kept(self) -> int | None:
        return None if self.num_stages is None else self.num_stages - self.stem_halvings
