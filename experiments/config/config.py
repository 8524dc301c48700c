"""The configuration of a trial: typed, frozen values. Unknown keys are errors, and every error names the path of its key."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from san.choice import ChoiceError, ModelError, choices, similar
from san.models import ModelSpec, ModuleSpec, model_spec

PROJECT_DIR = Path(__file__).resolve().parents[2]
"""Folder of the packages, data/ and runs/."""
GRIDS_DIR = PROJECT_DIR / "experiments" / "grids"


def _no_boolean(value: object) -> object:
    """Rejects true and false, which Python and pydantic accept as the numbers 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("boolean_number", "must be a number")
    if isinstance(value, list) and any(isinstance(part, bool) for part in value):
        raise PydanticCustomError("boolean_in_list", "must be a list of numbers")
    return value


def _increasing(values: tuple[float, float]) -> tuple[float, float]:
    if values[0] > values[1]:
        raise PydanticCustomError("not_increasing", "must be two increasing numbers")
    return values


NUMBERS = BeforeValidator(_no_boolean)
"""Validator for a number or a list of numbers."""
Whole = Annotated[int, NUMBERS]
Real = Annotated[float, NUMBERS]
Fraction = Annotated[Real, Field(ge=0, lt=1)]
Positive = Annotated[Real, Field(gt=0)]
NotNegative = Annotated[Real, Field(ge=0)]
Count = Annotated[Whole, Field(ge=1)]


class Strict(BaseModel):
    """An immutable section of the configuration; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(BaseModel):
    """The model: its `name`, and overrides of its other fields (`san models` lists names and fields)."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def spec(self) -> ModelSpec:
        """The model's spec. Raises ValueError if `model_errors` finds an error."""
        named = model_spec(self.name)
        model = named, repr(self.overrides)
        if model not in _SPECS:
            fields = _fields(type(named))  # type: ignore[arg-type]
            values = self.overrides.items()
            read = {key: fields[key].validate_python(value) if key in fields else value for key, value in values}
            _SPECS[model] = model_spec(self.name, read)
        return _SPECS[model]


_SPECS: dict[tuple[ModelSpec, str], ModelSpec] = {}
"""Specs by named spec and overrides, because large grids have few models and ask for them often."""


@functools.cache
def _fields(spec: type[ModelSpec]) -> dict[str, TypeAdapter[Any]]:
    """The validator of each field of a kind of spec."""
    hints = {field.name: typing.get_type_hints(spec)[field.name] for field in dataclasses.fields(spec)}
    any_type = ConfigDict(arbitrary_types_allowed=True)  # such as that of a parameter of a user's model

    def strict(hint: Any) -> Any:
        if hint is bool:
            return StrictBool
        takes_booleans = hint in (str, Any) or bool in typing.get_args(hint)
        return hint if takes_booleans else Annotated[hint, NUMBERS]

    return {field: TypeAdapter(strict(hint), config=any_type) for field, hint in hints.items()}


def is_module(name: object) -> bool:
    """Whether a model is one of timm or of the user, not one of this project's networks."""
    try:
        return isinstance(model_spec(str(name)), ModuleSpec)
    except ChoiceError:
        return False


IMPORT_HINT = "if a file of yours registers it, add --import FILE"


def model_errors(model: ModelConfig, size: int) -> Iterator[tuple[str, str]]:
    """Every error that prevents building the model for images of `size` pixels, as (path of the key, error)."""
    try:
        readers = _fields(type(model_spec(model.name)))  # type: ignore[arg-type]
    except ChoiceError as error:
        yield "model.name", f"{error}; {IMPORT_HINT}"
        return
    fields = [field for field in readers if field != "name"]
    wrong = []
    for key, value in model.overrides.items():
        if key not in fields:
            wrong.append((f"model.{key}", unknown_key(f"model.{key}", fields)))
            continue
        try:
            readers[key].validate_python(value)
        except ValidationError as error:
            item = error.errors()[0]
            wrong.append((f"model.{key}{_path(item['loc'])}", _words(item)))
    if wrong:
        yield from wrong
        return
    try:
        model.spec().check_input(size)
        with torch.device("meta"):
            model.spec().build(num_classes=2)
    except ChoiceError as error:
        yield f"model.{error.field}", f"{error}; {IMPORT_HINT}"
    except ModelError as error:
        yield "model", str(error)


class DataConfig(Strict):
    """The images and their preprocessing."""

    source: Literal["folder", "shards", "synthetic", "digits"]
    """`folder`: images at `root` in ImageNet's layout. `shards`: tar files at `root`, written by `san data pack`. `synthetic`:
    random noise, to measure compute speed without disk I/O. `digits`: the embedded dataset, written to `root` if missing."""
    root: str | None = None
    """Folder with `train/<class>/*` and `val/<class>/*`, or with shards. The number of class folders is the number of classes.
    A relative path is resolved from the current folder; in a profile file of your own, from the file's folder. Null: the digits
    are in the project's `data/digits`. Not used with synthetic images."""
    lists: str | None = None
    """Folder of the image lists written by `san data check`, if the lists are not in `root`.
    Relative paths are resolved as for `root`."""
    split: Literal["val-original", "val-split"] = "val-original"
    """Validation images: `val-original` uses `val`; `val-split` holds out images from `train`, as in the paper's ablations."""
    val_split_per_class: Count | None = None
    """Images per class that `val-split` holds out, the same images for every seed. Null: uses `val` instead."""
    val_split_seed: Annotated[Whole, Field(ge=0)] = 0
    """Seed that selects the images that `val-split` holds out."""
    train_per_class: Count | None = None
    """Number of training images per class, the same images for every seed; fewer in a class are an error. Null: all images."""
    val_per_class: Count | None = None
    """As `train_per_class`, for validation."""
    synthetic_classes: Count = 1000
    """Number of classes of the synthetic images."""
    synthetic_per_class: Count = 50
    """Synthetic images per class, in training and in validation. With `source: synthetic`, the keys `root`, `split`,
    `val_split_*` and all transform keys except `size` are ignored."""
    size: Count
    """Side in pixels of the model's square input."""
    resize: Count
    """Validation: length in pixels to which the shorter side is resized before the center crop."""
    crop_area: Annotated[tuple[Positive, Annotated[Real, Field(gt=0, le=1)]], AfterValidator(_increasing)] = (0.08, 1.0)
    """Training: range of a random crop's area, as a fraction of the image's area."""
    crop_ratio: Annotated[tuple[Positive, Positive], AfterValidator(_increasing)] = (3 / 4, 4 / 3)
    """Training: range of a random crop's aspect ratio (width over height)."""
    crop_padding: Annotated[Whole, Field(ge=0)] | None = None
    """Training: resizes and crops images as in validation, pads them with this many black pixels on each side, and cuts out a
    random square of `size`, as usual for CIFAR. `crop_area` and `crop_ratio` are then not used. Null: random resized crops."""
    flip: bool
    """Training: flip images horizontally with probability 0.5. Set this key to false for digits."""
    mean: tuple[Fraction, Fraction, Fraction]
    """Mean of each RGB channel, subtracted from the images (pixel values from 0 to 1)."""
    std: tuple[Positive, Positive, Positive]
    """Standard deviation of each RGB channel, by which the images are divided."""

    @property
    def folder(self) -> Path | None:
        """The folder of the images or the shards; None if `root` is missing."""
        root = "data/digits" if self.root is None and self.source == "digits" else self.root
        return None if root is None else PROJECT_DIR / root

    @field_validator("resize")
    @classmethod
    def _covers_the_square(cls, resize: int, info: ValidationInfo) -> int:
        if resize < (size := info.data.get("size", resize)):
            message = "must be at least data.size={size} (a larger size needs a larger resize)"
            raise PydanticCustomError("too_small", message, {"size": size})
        return resize

    @field_validator("crop_padding")
    @classmethod
    def _is_at_most_the_square(cls, padding: int | None, info: ValidationInfo) -> int | None:
        if padding is not None and padding > (size := info.data.get("size", padding)):
            message = "must be at most data.size={size} (a smaller size needs a smaller padding)"
            raise PydanticCustomError("too_large", message, {"size": size})
        return padding


class RecipeConfig(Strict):
    """Training with a cosine learning rate. Without further settings, SGD as in section 5 of the paper, "Implementation".

    Settings with a default go beyond the paper and are off. They are part of a trial's key only if they differ from the
    default, so new settings do not change the keys of trials. Defaults must never change.
    """

    epochs: Annotated[Whole, Field(ge=1, le=9999)]
    """Number of training epochs."""
    batch_size: Count
    """Images per step, summed over all workers."""
    lr: Positive
    """Initial learning rate; decays to zero along a half cosine, step by step."""
    momentum: Fraction
    """SGD momentum; for AdamW, beta 1 (beta 2 is 0.999)."""
    weight_decay: NotNegative
    """Weight decay; AdamW multiplies it by the learning rate."""
    label_smoothing: Fraction
    """Label smoothing for the cross-entropy loss."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101)."""
    nesterov: bool = False
    """Nesterov's momentum. SGD only."""
    decay: Literal["all", "weights"] = "all"
    """Parameters with weight decay: all of them, or only `weights`, without norms and biases."""
    augment: Literal["none", "trivial", "rand"] = "none"
    """Random changes of the cropped training images: `trivial` is TrivialAugment Wide, one operation of random strength (Müller
    and Hutter 2021, arXiv 2103.10158); `rand` is RandAugment, two operations of medium strength (Cubuk et al. 2020, arXiv
    1909.13719). Operations and strengths are those of torchvision."""
    random_erasing: Annotated[Real, Field(ge=0, le=1)] = 0.0
    """Probability with which a rectangle of a training image is replaced by the mean color (Zhong et al. 2020, arXiv
    1708.04896)."""
    lr_batch_size: Count | None = None
    """Batch size to which `lr` applies; with a different `batch_size`, the learning rate is scaled linearly.
    Null: no scaling."""
    warmup_epochs: NotNegative = 0.0
    """Epochs during which the learning rate rises linearly from 0, before the cosine decay."""
    mixup_alpha: NotNegative = 0.0
    """Alpha of mixup: pairs of images and labels are blended with weights from Beta(alpha, alpha). 0 turns mixup off."""
    cutmix_alpha: NotNegative = 0.0
    """Alpha of CutMix: a rectangle of an image comes from another one, and the labels are weighted by area (Yun et al. 2019,
    arXiv 1905.04899). 0 turns CutMix off. Together with mixup, each step uses one of the two at random."""
    drop_path: Fraction = 0.0
    """Probability with which training skips the last residual block for an image; it grows linearly from 0 in the first block
    (stochastic depth: Huang et al. 2016, arXiv 1603.09382)."""
    ema_decay: Fraction = 0.0
    """Decay per step of the exponential moving average of weights and BatchNorm statistics, which is then validated and saved.
    0 turns averaging off."""
    validate_every_n_epochs: Count = 1
    """Epochs between validations. The last epoch is always validated."""
    grad_accum_steps: Count = 1
    """Number of parts into which each step's batch is split to save memory. BatchNorm normalizes each part separately."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of the training images in the loss. `balanced`, for unbalanced folders: inversely proportional to the number of
    images of their class, with mean 1. Validation is not weighted."""
    patience: Count | None = None
    """Ends the training after this many epochs without a better top-1 (or a lower loss at the same top-1). The learning rate
    still follows `epochs`. Null: trains all epochs."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the layers that torch's autocast covers. Weights, their updates and validation are always float32."""
    sync_batchnorm: bool = False
    """Computes BatchNorm statistics over the images of all workers. GPUs only."""
    init: str | None = None
    """Initial weights, for fine-tuning or to train on: any checkpoint that `san evaluate` accepts, such as a file, the key of a
    trial (its best epoch), or the name of a network with weights. If the classes differ, the classifier is new.
    Relative paths are resolved as for `data.root`. A trial's key contains a digest of the weights. Null: random weights."""
    freeze: tuple[str, ...] = ()
    """Parts of the model that keep the weights and BatchNorm statistics of `init`, for example `[stem, stage1]`."""
    layer_decay: Annotated[Real, Field(gt=0, le=1)] = 1.0
    """Factor by which the learning rate decreases from each part of the model to the one before it, from the classifier down to
    the stem. 1: one learning rate for all parts."""

    @property
    def lr_used(self) -> float:
        """Learning rate at `batch_size` images a step (linear scaling: Goyal et al. 2017, arXiv 1706.02677)."""
        return self.lr if self.lr_batch_size is None else self.lr * (self.batch_size / self.lr_batch_size)

    def images_at_once(self, workers: int = 1) -> int:
        """Images that each worker computes at the same time. Batches of validation have this size."""
        return -(-self.batch_size // (workers * self.grad_accum_steps))

    @property
    def scaling(self) -> str | None:
        """Describes the scaled learning rate, or None if it is not scaled."""
        if self.lr_used == self.lr:
            return None
        return (
            f"learning rate scaled to {self.lr_used:.6g} for recipe.batch_size={self.batch_size} "
            f"(recipe.lr={self.lr:g} is for recipe.lr_batch_size={self.lr_batch_size})"
        )


class EngineConfig(Strict):
    """How training steps are computed. Affects speed, memory and rounding, and is not part of a trial's key."""

    compile: bool = False
    """Trains the model with `torch.compile`. The averaged model from `recipe.ema_decay` is not compiled."""
    channels_last: bool | None = None
    """Uses the channels-last memory format. Null: on GPUs only."""
    tf32: bool | None = None
    """Computes float32 products in TF32 (10-bit mantissas) on tensor cores. Null: on GPUs only."""
    cuda_graphs: bool = False
    """Captures the forward and backward passes once per batch size and replays them, which saves about
    1,500 kernel launches per step."""
    reference_operators: bool = False
    """Allows training on a GPU without the CUDA kernels, with slower operators that need about four times the memory."""
    deterministic: bool = False
    """Uses only deterministic algorithms where torch has them. CPU training is always deterministic."""

    def on(self, device: str) -> EngineConfig:
        """These settings with every null resolved for a device type, `cpu` or `cuda`."""
        on_gpu = device == "cuda"
        channels_last = on_gpu if self.channels_last is None else self.channels_last
        return self.model_copy(update={"channels_last": channels_last, "tf32": on_gpu and self.tf32 is not False})


class ResourcesConfig(Strict):
    """Resources of one trial: `workers` processes, each with `cpus` and `gpus`."""

    workers: Count = 1
    """Number of worker processes of a trial."""
    cpus: Count = 1
    """CPUs per worker."""
    gpus: Annotated[Real, Field(ge=0)] = 0.0
    """GPUs per worker: 0, 1, or a fraction such as 0.25 for trials that share a GPU."""


class CheckpointingConfig(Strict):
    """Checkpoints and failure detection. Does not change results."""

    checkpoint_every_n_minutes: Positive = 10.0
    """Maximum time between checkpoints within an epoch. A checkpoint is also written after every epoch."""
    keep_checkpoints: Count = 2
    """Number of latest checkpoints to keep, in addition to the best one."""
    check_every_n_steps: Count = 20
    """Maximum number of steps between checks for non-finite losses and for a checkpoint that is due. If steps are slow, checks
    are 2 s apart."""
    hang_timeout_minutes: Annotated[Real, Field(gt=0, le=100_000)] = 30.0
    """Time without a finished step after which a worker is stopped. Workers also wait this long for each other, at most 30
    minutes."""

    @property
    def hang_timeout(self) -> float:
        """Seconds."""
        return self.hang_timeout_minutes * 60


class TrialConfig(Strict):
    """The configuration of a trial: model, data, training, hardware and failure handling."""

    model: ModelConfig
    data: DataConfig
    recipe: RecipeConfig
    engine: EngineConfig = EngineConfig()
    resources: ResourcesConfig = ResourcesConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()


def too_many_parts(config: TrialConfig, images: int) -> str:
    """Error message for `recipe.grad_accum_steps` if a worker has only `images` images in a step."""
    recipe, workers = config.recipe, config.resources.workers
    return (
        f"must be at most {images}, not {recipe.grad_accum_steps}: in some steps each worker has {images} images "
        f"(recipe.batch_size={recipe.batch_size}, resources.workers={workers})"
    )


def combination_errors(config: TrialConfig) -> Iterator[tuple[str, str]]:
    """Values that are valid, but not in combination, as (path of the key, error)."""
    yield from _recipe_errors(config)
    yield from _engine_errors(config)
    if config.data.folder is None and config.data.source != "synthetic":
        example = "add the folder of your images, such as data.root=/path/to/images"
        yield "data.source", f"{config.data.source} needs data.root; {example}"
    workers, gpus = config.resources.workers, config.resources.gpus
    if gpus > 1:
        yield "resources.gpus", f"must be at most 1, as a worker uses one GPU, not {gpus:g}; for more, set resources.workers"
    elif gpus % 1 and workers > 1:
        yield "resources.gpus", f"must be 0 or 1 if a trial has several workers, not {gpus:g} (resources.workers={workers})"


def _recipe_errors(config: TrialConfig) -> Iterator[tuple[str, str]]:
    recipe, resources = config.recipe, config.resources
    if recipe.warmup_epochs >= recipe.epochs:
        yield "recipe.warmup_epochs", f"must be less than recipe.epochs={recipe.epochs}, not {recipe.warmup_epochs:g}"
    each = recipe.batch_size // resources.workers
    if each and recipe.grad_accum_steps > each:  # the loader reports workers without any images
        yield "recipe.grad_accum_steps", too_many_parts(config, each)
    if recipe.sync_batchnorm and not resources.gpus:
        yield "recipe.sync_batchnorm", "needs a GPU, but resources.gpus is 0; leave out this key, or set resources.gpus=1"
    if recipe.patience is not None and recipe.patience >= recipe.epochs:
        yield "recipe.patience", f"must be less than recipe.epochs={recipe.epochs}, not {recipe.patience}"
    if recipe.nesterov and (recipe.optimizer != "sgd" or not recipe.momentum):
        yield "recipe.nesterov", "needs recipe.optimizer=sgd and a recipe.momentum above 0; leave out recipe.nesterov"


def _engine_errors(config: TrialConfig) -> Iterator[tuple[str, str]]:
    recipe, engine = config.recipe, config.engine
    if engine.cuda_graphs and not config.resources.gpus:
        yield "engine.cuda_graphs", "needs a GPU, but resources.gpus is 0; leave out this key, or set resources.gpus=1"
    elif engine.cuda_graphs and recipe.sync_batchnorm:
        yield (
            "engine.cuda_graphs",
            "cannot be combined with recipe.sync_batchnorm, whose communication a CUDA graph cannot capture; "
            "leave out engine.cuda_graphs or recipe.sync_batchnorm",
        )


def fine_tuning_errors(config: TrialConfig) -> Iterator[tuple[str, str]]:
    """Errors in the keys for fine-tuning of a model that can be built."""
    recipe = config.recipe
    for key, is_set in {"layer_decay": recipe.layer_decay != 1, "drop_path": bool(recipe.drop_path)}.items():
        if is_set and is_module(config.model.name):
            yield f"recipe.{key}", f"has no effect on {config.model.name}, whose parts are not known; leave out this key"
    if not recipe.freeze:
        return
    if recipe.init is None:
        yield "recipe.freeze", "needs recipe.init, because random weights would stay random; add recipe.init=FILE"
    with torch.device("meta"):
        parts = list(config.model.spec().build(num_classes=2).parts())
    for name in set(recipe.freeze) - set(parts):
        yield "recipe.freeze", f"{config.model.name} has no part {name!r}; {choices('parts', name, parts)}"
    if set(parts) <= set(recipe.freeze):
        yield "recipe.freeze", "freezes the whole model; leave out the parts to train"


def schema_errors(error: ValidationError, schema: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Every error as (path of the key, what was expected and given)."""
    items = error.errors()
    for item in items:
        path, loc = _path(item["loc"]), item["loc"]
        if loc[-1:] == ("[key]",):  # of a mapping
            yield _path(loc[:-2]), f"has the key {json.dumps(loc[-2])}, which is not text; in {{a: 1,5}}, a comma starts a key"
            continue
        if item["type"] == "too_short" and any(other["loc"][: len(loc)] == loc != other["loc"] for other in items):
            continue  # the list is too short because items are invalid, which have their own messages
        yield path, unknown_key(path, keys_at(schema, item["loc"][:-1])) if item["type"] == "extra_forbidden" else _words(item)


def _path(loc: tuple[int | str, ...]) -> str:
    """For example `rows[2].recipe.lr`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _words(item: Any) -> str:
    """Pydantic's message, and the value as in YAML."""
    if item["type"] == "missing":
        return "missing; this key is required"
    if item["type"] == "string_type" and isinstance(item["input"], bool | int | float):
        return f"should be text, not {json.dumps(item['input'])}; put it in quotes"
    message = item["msg"].removeprefix("Input ").replace("valid tuple", "list").replace("Tuple", "List")
    message = re.sub(r"valid dictionary( or instance of \w+)?", "mapping of keys", message)
    message = message.partition(" after validation")[0]
    return f"{message[0].lower()}{message[1:]}, not {json.dumps(item['input'], default=str)}"


def unknown_key(path: str, allowed: Sequence[str]) -> str:
    """The error message for a key, with the most similar one."""
    section, dot, key = path.rpartition(".")
    near = [f"{section}{dot}{name}" for name in [similar(key, allowed)] if name]
    if not section and not near:  # a key without its section, such as `lr` for `recipe.lr`
        base = "base." * ("base" in allowed)  # in a grid
        keys = [f"{base}{section}.{name}" for section in TrialConfig.model_fields for name in keys_at(TrialConfig, (section,))]
        near = [full for full in keys if full.endswith(f".{key}")]
    hint = f"did you mean `{'` or `'.join(near)}`? Allowed" if near else "allowed"
    return f"unknown key; {hint}: {', '.join(sorted(allowed))}"


def keys_at(schema: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Keys that the schema allows below a path."""
    for part in loc:
        if isinstance(part, str):  # a number is an index of a list
            section = _schema_in(schema.model_fields[part].annotation)
            assert section is not None, "only a mapping of keys has unknown keys"
            schema = section
    return list(schema.model_fields)


def takes_text(key: str) -> bool:
    """Whether the value of a key such as `data.root` is text, or null."""
    section, _, name = key.partition(".")
    field = TrialConfig.model_fields.get(section)
    schema = field and _schema_in(field.annotation)
    if not schema or name not in schema.model_fields:
        return False
    return schema.model_fields[name].annotation in (str, str | None)


def _schema_in(annotation: Any) -> type[BaseModel] | None:
    """The first schema in an annotation such as `tuple[Row, ...]` or `Plot | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _schema_in(part))), None)


def merged(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merges nested mappings. Later layers override earlier ones; lists are replaced as a whole."""
    result = dict(base)
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            both = isinstance(below, Mapping) and isinstance(value, Mapping)
            result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys, for MLflow's parameters."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def value_at(config: TrialConfig, path: str) -> Any:
    """The value at a dotted path such as `recipe.lr` or `model.footprint`, including defaults of the model's spec.

    Raises:
        AttributeError: there is no such value.
    """
    first, _, rest = path.partition(".")
    value: Any = config.model.spec() if first == "model" else getattr(config, first)
    for part in rest.split("."):
        value = getattr(value, part)
    return value
