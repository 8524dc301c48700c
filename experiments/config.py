"""What a trial is made of: typed, frozen values that refuse unknown keys and name every mistake by its path."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from san.models import ModelSpec, model_spec

PROJECT_DIR = Path(__file__).resolve().parent.parent

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """Frozen; unknown keys are mistakes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(BaseModel):
    """A named variant; every other key overrides the field of its record of that name (`san models` lists both)."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def spec(self) -> ModelSpec:
        """The record of the model. Raises ValueError for an unknown name or field."""
        return model_spec(self.name, self.overrides)

    @model_validator(mode="after")
    def _fields_have_their_types(self) -> Self:
        spec = self.spec()
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        try:
            TypeAdapter(type(spec)).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{first['loc'][0]}: {first['msg']}, not {first['input']!r}") from None
        return self


class DataConfig(Strict):
    """Where images come from and what happens to them before the model."""

    source: Literal["folder", "digits"]
    """`folder`: ImageNet's layout at `root`; `digits`: the embedded data set, written to `root` when it is missing."""
    root: str
    """Folder with `train/<class>/*` and `val/<class>/*`; a relative path starts at the project."""
    size: Count
    """Side in pixels of the square that the model sees."""
    resize: Count
    """Validation: the shorter side is resized to this before the centre crop."""
    crop_area: tuple[Positive, Annotated[float, Field(gt=0, le=1)]]
    """Training: range of the share of the image's area that a random crop takes."""
    crop_ratio: tuple[Positive, Positive]
    """Training: range of a random crop's width over its height."""
    flip: bool
    """Training: mirror every other image. Digits must not be."""
    mean: tuple[Fraction, Fraction, Fraction]
    std: tuple[Positive, Positive, Positive]


class RecipeConfig(Strict):
    """How a model is trained: SGD with a cosine learning rate (section 5, "Implementation")."""

    epochs: Count
    batch: Count
    """Images per step over all workers."""
    lr: Positive
    """Learning rate of the first step; follows a half cosine to zero, step by step."""
    momentum: Fraction
    weight_decay: Annotated[float, Field(ge=0)]
    label_smoothing: Fraction


class PlacementConfig(Strict):
    """What one cell takes from the cluster: `workers` processes, each with `cpus` and `gpus`."""

    workers: Count = 1
    cpus: Count = 1
    gpus: Annotated[int, Field(ge=0)] = 0


class TrialConfig(Strict):
    """Everything that decides a trial's result, and where it runs."""

    model: ModelConfig
    data: DataConfig
    recipe: RecipeConfig
    placement: PlacementConfig = PlacementConfig()


def mistakes(error: ValidationError, schema: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Every mistake as (path of the key, what is wrong and what was expected)."""
    for item in error.errors():
        loc, kind = item["loc"], item["type"]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        if kind == "extra_forbidden":
            allowed = sorted(keys_at(schema, loc[:-1]))
            near = difflib.get_close_matches(str(loc[-1]), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            yield path, f"unknown key{hint} Allowed: {', '.join(allowed)}"
        elif kind == "missing":
            yield path, "missing; it must be given"
        elif kind == "value_error":
            yield path, str(item["ctx"]["error"])
        else:
            yield path, f"{item['msg'][0].lower()}{item['msg'][1:]}, not {item['input']!r}"


def keys_at(schema: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Keys that the schema allows below a path."""
    found: Any = schema
    for part in loc:
        if isinstance(part, int):
            found = typing.get_args(found)[0]
        else:
            found = found.model_fields[part].annotation
        if isinstance(found, types.UnionType):
            found = typing.get_args(found)[0]
    return list(found.model_fields)


def merged(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings laid over each other; later layers win, lists are replaced whole."""
    result = dict(base)
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            both = isinstance(below, Mapping) and isinstance(value, Mapping)
            result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys, for the tracker's parameters."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
