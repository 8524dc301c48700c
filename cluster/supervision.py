"""Notices within 30 s that Ray has died, and ends its processes.

Without this, Ray's functions wait forever for a lost raylet, and end the process with their own message a minute after the
global control service (GCS) was lost.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import grpc
import psutil
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

OnLost = Callable[[str], NoReturn]
"""Called with a message in a thread, because the main thread may be blocked in Ray. Must end the process."""

_SECONDS_BETWEEN_CHECKS = 1.0
_TIMEOUT = 5.0
_SECONDS_TO_START = 180.0
_PATIENCE_REFUSED = 15.0
"""How long the head may refuse connections, in seconds. Then its process is dead."""
_PATIENCE_SILENT = 50.0
"""How long the head may not answer, in seconds. It may only be busy, but Ray would end this process after 60 s."""
_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def supervised(local: bool, on_lost: OnLost | None) -> Iterator[None]:
    """Calls `on_lost` if Ray dies inside this block, which must be inside a session.

    Without `on_lost`, prints the message and ends the process with exit code 1.
    """
    watch = _Watch(local, on_lost or exit_lost)
    watch.start()
    try:
        yield
    finally:
        watch.ended.set()


@contextmanager
def time_limit(local: bool, on_lost: OnLost | None) -> Iterator[None]:
    """Calls `on_lost` if Ray takes too long to start on this machine. If its processes die meanwhile, it waits forever."""
    message = f"Ray did not start on this machine within {_SECONDS_TO_START:.0f} s"
    timer = threading.Timer(_SECONDS_TO_START, on_lost or exit_lost, [message])
    timer.daemon = True
    if local:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exit_lost(message: str) -> NoReturn:
    """Prints a message, and ends this process and its descendants with exit code 1."""
    print(f"san: {message}", file=sys.stderr, flush=True)
    kill_descendants()
    os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent dies, so that `kill_descendants` finds them. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(spared: frozenset[int] = frozenset()) -> None:
    """Kills all processes that this process has started, directly or not, except those with the process ids `spared`."""
    found = [child for child in psutil.Process().children(recursive=True) if child.pid not in spared]
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    pids, limit = [process.pid for process in found], time.monotonic() + _TIMEOUT
    while (pids := [pid for pid in pids if not _is_gone(pid)]) and time.monotonic() < limit:
        time.sleep(0.01)


def _is_gone(pid: int) -> bool:
    """Whether a killed process no longer exists. Reaps it if it is a child, which orphans become only after a moment."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not psutil.pid_exists(pid)


class _Watch(threading.Thread):
    """Asks the GCS every second whether the raylet of this machine is alive."""

    def __init__(self, local: bool, on_lost: OnLost) -> None:
        super().__init__(name="ray-watch", daemon=True)
        self.local, self.on_lost, self.ended = local, on_lost, threading.Event()
        context = ray.get_runtime_context()
        self.head, self.node = context.gcs_address, bytes.fromhex(context.get_node_id())

    def run(self) -> None:
        request = gcs_service_pb2.CheckAliveRequest(node_ids=[self.node])  # type: ignore[attr-defined]
        answered_at = time.monotonic()
        with init_grpc_channel(self.head) as channel:
            head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
            while not self.ended.wait(_SECONDS_BETWEEN_CHECKS):
                try:
                    reply = head.CheckAlive(request, timeout=_TIMEOUT)
                except grpc.RpcError as error:
                    is_refused = error.code() is grpc.StatusCode.UNAVAILABLE
                    if time.monotonic() - answered_at > (_PATIENCE_REFUSED if is_refused else _PATIENCE_SILENT):
                        where = "on this machine" if self.local else f"at {self.head}"
                        self._lose(f"the Ray head {where} does not respond, perhaps because it was killed")
                    continue
                answered_at = time.monotonic()
                if not all(reply.raylet_alive):
                    self._lose("Ray died on this machine, perhaps because memory ran out (see `dmesg`)")

    def _lose(self, message: str) -> None:
        # `ray.shutdown` disconnects before it ends the raylet. An interrupted sweep calls it before the session ends.
        if ray.is_initialized() and not self.ended.is_set():
            self.on_lost(message)
