"""Retries requests to a tracking server or a bucket that is away for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from experiments.errors import UnavailableError

_log = logging.getLogger(__name__)
T = TypeVar("T")

OUTAGE_TIMEOUT = 120.0
"""Seconds for which the end of a trial or of a grid waits for a server that is away."""
PAUSE = 2.0
"""Seconds between two attempts."""


def retry(request: Callable[[], T], seconds: float | None = None) -> T:
    """Returns the result of `request`, which is repeated for up to `seconds` (default: `OUTAGE_TIMEOUT`) while it raises
    `UnavailableError`.

    Raises:
        UnavailableError: the last attempt failed too.
    """
    seconds = OUTAGE_TIMEOUT if seconds is None else seconds
    limit, warned = time.monotonic() + seconds, False
    while True:
        try:
            return request()
        except UnavailableError as error:
            if seconds == 0:
                raise
            if time.monotonic() > limit:
                raise type(error)(f"{error}; gave up after {seconds:.0f} s") from None
            if not warned:
                _log.warning("%s; retrying for up to %.0f s", error, seconds)
            warned = True
            time.sleep(PAUSE)
