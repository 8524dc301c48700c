"""What a trial is made of: typed, frozen values that refuse unknown keys and name every mistake by its path."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from experiments.custom_code import custom_code
from experiments.renamed import new_key
from san.choice import ChoiceError
from san.models import ModelSpec, model_spec

PROJECT_DIR = Path(__file__).resolve().parent.parent
"""Where the packages lie."""


def base_folder() -> Path:
    """Where data/ and runs/ lie: in the project; where that is installed among other packages, in the current folder."""
    is_ours = (PROJECT_DIR / "setup.py").exists() or is_job_copy()
    return PROJECT_DIR if is_ours else Path.cwd()


def is_job_copy() -> bool:
    """Whether this is a Ray job's copy of the project, which is thrown away."""
    return "_ray_pkg_" in PROJECT_DIR.as_posix()


def _no_boolean(value: object) -> object:
    """For Python, and so for pydantic, true and false are the numbers 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "A number was expected")
    if isinstance(value, list):
        for part in value:
            _no_boolean(part)
    return value


NUMBERS = BeforeValidator(_no_boolean)
"""Of a number, or a list of numbers."""
Whole = Annotated[int, NUMBERS]
Real = Annotated[float, NUMBERS]
Fraction = Annotated[Real, Field(ge=0, lt=1)]
Positive = Annotated[Real, Field(gt=0)]
NotNegative = Annotated[Real, Field(ge=0)]
Count = Annotated[Whole, Field(ge=1)]


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
        """The record of the model. Raises ValueError where `model_mistakes` finds any."""
        fields = _fields(self.name)
        values = self.overrides.items()
        return model_spec(self.name, {k: fields[k].validate_python(v) if k in fields else v for k, v in values})


@functools.cache
def _fields(name: str) -> dict[str, TypeAdapter[Any]]:
    """What reads each field of a variant's record. Raises ValueError where there is no such variant."""
    hints = typing.get_type_hints(type(model_spec(name)))
    return {field: TypeAdapter(hint if hint is str else Annotated[hint, NUMBERS]) for field, hint in hints.items()}


def model_mistakes(model: ModelConfig, size: int) -> Iterator[tuple[str, str]]:
    """Everything that keeps a model from being built for images of `size` pixels, as (path of the key, what is wrong)."""
    try:
        readers = _fields(model.name)
    except ValueError as error:
        yield "model.name", str(error)
        return
    fields = [field for field in readers if field != "name"]
    found = False
    for key, value in model.overrides.items():
        if key not in fields:
            found = True
            yield f"model.{key}", _unknown(f"model.{key}", fields)
            continue
        try:
            readers[key].validate_python(value)
        except ValidationError as error:
            found = True
            yield f"model.{key}", _wrong(error.errors()[0])
    if found:
        return
    try:
        model.spec().check_input(size)
        with torch.device("meta"):
            model.spec().build(num_classes=2)
        custom_code(model.spec())
    except ChoiceError as error:
        yield f"model.{error.field}", str(error)
    except ValueError as error:
        yield "model", str(error)


class DataConfig(Strict):
    """Where images come from and what happens to them before the model."""

    source: Literal["folder", "shards", "synthetic", "digits", "shifted_digits"]
    """`folder`: ImageNet's layout at `root`. `shards`: what `san data pack` wrote there. `synthetic`: noise, to measure
    computing without a disk. Else an embedded data set of that name, written to `root` when it is missing."""
    root: str | None = None
    """Folder with `train/<class>/*` and `val/<class>/*`, or with shards; a relative path starts at `base_folder()`. Synthetic
    images have none."""
    lists: str | None = None
    """Folder with the lists that `san data check` or `san data split` wrote, where they are not in `root`; as `root`."""
    split: Literal["val-original", "val-split"] = "val-original"
    """Validation: the images of `val`, or some of `train` that are then not trained on, as in the paper's ablations."""
    val_split_per_class: Count | None = None
    """How many images of each class val-split holds out, the same for every seed of a trial; lists and shards `train-split` and
    `val-split` do not count then. Where it is null, those are taken, and where there are none, `val` serves for both."""
    val_split_seed: Annotated[Whole, Field(ge=0)] = 0
    """Which images val-split holds out."""
    train_per_class: Count | None = None
    """Training: only so many images of each class, the same for every seed; all where it is null."""
    synthetic_classes: Count = 1000
    synthetic_per_class: Count = 50
    """Synthetic images of each class, in training and in validation. For them `root`, `split` and `val_split_*`, which profiles
    and grids give, mean nothing, and of the transform `size` alone counts."""
    size: Count
    """Side in pixels of the square that the model sees."""
    resize: Count
    """Validation: the shorter side is resized to this before the centre crop."""
    crop_area: tuple[Positive, Annotated[Real, Field(gt=0, le=1)]]
    """Training: range of the share of the image's area that a random crop takes."""
    crop_ratio: tuple[Positive, Positive]
    """Training: range of a random crop's width over its height."""
    flip: bool
    """Training: mirror every other image. Digits must not be."""
    mean: tuple[Fraction, Fraction, Fraction]
    std: tuple[Positive, Positive, Positive]


class RecipeConfig(Strict):
    """How a model is trained: SGD with a cosine learning rate (section 5, "Implementation").

    What has a default here goes beyond the paper and is off. Such a value counts in a trial's key only where it is another than
    its default, so an option that is added changes no key; a default must never change.
    """

    epochs: Annotated[Whole, Field(ge=1, le=9999)]
    """At most what four digits hold, by which checkpoints are sorted."""
    batch_size: Count
    """Images per step over all workers."""
    lr: Positive
    """Learning rate of the first step; follows a half cosine to zero, step by step."""
    momentum: Fraction
    weight_decay: NotNegative
    label_smoothing: Fraction
    lr_batch_size: Count | None = None
    """`lr` is for so many images a step; with another `batch_size` it is scaled linearly. Never where it is null."""
    warmup_epochs: NotNegative = 0.0
    """The learning rate rises linearly from 0 for so long, step by step; the cosine has the rest."""
    mixup_alpha: NotNegative = 0.0
    """Images are blended in pairs, by shares drawn from Beta(mixup_alpha, mixup_alpha), and so are their labels; 0 does not."""
    ema_decay: Fraction = 0.0
    """Decay per step of the average over weights and BatchNorm statistics that is then validated and kept; 0 keeps none."""
    grad_accum_steps: Count = 1
    """In so many parts the images of a step are worked through, to save memory; BatchNorm sees each part alone."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the layers that torch's autocast lists; weights, their updates and validation are always float32."""
    sync_batchnorm: bool = False
    """BatchNorm sees the images of all workers, not of its own; on GPUs only."""

    @property
    def lr_used(self) -> float:
        """Learning rate at `batch_size` images a step (linear scaling: Goyal et al. 2017, arXiv 1706.02677)."""
        return self.lr if self.lr_batch_size is None else self.lr * (self.batch_size / self.lr_batch_size)

    @property
    def scaling(self) -> str | None:
        """What is to be said where the learning rate is not `lr`."""
        if self.lr_used == self.lr:
            return None
        return (
            f"learning rate {self.lr_used:.6g} for batches of {self.batch_size}: "
            f"recipe.lr={self.lr:g} is for recipe.lr_batch_size={self.lr_batch_size}"
        )


class EngineConfig(Strict):
    """How the recipe's steps are computed; changes speed, memory and roundings, and is no part of a trial's key."""

    zero_stage: Annotated[Literal[0, 1, 2], NUMBERS] = 0
    """Stage of DeepSpeed's ZeRO: from 1 on each worker keeps a share of the momentum, from 2 on of the gradients too."""
    compile: bool = False
    """The model runs through `torch.compile`; an averaged model, which is validated only, does not."""
    channels_last: bool | None = None
    """Feature maps and weights use the channels-last memory format. Null: on GPUs only, and not with `zero_stage`."""
    tf32: bool | None = None
    """Tensor cores compute float32 products with 10-bit mantissas, several times faster. Null: on GPUs only."""
    cuda_graphs: bool = False
    """Forward and backward are captured once for each batch size and replayed, which saves some 1 500 launches a step."""
    reference_operators: bool = False
    """Lets a cell train on a GPU without the CUDA kernels, on slower operators that need about four times the memory."""
    deterministic: bool = False
    """Only algorithms that give the same bits each time, where torch knows of any; on a CPU that is so anyway."""

    def on(self, device: str) -> EngineConfig:
        """These settings with every null resolved for a device type, `cpu` or `cuda`."""
        on_gpu = device == "cuda"
        channels_last = (on_gpu and not self.zero_stage) if self.channels_last is None else self.channels_last
        return self.model_copy(update={"channels_last": channels_last, "tf32": on_gpu and self.tf32 is not False})


class PlacementConfig(Strict):
    """What one cell takes from the cluster: `workers` processes, each with `cpus` and `gpus`."""

    workers: Count = 1
    cpus: Count = 1
    gpus: Annotated[Whole, Field(ge=0)] = 0


class ReliabilityConfig(Strict):
    """What is done about failures; changes no result."""

    checkpoint_every_n_minutes: Positive = 10.0
    """A checkpoint is written after every epoch, and inside an epoch when the last one is so old."""
    keep_checkpoints: Count = 2
    """How many of the last checkpoints are kept, besides the best."""
    check_every_n_steps: Count = 20
    """After so many steps it is looked whether losses are finite and whether a checkpoint is due."""
    hang_timeout_minutes: Annotated[Real, Field(gt=0, le=100_000)] = 30.0
    """A worker that ends no step for so long is ended, and so long it waits for the others."""

    @property
    def patience(self) -> timedelta:
        return timedelta(minutes=self.hang_timeout_minutes)


class TrialConfig(Strict):
    """Everything that decides a trial's result, how and where it runs, and what is done about failures."""

    model: ModelConfig
    data: DataConfig
    recipe: RecipeConfig
    engine: EngineConfig = EngineConfig()
    placement: PlacementConfig = PlacementConfig()
    reliability: ReliabilityConfig = ReliabilityConfig()


def too_many_parts(config: TrialConfig, images: int) -> str:
    """What is wrong with `recipe.grad_accum_steps` where a worker has so few images in a step."""
    recipe, workers = config.recipe, config.placement.workers
    return (
        f"{recipe.grad_accum_steps} parts cannot be made of the {images} images that each worker has in some steps "
        f"(recipe.batch_size={recipe.batch_size}, placement.workers={workers}); make them fewer"
    )


def contradictions(config: TrialConfig) -> Iterator[tuple[str, str]]:
    """Values that are right alone but not together, as (path of the key, what is wrong)."""
    recipe, engine, placement = config.recipe, config.engine, config.placement
    if recipe.warmup_epochs >= recipe.epochs:
        yield "recipe.warmup_epochs", f"must be less than recipe.epochs={recipe.epochs}, not {recipe.warmup_epochs:g}"
    each = recipe.batch_size // placement.workers
    if each and recipe.grad_accum_steps > each:  # that workers have no image at all, the loader tells
        yield "recipe.grad_accum_steps", too_many_parts(config, each)
    if recipe.sync_batchnorm and not placement.gpus:
        yield "recipe.sync_batchnorm", "torch has it for GPUs only, and placement.gpus is 0; leave it out"
    if engine.cuda_graphs and not placement.gpus:
        yield "engine.cuda_graphs", "CUDA graphs need a GPU, and placement.gpus is 0; leave it out"
    elif engine.cuda_graphs and engine.zero_stage:
        yield (
            "engine.cuda_graphs",
            f"a graph cannot capture how engine.zero_stage={engine.zero_stage} moves gradients; leave out one",
        )
    elif engine.cuda_graphs and recipe.sync_batchnorm:
        yield "engine.cuda_graphs", "a graph cannot capture recipe.sync_batchnorm's communication; leave out one of the two"
    if engine.channels_last and engine.zero_stage:
        yield (
            "engine.channels_last",
            f"engine.zero_stage={engine.zero_stage} keeps all weights in one flat piece; leave out one of the two",
        )


def mistakes(error: ValidationError, schema: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Every mistake as (path of the key, what is wrong and what was expected)."""
    found = error.errors()
    for item in found:
        loc = item["loc"]
        if item["type"] == "too_short" and any(other["loc"][: len(loc)] == loc != other["loc"] for other in found):
            continue  # too few, because of the mistakes that are told below it
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        if item["type"] == "extra_forbidden":
            yield path, _unknown(path, keys_at(schema, loc[:-1]))
        else:
            yield path, _wrong(item)


def _unknown(path: str, allowed: Sequence[str]) -> str:
    if new := new_key(path):
        return f"this key is now called {new}"
    near = difflib.get_close_matches(path.rpartition(".")[2], allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown key{hint} Allowed: {', '.join(sorted(allowed))}"


# What pydantic calls by names of Python's, in words of YAML's.
PLAIN_WORDS = {
    "missing": "missing; it must be given",
    "model_type": "a mapping of keys was expected",
    "dict_type": "a mapping of keys was expected",
    "tuple_type": "a list was expected",
}


def _wrong(item: Any) -> str:
    if item["type"] == "missing":
        return PLAIN_WORDS["missing"]
    expected = PLAIN_WORDS.get(item["type"]) or f"{item['msg'][0].lower()}{item['msg'][1:]}"
    return f"{expected}, not {item['input']!r}"


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


def value_at(config: TrialConfig, path: str) -> Any:
    """The value at a dotted path such as `recipe.lr` or `model.footprint`, defaults of the model's record included.

    Raises:
        AttributeError: there is none.
    """
    first, _, rest = path.partition(".")
    value: Any = config.model.spec() if first == "model" else getattr(config, first)
    for part in rest.split("."):
        value = getattr(value, part)
    return value
