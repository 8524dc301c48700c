"""Notices that Ray has died, and ends its processes.

Without this, Ray's functions wait forever for a lost raylet, and end the process with their own message a minute after the
global control service (GCS) was lost.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import psutil
import ray

OnLost = Callable[[str], NoReturn]
"""Called with a message in a thread, because the main thread may be blocked in Ray. Must end the process."""

_SECONDS_BETWEEN_CHECKS = 1.0
_TIMEOUT = 5.0
_SECONDS_TO_START = 300.0
_SECONDS_TO_RESPOND = 30.0
"""How long the head may not answer. Ray would end this process after 60 s."""


@contextmanager
def supervised(local: bool, on_lost: OnLost | None) -> Iterator[threading.Event]:
    """Calls `on_lost` if Ray dies inside this block; by default, prints the message and ends the process with exit code 1.

    The block connects to Ray and then sets the event. On this machine, Ray is lost if that takes too long.
    """
    connected, ended = threading.Event(), threading.Event()
    watch = threading.Thread(target=_watch, args=(local, connected, ended, on_lost or exit_lost), daemon=True)
    watch.start()
    try:
        yield connected
    finally:
        ended.set()
        connected.set()
        watch.join(_TIMEOUT)  # `ray.shutdown` during `ray.nodes` would crash the process


def _watch(local: bool, connected: threading.Event, ended: threading.Event, on_lost: OnLost) -> None:
    if not connected.wait(_SECONDS_TO_START if local else None):
        on_lost(f"Ray did not start on this machine within {_SECONDS_TO_START:.0f} s")
    if ended.is_set() or not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    address, node, responded_at = context.gcs_address, context.get_node_id(), time.monotonic()
    host, _, port = address.rpartition(":")
    while not ended.wait(_SECONDS_BETWEEN_CHECKS):
        message = None
        try:
            socket.create_connection((host, int(port)), timeout=_TIMEOUT).close()
            responded_at = time.monotonic()
            if node not in {each["NodeID"] for each in nodes()}:
                message = "Ray died on this machine, perhaps because memory ran out (see `dmesg`)"
        except OSError as error:
            has_ended = local and isinstance(error, ConnectionRefusedError)
            if has_ended or time.monotonic() - responded_at > _SECONDS_TO_RESPOND:
                where = "on this machine" if local else f"at {address}"
                message = f"the Ray head {where} does not respond, perhaps because it was killed"
        except Exception:  # an interrupted sweep has called `ray.shutdown`
            continue
        # `ray.shutdown` disconnects before it ends the raylet.
        if message and ray.is_initialized() and not ended.is_set():
            on_lost(message)


def nodes() -> list[dict[str, Any]]:
    """The nodes of this session's cluster that are alive, as Ray describes them."""
    described: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in described if node["Alive"]]


def exit_lost(message: str) -> NoReturn:
    """Prints a message, and ends this process and its descendants with exit code 1."""
    print(f"san: {message}", file=sys.stderr, flush=True)
    kill_descendants()
    os._exit(1)


def kill_descendants(others: Collection[psutil.Process] = ()) -> None:
    """Kills all processes that this process has started, directly or not, except `others`. Workers whose raylet is gone end by
    themselves."""
    processes = [process for process in psutil.Process().children(recursive=True) if process not in others]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_TIMEOUT)
