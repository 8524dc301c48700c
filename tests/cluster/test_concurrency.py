import pytest

from cluster import ClusterError, Node, Placement, Resources, concurrency
from cluster.sweep import _trials_to_start


@pytest.mark.parametrize(
    ("placement", "nodes", "cells"),
    [
        (Placement(), (Node(2, 0),), 2),
        (Placement(cpus=2), (Node(5, 0),), 2),
        (Placement(workers=2), (Node(4, 0),), 2),
        (Placement(gpus=1), (Node(16, 2),), 2),
        (Placement(cpus=8, gpus=1), (Node(16, 4),), 2),
        (Placement(gpus=0.1), (Node(64, 2),), 20),
        (Placement(gpus=0.4), (Node(64, 2),), 4),  # a worker does not span GPUs
        (Placement(workers=8, cpus=4, gpus=1), (Node(64, 8), Node(64, 8)), 2),
        (Placement(workers=16, cpus=4, gpus=1), (Node(64, 8), Node(64, 8)), 1),
        (Placement(cpus=2), (Node(3, 0), Node(3, 0)), 2),  # a worker does not span nodes
        (Placement(cpus=2), (Node(0, 0), Node(4, 0)), 2),  # the head has no CPUs
    ],
)
def test_trials_at_once(placement: Placement, nodes: tuple[Node, ...], cells: int) -> None:
    assert concurrency(placement, Resources(nodes)) == cells


@pytest.mark.parametrize(
    ("nodes", "grows", "cells"),
    [
        ((Node(2, 0),), False, 2),
        ((Node(0, 0),), False, 1),  # its nodes may be lost at the moment
        ((Node(0, 0),), True, 4),
        ((Node(2, 0),), True, 6),
        ((Node(0, 0), *(Node(8, 0),) * 8), True, 128),
    ],
)
def test_more_trials_wait_in_a_cluster_that_grows(nodes: tuple[Node, ...], grows: bool, cells: int) -> None:
    assert _trials_to_start(Placement(), Resources(nodes, grows)) == cells


def test_rejects_a_trial_that_does_not_fit() -> None:
    with pytest.raises(ClusterError) as caught:
        concurrency(Placement(workers=4), Resources((Node(2, 0),)))
    assert str(caught.value) == (
        "a trial needs 4 workers with 1 CPU each, but the cluster has 2 CPUs and 0 GPUs on 1 node, "
        "enough for 2 such workers; lower placement.workers, placement.cpus or placement.gpus, or use a larger cluster"
    )


def test_rejects_gpus_that_are_not_there() -> None:
    with pytest.raises(ClusterError, match="needs 1 worker with 4 CPUs and 1 GPU, but the cluster has 8 CPUs and 0"):
        concurrency(Placement(cpus=4, gpus=1), Resources((Node(8, 0),)))


@pytest.mark.parametrize(("field", "value"), [("workers", 0), ("cpus", 0), ("gpus", -1)])
def test_rejects_impossible_placement(field: str, value: int) -> None:
    with pytest.raises(ClusterError, match=f"placement.{field} must be at least ., not {value}"):
        Placement(**{field: value})
