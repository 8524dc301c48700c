"""A sweep in this process, without Ray: one trial after the other, for breakpoints, profilers and tests.

`Outcome` and `Observer` belong to every sweep. They are here because this file does not import Ray.
"""

import textwrap
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cluster.errors import ClusterError

ReportFn = Callable[[Mapping[str, float]], None]
V = TypeVar("V")

_LONGEST_REASON = 800
"""Maximum length of the reason for a failure, in characters."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended: `error` is one line, or None for success; `traceback` contains the details."""

    key: str
    error: str | None = None
    traceback: str = ""


class Observer(Protocol):
    """Observes a sweep. Its methods are called in the process and thread that called `sweep`."""

    def started(self, key: str) -> None:
        """A trial starts, for the first time or as a retry."""

    def progress(self, key: str, metrics: Mapping[str, float]) -> None:
        """The first worker of a trial has reported metrics."""

    def failed(self, key: str, reason: str) -> None:
        """A trial has failed and will be retried."""

    def finished(self, outcome: Outcome) -> None:
        """A trial has ended and will not be retried."""

    def waiting(self, reason: str) -> None:
        """No trial can run, for example because nodes were lost. Called at once, and then every minute."""


def sweep(
    function: Callable[[V, ReportFn], object],
    values: Mapping[str, V],
    *,
    observer: Observer,
    non_retryable: tuple[type[Exception], ...] = (),
    fatal: tuple[type[Exception], ...] = (),
    is_interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Outcome]:
    """Calls `function(value, report)` for every value in this thread, and returns how each call ended.

    As `cluster.sweep.sweep`, except that there is one worker, and that no trial is retried: the same process would fail again.

    Raises:
        KeyboardInterrupt: `is_interrupted`, or the user has left a debugger.
    """
    outcomes: dict[str, Outcome] = {}
    errors_of_observer: list[Exception] = []

    def report(metrics: Mapping[str, float]) -> None:
        try:
            observer.progress(key, metrics)
        except Exception as error:
            errors_of_observer.append(error)
            raise

    for key, value in values.items():
        if is_interrupted():
            break
        observer.started(key)
        try:
            function(value, report)
            outcomes[key] = Outcome(key)
        except BdbQuit:
            raise KeyboardInterrupt from None
        except Exception as error:
            if error in errors_of_observer:
                raise
            reason = one_line(str(error)) if isinstance(error, (*non_retryable, *fatal)) else described(error)
            outcomes[key] = Outcome(key, reason, traceback.format_exc())
            if isinstance(error, fatal):
                observer.finished(outcomes[key])
                raise ClusterError(reason) from None
        observer.finished(outcomes[key])
    if is_interrupted():
        raise KeyboardInterrupt
    return outcomes


def described(error: Exception) -> str:
    """One line with the type of an exception and its message."""
    return one_line(": ".join(filter(None, (type(error).__name__, str(error)))))


def one_line(text: str) -> str:
    """A reason for a failure, shortened."""
    return textwrap.shorten(text, _LONGEST_REASON)
