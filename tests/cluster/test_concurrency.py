import pytest

from cluster import ClusterError, Node, Placement, Resources, concurrency


@pytest.mark.parametrize(
    ("placement", "nodes", "trials"),
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
def test_trials_at_once(placement: Placement, nodes: tuple[Node, ...], trials: int) -> None:
    assert concurrency(placement, Resources(nodes)) == trials


@pytest.mark.parametrize(
    ("placement", "node", "words"),
    [
        (Placement(workers=4), Node(2, 0), ("4 workers with 1 CPU", "2 CPUs and 0 GPUs on 1 node", "enough for 2")),
        (Placement(cpus=4, gpus=1), Node(8, 0), ("1 worker with 4 CPUs and 1 GPU", "8 CPUs and 0 GPUs")),
    ],
)
def test_rejects_a_trial_that_does_not_fit(placement: Placement, node: Node, words: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError) as caught:
        concurrency(placement, Resources((node,)))
    assert all(word in str(caught.value) for word in words)
