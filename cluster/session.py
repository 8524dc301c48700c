"""A connection to a Ray cluster, and the resources of the cluster."""

import logging
import os
import secrets
import shlex
import signal
import socket
import stat
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray._private.worker
from filelock import FileLock, Timeout

from cluster.errors import TOKEN_HINT, ClusterError
from cluster.placement import Node, Resources, available_cpus
from cluster.supervision import AtLoss, descendants, kill, nodes, supervised

_log = logging.getLogger(__name__)
T = TypeVar("T")

_ATTEMPTS = 3
"""How often Ray may start: it waits only 30 s for its own processes, which a busy machine can miss."""

_LONGEST_TEMPORARY = 25
"""Most bytes in the path of the temporary folder: Ray adds 80, and the path of a Unix socket may have 107."""

# Ray reads these from the environment of the driver, and Tune passes them on to its processes.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # no tables from Tune
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C raises KeyboardInterrupt instead of requesting a snapshot
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no CSV, JSON and TensorBoard copies of every metric
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a trial without GPUs sees none; without this, Ray prints a warning
    "TUNE_MAX_PENDING_TRIALS_PG": "1000",  # trials start at the same time; the sweep limits their number
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths have the same meaning in trials and in the driver
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "60",  # a stopped trial cleans up before another trial uses its process
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Interval at which Ray collects the reports of several workers, which wait until the previous report was collected. With
    # Ray's default of 2 s, a trial with short epochs spent most of its time waiting.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}


@contextmanager
def session(address: str | None = None, at_loss: AtLoss = ()) -> Iterator[Resources]:
    """Connects to a cluster inside a `with` block, and returns its current resources.

    Joins the cluster at `address` (`auto`, `host:6379`) or at `RAY_ADDRESS`, which is set inside a Ray job. Without an
    address, starts a local cluster with the CPUs and GPUs that this process may use, and shuts it down at the end. If Ray dies,
    this process ends (see `supervised`).

    Raises:
        ClusterError: Ray did not start here in three attempts, or the cluster cannot be joined.
    """
    _quieten()
    local = is_local(address)
    try:
        with supervised(local, at_loss) as connected:
            handler = signal.getsignal(signal.SIGTERM)
            # Ray puts the current folder on the path of its workers, where a file profile.py would replace Python's module.
            with chdir(Path(__file__).parents[1]):
                _connect(address or os.environ.get("RAY_ADDRESS") or None)
            if threading.current_thread() is threading.main_thread():  # only this thread can set handlers
                signal.signal(signal.SIGTERM, handler)  # Ray's would end the process without a message
            connected.set()
            yield resources()
    finally:
        ray.shutdown()  # ends a local cluster; in a joined cluster, ends the processes of this driver


def is_local(address: str | None) -> bool:
    """Whether a session with this address would start a cluster on this machine."""
    return not (address or os.environ.get("RAY_ADDRESS"))


@contextmanager
def only_session() -> Iterator[bool]:
    """Whether no other process of this user is in such a block on this machine."""
    lock = FileLock(private_folder() / "session.lock")
    with suppress(Timeout):
        lock.acquire(timeout=0)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _quieten() -> None:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)

    # Private, because there is no setting: Ray prints warnings of the raylet on stdout, which is for our tables.
    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            _log.info("ray: %s", line)

    ray._private.worker.print_to_stdstream = log


def _is_writable(folder: Path) -> bool:
    """Whether files can be written to a folder, which is created if it is missing. Permissions can be wrong, as in /sys."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _connect(address: str | None) -> None:
    quiet: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if address is None:
        # Without the dashboard, whose dozen processes take seconds to start.
        local: dict[str, Any] = {"address": "local", "num_cpus": available_cpus(), "include_dashboard": False}
        if (python := shlex.quote(sys.executable)) != sys.executable:  # Ray passes it to a shell without quotes
            local["runtime_env"] = {"py_executable": python}
        if not _is_writable(Path(os.path.expanduser("~/.ray"))) and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            # Ray would write its token into the home folder, which some users of containers do not have.
            (token := private_folder() / "auth_token").write_text(secrets.token_hex(32))
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        start_ray(lambda: ray.init(**local, _temp_dir=str(private_folder() / "ray"), **quiet))
        with suppress(OSError):  # Ray creates the token with the default permissions
            Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token").chmod(0o600)
        return
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            f"{address} is the address of a job server; submit to it with `san submit`, or join the cluster at HEAD:6379"
        )
    # Ray turns on authentication if it finds a token, and every local session leaves one in the home folder. On a cluster
    # without authentication, every trial would then fail without a useful message.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():  # `ray.init` would take two minutes to fail
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, **quiet)
    except Exception as error:
        raise ClusterError(
            f"cannot join a Ray cluster at {address!r} ({_reason(error)}); check the address. If the cluster requires a token, "
            f"{TOKEN_HINT}. To run on this machine, leave --address out and unset RAY_ADDRESS"
        ) from error


def start_ray(start: Callable[[], T]) -> T:
    """Calls a function that starts processes of Ray here, up to three times until it succeeds. Says so on stderr.

    Raises:
        ClusterError: all attempts failed.
    """
    attempt = 1
    while True:
        others = descendants()
        try:
            return start()
        except Exception as error:  # Ray raises Exception itself
            kill(descendants() - others)
            if attempt == _ATTEMPTS or isinstance(error, (ValueError, PermissionError)):  # another start would raise it again
                raise ClusterError(f"Ray did not start on this machine ({_reason(error)})") from error
            attempt += 1
            again = f"starting it again ({attempt} of {_ATTEMPTS})"
            print(f"Ray did not start ({_reason(error)}); {again}", file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    return textwrap.shorten(str(error), 300)


def private_folder() -> Path:
    """A folder that only this user can open: Ray lets everyone write to its own folder of sockets and logs."""
    temporary = Path(tempfile.gettempdir())
    if len(os.fsencode(temporary)) > _LONGEST_TEMPORARY:
        temporary = Path("/tmp")
    folder = temporary / f"san-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700 or not stat.S_ISDIR(status.st_mode):
        return Path(tempfile.mkdtemp(prefix="san-", dir=temporary))  # another user created it
    return folder


def resources() -> Resources:
    """The current resources of this session's cluster."""
    members = nodes()
    # `ray up` and KubeRay label each node with its group for Ray's autoscaler; `ray start` does not.
    grows = any("ray.io/node-group" in node["Labels"] for node in members)
    amounts = [node["Resources"] for node in members]
    return Resources(tuple(Node(int(amount.get("CPU", 0)), int(amount.get("GPU", 0))) for amount in amounts), grows)
