"""Our SAN10 reproduces the released code's numbers in float64: names, forward, gradients, running statistics."""

import pytest

from tests.golden.replay import TOLERANCE, errors, recorded, replay


@pytest.mark.every_isa
def test_replays_the_recorded_numbers() -> None:
    replayed = replay("cpu")
    assert replayed.shapes == {key: list(shape) for key, shape in recorded()["keys"].items()}
    found = errors(replayed)
    assert found.keys() == {"train_logits", "loss", "eval_logits", "grad_norm", "running"}
    assert all(error <= TOLERANCE for error in found.values()), found
