"""Runs cases one after another, each in its own process, and writes a JSON line after each case.

A case has a time limit, and all together have a budget. A case that crashes is run once more with
`SAN_CUDA_SYNC=1`, with which every launch is followed by a synchronisation, so that the error names its kernel.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gpu.case import Case, Row, Settings

ROOT = Path(__file__).resolve().parents[2]
SYNCHRONOUS = {"SAN_CUDA_SYNC": "1", "CUDA_LAUNCH_BLOCKING": "1"}
KERNEL = re.compile(r"\b(\w+_kernel)\b")
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
        self.records: list[Row] = []
        (out / "logs").mkdir(parents=True, exist_ok=True)
        self.file = open(out / "results.jsonl", "w", encoding="utf-8")

    def run(self, cases: Sequence[Case]) -> list[Row]:
        """Runs the cases by priority. Cases that the time budget does not allow get the status `not run`."""
        reason = ""
        for case in sorted(cases, key=lambda case: case.priority):
            if not reason and self.left() < LEAST:
                reason = "the budget is spent"
            record = self._not_run(case, reason) if reason else self._run(case)
            if case.id == FIRST and record["status"] != "passed":
                reason = f"{FIRST} did not pass"
            self._write(record)
        self.file.close()
        return self.records

    def left(self) -> float:
        return self.ends - time.monotonic()

    def _not_run(self, case: Case, reason: str) -> Row:
        return {"part": case.part, "name": case.name, "status": "not run", "seconds": 0.0, "rows": [], "error": reason}

    def _run(self, case: Case) -> Row:
        record = self._attempt(case, {})
        if record["status"] == "crashed" and self.left() > LEAST:
            again = self._attempt(case, SYNCHRONOUS)
            record["synchronous"] = {key: again.get(key) for key in ("status", "error")}
        if record["status"] in ("crashed", "failed"):
            # The synchronous error has priority; the other one may name a later kernel.
            found = KERNEL.search(f"{record.get('synchronous', {}).get('error')}\n{record['error']}")
            record["kernel"] = found[1] if found else None
        return record

    def _attempt(self, case: Case, environment: Mapping[str, str]) -> Row:
        """Runs a case in a process and returns its record."""
        name = case.id.replace("/", "-") + ("-synchronous" if environment else "")
        rows_file, log_file = self.out / "logs" / f"{name}.jsonl", self.out / "logs" / f"{name}.txt"
        rows_file.unlink(missing_ok=True)
        limit = min(case.limit, self.left())
        began = time.monotonic()
        with open(log_file, "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*self.child, self.settings.to_json(), case.id, str(rows_file)],
                cwd=ROOT,
                env={**os.environ, **self.environment, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._kill(process)
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
        end = rows.pop()["end"] if rows and "end" in rows[-1] else self._without_end(code, limit < case.limit, limit, log_file)
        return {"part": case.part, "name": case.name, "seconds": round(time.monotonic() - began, 1), "rows": rows, **end}

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Ends the process and its children and waits for it."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def _without_end(self, code: int | None, is_cut: bool, limit: float, log: Path) -> Row:
        """Returns the status of a process that ended without reporting one."""
        if code is None and is_cut:
            return {"status": "not run", "error": f"the budget ended after {limit:.0f} s of this case"}
        if code is None:
            return {"status": "timeout", "error": f"killed after {limit:.0f} s"}
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        output = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        return {"status": "crashed", "error": f"{how}\n{output}"[:2000]}

    def _write(self, record: Row) -> None:
        self.records.append(record)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        print(
            f"{record['status']:8} {record['seconds']:6.1f} s  {record['part']}/{record['name']}", file=sys.stderr, flush=True
        )
        if record["status"] in ("failed", "timeout", "crashed"):
            print(f"  {record.get('kernel') or ''} {record['error'].splitlines()[0][:300]}", file=sys.stderr, flush=True)
