"""The cluster definitions in `cluster/`: valid YAML that Ray accepts, and consistent with this project."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from experiments.cli.commands import cli
from experiments.config.expand import expand
from experiments.config.grid import GridRequest
from experiments.paper.tables import table_names

ROOT = Path(__file__).parent.parent.parent
CLUSTER = ROOT / "cluster"
LAUNCHERS = ("ray/aws.yaml", "ray/local.yaml")
PINS = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line)


def read(name: str) -> list[dict[str, Any]]:
    """The documents of a definition."""
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


def require_known(command: list[str]) -> None:
    """Raises if Ray, MLflow or `san` rejects the arguments of a command, or a grid its overrides."""
    group: Any = cli
    if command[0] == "ray":
        from ray.scripts.scripts import cli as group
    elif command[0] == "mlflow":
        from mlflow.cli import cli as group
    arguments = command[3:] if command[0] == "python" else command[1:]
    while isinstance(group, click.Group):
        group, arguments = group.commands[arguments[0]], arguments[1:]
    filled = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", argument) for argument in arguments]  # like Compose
    context = group.make_context(command[0], filled)
    if group is cli.commands["run"]:
        request = GridRequest(ROOT / context.params["grid"], context.params["profile"], context.params["overrides"])
        expand(request, table_names())


@pytest.mark.parametrize("name", LAUNCHERS)
def test_ray_accepts_a_launcher_and_its_processes_require_the_token(name: str) -> None:
    (document,) = read(name)
    validate_config(prepare_config(copy.deepcopy(document)))
    options = document.get("docker", {}).get("run_options", [])
    starts = [
        line for line in (*document["head_start_ray_commands"], *document["worker_start_ray_commands"]) if "ray start" in line
    ]
    assert len(starts) == 2
    for line in starts:
        assert "RAY_AUTH_MODE=token" in line or "--env=RAY_AUTH_MODE=token" in options, line
        for command in re.findall(r"\bray start[^;&|]*", line):
            require_known(shlex.split(command))


def test_compose_services_have_valid_commands_and_require_the_token() -> None:
    services = read("compose.yaml")[0]["services"]
    for service in services.values():
        assert services.keys() >= set(service.get("depends_on", {}))
        program = service.get("command", [""])[0]
        if program in ("ray", "mlflow"):
            require_known(service["command"])
        assert program != "ray" or service["environment"]["RAY_AUTH_MODE"] == "token"


def test_kubernetes_definitions_are_complete() -> None:
    folder = CLUSTER / "kuberay"
    kinds = {document["kind"] for path in folder.glob("*.yaml") for document in read(f"kuberay/{path.name}")}
    assert {"RayCluster", "RayJob", "NetworkPolicy", "PersistentVolumeClaim", "Deployment", "Service"} <= kinds
    listed = set(read("kuberay/kustomization.yaml")[0]["resources"])
    assert listed == {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml", "rayjob.yaml"}
    (cluster,), (job,) = read("kuberay/raycluster.yaml"), read("kuberay/rayjob.yaml")
    assert cluster["spec"]["rayVersion"] == PINS["ray"]
    assert cluster["spec"]["authOptions"]["mode"] == "token"
    require_known(shlex.split(job["spec"]["entrypoint"]))


def test_files_of_the_dockerfile_exist() -> None:
    ignored = (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = re.findall(r"^COPY --chown=\S+ (.*)$", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE)
    assert copied
    for arguments in copied:
        *sources, _ = arguments.split()
        assert all((ROOT / source).exists() and source in kept for source in sources), arguments
