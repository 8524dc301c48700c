import stat
from pathlib import Path

import grpc
import pytest
import ray
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

import cluster.session
from cluster import Node, Resources, available_cpus
from cluster.session import alone


def test_resources_add_up() -> None:
    resources = Resources((Node(4, 1), Node(2, 0)))
    assert (resources.cpus, resources.gpus) == (6, 1)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({}, 8),
    ],
    ids=["version 2", "less than one", "version 2 without limit", "version 1", "no cgroups"],
)
def test_available_cpus_respect_the_control_group(
    files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("cluster.placement.Path", lambda path: tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert available_cpus() == cpus


def test_local_session_has_the_cpus_of_this_process(resources: Resources) -> None:
    assert len(resources.nodes) == 1
    assert resources.cpus == available_cpus()


def test_ray_head_of_a_local_session_requires_the_token(resources: Resources) -> None:
    channel = grpc.insecure_channel(ray.get_runtime_context().gcs_address)
    head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
    with pytest.raises(grpc.RpcError) as refused:
        head.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=30)  # type: ignore[attr-defined]
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    folder = cluster.session.private_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "ray").is_dir()
    assert stat.S_IMODE((Path.home() / ".ray/auth_token").stat().st_mode) == 0o600


def test_a_second_session_on_a_machine_is_not_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with alone() as first, alone() as second:
        assert first and not second
    with alone() as third:
        assert third
