"""The tracker's address, and how long the project waits for the tracker."""

from __future__ import annotations

import re

from experiments.errors import UserError

PATIENCE = 120.0  # seconds that the end of a trial, or of a grid, waits for a tracker that is away
PAUSE = 2.0  # seconds before a tracker that is away is asked again


def require_no_secret(uri: str) -> None:
    """An address is printed, kept with runs and handed to other processes, so it must hold no password.

    Raises:
        UserError: it does; the text shows no more of the address than its kind, for a password may hold an @ or a ? too.
    """
    scheme, _, rest = uri.partition("://")
    if scheme in ("sqlite", "file"):
        return
    server = scheme in ("http", "https")
    if not re.search("@" if server else "^[^@]*:[^@]*@|passw(or)?d=", rest):
        return
    way = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    remedy = f"set {way}" if server else "store it where the database expects it, such as in PGPASSWORD or ~/.pgpass"
    raise UserError(
        f"MLFLOW_TRACKING_URI={scheme}://...: this address contains a password, which would be printed and stored; "
        f"remove the password and {remedy}"
    )
