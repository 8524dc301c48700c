"""Tests and times the project on a GPU: `python -m tests.gpu --out DIR [--budget SECONDS] [--case TEXT ...]`.

Parts: correctness (kernels, modules, models), cores (attention alone), models (training and evaluation of networks), kernels
(a profile of attention), network (a profile of a training step), tune (attention kernels with other sizes of blocks), loader
(images from files), training (CUDA graphs against eager steps) and system (`san` commands). All but the last three need only
torch, numpy, pytest and nvcc; CUDA graphs also need pydantic and DeepSpeed. Results go to
DIR/results.jsonl, one line per case, and logs to DIR/logs. `python -m tests.gpu.report DIR/results.jsonl` prints tables.

Each case runs in its own process with a time limit, because one illegal access ruins the CUDA context of a process. A process
costs 3 to 5 s before its first kernel runs, so a case holds all checks of one kernel, or all timings that are compared with
each other. The most important cases run first, across parts; what the budget does not reach is recorded as
`not run`. The exit code is 1 if a case failed, crashed or timed out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.gpu.case import Settings
from tests.gpu.cases import all_cases
from tests.gpu.runner import Runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument(
        "--budget", type=float, default=540.0, help="seconds for all cases together (default 540; 3600 are enough for all)"
    )
    parser.add_argument("--case", action="append", help="run only cases whose PART/NAME contains this; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU; small sizes on the CPU")
    parser.add_argument("--authors", type=Path, help="checkout of github.com/hszhao/SAN, to time its kernels too (needs CuPy)")
    parser.add_argument("--photographs", type=Path, help="folder of JPEG photographs, instead of generated ones")
    parser.add_argument("--cifar10", type=Path, help="CIFAR-10 as `san data prepare cifar10` writes it, instead of the digits")
    parser.add_argument("--report", action="store_true", help="print the tables at the end")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = options.authors, options.photographs, options.cifar10
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:  # a killed case may still write
        settings = Settings(device, work, *(str(folder.resolve()) if folder else None for folder in given))
        wanted = ("build/", *(options.case or [""]))
        cases = [case for case in all_cases(settings) if any(text in case.id for text in wanted)]
        if nowhere := [text for text in wanted if not any(text in case.id for case in cases)]:
            parser.error(f"--case {nowhere[0]}: no case's PART/NAME contains this")
        records = Runner(settings, options.out, options.budget).run(cases)
    counts = Counter(record["status"] for record in records)
    print(", ".join(f"{count} {status}" for status, count in counts.items()), file=sys.stderr)
    if options.report:
        from tests.gpu.report import report

        print(report(records))
    sys.exit(1 if counts["failed"] + counts["crashed"] + counts["timeout"] else 0)


if __name__ == "__main__":
    main()
