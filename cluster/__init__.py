"""Processes, CPUs, GPUs and nodes: Ray sessions, sweeps of a function over many values, and jobs on a remote cluster.

This is the only package that imports Ray, and it knows nothing about training: it calls any function with any picklable values.

This file does not import Ray, which takes a second. Import `cluster.session`, `cluster.sweep` (Ray Tune and Train) or
`cluster.submit` (Ray's jobs) when they are needed.
"""

from cluster.errors import ClusterError
from cluster.placement import Node, Placement, Resources, available_cpus, concurrency, this_machine
from cluster.serial import Observer, Outcome, ReportFn

__all__ = [
    "ClusterError",
    "Node",
    "Observer",
    "Outcome",
    "Placement",
    "ReportFn",
    "Resources",
    "available_cpus",
    "concurrency",
    "this_machine",
]
