"""Models that come from elsewhere: from functions of users, and from timm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from san.choice import ChoiceError, ModelError, check_counts, similar
from san.models.base import BaseModel, ModelSpec

Build = Callable[..., nn.Module]
SIZES = ("num_classes", "in_channels")
TIMM = "timm/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec(ModelSpec):
    """A model that a function builds. Each parameter of the function besides `SIZES` is a field of a subclass."""

    function: ClassVar[Build]

    def __reduce__(self) -> tuple[Any, ...]:  # pickle does not find the class of a function
        return _again, (self.name, {each.name: getattr(self, each.name) for each in fields(self) if each.name != "name"})

    def __deepcopy__(self, memo: object) -> ModuleSpec:
        return self

    def check_input(self, size: int) -> None:
        """Raises ModelError if the function or its model fails, or does not return logits, for images of this size."""
        try:
            with torch.device("meta"), torch.no_grad():
                model = self.build(2).eval()
                lazy = any(map(is_lazy, (*model.parameters(), *model.buffers())))
                logits = model(torch.empty(1, 3, size, size))
        except Exception as error:  # any: it is not our code
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ModelError(f"{self.name} cannot classify images of {size} x {size} pixels ({reason})") from error
        if lazy:
            raise ModelError(f"{self.name}: its layers must know their sizes; replace layers such as nn.LazyLinear")
        if not isinstance(logits, Tensor) or logits.shape != (1, 2):
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(f"{self.name} must return logits [N, num_classes], here [1, 2], not {shape}")

    def build(self, num_classes: int | None, in_channels: int = 3) -> ModuleModel:
        if num_classes is None:
            raise ModelError(f"{self.name} cannot be built with features_only=True, which only this package's networks support")
        check_counts(num_classes=num_classes)
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "name"}
        build = functools.partial(type(self).function, num_classes=num_classes, in_channels=in_channels, **settings)
        try:
            module = build()
        except RuntimeError:
            if torch.get_default_device().type != "meta":
                raise
            with torch.device("cpu"):  # functions may read numbers from tensors, such as the rates of stochastic depth
                module = build().to("meta")
        if not isinstance(module, nn.Module):
            raise ModelError(f"{self.name}: its function must return a torch.nn.Module, not {type(module).__name__}")
        return ModuleModel(self, module, num_classes, in_channels)


class ModuleModel(BaseModel):
    """Wraps a module that returns logits. It is counted, trained and stored as one part, and has no feature maps."""

    classifier_name = ""

    def __init__(self, spec: ModuleSpec, module: nn.Module, num_classes: int, in_channels: int) -> None:
        super().__init__(spec, in_channels)
        self.module, self._num_classes = module, num_classes

    @property
    def num_classes(self) -> int:
        return self._num_classes

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"model": [self.module]}

    def forward(self, x_NCHW: Tensor) -> Tensor:
        logits_NC: Tensor = self.module(x_NCHW)
        return logits_NC

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        raise ValueError(f"the classifier of {self.spec.name} is not known; create the model with another num_classes")

    def set_drop_rates(self, drop_rate: float = 0.0, drop_path_rate: float = 0.0) -> None:
        if drop_rate or drop_path_rate:
            raise ValueError(f"the blocks of {self.spec.name} are not known; its function can take the rates as parameters")

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if enable:
            raise ValueError(f"the blocks of {self.spec.name} are not known, so their activations cannot be recomputed")


def _again(name: str, values: dict[str, object]) -> ModelSpec:
    from san.models.registry import model_spec  # imports this file

    return model_spec(name, values)


def module_spec(name: str, function: Build) -> ModuleSpec:
    """The spec of a model that a function or a class builds.

    Raises:
        ValueError: a parameter lacks a type hint or a default that is a plain value.
    """
    hints, settings = get_type_hints(function.__init__ if inspect.isclass(function) else function), []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in SIZES:
            continue
        if parameter.default is parameter.empty or parameter.name not in hints:
            raise ValueError(f"model {name!r}: its parameter {parameter.name} needs a type hint and a default")
        if not isinstance(parameter.default, bool | int | float | str | tuple | None):
            raise ValueError(
                f"model {name!r}: the default of its parameter {parameter.name} must be a number, a text, a tuple or None"
            )
        settings.append((parameter.name, hints[parameter.name], field(default=parameter.default)))
    kind = make_dataclass(
        "RegisteredSpec",
        settings,
        bases=(ModuleSpec,),
        namespace={"function": staticmethod(function), "__module__": __name__},
        frozen=True,
        slots=True,
        kw_only=True,
    )
    spec: ModuleSpec = kind(name=name)
    return spec


@functools.cache
def timm_spec(name: str) -> ModuleSpec:
    """A model of timm, `timm/NAME`, without its weights. Fields: `drop_path_rate`, and `img_size` for models with a fixed size.

    Raises:
        ChoiceError: timm is not installed, or has no such model.
    """
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # timm imports torchvision, which raises the second beside another torch
        reason = f"cannot be imported ({str(error).partition(chr(10))[0]})"
        raise ChoiceError("name", f"{name} needs timm, which {reason}; see docs/guides/pytorch.md") from None
    theirs = name.removeprefix(TIMM)
    if not timm.is_model(theirs):
        near = similar(theirs, timm.list_models())
        hint = f"did you mean `{TIMM}{near}`?" if near else "see timm.list_models()"
        raise ChoiceError("name", f"timm {timm.__version__} has no model {theirs!r}; {hint}")

    def build(num_classes: int, in_channels: int, drop_path_rate: float = 0.0, img_size: int | None = None) -> nn.Module:
        # timm leaves out settings that are None; not all of its models have these.
        settings = {"drop_path_rate": drop_path_rate or None, "img_size": img_size}
        module: nn.Module = timm.create_model(theirs, num_classes=num_classes, in_chans=in_channels, **settings)
        return module

    return module_spec(name, build)
