"""Grids on three nodes, with a relation and a model of the user. One node fails during a trial."""

import os
from pathlib import Path

import pytest

from experiments.config.config import PROJECT_DIR
from experiments.config.grid import GridRequest
from experiments.runner.grid_run import open_grid_run
from tests.cluster.nodes import Nodes, nodes, separate_addresses
from tests.docs.test_guides import blocks
from tests.experiments.drivers import Driver, wait_until
from tests.experiments.samples import assert_complete
from tests.faults.witness import Step, steps_of

CHECK_EVERY = 5
"""Steps between two checkpoints."""
EPOCHS, STEPS = 3, 12
ONE_WORKER = (
    *(f"recipe.epochs={EPOCHS}", "recipe.batch_size=20", "data.train_per_class=24"),
    *(f"checkpointing.check_every_n_steps={CHECK_EVERY}", "checkpointing.checkpoint_every_n_minutes=1e-9"),
)
TWO_WORKERS = (*ONE_WORKER, "resources.workers=2")
TWO_TRIALS = """
question: Which failures does a grid survive?
imports: [mine.py]
rows:
  - {id: pairwise_3, model: {name: san10_pairwise, footprint: 3, relation: maximum}}
  - {id: cnn, model: {name: plain_cnn}}
"""
MINE = next(block.text for block in blocks((PROJECT_DIR / "docs/guides/grids.md").read_text()) if block.file == "mine.py")
"""A relation and a model of a user."""
pytestmark = pytest.mark.slow


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "two.yaml").write_text(TWO_TRIALS)
    return tmp_path / "two.yaml"


def environment(pause: str) -> dict[str, str]:
    """With Ray's authentication as in the nodes, which inherit it from this process."""
    return {"WITNESS_PAUSE": pause} | {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}


def _wait_for_step(number: int, runs: Path, driver: Driver) -> dict[int, Step]:
    """Waits until the first worker has reached a step; returns the latest step of each worker."""
    wait_until(lambda: any(step.rank == 0 and step.number >= number for step in steps_of(runs)), driver.process, driver.log)
    return {step.rank: step for step in steps_of(runs)}


def _kill_a_node(pair: dict[int, Step], cluster: Nodes) -> None:
    places = [cluster.of(step.pid) for step in pair.values()]
    assert len(places) == len(set(places)) == 2, "the workers are not on two nodes"
    cluster.kill(next(lost_node for lost_node in places if lost_node is not None))


def test_lost_node_costs_at_most_one_checkpoint_interval(grid: Path, tmp_path: Path) -> None:
    """Of a trial with two workers. The nodes have separate addresses if possible."""
    runs = tmp_path / "runs"
    with separate_addresses() as network, nodes(1, network) as cluster:
        cluster.add()
        cluster.add()
        options = (*TWO_WORKERS, "--only", "pairwise_3", "--address", cluster.address)
        with Driver(grid, runs, options, environment("0.1"), "tests.faults.witness") as driver:
            _kill_a_node(_wait_for_step(EPOCHS * STEPS // 2, runs, driver), cluster)
            code = driver.finish()
    assert code == 0, driver.said
    failures = driver.said.count("resumes after a failure")
    assert failures > 0, driver.said

    grid_run = open_grid_run(GridRequest(grid, "digits", TWO_WORKERS, runs, only=("pairwise_3",)))
    numbers = [step.number for step in steps_of(runs) if step.rank == 0]
    twice = len(numbers) - EPOCHS * STEPS
    assert set(numbers) == set(range(1, EPOCHS * STEPS + 1))
    assert 0 <= twice <= failures * CHECK_EVERY
    assert_complete(grid_run, EPOCHS)


def test_trial_of_a_node_without_a_network_goes_on_elsewhere(grid: Path, tmp_path: Path) -> None:
    """Its process still reaches the shared folder, but no longer owns the trial: it ends when it would write a checkpoint."""
    runs = tmp_path / "runs"
    with separate_addresses() as network:
        if network is None:
            pytest.skip("needs network namespaces")
        with nodes(0, network) as cluster:
            for _ in range(2):
                cluster.add()
            options = (*ONE_WORKER, "--only", "cnn", "--address", cluster.address)
            with Driver(grid, runs, options, environment("0.5"), "tests.faults.witness") as driver:
                old = _wait_for_step(2 * CHECK_EVERY, runs, driver)[0]
                lost_node = cluster.of(old.pid)
                assert lost_node is not None
                cluster.cut_off(lost_node)
                driver.wait_for("resumes after a failure")
                code = driver.finish()
    assert code == 0, driver.said
    steps = steps_of(runs)
    assert len({step.pid for step in steps}) > 1
    assert {step.number for step in steps} == set(range(1, EPOCHS * STEPS + 1))
    assert_complete(open_grid_run(GridRequest(grid, "digits", ONE_WORKER, runs, only=("cnn",))), EPOCHS)
