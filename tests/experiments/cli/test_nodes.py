"""Grids on three nodes. One node fails during a trial."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from experiments.runner.job import Job, open_job
from experiments.runs.store import S3Store
from experiments.training.checkpoint import Checkpoint, last_of
from tests.cluster.nodes import Nodes, nodes, separate_addresses
from tests.experiments.drivers import PATIENCE, Driver
from tests.experiments.samples import without_times
from tests.experiments.servers import LOOPBACK, ObjectStore, Server
from tests.faults.witness import Step, steps_of

CHECK_EVERY = 5
"""Steps between two checkpoints."""
EPOCHS, STEPS = 3, 12
ONE_WORKER = (
    *(f"recipe.epochs={EPOCHS}", "recipe.batch_size=20", "data.train_per_class=24"),
    *(f"reliability.check_every_n_steps={CHECK_EVERY}", "reliability.checkpoint_every_n_minutes=1e-9"),
)
TWO_WORKERS = (*ONE_WORKER, "placement.workers=2")
TWO_CELLS = """
question: Which failures does a grid survive?
rows:
  - {id: pairwise_3, model: {name: san10_pairwise, footprint: 3}}
  - {id: resnet26_3, model: {name: resnet26, footprint: 3}}
"""
THREE_CELLS = f"{TWO_CELLS}  - {{id: patchwise_3, model: {{name: san10_patchwise, footprint: 3}}}}\n"
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")


def _wait_for_step(number: int, runs: Path, driver: Driver) -> dict[int, Step]:
    """Waits until the first worker has reached a step; returns the latest step of each worker."""
    limit = time.monotonic() + PATIENCE
    while True:
        latest = {step.rank: step for step in steps_of(runs)}
        if 0 in latest and latest[0].number >= number:
            return latest
        assert driver.process.poll() is None and time.monotonic() < limit, driver.said
        time.sleep(0.05)


def _kill_a_node(pair: dict[int, Step], cluster: Nodes) -> None:
    places = [cluster.of(step.pid) for step in pair.values()]
    assert len(places) == len(set(places)) == 2, "the workers are not on two nodes"
    cluster.kill(next(lost_node for lost_node in places if lost_node is not None))


@pytest.mark.slow
@needs_proc
def test_lost_node_costs_at_most_one_checkpoint_interval(tmp_path: Path) -> None:
    """The nodes have separate addresses if network namespaces are available."""
    runs, grid = tmp_path / "runs", tmp_path / "two.yaml"
    grid.write_text(TWO_CELLS)
    with separate_addresses() as network, nodes(1, network) as cluster:
        cluster.add()
        cluster.add()
        options = (*TWO_WORKERS, "--address", cluster.address)
        with Driver(grid, runs, options, {"WITNESS_PAUSE": "0.1"}, "tests.faults.witness") as driver:
            _kill_a_node(_wait_for_step(EPOCHS * STEPS // 2, runs, driver), cluster)
            lost_at = time.monotonic()
            code = driver.finish()
    assert code == 0, driver.said
    assert driver.said.count("resumes after a failure") == 1, driver.said

    numbers = [step.number for step in steps_of(runs) if step.rank == 0]
    twice = len(numbers) - 2 * EPOCHS * STEPS
    print(f"{twice} steps trained twice; the grid was complete {time.monotonic() - lost_at:.0f} s after the node was lost")
    assert set(numbers) == set(range(1, EPOCHS * STEPS + 1))
    assert 0 <= twice <= CHECK_EVERY

    _assert_complete(open_job(grid, "digits", TWO_WORKERS, runs))


def _assert_complete(job: Job) -> None:
    """Checks that every trial is finished, and that MLflow has one run for it, with each epoch once."""
    results, client = job.tracker.results(), job.tracker.client
    assert [results[trial.key].finished for trial in job.trials] == [True] * len(job.trials)
    experiment = client.get_experiment_by_name(job.name)
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], "tags.`san.role` = 'trial'")
    histories = [client.get_metric_history(run.info.run_id, "val/top1") for run in found]
    assert [sorted(metric.step for metric in history) for history in histories] == [list(range(EPOCHS))] * len(job.trials)


@contextmanager
def _bucket_and_tracker(folder: Path, host: str) -> Iterator[tuple[S3Store, Server]]:
    """An object store and a tracking server that nodes reach at this address of the machine."""
    store = ObjectStore(folder / "store.log", host)
    server = Server(folder, f"sqlite:///{folder / 'mlflow.db'}", host=host)
    try:
        server.launch()
        server.wait()
        yield S3Store.parse(store.uri("grids")), server
    finally:
        server.kill()
        store.end()


@pytest.mark.slow
@needs_proc
def test_trial_of_a_lost_node_resumes_from_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes and the driver share no folder. The weights equal those of an undisturbed grid in a shared folder."""
    grid, undisturbed = tmp_path / "three.yaml", tmp_path / "undisturbed"
    grid.write_text(THREE_CELLS)
    assert Driver(grid, undisturbed, ONE_WORKER).finish() == 0
    for name, value in {**ObjectStore.KEYS, "SAN_SCRATCH": str(tmp_path / "driver")}.items():
        monkeypatch.setenv(name, value)

    with separate_addresses() as network:
        with _bucket_and_tracker(tmp_path, network.HOST if network else LOOPBACK) as (bucket, server):
            monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
            job = open_job(grid, "digits", ONE_WORKER, bucket.address)
            with nodes(0, network) as cluster:
                folders = {cluster.add(environment={"SAN_SCRATCH": str(path)}): path for path in map(tmp_path.joinpath, "abc")}
                environment = {"WITNESS_PAUSE": "0.2", "MLFLOW_TRACKING_URI": server.uri}
                options = (*ONE_WORKER, "--address", cluster.address)
                with Driver(grid, tmp_path / "driver", options, environment, "tests.faults.witness", bucket.address) as driver:
                    step = _wait_for_step(EPOCHS * STEPS // 2, job.workspace.runs, driver)[0]
                    lost_node = cluster.of(step.pid)
                    assert lost_node is not None
                    cluster.kill(lost_node)
                    lost_at = time.monotonic()
                    code = driver.finish()
            seconds = time.monotonic() - lost_at
            assert code == 0, driver.said
            (trial,) = (trial for trial in job.trials if trial.key == step.cell)
            assert driver.said.count("resumes after a failure") == 1, driver.said
            assert f"{trial.name} resumes after a failure" in driver.said

            steps = steps_of(job.workspace.runs)
            lost = [other for other in steps if other.pid == step.pid]
            again = next(other for other in steps if other.cell == step.cell and other.pid != step.pid)
            twice = lost[-1].number - again.number + 1
            print(f"{twice} steps trained twice; the grid was complete {seconds:.0f} s after the node was lost")
            assert len(steps) == len(job.trials) * EPOCHS * STEPS + twice
            assert 0 <= twice <= CHECK_EVERY
            # Only a node that is killed during an upload keeps a checkpoint.
            assert {node for node, path in folders.items() if list(path.rglob("epoch-*.pt"))} <= {lost_node}
            _assert_complete(job)
            for trial in job.trials:
                name = last_of(Path("checkpoints") / trial.key, EPOCHS)
                here, there = (
                    Checkpoint.read(undisturbed / name),
                    Checkpoint.of_bytes(bucket.read(str(name)) or b""),
                )
                assert without_times(here.history) == without_times(there.history)
                model = here.engine["model"]
                assert all(torch.equal(value, there.engine["model"][part]) for part, value in model.items())
            assert [bucket.names(f"locks{folder}") for folder in ("", "/trials", "/grids")] == [[], [], []]


@pytest.mark.slow
@needs_proc
def test_node_without_a_network_releases_its_trial(tmp_path: Path) -> None:
    """Its processes keep the lock of the trial's folder, which all nodes share, so two nodes never train the trial at once."""
    runs, grid = tmp_path / "runs", tmp_path / "two.yaml"
    grid.write_text(TWO_CELLS)
    with separate_addresses() as network:
        if network is None:
            pytest.skip("needs network namespaces")
        with nodes(0, network) as cluster:
            for _ in range(3):
                cluster.add()
            options = (*ONE_WORKER, "--address", cluster.address)
            with Driver(grid, runs, options, {"WITNESS_PAUSE": "0.5"}, "tests.faults.witness") as driver:
                old = _wait_for_step(2 * CHECK_EVERY, runs, driver)[0]
                lost_node = cluster.of(old.pid)
                assert lost_node is not None
                cluster.cut_off(lost_node)
                cut_at = time.monotonic()
                driver.wait_for("resumes after a failure")
                missed = time.monotonic() - cut_at
                while Path(f"/proc/{old.pid}").exists():
                    assert driver.process.poll() is None, driver.said
                    time.sleep(0.05)
                ended = time.monotonic() - cut_at
                code = driver.finish()
    assert code == 0, driver.said
    steps = [step for step in steps_of(runs) if step.cell == old.cell]
    order = list(dict.fromkeys(step.pid for step in steps))
    assert [step.pid for step in steps] == sorted((step.pid for step in steps), key=order.index), "trained on both sides"
    numbers = [step.number for step in steps]
    print(f"missed after {missed:.0f} s, ended after {ended:.0f} s; {len(numbers) - EPOCHS * STEPS} steps trained twice")
    assert len(order) == 2
    assert set(numbers) == set(range(1, EPOCHS * STEPS + 1))
    assert len(numbers) - EPOCHS * STEPS <= CHECK_EVERY
    _assert_complete(open_job(grid, "digits", ONE_WORKER, runs))
