"""Our SAN10 reproduces the released code's numbers in float64: names, forward, gradients, running statistics."""

from __future__ import annotations

import pytest

from tests.golden.replay import TOLERANCE, Replay, errors, recorded, replay

pytestmark = pytest.mark.every_isa


@pytest.fixture(scope="module")
def replayed() -> Replay:
    return replay("cpu")


def test_state_dict_names_and_shapes(replayed: Replay) -> None:
    assert replayed.shapes == {key: list(shape) for key, shape in recorded()["keys"].items()}


@pytest.mark.parametrize("what", ["train_logits", "loss", "eval_logits", "grad_norm", "running"])
def test_numbers(what: str, replayed: Replay) -> None:
    found = {name: error for name, error in errors(replayed).items() if name.startswith(what)}
    assert found and all(error <= TOLERANCE for error in found.values()), found
