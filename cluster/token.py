"""The token that a cluster asks for: where it is looked for, as Ray does, and what is said when it does not fit."""

import os
import re
from pathlib import Path

from cluster.errors import ClusterError


def token() -> str | None:
    """The user's token; None where there is none, or where RAY_AUTH_MODE says not to send it.

    Raises:
        ClusterError: what is there cannot be one.
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
        raise ClusterError(f"{_place()} holds no token, which is one word of ASCII; `ray get-auth-token --generate` makes one")
    return found or None


def refused(address: str) -> ClusterError:
    """What to say when a cluster has refused what `token` has, or that it has nothing."""
    if token() is not None:
        return ClusterError(f"{address} refuses the token in {_place()}: it is not the one that this cluster was started with")
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        return ClusterError(f"{address} asks for a token, and RAY_AUTH_MODE={mode} sends none: set RAY_AUTH_MODE=token")
    return ClusterError(
        f"{address} asks for a token, and there is none: put the cluster's into {_file()}, or set RAY_AUTH_TOKEN or "
        "RAY_AUTH_TOKEN_PATH"
    )


def _place() -> str:
    return "RAY_AUTH_TOKEN" if "RAY_AUTH_TOKEN" in os.environ else str(_file())


def _file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
