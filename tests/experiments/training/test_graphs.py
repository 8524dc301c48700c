"""Training with CUDA graphs, with a fake capture. On a GPU, `python -m tests.gpu` compares real graphs with eager steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from experiments.grids.config import EngineConfig
from experiments.training import graphs
from experiments.training.engine import Engine
from tests.experiments.training.test_engine import convolution, recipe

ON = EngineConfig(cuda_graphs=True)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Replaces the capture of CUDA graphs: a replay calls the function again. Counts the replays of each capture."""
    counts: list[int] = []

    def record(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        for _ in range(graphs.WARM_UP):
            result = run().clone()
        number = len(counts)
        counts.append(0)

        def replay() -> None:
            counts[number] += 1
            result.copy_(run())

        return replay, result

    monkeypatch.setattr(graphs, "record", record)
    yield counts


@pytest.mark.parametrize(
    "options", [{}, {"grad_accum_steps": 2}, {"mixup_alpha": 0.4, "grad_accum_steps": 3}, {"ema_decay": 0.9}], ids=str
)
def test_graphs_train_like_eager_steps(options: dict[str, float], captures: list[int], process_group: None) -> None:
    ours, eager = (Engine(convolution(), recipe(**options), 4, 8, how) for how in (ON, EngineConfig()))
    generator = torch.Generator().manual_seed(3)
    for images in (8, 7, 8, 7):  # an epoch has batches of two sizes
        batch = torch.randn(images, 3, 4, 4, generator=generator), torch.arange(images) % 4
        torch.manual_seed(images)
        loss = ours.train_step(*batch)
        torch.manual_seed(images)
        assert torch.equal(loss, eager.train_step(*batch))
    for (name, mine), theirs in zip(ours.model.state_dict().items(), eager.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert sum(captures) == 4 * recipe(**options).grad_accum_steps


def test_each_size_of_batch_is_captured_once(captures: list[int], process_group: None) -> None:
    engine = Engine(convolution(), recipe(), 6, 8, ON)
    for images in (8, 8, 7, 8, 7, 8):
        engine.train_step(torch.randn(images, 3, 4, 4), torch.arange(images) % 4)
    assert captures == [4, 2]
