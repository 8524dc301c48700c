"""`make audit` where there is no network, and what it asks of the list of accepted vulnerabilities."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def audit(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "AUDIT_DATABASE": "http://127.0.0.1:9", **variables}
    return subprocess.run([ROOT / ".ci/audit"], env=environment, capture_output=True, text=True)


def test_without_a_network_it_says_so_and_fails_nothing() -> None:
    done = audit()
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "audit: not done, for http://127.0.0.1:9 cannot be reached\n"


def test_nothing_is_accepted_without_a_reason(tmp_path: Path) -> None:
    accepted = tmp_path / "accepted.txt"
    accepted.write_text("# identifier, then why\nGHSA-aaaa-bbbb-cccc only its server is concerned, which we do not start\n")
    assert audit(AUDIT_ACCEPTED=str(accepted)).returncode == 0
    accepted.write_text("GHSA-aaaa-bbbb-cccc\n")
    done = audit(AUDIT_ACCEPTED=str(accepted))
    assert (done.returncode, done.stderr) == (2, f"audit: {accepted} accepts GHSA-aaaa-bbbb-cccc without a reason\n")
