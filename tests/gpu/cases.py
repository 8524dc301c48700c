"""All cases of the GPU check."""

from __future__ import annotations

from tests.gpu import build, cores, correctness, graphs, kernels, limits, loader, models, network, system, training, tune
from tests.gpu.case import Case, Settings


def all_cases(settings: Settings) -> list[Case]:
    """Returns all cases; on a CPU, only one size of each network and attention."""
    networks = models.SMALL if settings.small else models.ALL
    attention = cores.SMALL if settings.small else cores.ALL
    return [
        *build.CASES,
        *graphs.ALL,
        *correctness.ALL,
        *attention,
        *networks,
        *kernels.ALL,
        *network.ALL,
        *tune.ALL,
        *limits.ALL,
        *loader.ALL,
        *training.ALL,
        *system.ALL,
    ]
