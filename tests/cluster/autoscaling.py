"""A head whose autoscaler starts nodes on this machine, by Ray's own provider for tests, and a driver on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE, FakeMultiNodeProvider
from ray.util import get_node_ip_address

from cluster import Placement, Report, session, sweep
from cluster.session import _nodes
from tests.cluster.cells import Memory
from tests.cluster.test_submit import LEFT_OUT, MARK, OTHERS, free_port, marked

GROUP = "worker"


def _config(address: str, most: int, idle_minutes: float) -> dict[str, object]:
    """What `ray up` hands to a head, for nodes of one CPU."""
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    workers = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": most}
    # Under its own name ("fake_multinode") Ray looks for an example that its packages leave out.
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
def autoscaling_head(most: int, idle_minutes: float) -> Iterator[str]:
    """The address of a head without CPUs; its autoscaler adds up to `most` nodes. All of its processes end with it."""
    folder = Path(tempfile.mkdtemp(prefix="san-"))  # a short path: Ray keeps sockets below it
    port = free_port()
    address = f"{get_node_ip_address()}:{port}"
    (folder / "config.json").write_text(json.dumps(_config(address, most, idle_minutes)))
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=0", f"--port={port}"]
    command += [f"--autoscaling-config={folder / 'config.json'}", f"--temp-dir={folder}", "--include-dashboard=false"]
    command += [f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
    environment = {name: value for name, value in os.environ.items() if name not in (*LEFT_OUT, *OTHERS)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    # As `ray up` and KubeRay start a head.
    environment |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
    environment |= {"RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE, MARK: str(folder)}
    with open(folder / "head.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        limit = time.monotonic() + 90
        while "Ray runtime started" not in (folder / "head.log").read_text():
            assert process.poll() is None and time.monotonic() < limit, (folder / "head.log").read_text()
            time.sleep(0.3)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
        for pid in marked(str(folder)):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def placed(seconds: float, report: Report) -> None:
    """Reports the last digits of its node's name."""
    report({"node": int(ray.get_runtime_context().get_node_id()[-4:])})
    time.sleep(seconds)


def main(storage: str, address: str) -> None:
    """Four cells where there is room for none; then waits until the nodes that came are gone."""
    memory = Memory()
    with session(address) as found:
        print(json.dumps({"cpus": found.cpus, "grows": found.grows}), flush=True)
        outcomes = sweep(placed, dict.fromkeys("abcd", 8.0), Placement(), storage=storage, observer=memory)
        nodes = {report["node"] for _, report in memory.reports}
        errors = [outcome.error for outcome in outcomes.values()]
        print(json.dumps({"nodes": len(nodes), "errors": errors}), flush=True)
        limit = time.monotonic() + 60
        while len(_nodes()) > 1 and time.monotonic() < limit:
            time.sleep(0.5)
        print(json.dumps({"left": len(_nodes()) - 1}), flush=True)


if __name__ == "__main__":
    # The cells must be able to import their function: not from __main__.
    from tests.cluster import autoscaling

    autoscaling.main(*sys.argv[1:])
