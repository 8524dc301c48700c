"""Runs in a bucket, with a real S3 server: what is put comes back, one process writes, any node goes on."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from experiments.cli import main, submit
from experiments.errors import UserError
from experiments.runs import Bucket, Lease, LeaseError, Mirror, StorageError, lease, writer_in
from experiments.runs.bucket import OPTIONS, _opened
from experiments.runs.claims import claimed_cells
from experiments.runs.workspace import Workspace, open_workspace
from experiments.training.checkpoint import Checkpoints
from experiments.training.job import Job, open_job
from tests.experiments.conftest import SMALL_GRID
from tests.experiments.processes import Kill, ended, start, weights
from tests.experiments.servers import ObjectStore, free_port
from tests.experiments.training.test_reliability import ALWAYS, SHORT, flip_a_bit, of_step, without_times


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    running = ObjectStore(tmp_path_factory.mktemp("store") / "log")
    yield running
    running.end()


@pytest.fixture
def bucket(store: ObjectStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """A prefix of its own for each test."""
    for name, value in ObjectStore.KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SAN_SCRATCH", str(tmp_path / "scratch"))
    return Bucket.parse(store.uri(re.sub(r"\W+", "-", request.node.name)))


def impatient() -> None:
    """The store's clock ticks once a second."""
    lease.LIFE, lease.RENEWAL = 3.0, 0.8


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LIFE", lease.LIFE)
    monkeypatch.setattr(lease, "RENEWAL", lease.RENEWAL)
    impatient()


def test_what_is_put_comes_back(bucket: Bucket) -> None:
    assert bucket.names("") == {}
    assert bucket.get("deep/a") is None
    bucket.remove("deep/a")
    large = bytes(range(256)) * 50_000  # in several requests
    for content in (b"", b"first", large):
        bucket.put("deep/a", content)
        assert bucket.get("deep/a") == content
    bucket.put("b", b"")
    assert set(bucket.names("")) == {"deep/a", "b"}
    assert set(bucket.names("deep")) == {"deep/a"}
    assert abs(bucket.names("")["b"] - time.time()) < 60
    bucket.remove("b")
    bucket.remove_folder("deep")
    assert bucket.names("") == {}


@pytest.mark.parametrize(
    "uri",
    [
        "s3://ada:opensesame@runs/prefix",
        "s3://ada:open/sesame@runs/prefix",
        "s3://runs/prefix?access_key=ada&secret_key=opensesame",
        "s3://runs/prefix?session_token=opensesame",
        "s3://runs/prefix?endpoint_override=http://ada:opensesame@host:9000",
        "s3://runs/prefix?endpoint_override=http%3A%2F%2Fada%3Aopensesame%40host",
    ],
)
def test_rejects_secrets_in_an_address(uri: str) -> None:
    """Wherever one is given, and without showing them."""
    for take in (open_workspace, functools.partial(submit.check, SMALL_GRID, "digits", ())):
        with pytest.raises(
            UserError, match=r"contains a key or password.* AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) as raised:
            take(uri)
        assert "sesame" not in str(raised.value)


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("gs://runs/prefix", "gs://...: runs cannot be stored here; expected a folder or a bucket such as s3://bucket/prefix"),
        ("s3://", "s3://: the name of the bucket is missing"),
        ("s3:///prefix", "s3:///prefix: the name of the bucket is missing"),
        ("s3://[runs/prefix", "s3://[runs/prefix: not a valid address (Invalid IPv6 URL)"),
        ("s3://runs/prefix?endpoint=http://host", "unknown option endpoint; choose from endpoint_override, region,"),
    ],
)
def test_rejects_what_is_no_bucket(uri: str, told: str) -> None:
    with pytest.raises(UserError) as raised:
        open_workspace(uri)
    assert told in str(raised.value)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_known_to_the_store(option: str) -> None:
    values = {"endpoint_override": "http://127.0.0.1:9", "scheme": "http", "tls_verify_certificates": "false"}
    assert _opened(Bucket.parse(f"s3://runs/prefix?region=eu-west-1&{option}={values.get(option, 'x')}").uri)


def test_a_bucket_needs_the_address_of_a_tracker(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="MLflow's database cannot be in a bucket; set MLFLOW_TRACKING_URI"):
        open_workspace(bucket.uri)


def named_wrongly(store: ObjectStore) -> str:
    return store.uri("prefix", bucket="nobodys")


def where_nobody_answers(store: ObjectStore) -> str:
    return f"s3://runs/prefix?endpoint_override=http://127.0.0.1:{free_port()}"


def to_be_refused(store: ObjectStore) -> str:
    store.refuse()
    return store.uri("prefix")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (named_wrongly, r"s3://nobodys/prefix\?.*: no such bucket; create the bucket or correct the name"),
        (
            where_nobody_answers,
            r"s3://runs/prefix\?.*: the store does not answer \(.*onnect.*\); check the address and that the server",
        ),
        (
            to_be_refused,
            r"s3://runs/prefix\?.*: the store rejected the credentials; check AWS_ACCESS_KEY",
        ),
    ],
)
def test_a_bucket_that_cannot_be_used_is_told_before_anything_starts(
    address: Callable[[ObjectStore], str],
    told: str,
    store: ObjectStore,
    bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    _opened.cache_clear()
    try:
        monkeypatch.setattr(sys, "argv", ["san", "run", str(SMALL_GRID), "--runs", address(store)])
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        store.refuse(wanted=False)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert re.match(f"san: {told}", said), said


def of_cell(bucket: Bucket, writer: str) -> Lease:
    return Lease(bucket, "cells/abc", "the cell pairwise_3", writer)


def test_a_lease_that_is_renewed_is_respected(bucket: Bucket, short_leases: None) -> None:
    """A second writer hears who has it; once that has left, it waits no longer."""
    with of_cell(bucket, "one").held(seconds=0):
        with pytest.raises(
            LeaseError, match=r"another process is working on the cell pairwise_3 \(.*, process \d+\); wait until that"
        ):
            with of_cell(bucket, "two").held(seconds=1):
                pass
    with of_cell(bucket, "two").held(seconds=0) as now:
        now.renew()
    assert bucket.names("leases") == {}


def test_a_stale_lease_is_taken_over_and_its_holder_stops(
    bucket: Bucket, short_leases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first writer stands still for so long that it does not renew."""
    monkeypatch.setattr(Lease, "_keep", lambda self: None)
    with of_cell(bucket, "one").held(seconds=0) as first:
        start = time.monotonic()
        with of_cell(bucket, "two").held(seconds=0) as second:
            assert time.monotonic() - start > lease.LIFE - 1
            with pytest.raises(LeaseError, match=r"another process took over the cell pairwise_3, because this process"):
                first.renew()
            with pytest.raises(LeaseError):
                first.require()
            second.renew()
            assert list(bucket.names("leases")) == ["leases/cells/abc/holds-two"]


def test_a_holder_that_ends_while_it_is_waited_for_is_followed(
    bucket: Bucket, short_leases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was alive when that began; when the time is up its lease is not stale yet, and nobody renews it."""
    monkeypatch.setattr(Lease, "_keep", lambda self: None)
    renewals = iter([1])

    def renew_once() -> float:
        for _ in renewals:
            time.sleep(1.1)  # the store's clock ticks once a second
            first.renew()
        return 0.05

    monkeypatch.setattr(lease, "_pause", renew_once)
    with of_cell(bucket, "one").held(seconds=0) as first, of_cell(bucket, "two").held(seconds=3):
        assert list(bucket.names("leases")) == ["leases/cells/abc/holds-two"]


def test_a_lease_that_another_had_meanwhile_is_lost(bucket: Bucket) -> None:
    """Though nobody has it now: what is in the bucket may be the other's."""
    with of_cell(bucket, "one").held(seconds=0) as first:
        bucket.remove("leases/cells/abc/holds-one")
        with pytest.raises(LeaseError):
            first.renew()
    assert bucket.names("leases") == {}


def test_a_lease_that_nobody_wanted_meanwhile_is_kept(bucket: Bucket) -> None:
    """Its holder comes back late, after the store was away, say."""
    with of_cell(bucket, "one").held(seconds=0) as first:
        first._renewed -= 2 * lease.LIFE
        first.renew()
        first.renew()
        assert list(bucket.names("leases")) == ["leases/cells/abc/holds-one"]


def test_a_process_that_follows_a_killed_one_on_its_node_does_not_wait(bucket: Bucket, tmp_path: Path) -> None:
    """With leases of a minute."""
    writer = writer_in(tmp_path / "writer")
    with of_cell(bucket, writer).held(seconds=0):
        start = time.monotonic()
        with of_cell(bucket, writer_in(tmp_path / "writer")).held(seconds=0):
            assert time.monotonic() - start < 10


def test_of_many_that_ask_at_a_time_one_has_the_lease(bucket: Bucket, short_leases: None) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with of_cell(bucket, f"writer{number}").held(seconds=60):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.05)
            inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert most == [1] * 4


def open_on(node: str, bucket: Bucket, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The small grid in a bucket, as a node of that name opens it."""
    if not (tmp_path / "mlflow.db").exists():
        shutil.copy(empty_database, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("SAN_SCRATCH", str(tmp_path / node))
    return open_job(SMALL_GRID, "digits", (*SHORT, *ALWAYS), bucket.uri)


def test_two_san_run_of_one_bucket_share_no_cell(
    bucket: Bucket, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_leases: None
) -> None:
    """The same grid is refused; another one with the same cells, on another node, gets those that are left."""
    job = open_on("here", bucket, empty_database, tmp_path, monkeypatch)
    there = open_on("there", bucket, empty_database, tmp_path, monkeypatch)
    cells = {trial.key: trial for trial in job.trials}
    first, *others = cells
    with claimed_cells(job.workspace, "small-digits", {first: cells[first]}) as (claimed, claim):
        assert list(claimed) == [first]
        assert claim is not None
        with pytest.raises(LeaseError, match=r"another process is working on the grid small-digits \("):
            with claimed_cells(there.workspace, "small-digits", cells):
                pass
        with claimed_cells(there.workspace, "other-digits", cells) as (claimed, _):
            assert list(claimed) == others


@pytest.fixture
def mirrored(bucket: Bucket, tmp_path: Path) -> Iterator[Callable[[str], tuple[Checkpoints, Mirror]]]:
    """Checkpoints on a node of that name, and what brings them to the bucket."""
    with of_cell(bucket, "one").held(seconds=0) as held:

        def on(node: str) -> tuple[Checkpoints, Mirror]:
            checkpoints = Checkpoints(tmp_path / node, "abc", 2, 600)
            checkpoints.prepare()
            mirror = Mirror(checkpoints.folder, bucket, "checkpoints/abc", held, seconds=20)
            mirror.bring()
            return checkpoints, mirror

        yield on


def names(bucket: Bucket) -> list[str]:
    return [Path(name).name for name in sorted(bucket.names("checkpoints/abc"))]


def test_a_broken_checkpoint_in_the_bucket_gives_way_to_the_one_before(
    bucket: Bucket, mirrored: Callable[[str], tuple[Checkpoints, Mirror]], caplog: pytest.LogCaptureFixture
) -> None:
    """The next node finds it set aside."""
    checkpoints, mirror = mirrored("here")
    for epoch in (1, 2, 3):
        checkpoints.save(of_step(epoch, value=1.0))
        mirror.send()
    assert names(bucket) == ["epoch-0001-step-0000000.pt", "epoch-0002-step-0000000.pt", "epoch-0003-step-0000000.pt"]
    bucket.put("checkpoints/abc/epoch-0003-step-0000000.pt", flip_a_bit(of_step(3, value=1.0).as_bytes()))
    checkpoints, mirror = mirrored("there")
    loaded = checkpoints.load()
    assert loaded is not None and loaded.running.number == 2
    mirror.send()
    assert names(bucket)[1:] == ["epoch-0002-step-0000000.pt", "epoch-0003-step-0000000.broken"]
    assert "resuming from epoch-0002-step-0000000.pt" in caplog.text
    checkpoints, _ = mirrored("elsewhere")
    loaded = checkpoints.load()
    assert loaded is not None and loaded.running.number == 2


def test_the_last_and_the_best_are_kept_in_the_bucket(
    bucket: Bucket, mirrored: Callable[[str], tuple[Checkpoints, Mirror]]
) -> None:
    """What is no checkpoint goes along, what only the node needs does not."""
    checkpoints, mirror = mirrored("here")
    (checkpoints.folder / "lock").touch()
    for epoch in (1, 2, 3, 4):  # the first is the best
        checkpoints.save(of_step(epoch))
        (checkpoints.folder / "summary.csv").write_text(f"{epoch}")
        mirror.send()
    kept = ["epoch-0001-step-0000000.pt", "epoch-0003-step-0000000.pt", "epoch-0004-step-0000000.pt", "summary.csv"]
    assert names(bucket) == kept
    assert bucket.get("checkpoints/abc/summary.csv") == b"4"
    mirror.clear()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["lock"]


@pytest.mark.parametrize(("elsewhere", "goes_on_from"), [(False, 3), (True, 2)])
def test_what_a_node_could_not_send_counts_where_nobody_went_on_without_it(
    elsewhere: bool, goes_on_from: int, bucket: Bucket, mirrored: Callable[[str], tuple[Checkpoints, Mirror]]
) -> None:
    checkpoints, mirror = mirrored("here")
    for epoch in (1, 2):
        checkpoints.save(of_step(epoch))
        mirror.send()
    checkpoints.save(of_step(3))
    if elsewhere:
        checkpoints, mirror = mirrored("there")
        checkpoints.save(of_step(2, value=1.0))  # not the same bits: another kind of GPU, say
        mirror.send()
    checkpoints, mirror = mirrored("here")
    loaded = checkpoints.load()
    assert loaded is not None and loaded.running.number == goes_on_from
    assert float(loaded.engine["model"]["w"][0]) == float(elsewhere)


@pytest.mark.parametrize(
    ("leave", "come_back", "seconds"),
    [(ObjectStore.stop, ObjectStore.resume, 10), (ObjectStore.refuse, functools.partial(ObjectStore.refuse, wanted=False), 1)],
    ids=["silent", "refusing"],
)
def test_a_store_that_is_away_is_waited_for(
    leave: Callable[[ObjectStore], None],
    come_back: Callable[[ObjectStore], None],
    seconds: float,
    store: ObjectStore,
    bucket: Bucket,
    mirrored: Callable[[str], tuple[Checkpoints, Mirror]],
) -> None:
    checkpoints, mirror = mirrored("here")
    leave(store)
    timer = threading.Timer(seconds, come_back, (store,))
    timer.start()
    checkpoints.save(of_step(1))
    mirror.send()
    assert timer.finished.is_set()
    assert names(bucket) == ["epoch-0001-step-0000000.pt"]


def test_a_store_that_stays_away_ends_the_cell_with_a_sentence(
    store: ObjectStore, bucket: Bucket, mirrored: Callable[[str], tuple[Checkpoints, Mirror]], tmp_path: Path
) -> None:
    checkpoints, mirror = mirrored("here")
    checkpoints.save(of_step(1))
    mirror.seconds = 1.0
    store.refuse()
    try:
        with pytest.raises(
            StorageError,
            match=r"^s3://runs/.*: the store rejected the credentials; .*; gave up after 1 s; "
            r".*/here/epoch-0001-step-0000000.pt is kept on this node \(.*\); repair the store, then rerun the same command "
            "to resume$",
        ):
            mirror.send()
    finally:
        store.refuse(wanted=False)
    assert (tmp_path / "here" / "epoch-0001-step-0000000.pt").exists()


def on_node(folder: str) -> None:
    """A worker on a machine of its own: nothing that another has written is there."""
    impatient()
    os.environ.update(ObjectStore.KEYS)  # the server that forks workers may be older than this test
    os.environ["SAN_SCRATCH"] = f"{folder}-{os.environ['RANK']}"


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_cell_goes_on_on_another_node(
    world: int,
    bucket: Bucket,
    empty_database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[str], Workspace],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each worker on a node of its own: the bits of an undisturbed cell in a folder. It can be evaluated there."""
    job = open_on("driver", bucket, empty_database, tmp_path, monkeypatch)
    job.tracker.prepare(job.grid, tmp_path / "artifacts")
    (trial,) = (trial for trial in job.trials if trial.row == "resnet26_3")
    whole, runs = place("whole"), tmp_path / "results"
    runs.mkdir()
    workspace = Workspace(runs, job.workspace.tracking_uri, bucket)
    assert ended(start(whole, trial, world)) == [0] * world

    first, second = (functools.partial(on_node, str(tmp_path / node)) for node in ("first", "second"))
    assert ended(start(workspace, trial, world, Kill("step", 7), body=first))[-1] == -9
    before = sorted(name for name in bucket.names(f"checkpoints/{trial.key}") if name.endswith(".pt"))[-1]
    assert ended(start(workspace, trial, world, body=second)) == [0] * world
    (log,) = (bucket.get(name) or b"" for name in bucket.names("logs"))
    assert f"resuming from {Path(before).name}" in log.decode()
    for rank in range(world):
        for name, value in weights(whole, rank).items():
            assert torch.equal(value, weights(workspace, rank)[name]), (rank, name)
    assert not list((tmp_path / "second-0").rglob("*.pt")), "a finished cell leaves its checkpoints on the node"

    found = Checkpoints(whole.checkpoints(trial), trial.key, 2, 600).load()
    there = Checkpoints(tmp_path / "copy", trial.key, 2, 600)
    there.prepare()
    for name in bucket.names(f"checkpoints/{trial.key}"):
        (there.folder / Path(name).name).write_bytes(bucket.get(name) or b"")
    copied = there.load()
    assert found is not None and copied is not None
    assert without_times(copied.history) == without_times(found.history)

    result = job.tracker.results()[trial.key]
    best = max(copied.history, key=lambda epoch: epoch.top1)
    folder = f"checkpoints/{trial.key}"
    for checkpoint in (trial.key, bucket.below(folder), bucket.below(f"{folder}/epoch-{best.epoch + 1:04d}-step-0000000.pt")):
        monkeypatch.setattr(sys, "argv", ["san", "evaluate", checkpoint, "--runs", bucket.uri, "--json"])
        main()
        told = json.loads(capsys.readouterr().out)
        assert told["checkpoint"].startswith(f"s3://runs/{bucket.uri.split('/')[3].partition('?')[0]}/checkpoints/{trial.key}/")
        assert result.finished and told["top1"] == best.top1


@pytest.mark.slow
def test_san_run_needs_no_shared_folder(
    bucket: Bucket,
    write_grid: Callable[[str], Path],
    empty_database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All that it leaves is in the bucket, and the keys to that are nowhere."""
    grid = write_grid("{question: 'Does it run?', rows: [{id: pairwise_3, model: {name: san10_pairwise, footprint: 3}}]}")
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    job = (str(grid), *SHORT[1:], "recipe.epochs=1")
    finished = "1 cells, 1 already finished"
    for command, told in (
        (("run", *job), "trained 1 cell in "),
        (("run", *job), finished),
        (("report", *job), f"report: {bucket.below('small-digits/report.html')}\n"),
        (("plan", *job), "finished"),
        (("runs",), "1/1"),
    ):
        monkeypatch.setattr(sys, "argv", ["san", *command, "--runs", bucket.uri])
        with suppress(SystemExit):
            main()
        said = "".join(capfd.readouterr())
        assert told in said
        assert ObjectStore.KEYS["AWS_SECRET_ACCESS_KEY"] not in said
    kept = {re.sub(r"[0-9a-f]{12}", "KEY", name) for name in bucket.names("")}
    checkpoints = {f"checkpoints/KEY/{name}" for name in ("epoch-0001-step-0000000.pt", "run_id", "summary.csv")}
    log = f"logs/pairwise_3-KEY-{socket.gethostname()}.log"
    assert kept == checkpoints | {
        log,
        *(f"small-digits/{name}" for name in ("plot.png", "report.html", "table.csv", "table.md")),
    }
    assert b'class="tiles"' in (bucket.get("small-digits/report.html") or b"")  # the checkpoint was read from there
    secret = ObjectStore.KEYS["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [name for name in bucket.names("") if secret in (bucket.get(name) or b"")]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert not list((tmp_path / "scratch").rglob("epoch-*"))
