from pathlib import Path

import ray

from cluster import Node, Resources
from cluster.session import _cgroup_quota, available_cpus, session


def test_resources_add_up() -> None:
    resources = Resources((Node(4, 1), Node(2, 0)))
    assert (resources.cpus, resources.gpus) == (6, 1)


def test_cgroup_quota_version_2(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert _cgroup_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _cgroup_quota(tmp_path) is None


def test_cgroup_quota_version_1(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert _cgroup_quota(tmp_path) == 2.0


def test_cgroup_absent(tmp_path: Path) -> None:
    assert _cgroup_quota(tmp_path) is None


def test_local_session_has_the_cpus_of_this_process(resources: Resources) -> None:
    assert len(resources.nodes) == 1
    assert resources.cpus == available_cpus()


def test_session_inside_a_session_is_the_same(resources: Resources) -> None:
    with session() as inner:
        assert inner == resources
    assert ray.is_initialized()
