"""A cluster of several nodes on one machine, which can be killed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO
from unittest.mock import patch

import psutil
import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster

from cluster import Placement, ReportFn
from cluster.session import session, start_ray
from cluster.sweep import sweep
from tests.cluster.functions import Shouting
from tests.cluster.heads import skip_unless_ray_can_start
from tests.experiments.drivers import PATIENCE

# Ray notices a killed node at once, and one without a network after 15 s. A busy node may take as long to answer.
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


class Network:
    """Linux network namespaces connected by a bridge, so that each node has its own address."""

    def __init__(self) -> None:
        self.names: list[str] = []
        number = _add_bridge("santest")
        self.bridge, self._subnet = f"santest{number}", f"10.213.{number}"
        self.host = f"{self._subnet}.254"
        _ip("addr", "add", f"{self.host}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")

    def add(self) -> tuple[str, str]:
        """Adds a namespace; returns its name and address."""
        name, address = f"{self.bridge}n{len(self.names)}", f"{self._subnet}.{len(self.names) + 1}"
        _ip("netns", "add", name)
        self.names.append(name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", self.bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
        return name, address

    @staticmethod
    @contextmanager
    def inside(name: str) -> Iterator[None]:
        """Moves this thread, and the processes that it starts, into the namespace."""
        with open("/proc/thread-self/ns/net") as home, open(f"/var/run/netns/{name}") as there:
            _enter(there)
            try:
                yield
            finally:
                _enter(home)

    def close(self) -> None:
        for name in self.names:
            _ip("link", "del", name)  # otherwise it lives until the last process in the namespace ends
            _ip("netns", "del", name)
        _ip("link", "del", self.bridge)


def _add_bridge(name: str) -> int:
    """Returns the number after its name. Tests that run at the same time use others, and tests that were killed left theirs."""
    for number in range(256):
        try:
            _ip("link", "add", "name", f"{name}{number}", "type", "bridge")
            return number
        except subprocess.CalledProcessError as error:
            if "File exists" not in error.stderr:
                raise
    raise OSError(f"256 bridges {name}* exist; delete those that no test uses with: ip link del {name}0")


def _enter(namespace: TextIO) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Nodes:
    """A head and other nodes; drivers join at `address`. With a network, each node has its own address."""

    def __init__(self, head_cpus: int, network: Network | None) -> None:
        self.network = network
        self._names: dict[str, Node] = {}
        """Nodes by the name of their namespace."""
        head: dict[str, object] = {"num_cpus": head_cpus, "include_dashboard": False, "_system_config": HEALTH_CHECKS}
        if network is not None:
            head["node_ip_address"] = network.host
        with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": network.bridge} if network else {}):
            self.cluster = start_ray(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address: str = self.cluster.address

    def add(self, cpus: int = 1, environment: Mapping[str, str] = {}) -> Node:
        """Adds a node whose processes have these variables too."""
        if self.network is None:
            with patch.dict(os.environ, environment):
                return start_ray(lambda: self.cluster.add_node(num_cpus=cpus))
        name, address = self.network.add()
        # gloo cannot resolve the machine's name inside a namespace, so it needs the interface.
        with self.network.inside(name), patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth0", **environment}):
            node = start_ray(lambda: self.cluster.add_node(num_cpus=cpus, node_ip_address=address))
        self._names[name] = node
        return node

    def of(self, pid: int) -> Node | None:
        """The node of a worker process, unless it is the head."""
        parent = psutil.Process(pid).ppid()
        return next((node for node in self.cluster.worker_nodes if _raylet(node) == parent), None)

    def kill(self, node: Node) -> None:
        """Kills a node and all of its workers at once, like a power failure."""
        with suppress(psutil.NoSuchProcess):
            raylet = psutil.Process(_raylet(node))
            for process in (raylet, *raylet.children()):
                with suppress(psutil.NoSuchProcess):  # a worker may notice that its raylet is gone
                    process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def cut_off(self, node: Node) -> None:
        """Disconnects the network of a node, whose processes continue."""
        assert self.network is not None
        name = next(name for name, member in self._names.items() if member is node)
        _ip("link", "set", name, "down")


def _raylet(node: Node) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


@contextmanager
def nodes(head_cpus: int, network: Network | None = None) -> Iterator[Nodes]:
    skip_unless_ray_can_start()
    several = Nodes(head_cpus, network)
    try:
        yield several
    finally:
        several.cluster.shutdown()


@contextmanager
def separate_addresses() -> Iterator[Network | None]:
    """A network for the nodes; None, with a message, if this user or kernel cannot create one."""
    try:
        network = Network()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"one address for all nodes, no network namespaces here: {getattr(error, 'stderr', None) or error}")
        yield None
        return
    try:
        yield network
    finally:
        network.close()


def outliving(folder: str, report: ReportFn) -> None:
    """Ends at the third attempt; the others sleep until they are killed."""
    attempts = Path(folder) / "attempts"
    with open(attempts, "a") as file:
        file.write("x")
    report({"pid": os.getpid()})
    time.sleep(0 if attempts.stat().st_size == 3 else 1e5)


def outlive(folder: str, address: str) -> None:
    """A driver for a trial that loses two nodes."""
    memory = Shouting()
    with session(address):
        outcomes = sweep(outliving, {"trial": folder}, Placement(), storage=f"{folder}/sweep", observer=memory)
    print(f"{len(memory.starts)} starts, error {outcomes['trial'].error}")


def placed(file: str, report: ReportFn) -> None:
    """Each worker writes the ID of its node, and occupies it until the workers of both trials have written theirs."""
    Path(f"{file}-{os.environ['RANK']}").write_text(ray.get_runtime_context().get_node_id())
    report({"pid": os.getpid()})
    limit = time.monotonic() + PATIENCE
    while len(list(Path(file).parent.glob("[ab]-[01]"))) < 4 and time.monotonic() < limit:
        time.sleep(0.1)


def place(folder: str, address: str) -> None:
    """A driver of two trials with two workers each."""
    with session(address):
        values = {name: f"{folder}/{name}" for name in "ab"}
        sweep(placed, values, Placement(workers=2), storage=f"{folder}/sweep", observer=Shouting())


if __name__ == "__main__":
    # Workers cannot import functions from __main__.
    from tests.cluster import nodes as here

    {"outlive": here.outlive, "place": here.place}[sys.argv[1]](*sys.argv[2:])
