"""Runs one case and writes its rows: `python -m tests.gpu.child SETTINGS CASE ROWS_FILE`, started by `runner.py`.

The last line of the file tells how the case ended. If it is missing, the process crashed or was killed.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

from tests.gpu.case import Case, Row, Settings, SkipCase

OURS = ("tests", "san", "cuda_ext", "pipelines", "cluster", "experiments")


def main(cases: Callable[[Settings], list[Case]]) -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    case = next(case for case in cases(settings) if case.id == sys.argv[2])
    if not settings.on_gpu:
        import torch

        torch.set_num_threads(1)  # with other work on the machine, several threads wait for each other
    with open(sys.argv[3], "w", encoding="utf-8") as file:

        def write(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        write({"end": run(case, settings, write)})


def run(case: Case, settings: Settings, write: Callable[[Row], None]) -> Row:
    """Writes the case's rows and returns its status."""
    failed = []
    try:
        for row in case.run(settings):
            write(row)
            if row.get("passed") is False:
                failed.append(row)
    except SkipCase as reason:
        return {"status": "skipped", "error": str(reason)}
    except Exception as error:
        may_miss = case.part in ("loader", "training", "system")  # the other parts need only torch and numpy
        if may_miss and isinstance(error, ModuleNotFoundError) and (error.name or "tests").split(".")[0] not in OURS:
            return {"status": "skipped", "error": f"needs the package {error.name}"}
        traceback.print_exc()
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}
    if failed:
        return {"status": "failed", "error": f"{len(failed)} checks failed, the first: {json.dumps(failed[0])}"[:2000]}
    return {"status": "passed"}


if __name__ == "__main__":
    from tests.gpu.cases import all_cases

    main(all_cases)
