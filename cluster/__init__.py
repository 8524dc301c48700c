"""Where things run: Ray sessions, sweeps of a function over many values, and jobs on a cluster elsewhere.

Here belongs what knows about processes, CPUs, GPUs and nodes. What is computed in them never does: this
package takes any callable and any picklable values, and it is the only one that imports Ray.
"""

from cluster.errors import ClusterError
from cluster.halving import Halving, Judge, judge
from cluster.session import Node, Resources, session, this_machine
from cluster.submit import Job, JobServer
from cluster.sweep import Observer, Outcome, Placement, Report, concurrency, sweep

__all__ = [
    "ClusterError",
    "Halving",
    "Job",
    "JobServer",
    "Judge",
    "Node",
    "Observer",
    "Outcome",
    "Placement",
    "Report",
    "Resources",
    "concurrency",
    "judge",
    "session",
    "sweep",
    "this_machine",
]
