"""All cases of the GPU check."""

from __future__ import annotations

from tests.gpu import build, cores, correctness, graphs, kernels, limits, loader, models, network, system, tune
from tests.gpu.case import Case, Settings


def all_cases(settings: Settings) -> list[Case]:
    """Returns all cases; on a CPU, fewer of networks."""
    return [
        *build.CASES,
        *graphs.ALL,
        *correctness.ALL,
        *cores.ALL,
        *(models.SMALL if settings.small else models.ALL),
        *kernels.ALL,
        *network.ALL,
        *tune.ALL,
        *limits.ALL,
        *loader.ALL,
        *system.ALL,
    ]
