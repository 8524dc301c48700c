"""A session: being connected to a Ray cluster, and what that cluster has."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import ray
import ray._private.worker
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.grpc_utils import init_grpc_channel
from ray._raylet import RAY_NODE_GROUP_KEY, Config  # type: ignore[attr-defined]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.exceptions import AuthenticationError

from cluster.errors import ClusterError
from cluster.placement import Node, Resources
from cluster.token import refused, token

_log = logging.getLogger(__name__)

# Read by Ray from the environment of the driver; Tune hands what its processes need on to them.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # no tables of Tune's own
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is a KeyboardInterrupt, not the request for a last snapshot
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no CSV, JSON and TensorBoard copies of every metric
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a cell without GPUs sees none; set, or Ray warns about it
    "TUNE_MAX_PENDING_TRIALS_PG": "1000",  # cells start beside each other; how many run is bounded by the sweep
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean the same in a cell as in the driver
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "60",  # a cell that is stopped clears up before another has its process
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # How often several workers are asked for reports. They wait in `report` until the one before was taken: at Ray's 2 s a cell
    # with short epochs spent most of its time there.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}


@contextmanager
def session(address: str | None = None) -> Iterator[Resources]:
    """Connects to a cluster for the length of a `with` block, and says what the cluster has.

    With an address (`auto`, `host:6379`) that cluster is joined. Without one it is the cluster named by
    `RAY_ADDRESS`, which is set inside a Ray job; failing that, a local cluster is started with the CPUs and
    GPUs that this process may use, and is shut down at the end. Inside another session, that session is used.

    A cluster counts as what it is when it is asked; nodes may come and go.
    """
    if ray.is_initialized():
        yield resources()
        return
    _quieten()
    try:
        with _same_meaning_of_sigterm():
            _connect(address or os.environ.get("RAY_ADDRESS") or None)
        yield resources()
    finally:
        # Ends the local cluster; for a joined one it ends what this driver started there.
        ray.shutdown()


def is_local(address: str | None) -> bool:
    """Whether a session with this address would start a cluster on this machine."""
    return not (ray.is_initialized() or address or os.environ.get("RAY_ADDRESS"))


def _quieten() -> None:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)

    # Ray prints the raylet's complaints on stdout, where the caller's tables go, and has no setting for that.
    def complain(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            _log.info("ray: %s", line)

    ray._private.worker.print_to_stdstream = complain


@contextmanager
def _same_meaning_of_sigterm() -> Iterator[None]:
    """Ray would make it the end of this process without a word, whatever the caller wanted of it."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():  # in others neither Ray nor anybody may change it
        signal.signal(signal.SIGTERM, handler)


def _connect(address: str | None) -> None:
    if address is None:
        # Starting the dashboard's dozen processes costs seconds, and nobody looks at a cluster of one sweep.
        ray.init(
            address="local",
            num_cpus=available_cpus(),
            include_dashboard=False,
            logging_level=logging.CRITICAL,
            log_to_driver=False,
        )
        return
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            f"{address} is the address of a job server; submit to it with `san submit`, or join the cluster at HEAD:6379"
        )
    try:
        try:
            _knock(address)
        except AuthenticationError:
            _take_token()
            _knock(address)
        ray.init(address=address, logging_level=logging.CRITICAL, log_to_driver=False)
    except AuthenticationError:
        raise refused(address) from None
    except ClusterError:  # a ValueError, which says what is wrong
        raise
    except (OSError, RuntimeError, ValueError) as error:
        if str(error).startswith("Version mismatch"):
            said = " ".join(str(error).split())
            raise ClusterError(f"{address}: {said} Install the same versions of Ray and Python on both sides.") from None
        raise ClusterError(
            f"no Ray cluster answers at {address!r}; check the address. To run on this machine, leave --address out and "
            "unset RAY_ADDRESS"
        ) from error


def _take_token() -> None:
    """Where there is a token it is sent, as Ray itself does for `auto` only. Not to a cluster that asks for none: from then on
    this process refuses what the head tells it without a token, and its actors are taken for lost."""
    if token() is not None and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")


def _knock(address: str) -> None:
    """Asks the head at `host:port` for its name: Ray takes 20 s to say no, and then tells no wrong token from a wrong address.

    Raises:
        OSError: no head of Ray is there.
        AuthenticationError: it does not take the token.
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
    """Raises OSError where nothing listens, within 10 s."""
    socket.create_connection((host, port), timeout=10).close()


def this_machine() -> Resources:
    """What a local cluster would have, without starting one."""
    gpus = get_accelerator_manager_for_resource("GPU")
    assert gpus is not None, "Ray knows GPUs"
    visible = gpus.get_current_process_visible_accelerator_ids()
    number = gpus.get_current_node_num_accelerators()
    return Resources((Node(available_cpus(), number if visible is None else min(number, len(visible))),))


def resources() -> Resources:
    """What the cluster of this session has now."""
    nodes = _nodes()
    # Both `ray up` and KubeRay name the group of each node for Ray's autoscaler; `ray start` by hand does not.
    grows = any(RAY_NODE_GROUP_KEY in node["Labels"] for node in nodes)
    has = [node["Resources"] for node in nodes]
    return Resources(tuple(Node(int(one.get("CPU", 0)), int(one.get("GPU", 0))) for one in has), grows)


def alive() -> frozenset[str]:
    """Names of the nodes that the cluster of this session has now."""
    return frozenset(node["NodeID"] for node in _nodes())


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def available_cpus() -> int:
    """CPUs this process may use: its affinity mask, and the quota of its control group where there is one."""
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
