"""No numeric field of a config accepts a boolean."""

import itertools
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from experiments.config.config import ModelConfig, Strict, TrialConfig, model_errors
from experiments.config.grid import Grid
from san.models.registry import VARIANTS, model_spec


def schemas(base: type[BaseModel] = Strict) -> Iterator[type[BaseModel]]:
    for schema in base.__subclasses__():
        yield schema
        yield from schemas(schema)


def leaves(annotation: Any) -> set[Any]:
    """The types and literal values in an annotation."""
    parts = typing.get_args(annotation)
    return {annotation}.union(*map(leaves, parts)) if parts else {annotation}


def with_booleans() -> Iterator[Any]:
    """A boolean, alone and at each place of lists of numbers."""
    for wrong in (True, False):
        yield wrong
        for length, other in itertools.product((1, 2, 3), (1, 0.5)):
            for place in range(length):
                yield [wrong if index == place else other for index in range(length)]


FIELDS = {f"{schema.__name__}.{name}": (schema, name) for schema in schemas() for name in schema.model_fields}


def takes_booleans(field: str) -> bool:
    schema, name = FIELDS[field]
    return bool(leaves(schema.model_fields[name].annotation) & {bool, Any})


def test_finds_all_fields() -> None:
    assert {schema.__name__ for schema in (Grid, TrialConfig)} < {name.partition(".")[0] for name in FIELDS}
    assert {"RecipeConfig.epochs", "DataConfig.crop_area", "Grid.seeds", "EarlyStopping.grace_epochs"} < FIELDS.keys()


@pytest.mark.parametrize("field", [name for name in FIELDS if not takes_booleans(name)])
def test_rejects_a_boolean_for_a_number(field: str) -> None:
    schema, name = FIELDS[field]
    for value in with_booleans():
        with pytest.raises(ValidationError) as wrong:
            schema.model_validate({name: value})
        assert [error for error in wrong.value.errors() if error["loc"][0] == name], value


@pytest.mark.parametrize("variant", {type(spec): name for name, spec in VARIANTS.items()}.values())
def test_rejects_a_boolean_for_a_number_of_a_model(variant: str) -> None:
    spec = model_spec(variant)
    for field in spec.__dataclass_fields__.keys() - {"name"}:
        for value in with_booleans():
            model = ModelConfig.model_validate({"name": variant, field: value})
            assert [path for path, _ in model_errors(model, 224)] == [f"model.{field}"], (field, value)
