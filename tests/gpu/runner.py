"""Runs cases one after another, each in its own process, and writes a JSON line after each case.

A case has a time limit, and all together have a budget.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.case import Case, Row, Settings

ROOT = Path(__file__).resolve().parents[2]
LEAST = 5.0
"""Seconds that must be left of the budget to start a case."""
FIRST = "build/kernels"
"""No other case can pass if this one fails."""


class Runner:
    """Runs cases and keeps their records, in memory and in `DIR/results.jsonl`."""

    def __init__(
        self, settings: Settings, out: Path, budget: float, child: Sequence[str] = (sys.executable, "-m", "tests.gpu.child")
    ) -> None:
        self.settings, self.out, self.child = settings, out, child
        self.environment = {} if settings.on_gpu else {"CUDA_VISIBLE_DEVICES": "", "SAN_CUDA": "0"}
        self.ends = time.monotonic() + budget
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, cases: Sequence[Case]) -> list[Row]:
        """Runs the cases by priority. Cases that the time budget does not allow get the status `not run`."""
        reason, records = "", list[Row]()
        with open(self.out / "results.jsonl", "w", encoding="utf-8") as file:
            for case in sorted(cases, key=lambda case: case.priority):
                if not reason and self.left() < LEAST:
                    reason = "the budget is spent"
                record: Row = {"status": "not run", "seconds": 0.0, "rows": [], "error": reason} if reason else self._run(case)
                if case.id == FIRST and record["status"] != "passed":
                    reason = f"{FIRST} did not pass"
                records.append({"part": case.part, "name": case.name, **record})
                print(json.dumps(records[-1]), file=file, flush=True)
                error = f": {record['error'].splitlines()[0][:300]}" if record.get("error") else ""
                print(f"{record['status']:8} {record['seconds']:6.1f} s  {case.id}{error}", file=sys.stderr, flush=True)
        return records

    def left(self) -> float:
        return self.ends - time.monotonic()

    def _run(self, case: Case) -> Row:
        """Runs a case in a process and returns its record."""
        name = case.id.replace("/", "-")
        rows_file, log_file = self.out / "logs" / f"{name}.jsonl", self.out / "logs" / f"{name}.txt"
        rows_file.unlink(missing_ok=True)
        limit = min(case.limit, self.left())
        began = time.monotonic()
        with open(log_file, "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*self.child, self.settings.to_json(), case.id, str(rows_file)],
                cwd=ROOT,
                env=os.environ | self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
        if rows and "end" in rows[-1]:
            end = rows.pop()["end"]
        elif code is None:
            end = {"status": "timeout" if limit == case.limit else "not run", "error": f"killed after {limit:.0f} s"}
        else:
            output = "\n".join(log_file.read_text(errors="replace").splitlines()[-15:])
            end = {"status": "crashed", "error": f"exit code {code}\n{output}"[:2000]}
        return {"seconds": round(time.monotonic() - began, 1), "rows": rows, **end}
