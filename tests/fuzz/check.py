"""Reads one malformed input and checks the outcome: a correct result, or an error with one clear message."""

from __future__ import annotations

from typing import Any

from experiments.errors import UserError
from pipelines import DataError
from san import CheckpointError
from tests.fuzz.targets import Target


def accepts(target: Target, content: Any) -> bool:
    """Whether the target reads the input without an error. Any error except those for users fails the test."""
    try:
        target.read(content)
    except (UserError, DataError, CheckpointError) as error:
        message = str(error)
        assert message.strip(), "empty message"
        assert "Traceback" not in message and " object at 0x" not in message, message
        return False
    return True
