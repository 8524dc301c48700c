"""MLflow's address."""

from __future__ import annotations

import re

from experiments.errors import UserError


def require_no_secret(uri: str) -> None:
    """Raises `UserError` if an address contains a password, because addresses are printed, stored and passed on.

    The message repeats only the scheme of the address, because the password itself may contain an @ or a ?.
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
