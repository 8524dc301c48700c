"""Finds the user's token in the same places as Ray, and explains why a cluster rejected it."""

import os
import re
from contextlib import suppress
from pathlib import Path

from cluster.errors import ClusterError


def token() -> str | None:
    """The user's token; None if there is none, or if RAY_AUTH_MODE disables tokens.

    Raises:
        ClusterError: the variable or file does not contain a valid token.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return None
    if "RAY_AUTH_TOKEN" in os.environ:
        found = os.environ["RAY_AUTH_TOKEN"].strip()
    else:
        try:
            found = _file().read_bytes().strip().decode(errors="replace")
        except OSError:
            return None
    if not re.fullmatch("[!-~]*", found):
        raise ClusterError(
            f"{_place()} does not hold a valid token (one word in ASCII); create one with `ray get-auth-token --generate`"
        )
    return found or None


def restrict_token() -> None:
    """Makes the token file readable only for the user, because Ray creates it with the default permissions."""
    with suppress(OSError):
        _file().chmod(0o600)


def rejected(address: str) -> ClusterError:
    """The error for a cluster that rejected the user's token or requires one."""
    if token() is not None:
        return ClusterError(f"{address} rejected the token in {_place()}; use the token that the cluster was started with")
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        return ClusterError(f"{address} requires a token, but RAY_AUTH_MODE={mode} sends none; set RAY_AUTH_MODE=token")
    return ClusterError(
        f"{address} requires a token; save the cluster's token to {_file()}, or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    )


def _place() -> str:
    return "RAY_AUTH_TOKEN" if "RAY_AUTH_TOKEN" in os.environ else str(_file())


def _file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
