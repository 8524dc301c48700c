"""Notices that Ray has died, and ends this process.

Without this, Ray's functions wait forever for a lost raylet, and end the process with their own message a minute after the
global control service (GCS) was lost.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import psutil
import ray

from cluster.interrupt import INTERRUPTED

T = TypeVar("T")
AtLoss = Sequence[Callable[[], object]]
"""What to do before this process ends; the last one is done first."""

_SECONDS_BETWEEN_CHECKS = 1.0
_TIMEOUT = 5.0
_SECONDS_TO_START = 300.0
_SECONDS_TO_RESPOND = 30.0
"""How long the head may not answer. Ray would end this process after 60 s."""
_SECONDS_AT_LOSS = 10.0
"""How long `AtLoss` may take, because a server may be lost together with Ray."""


@contextmanager
def supervised(local: bool, at_loss: AtLoss) -> Iterator[threading.Event]:
    """Ends this process if Ray dies inside this block, with a message and exit code 75 (`EX_TEMPFAIL`): a later
    attempt may succeed. After an interruption, the exit code is 1: a signal to the whole process group, as from `timeout`, ends
    Ray as well.

    The block connects to Ray and then sets the event. On this machine, Ray is lost if that takes too long.
    """
    connected, ended = threading.Event(), threading.Event()
    watch = threading.Thread(target=_watch, args=(local, connected, ended, at_loss), daemon=True)
    watch.start()
    try:
        yield connected
    finally:
        ended.set()
        connected.set()
        watch.join(_TIMEOUT + _SECONDS_AT_LOSS)


def _watch(local: bool, connected: threading.Event, ended: threading.Event, at_loss: AtLoss) -> None:
    if not connected.wait(_SECONDS_TO_START if local else None):
        _end(f"Ray did not start on this machine within {_SECONDS_TO_START:.0f} s", at_loss)
    if ended.is_set() or not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    address, node, responded_at = context.gcs_address, context.get_node_id(), time.monotonic()
    host, _, port = address.rpartition(":")
    # A head of others is known by its answers alone; it takes 12 s to notice a lost raylet.
    running = psutil.process_iter(["ppid", "name"]) if local else ()
    ours = [each for each in running if each.info["ppid"] == os.getpid() and each.info["name"] in ("raylet", "gcs_server")]
    family: Set[psutil.Process] = frozenset()
    answer: Future[list[dict[str, Any]]] | None = None
    while not ended.wait(_SECONDS_BETWEEN_CHECKS):
        message = None
        try:
            found = descendants()
            is_alive = all(_is_alive(child) for child in ours)
            if is_alive:
                family = found
                socket.create_connection((host, int(port)), timeout=_TIMEOUT).close()
                answer = answer or _ask(nodes)
                is_alive = node in {each["NodeID"] for each in answer.result(_TIMEOUT)}
                answer, responded_at = None, time.monotonic()
            if not is_alive:
                died = "Ray died on this machine, perhaps because memory ran out (see `dmesg`)"
                message = "the signal has also ended Ray" if INTERRUPTED.is_set() else died
        except OSError:
            if time.monotonic() - responded_at > _SECONDS_TO_RESPOND:
                message = f"the Ray head at {address} does not respond, perhaps because it was killed"
        except Exception:  # an interrupted sweep has called `ray.shutdown`
            answer = None
        # `ray.shutdown` disconnects before it ends the raylet.
        if message and ray.is_initialized() and not ended.is_set():
            _end(message, at_loss, family)
    futures.wait([answer] if answer else [], _SECONDS_AT_LOSS)  # `ray.shutdown` during `ray.nodes` would crash the process


def nodes() -> list[dict[str, Any]]:
    """The nodes of this session's cluster that are alive, as Ray describes them."""
    described: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in described if node["Alive"]]


def _ask(question: Callable[[], T]) -> Future[T]:
    """Asks in a thread, because Ray waits forever for a head that hangs."""
    answer = Future[T]()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer


def _end(message: str, at_loss: AtLoss, family: Set[psutil.Process] = frozenset()) -> NoReturn:
    """Ends this process and its descendants. Not with an exception, because the main thread may be blocked in Ray.

    A trial's process whose raylet is gone is no longer a descendant, but it writes until it notices that. `family` has the
    descendants at the last check.
    """
    kill(family | descendants())
    last = threading.Thread(target=lambda: [act() for act in reversed(at_loss)], daemon=True)
    last.start()
    last.join(_SECONDS_AT_LOSS)
    print(f"san: {message}. Finished epochs are kept; run the same command again to continue", file=sys.stderr, flush=True)
    os._exit(1 if INTERRUPTED.is_set() else os.EX_TEMPFAIL)


def descendants() -> Set[psutil.Process]:
    """The processes that this one has started, directly or not. None where a user may not look at processes of others."""
    with suppress(psutil.AccessDenied):
        return frozenset(psutil.Process().children(recursive=True))
    return frozenset()


def kill(processes: Set[psutil.Process]) -> None:
    """Kills processes and waits until they have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    limit = time.monotonic() + _TIMEOUT
    while any(_is_alive(process) for process in processes) and time.monotonic() < limit:
        time.sleep(0.01)


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not; in a container, its parent may never ask for its exit code."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
