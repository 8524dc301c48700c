"""All cases of the GPU check."""

from __future__ import annotations

from tests.gpu import build, cores, correctness, graphs, loader, models, training
from tests.gpu.case import Case, Settings


def all_cases(settings: Settings) -> list[Case]:
    """On the CPU without those that would only repeat the same code at other sizes."""
    networks = models.SMALL if settings.small else models.ALL
    attention = cores.SMALL if settings.small else cores.ALL
    return [*build.CASES, *graphs.ALL, *correctness.ALL, *attention, *networks, *loader.ALL, *training.ALL]
