import threading
from pathlib import Path

import pytest
import ray

from cluster import ClusterError, Node, Resources
from cluster.session import _cgroup_quota, available_cpus, session
from tests.experiments.drivers import PATIENCE


def test_resources_add_up() -> None:
    resources = Resources((Node(4, 1), Node(2, 0)))
    assert (resources.cpus, resources.gpus) == (6, 1)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({}, None),
    ],
    ids=["version 2", "version 2 without limit", "version 1", "no cgroups"],
)
def test_cgroup_quota(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _cgroup_quota(tmp_path) == quota


def test_local_session_has_the_cpus_of_this_process(resources: Resources) -> None:
    assert len(resources.nodes) == 1
    assert resources.cpus == available_cpus()


def test_nested_session_is_the_same(resources: Resources) -> None:
    with session() as inner:
        assert inner == resources
    assert ray.is_initialized()


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hides the session that other tests share."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return monkeypatch


def test_failed_start_of_ray_is_an_error_for_users(no_ray: pytest.MonkeyPatch) -> None:
    def fail(**settings: object) -> None:
        raise Exception("The current node timed out during startup")

    no_ray.setattr(ray, "init", fail)
    lost: list[str] = []
    message = r"Ray did not start on this machine \(The current node timed out during startup\)"
    with pytest.raises(ClusterError, match=message) as caught, session(None, lost.append):  # type: ignore[arg-type]
        pass
    assert lost == [str(caught.value)]


def test_ray_that_does_not_start_is_lost(no_ray: pytest.MonkeyPatch) -> None:
    lost = threading.Event()
    no_ray.setattr("cluster.supervision._SECONDS_TO_START", 0.01)
    no_ray.setattr("cluster.session.resources", lambda: None)
    no_ray.setattr(ray, "init", lambda **settings: lost.wait(PATIENCE))
    with session(None, lambda message: lost.set()):  # type: ignore[arg-type, return-value]
        pass
    assert lost.is_set()
