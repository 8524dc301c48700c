"""Where things run: Ray sessions, sweeps of a function over many values, and jobs on a cluster elsewhere.

Here belongs what knows about processes, CPUs, GPUs and nodes. What is computed in them never does: this
package takes any callable and any picklable values, and it is the only one that imports Ray.

What is below imports no Ray. Whoever asks a cluster for something imports `cluster.session`, `cluster.sweep`
(Ray Tune and Train, a second) or `cluster.submit` (Ray's jobs) when it does.
"""

from cluster.errors import ClusterError, ClusterLostError
from cluster.placement import Node, Placement, Resources, concurrency

__all__ = ["ClusterError", "ClusterLostError", "Node", "Placement", "Resources", "concurrency"]
