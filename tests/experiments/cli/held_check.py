"""`python -m tests.experiments.cli.held_check data check ROOT` is `san data check ROOT` that draws its bar after each step, and
that decodes the images after the first `AT_ONCE` only when there is a file `ROOT/released`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pipelines.datasets import check
from pipelines.datasets.check import Broken, Source

CHECK = check._check


def held(images: list[tuple[int, Source]]) -> list[Broken]:
    while images[0][0] >= check.AT_ONCE and not Path(sys.argv[-1], "released").exists():
        time.sleep(0.02)
    return CHECK(images)


if __name__ == "__main__":
    from experiments.cli.commands import main
    from experiments.runner import progress

    progress.SECONDS_BETWEEN_DRAWINGS = 0.0
    check._check = held
    main()
