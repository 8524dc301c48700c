"""All cases of the GPU check."""

from __future__ import annotations

from tests.gpu import build, correctness
from tests.gpu.case import Case, Settings


def all_cases(settings: Settings) -> list[Case]:
    return [*build.CASES, *correctness.ALL]
