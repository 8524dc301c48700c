"""Folders and buckets as stores of files and locks. The bucket is on an S3 server in another process."""

from __future__ import annotations

import functools
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from experiments.cli import submit
from experiments.errors import UserError
from experiments.runner.job import open_job
from experiments.runs import store as stores
from experiments.runs.locks import claimed_trials, trial_lock
from experiments.runs.store import OPTIONS, LocalStore, LockError, S3Store, StorageError, Store, _client
from experiments.runs.workspace import open_workspace
from experiments.training.checkpoint import Checkpoints
from tests.experiments.conftest import SMALL_GRID, San
from tests.experiments.drivers import PATIENCE
from tests.experiments.samples import flip_a_bit, of_step
from tests.experiments.servers import ObjectStore, free_port

NAME = "locks/trials/abc"
BUSY = "another process is training this trial"
NODE = Callable[[str], S3Store]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    running = ObjectStore(tmp_path_factory.mktemp("store") / "log")
    yield running
    running.end()


@pytest.fixture
def bucket(server: ObjectStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Store:
    """A bucket in which each test has a separate prefix."""
    for name, value in ObjectStore.KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SAN_SCRATCH", str(tmp_path / "scratch"))
    return S3Store.parse(server.uri(re.sub(r"\W+", "-", request.node.name)))


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "runs") if request.param == "folder" else request.getfixturevalue("bucket")


@pytest.fixture
def short_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "LIFE", 2.0)
    monkeypatch.setattr(stores, "RENEWAL", 0.4)
    monkeypatch.setattr(stores, "POLL", 0.1)


class NodeBucket(S3Store):
    """The bucket, with the scratch folder of another node."""

    def __init__(self, address: str, scratch: Path) -> None:
        super().__init__(address)
        object.__setattr__(self, "scratch", scratch)

    @property
    def folder(self) -> Path:
        return self.scratch

    def patient(self, seconds: float) -> NodeBucket:
        other = NodeBucket(self.address, self.scratch)
        object.__setattr__(other, "patience", seconds)
        return other


@pytest.fixture
def node(bucket: S3Store, tmp_path: Path, short_locks: None) -> Callable[[str], NodeBucket]:
    return lambda name: NodeBucket(bucket.address, tmp_path / name)


def all_names(store: S3Store, folder: str = "") -> list[str]:
    return store._ask(lambda s3: store._list(s3, folder))


def test_files_round_trip(store: Store) -> None:
    with store.lock(NAME, BUSY, wait=0) as lock:
        assert store.names("deep") == []
        assert store.read("deep/a") is None
        store.delete("deep/a")
        store.recover("deep", lock)
        for content in (b"", b"first", bytes(range(256)) * 50_000):
            store.write("deep/a", content)
            assert store.read("deep/a") == content
        store.recover("deep/er", lock)
        store.write("deep/er/b", b"")
        assert store.names("deep") == ["deep/a"]
        assert store.uri("deep/a").partition("?")[0].endswith("/deep/a")
        store.delete_folder("deep")
        assert store.names("deep") == store.names("deep/er") == []


def test_file_uploaded_by_one_node_is_downloaded_by_another(node: NODE) -> None:
    here, there = node("here"), node("there")
    for each in (here, there):
        (each.folder / "logs").mkdir(parents=True)
    (here.folder / "logs/a.log").write_text("first line")
    here.upload(here.folder / "logs/a.log")
    there.download(there.folder / "logs/a.log")
    assert (there.folder / "logs/a.log").read_text() == "first line"


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
def test_rejects_an_address_with_a_password_without_printing_it(uri: str) -> None:
    for take in (open_workspace, functools.partial(submit.check, SMALL_GRID, "digits", ())):
        with pytest.raises(
            UserError, match=r"contains a key or password.* AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) as raised:
            take(uri)
        assert "sesame" not in str(raised.value)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gs://runs/prefix", "gs://...: runs cannot be stored here; expected a folder or a bucket such as s3://bucket/prefix"),
        ("s3://", "s3://: the name of the bucket is missing"),
        ("s3:///prefix", "s3:///prefix: the name of the bucket is missing"),
        ("s3://[runs/prefix", "s3://[runs/prefix: not a valid address (Invalid IPv6 URL)"),
        ("s3://runs/prefix?endpoint=http://host", "unknown option endpoint; choose from endpoint_override, region,"),
    ],
)
def test_rejects_an_invalid_address(uri: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        open_workspace(uri)
    assert message in str(raised.value)


def test_options_of_an_address_are_passed_to_the_client() -> None:
    assert {*OPTIONS} == {"endpoint_override", "region", "scheme", "tls_ca_file_path", "tls_verify_certificates"}
    plain = _client("s3://runs/prefix?region=eu-west-1&scheme=http")
    assert plain.meta.endpoint_url == "http://s3.eu-west-1.amazonaws.com"
    own = _client("s3://runs/a?endpoint_override=host:9000&scheme=http&tls_ca_file_path=/ca.pem")
    assert own.meta.endpoint_url == "http://host:9000"
    assert own._endpoint.http_session._verify == "/ca.pem"
    assert _client("s3://runs/a?tls_verify_certificates=false&region=a")._endpoint.http_session._verify is False


def test_bucket_needs_a_tracking_server(bucket: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match="MLflow's database cannot be in a bucket; set MLFLOW_TRACKING_URI"):
        open_workspace(bucket.address)


def without_a_bucket(server: ObjectStore) -> str:
    return server.uri("prefix", bucket="nobodys")


def without_a_server(server: ObjectStore) -> str:
    return f"s3://runs/prefix?endpoint_override=http://127.0.0.1:{free_port()}"


def without_permission(server: ObjectStore) -> str:
    server.refuse()
    return server.uri("prefix")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (without_a_bucket, r"s3://nobodys/prefix\?.*: no such bucket; create the bucket or correct the name"),
        (
            without_a_server,
            r"s3://runs/prefix\?.*: the store does not answer \(.*onnect.*\); check the address and that the server",
        ),
        (without_permission, r"s3://runs/prefix\?.*: the store rejected the credentials; check AWS_ACCESS_KEY"),
    ],
)
def test_rejects_an_unusable_bucket_before_anything_starts(
    address: Callable[[ObjectStore], str],
    message: str,
    server: ObjectStore,
    bucket: S3Store,
    monkeypatch: pytest.MonkeyPatch,
    run_san: San,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    try:
        code, _, err = run_san("run", SMALL_GRID, "--runs", address(server))
    finally:
        server.refuse(wanted=False)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert re.match(f"san: {message}", err), err


def test_only_one_process_owns_a_lock(store: Store, short_locks: None, caplog: pytest.LogCaptureFixture) -> None:
    """On one machine, the second one does not wait until the first one's lock expires."""
    with store.lock(NAME, BUSY, wait=0) as lock:
        lock.check()
        with pytest.raises(LockError, match=rf"{NAME}: {BUSY} \(.*, process \d+\); wait until that process ends, or stop it"):
            with store.lock(NAME, BUSY, wait=0.2):
                pass
    assert f"{NAME}: {BUSY}" in caplog.text and "waiting up to 0 s for that process" in caplog.text
    with store.lock(NAME, BUSY, wait=0) as lock:
        lock.check()


def test_process_waits_for_a_lock_until_its_owner_ends(store: Store) -> None:
    leaving = ExitStack()
    leaving.enter_context(store.lock(NAME, BUSY, wait=0))
    timer = threading.Timer(0.5, leaving.close)
    timer.start()
    with store.lock(NAME, BUSY, wait=PATIENCE):
        assert timer.finished.is_set()


def test_renewed_lock_of_another_node_is_kept(node: NODE) -> None:
    with node("here").lock(NAME, BUSY, wait=0):
        with pytest.raises(LockError, match=rf"{NAME}\?.*: {BUSY} \(.*, process \d+\); wait until that process ends"):
            with node("there").lock(NAME, BUSY, wait=1):
                pass
    with node("there").lock(NAME, BUSY, wait=0) as lock:
        lock.check()
    assert all_names(node("here")) == []


@contextmanager
def frozen(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.Lock]:
    """A lock whose owner is too slow to renew it."""
    with monkeypatch.context() as patch:
        patch.setattr(stores, "RENEWAL", 1e9)
        with store.lock(NAME, BUSY, wait=0) as lock:
            yield lock


def test_expired_lock_is_taken_over_and_its_owner_stops(node: NODE, monkeypatch: pytest.MonkeyPatch) -> None:
    with frozen(node("here"), monkeypatch) as first:
        start = time.monotonic()
        with node("there").lock(NAME, BUSY, wait=0) as second:
            assert time.monotonic() - start > stores.LIFE
            first.raise_if_lost()  # it does not know yet
            with pytest.raises(LockError, match=r"another process took over this lock, because this process"):
                first.check()
            with pytest.raises(LockError):
                first.raise_if_lost()
            second.check()
        assert not second.continued
    assert all_names(node("here")) == []


def test_lock_of_an_owner_that_dies_is_taken_over_by_a_waiting_node(node: NODE, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock has not expired yet when the waiting time is over."""
    with frozen(node("here"), monkeypatch) as first:
        timer = threading.Timer(1.5, first.check)
        timer.start()
        with node("there").lock(NAME, BUSY, wait=2) as lock:
            assert timer.finished.is_set()
            lock.check()


def test_lock_is_lost_if_another_process_owned_it_meanwhile(node: NODE) -> None:
    """Even if nobody owns it now."""
    with node("here").lock(NAME, BUSY, wait=0) as lock:
        node("here").delete(NAME)
        with pytest.raises(LockError):
            lock.check()
    assert all_names(node("here")) == []


def test_late_renewal_is_accepted_if_no_process_took_the_lock(node: NODE, monkeypatch: pytest.MonkeyPatch) -> None:
    with frozen(node("here"), monkeypatch) as lock:
        time.sleep(stores.LIFE + 0.1)
        lock.check()


def test_lock_of_a_killed_process_is_free_on_its_node(bucket: S3Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lock expires after a minute. A kill leaves its object in the bucket, but frees the file lock."""
    with bucket.lock(NAME, BUSY, wait=0):
        left = bucket.read(NAME)
    bucket.write(NAME, left or b"")
    start = time.monotonic()
    with bucket.lock(NAME, BUSY, wait=0) as lock:
        assert time.monotonic() - start < stores.LIFE
        assert lock.continued


def test_only_one_of_many_nodes_owns_a_lock(node: NODE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "LIFE", PATIENCE)  # no lock expires, however slow the machine is
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with node(f"node{number}").lock(NAME, BUSY, wait=PATIENCE):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.05)
            inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert most == [1] * 4


def test_rejects_a_store_that_ignores_conditions(bucket: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put = S3Store._put
    monkeypatch.setattr(S3Store, "_put", lambda self, s3, name, content, condition=None: put(self, s3, name, content))
    with pytest.raises(UserError, match=r"ignores the condition of a put .*; choose a store that supports conditional puts"):
        with bucket.lock(NAME, BUSY, wait=0):
            pass


def test_two_grids_do_not_train_the_same_trial(store: Store, tmp_path: Path, short_locks: None) -> None:
    """The same grid is an error. Another grid gets the remaining trials, also after a `san run` was killed."""
    cells = {trial.key: trial for trial in open_job(SMALL_GRID, "digits", (), tmp_path / "job").trials}
    first, *others = cells
    with claimed_trials(store, "small-digits", {first: cells[first]}) as (claimed, lock):
        assert list(claimed) == [first]
        lock.raise_if_lost()
        with pytest.raises(LockError, match=r"locks/grids/small-digits.*: another `san run` is training this grid \("):
            with claimed_trials(store, "small-digits", cells):
                pass
        with claimed_trials(store, "other-digits", cells) as (claimed, _):
            assert list(claimed) == others
        killed = store.read("locks/grids/small-digits")
    store.write("locks/grids/small-digits", killed or b"")
    with claimed_trials(store, "other-digits", cells) as (claimed, _):
        assert claimed == cells


@contextmanager
def checkpoints_on(store: Store) -> Iterator[Checkpoints]:
    """The checkpoints of a trial, opened as by its next attempt."""
    store = store.patient(PATIENCE)
    with trial_lock(store, "abc") as lock:
        yield Checkpoints(store, "checkpoints/abc", "abc", lock, 2, 600)


def files(store: Store) -> list[str]:
    return [Path(name).name for name in store.names("checkpoints/abc")]


def test_damaged_checkpoint_in_a_bucket_is_renamed(node: NODE, caplog: pytest.LogCaptureFixture) -> None:
    here = node("here")
    with checkpoints_on(here) as checkpoints:
        for epoch in (1, 2, 3, 4):  # the first is the best
            checkpoints.save(of_step(epoch, value=1.0))
    assert files(here) == [f"epoch-000{epoch}-step-0000000.pt" for epoch in (1, 3, 4)]
    here.write("checkpoints/abc/epoch-0004-step-0000000.pt", flip_a_bit(of_step(4, value=1.0).as_bytes()))
    for name in ("there", "elsewhere"):
        with checkpoints_on(node(name)) as checkpoints:
            loaded = checkpoints.load()
            assert loaded is not None and loaded.running.number == 3
        assert files(here)[2:] == ["epoch-0004-step-0000000.broken"]
    assert "resuming from epoch-0003-step-0000000.pt" in caplog.text
    assert not [path for path in here.folder.rglob("epoch-*")], "a checkpoint stays on the node"


@pytest.mark.parametrize(("elsewhere", "resumed"), [(False, 3), (True, 2)])
def test_checkpoint_kept_on_a_node_is_used_unless_another_node_continued(
    elsewhere: bool, resumed: int, node: NODE, server: ObjectStore
) -> None:
    here = node("here")
    try:
        with checkpoints_on(here) as checkpoints:
            for epoch in (1, 2):
                checkpoints.save(of_step(epoch))
            checkpoints.store = here.patient(0.1)
            checkpoints.lock = stores.Lock()  # the store fails just after the lock was checked
            server.refuse()
            checkpoints.save(of_step(3))
    except StorageError as error:
        assert re.fullmatch(
            r"s3://runs/.*: the store rejected the credentials; .*; gave up after 0 s; .*/here/checkpoints/abc/"
            r"epoch-0003-step-0000000.pt is kept on this node \(.*\); the last good checkpoint is epoch-0002-step-0000000.pt; "
            "check the bucket, then run the same command again to resume",
            str(error),
        )
    finally:
        server.refuse(wanted=False)
    assert [path.name for path in here.folder.rglob("epoch-*")] == ["epoch-0003-step-0000000.pt"]
    if elsewhere:
        with checkpoints_on(node("there")) as checkpoints:
            checkpoints.load()
            checkpoints.save(of_step(2, value=1.0))  # with other weights, as from another kind of GPU
    with checkpoints_on(here) as checkpoints:
        loaded = checkpoints.load()
    assert loaded is not None and loaded.running.number == resumed
    assert float(loaded.engine["model"]["w"][0]) == float(elsewhere)
    assert not list(here.folder.rglob("epoch-*"))


@pytest.mark.parametrize(
    ("fail", "recover", "seconds"),
    [
        pytest.param(ObjectStore.stop, ObjectStore.resume, 10, id="silent", marks=pytest.mark.slow),
        pytest.param(ObjectStore.refuse, functools.partial(ObjectStore.refuse, wanted=False), 1, id="refusing"),
    ],
)
def test_requests_to_an_unavailable_store_are_repeated(
    fail: Callable[[ObjectStore], None],
    recover: Callable[[ObjectStore], None],
    seconds: float,
    server: ObjectStore,
    node: NODE,
) -> None:
    with checkpoints_on(node("here")) as checkpoints:
        fail(server)
        timer = threading.Timer(seconds, recover, (server,))
        timer.start()
        checkpoints.save(of_step(1))
        assert timer.finished.is_set()
    assert files(node("here")) == ["epoch-0001-step-0000000.pt"]
    assert not list(node("here").folder.rglob("epoch-*"))


def test_lock_on_a_full_disk_is_an_error_for_users(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # every write fails
    try:
        with pytest.raises(StorageError) as caught, LocalStore(tmp_path).lock("lock", "busy", wait=1):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == f"{tmp_path}/lock: cannot write this file (File too large); check the disk"
    with LocalStore(tmp_path).lock("lock", "busy", wait=1):
        pass
