"""A connection to a Ray cluster, and the resources of the cluster."""

import logging
import os
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
import ray._private.worker
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.grpc_utils import init_grpc_channel
from ray._raylet import RAY_NODE_GROUP_KEY, Config  # type: ignore[attr-defined]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.exceptions import AuthenticationError

from cluster.errors import ClusterError, StartError
from cluster.placement import Node, Resources
from cluster.supervision import OnLost, adopt_orphans, kill_descendants, supervised, time_limit
from cluster.token import rejected, restrict_token, token

_log = logging.getLogger(__name__)

# Ray reads these from the environment of the driver, and Tune passes them on to its processes.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # no tables from Tune
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C raises KeyboardInterrupt instead of requesting a snapshot
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no CSV, JSON and TensorBoard copies of every metric
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a cell without GPUs sees none; without this, Ray prints a warning
    "TUNE_MAX_PENDING_TRIALS_PG": "1000",  # cells start at the same time; the sweep limits their number
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths have the same meaning in cells and in the driver
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "60",  # a stopped cell cleans up before another cell uses its process
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Interval at which Ray collects the reports of several workers, which wait until the previous report was collected. With
    # Ray's default of 2 s, a cell with short epochs spent most of its time waiting.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}


@contextmanager
def session(address: str | None = None, on_lost: OnLost | None = None) -> Iterator[Resources]:
    """Connects to a cluster inside a `with` block, and returns its current resources.

    Joins the cluster at `address` (`auto`, `host:6379`) or at `RAY_ADDRESS`, which is set inside a Ray job. Without an
    address, starts a local cluster with the CPUs and GPUs that this process may use, and shuts it down at the end. Inside
    another session, that session is used. If Ray does not start or dies, calls `on_lost`; by default, this process ends.
    """
    if ray.is_initialized():
        yield resources()
        return
    _quieten()
    local = is_local(address)
    if local:
        adopt_orphans()
    others = frozenset(child.pid for child in psutil.Process().children(recursive=True))
    try:
        try:
            with _keep_sigterm_handler(), time_limit(local, on_lost):
                _connect(address or os.environ.get("RAY_ADDRESS") or None)
        except StartError as error:
            if on_lost is not None:
                on_lost(str(error))
            raise
        with supervised(local, on_lost):
            yield resources()
    finally:
        # Shuts down a local cluster; in a joined cluster, ends the processes of this driver.
        ray.shutdown()
        if local:
            kill_descendants(others)  # stopped processes, for example, survive the shutdown


def is_local(address: str | None) -> bool:
    """Whether a session with this address would start a cluster on this machine."""
    return not (ray.is_initialized() or address or os.environ.get("RAY_ADDRESS"))


def _quieten() -> None:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)

    # Private, because there is no setting: Ray prints warnings of the raylet on stdout, which is for our tables.
    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            _log.info("ray: %s", line)

    ray._private.worker.print_to_stdstream = log


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Keeps the caller's handler of SIGTERM, which Ray replaces with one that ends the process without a message."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():  # only this thread can set handlers
        signal.signal(signal.SIGTERM, handler)


def _connect(address: str | None) -> None:
    if address is None:
        # Without the dashboard, whose dozen processes take seconds to start.
        try:
            ray.init(
                address="local",
                num_cpus=available_cpus(),
                include_dashboard=False,
                logging_level=logging.CRITICAL,
                log_to_driver=False,
                _temp_dir=str(_private_folder() / "ray"),
            )
        except Exception as error:  # Ray raises Exception itself
            reason = str(error).partition("\n")[0]
            raise StartError(f"Ray did not start on this machine ({reason.rstrip('.')})") from error
        restrict_token()
        return
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            f"{address} is the address of a job server; submit to it with `san submit`, or join the cluster at HEAD:6379"
        )
    try:
        try:
            _check_head(address)
        except AuthenticationError:
            _send_token()
            _check_head(address)
        ray.init(address=address, logging_level=logging.CRITICAL, log_to_driver=False)
    except AuthenticationError:
        raise rejected(address) from None
    except ClusterError:  # a ValueError with a message for users
        raise
    except (OSError, RuntimeError, ValueError) as error:
        if str(error).startswith("Version mismatch"):
            said = " ".join(str(error).split())
            raise ClusterError(f"{address}: {said} Install the same versions of Ray and Python on both sides.") from None
        raise ClusterError(
            f"no Ray cluster answers at {address!r}; check the address. To run on this machine, leave --address out and "
            "unset RAY_ADDRESS"
        ) from error


def _private_folder() -> Path:
    """A folder that only this user can open: Ray lets everyone write to its own folder of sockets and logs."""
    folder = Path(tempfile.gettempdir()) / f"san-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700 or not stat.S_ISDIR(found.st_mode):
        return Path(tempfile.mkdtemp(prefix="san-"))  # another user created it
    return folder


def _send_token() -> None:
    """Makes Ray send the user's token, which it does by itself only for the address `auto`.

    Only for clusters that require a token: otherwise this process rejects messages from the head, and Ray considers its actors
    lost. Private, because Ray reads RAY_AUTH_MODE only once, when it is imported.
    """
    if token() is not None and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")


def _check_head(address: str) -> None:
    """Checks that a Ray head responds at `host:port` and accepts the token.

    Private, because `ray.init` takes 20 s to fail and does not distinguish a wrong token from a wrong address.

    Raises:
        OSError: there is no Ray head.
        AuthenticationError: the head rejects the token.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    reach(host, int(port))
    with init_grpc_channel(address) as channel:
        head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            head.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=10)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise AuthenticationError(error.details()) from None
            raise ConnectionError(error.details()) from None


def reach(host: str, port: int) -> None:
    """Raises OSError if nothing listens, within 10 s."""
    socket.create_connection((host, port), timeout=10).close()


def this_machine() -> Resources:
    """The resources of a local cluster, without starting one. Uses the private functions with which Ray counts GPUs."""
    gpus = get_accelerator_manager_for_resource("GPU")
    assert gpus is not None, "Ray knows GPUs"
    visible = gpus.get_current_process_visible_accelerator_ids()
    number = gpus.get_current_node_num_accelerators()
    return Resources((Node(available_cpus(), number if visible is None else min(number, len(visible))),))


def resources() -> Resources:
    """The current resources of this session's cluster."""
    nodes = _nodes()
    # `ray up` and KubeRay label each node with its group for Ray's autoscaler; `ray start` does not.
    grows = any(RAY_NODE_GROUP_KEY in node["Labels"] for node in nodes)
    has = [node["Resources"] for node in nodes]
    return Resources(tuple(Node(int(one.get("CPU", 0)), int(one.get("GPU", 0))) for one in has), grows)


def alive() -> frozenset[str]:
    """Ids of the nodes of this session's cluster that are alive."""
    return frozenset(node["NodeID"] for node in _nodes())


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def available_cpus() -> int:
    """CPUs that this process may use: its affinity mask, limited by the quota of its control group."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, int(_cgroup_quota(Path("/sys/fs/cgroup")) or affinity)))


def _cgroup_quota(root: Path) -> float | None:
    """CPUs granted by the control group mounted at `root` (version 2 or 1), None without a limit."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
    except OSError:
        return None
    return None if quota in ("max", "-1") else max(1.0, float(quota) / float(period))
