"""A grid on three nodes whose cells have workers on two of them; one node is lost in the middle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from experiments.job import open_job
from tests.cluster.nodes import Nodes, nodes, separate_addresses
from tests.experiments.drivers import Driver
from tests.faults.witness import Step, steps_of

LOOK = 5
"""Steps between two checkpoints."""
EPOCHS, STEPS = 3, 12
OVERRIDES = (
    *(f"recipe.epochs={EPOCHS}", "recipe.batch=20", "data.train_per_class=24", "placement.workers=2"),
    *(f"reliability.look_steps={LOOK}", "reliability.checkpoint_minutes=1e-9"),
)
GRID = """
question: What does a grid survive?
rows:
  - {id: pairwise_3, model: {name: san10_pairwise, footprint: 3}}
  - {id: resnet26_3, model: {name: resnet26, footprint: 3}}
"""


def _pair_at(number: int, runs: Path, driver: Driver, seconds: float = 120) -> dict[int, Step]:
    """The latest step of each worker, once the first has done so many."""
    limit = time.monotonic() + seconds
    while True:
        latest = {step.rank: step for step in steps_of(runs)}
        if 0 in latest and latest[0].number >= number:
            return latest
        assert driver.process.poll() is None and time.monotonic() < limit, driver.said
        time.sleep(0.05)


def _lose_a_node_of(pair: dict[int, Step], several: Nodes) -> None:
    places = [several.of(step.pid) for step in pair.values()]
    assert len(places) == len(set(places)) == 2, "the workers are not on two nodes"
    several.kill(next(place for place in places if place is not None))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
def test_a_lost_node_costs_a_checkpoint_interval_at_most(tmp_path: Path) -> None:
    """Nodes have addresses of their own where that can be had."""
    runs, grid = tmp_path / "runs", tmp_path / "two.yaml"
    grid.write_text(GRID)
    with separate_addresses() as network, nodes(1, network) as several:
        several.add()
        several.add()
        given = (*OVERRIDES, "--address", several.address)
        driver = Driver(grid, runs, given, {"WITNESS_PAUSE": "0.1"}, "tests.faults.witness")
        try:
            _lose_a_node_of(_pair_at(EPOCHS * STEPS // 2, runs, driver), several)
            lost_at = time.monotonic()
            code = driver.finish()
        finally:
            driver.process.kill()
            driver.process.wait()
    assert code == 0, driver.said
    assert driver.said.count("continues after a failure") == 1, driver.said

    numbers = [step.number for step in steps_of(runs) if step.rank == 0]
    twice = len(numbers) - 2 * EPOCHS * STEPS
    print(f"{twice} steps trained twice; the grid was complete {time.monotonic() - lost_at:.0f} s after the node was lost")
    assert set(numbers) == set(range(1, EPOCHS * STEPS + 1))
    assert 0 <= twice <= LOOK

    job = open_job(grid, "digits", OVERRIDES, runs)
    results, client = job.tracker.results(), job.tracker.client
    assert [results[trial.key].finished for trial in job.trials] == [True, True]
    experiment = client.get_experiment_by_name("two")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], "tags.`san.role` = 'trial'")
    histories = [client.get_metric_history(run.info.run_id, "val/top1") for run in found]
    assert [sorted(metric.step for metric in history) for history in histories] == [list(range(EPOCHS))] * 2
