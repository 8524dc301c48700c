"""Malformed input of every kind is read correctly or rejected with a clear message: no other exception, no modified file."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from experiments.errors import UnavailableError, UserError
from pipelines import DataError
from san import CheckpointError
from tests.fuzz.targets import Target, targets


@pytest.mark.slow
def test_malformed_input(tmp_path: Path) -> None:
    """HYPOTHESIS_EXAMPLES sets the number of inputs per target."""
    for target in targets(tmp_path):
        _read_malformed(target)


def _read_malformed(target: Target) -> None:
    @settings(database=None, suppress_health_check=list(HealthCheck))
    @given(target.inputs)
    def read(content: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                target.read(content)
            except (UserError, UnavailableError, DataError, CheckpointError) as error:
                message = str(error)
                assert message.strip() and "Traceback" not in message and " object at 0x" not in message, (target.name, message)

    read()
