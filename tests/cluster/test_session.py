import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest
import ray
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

import cluster.session
from cluster import ClusterError, Node, Resources, available_cpus
from cluster.session import only_session, private_folder, start_ray


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
        head.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest())  # type: ignore[attr-defined]
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    folder = cluster.session.private_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "ray").is_dir()
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray/auth_token"))
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def is_alive(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


_TASK_WITH_VARIABLES = """
import os, sys, ray, cluster.session
cluster.supervision._SECONDS_BETWEEN_CHECKS = 0.001
here = os.getcwd()
with cluster.session.session():
    task = ray.remote(lambda: (sys.executable, here in sys.path)).options(runtime_env={"env_vars": {"SET_BY": "Tune"}})
    print(*ray.get(task.remote(), timeout=240), flush=True)
    ray.shutdown()  # as in a sweep that Ctrl-C interrupts; this is not Ray's death
"""


@pytest.mark.slow
def test_trials_start_in_any_folder(tmp_path: Path) -> None:
    """The path of Python has a space, the current folder has files with the names of modules, and no home folder can keep Ray's
    token."""
    (tmp_path / "wörk dir").symlink_to(sys.prefix)
    python = tmp_path / "wörk dir/bin/python"
    for name in ("san", "profile", "statistics"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit")
    # -P: not in the path of this process either, as for the command `san`
    command, environment = [python, "-P", "-c", _TASK_WITH_VARIABLES], os.environ | {"HOME": str(tmp_path / "san.py")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.stdout, run.returncode) == (f"{python} False\n", 0), run.stderr


def test_ray_is_started_again_without_the_processes_of_the_failed_start(capsys: pytest.CaptureFixture[str]) -> None:
    """As after Ray's limit for its start. After three attempts, the error is for the user."""
    started: list[subprocess.Popen[bytes]] = []
    fails = [True, True]

    def start() -> str:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        if fails:
            fails.pop()
            raise RuntimeError("timed out")
        return "connected"

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert start_ray(start) == "connected"
        assert not any(map(is_alive, started[:2]))
        assert started[2].poll() is None is other.poll()
        assert re.findall(r"starting it again \((\d) of 3\)", capsys.readouterr().err) == ["2", "3"]
        fails.extend([True] * 3)
        with pytest.raises(ClusterError, match=r"Ray did not start on this machine \(timed out\)"):
            start_ray(start)
        assert not any(map(is_alive, started[3:]))
        for process in (other, started[2]):
            process.communicate(b"\n")


def test_rays_folder_is_short_where_the_temporary_folder_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch := tmp_path / ("x" * 40)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert private_folder().parent == Path("/tmp")


def test_an_error_that_would_be_raised_again_is_not_retried() -> None:
    starts: list[int] = []

    def start() -> None:
        starts.append(1)
        raise PermissionError(13, "Permission denied", "/.ray")

    with pytest.raises(ClusterError, match=r"/\.ray"):
        start_ray(start)
    assert starts == [1]


def test_a_second_session_on_a_machine_is_not_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.session.private_folder", lambda: tmp_path)
    with only_session() as first, only_session() as second:
        assert first and not second
    with only_session() as third:
        assert third
