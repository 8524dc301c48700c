"""Resources of trials and clusters, and how many trials fit. Does not need Ray."""

import os
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Node:
    """Resources of one machine."""

    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a cluster by node, because a worker cannot use two nodes."""

    nodes: tuple[Node, ...]
    grows: bool = False
    """Whether an autoscaler adds nodes for waiting trials; Ray does not say how many."""

    def __str__(self) -> str:
        return f"{_count(self.cpus, 'CPU')} and {_count(self.gpus, 'GPU')} on {_count(len(self.nodes), 'node')}"

    @property
    def cpus(self) -> int:
        """CPUs of all nodes."""
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of one trial: `workers` processes, each with `cpus` CPUs and `gpus` GPUs or a fraction of one."""

    workers: int = 1
    cpus: int = 1
    gpus: float = 0

    def __str__(self) -> str:
        workers = _count(self.workers, "worker")
        each = _count(self.cpus, "CPU") + (f" and {_count(self.gpus, 'GPU')}" if self.gpus else "")
        return f"{workers} with {each}" + (" each" if self.workers > 1 else "")


def concurrency(placement: Placement, resources: Resources) -> int:
    """How many trials run at once. A trial can use several nodes, but a worker cannot.

    Raises:
        ClusterError: no trial fits, and the cluster does not grow.
    """
    workers = workers_that_fit(placement, resources)
    trials = workers // placement.workers
    if trials == 0 and not resources.grows:
        enough = f"enough for {_count(workers, 'such worker')}" if workers else "not enough for one such worker"
        raise ClusterError(
            f"a trial needs {placement}, but the cluster has {resources}, {enough}; "
            "lower resources.workers, resources.cpus or resources.gpus, or use a larger cluster"
        )
    return trials


def workers_that_fit(placement: Placement, resources: Resources) -> int:
    """How many workers fit on the nodes."""
    slots = [node.cpus // placement.cpus for node in resources.nodes]
    if placement.gpus:
        slots = [min(n, _workers_on_gpus(node.gpus, placement.gpus)) for n, node in zip(slots, resources.nodes, strict=True)]
    return sum(slots)


def _workers_on_gpus(gpus: int, each: float) -> int:
    """A worker with a fraction of a GPU uses one GPU, not parts of several."""
    return int(gpus // each) if each >= 1 else gpus * int(1 / each + 1e-9)


def this_machine() -> Resources:
    """The resources of a local cluster, without starting one."""
    import torch  # takes a second

    return Resources((Node(available_cpus(), torch.cuda.device_count()),))


def available_cpus() -> int:
    """CPUs that this process may use: its affinity mask, limited by the quota of its control group."""
    affinity = len(os.sched_getaffinity(0))
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


def _count(number: float, thing: str) -> str:
    return f"{number:g} {thing}{'' if number == 1 else 's'}"
