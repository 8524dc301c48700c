"""Malformed input of every kind is read correctly or rejected with a clear message: no other exception, no modified file."""

from __future__ import annotations

import os
import warnings

import pytest
from hypothesis import HealthCheck, given, settings

from experiments.errors import UnavailableError, UserError
from pipelines import DataError
from san import CheckpointError
from tests.fuzz.targets import Target, targets

NAMES = (
    *("grid", "profile", "override", "address", "summary.csv", "weights", "weights in `san evaluate`", "released weights"),
    *("index of shards", "shard", "list", "image"),
)
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "200"))
"""Inputs per target."""


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {target.name: target for target in targets(tmp_path_factory.mktemp("fuzz"))}


def test_every_target_is_tested(by_name: dict[str, Target]) -> None:
    assert tuple(by_name) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_malformed_input(name: str, by_name: dict[str, Target]) -> None:
    target = by_name[name]

    @settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(target.inputs)
    def read(content: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                target.read(content)
            except (UserError, UnavailableError, DataError, CheckpointError) as error:
                message = str(error)
                assert message.strip() and "Traceback" not in message and " object at 0x" not in message, message

    read()
