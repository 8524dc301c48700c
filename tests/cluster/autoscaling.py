"""A head whose autoscaler starts nodes on this machine with Ray's provider for tests, and a driver that uses it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE, FakeMultiNodeProvider
from ray.util import get_node_ip_address

from cluster import Placement
from cluster.session import session
from cluster.supervision import nodes
from cluster.sweep import Report, sweep
from tests.cluster.cells import Memory
from tests.cluster.heads import ray_head
from tests.experiments.drivers import PATIENCE
from tests.experiments.servers import free_port

GROUP = "worker"


def _config(address: str, most: int, idle_minutes: float) -> dict[str, object]:
    """The configuration that `ray up` passes to a head, for nodes with one CPU."""
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    workers = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": most}
    # With the type "fake_multinode", Ray looks for an example file that its packages leave out.
    module = f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}"
    provider = {"type": "external", "module": module, "launch_multiple": True, "gcs_address": address}
    return {
        "cluster_name": "fake",
        "provider": provider,
        "available_node_types": {FAKE_HEAD_NODE_TYPE: head, GROUP: workers},
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_minutes,
        "auth": {},
        **{key: {} for key in ("file_mounts", "docker")},
        **{key: [] for key in ("cluster_synced_files", "initialization_commands")},
        "file_mounts_sync_continuously": False,
        **{f"{kind}setup_commands": [] for kind in ("", "head_", "worker_")},
        **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
    }


@contextmanager
def autoscaling_head(most: int, idle_minutes: float, folder: Path) -> Iterator[str]:
    """The address of a head without CPUs, whose autoscaler adds up to `most` nodes."""
    port = free_port()
    address = f"{get_node_ip_address()}:{port}"
    (folder / "config.json").write_text(json.dumps(_config(address, most, idle_minutes)))
    options = ["--num-cpus=0", f"--autoscaling-config={folder / 'config.json'}", "--include-dashboard=false"]
    environment = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    # These are also set by `ray up` and KubeRay.
    environment |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
    environment |= {"RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE}
    with ray_head(port, *options, environment=environment):
        yield address


def placed(seconds: float, report: Report) -> None:
    """Reports the last digits of the node's ID."""
    report({"node": int(ray.get_runtime_context().get_node_id()[-4:])})
    time.sleep(seconds)


def main(storage: str, address: str) -> None:
    """Runs four trials on a cluster without CPUs, then waits until the added nodes are removed."""
    memory = Memory()
    with session(address) as found:
        print(json.dumps({"cpus": found.cpus, "grows": found.grows}), flush=True)
        outcomes = sweep(placed, dict.fromkeys("abcd", 8.0), Placement(), storage=storage, observer=memory)
        used = {report["node"] for _, report in memory.reports}
        errors = [outcome.error for outcome in outcomes.values()]
        print(json.dumps({"nodes": len(used), "errors": errors}), flush=True)
        limit = time.monotonic() + PATIENCE
        while len(nodes()) > 1 and time.monotonic() < limit:
            time.sleep(0.5)
        print(json.dumps({"left": len(nodes()) - 1}), flush=True)


if __name__ == "__main__":
    # The trials must be able to import their function: not from __main__.
    from tests.cluster import autoscaling

    autoscaling.main(*sys.argv[1:])
