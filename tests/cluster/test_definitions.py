"""The cluster definitions in `cluster/`: valid for the programs that read them, and consistent with this project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.definitions import (
    CLUSTER,
    COMPOSE,
    DEFINITIONS,
    LAUNCHERS,
    MANIFESTS,
    ROOT,
    commands,
    pods,
    read,
    require_known,
    validate,
)
from tests.experiments.servers import POOL

PINS = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line)
every_definition = pytest.mark.parametrize("name", DEFINITIONS)


@every_definition
def test_definition_matches_its_schema(name: str) -> None:
    for document in read(name):
        validate(name, document)


@every_definition
def test_commands_of_a_definition_are_valid(name: str) -> None:
    for document in read(name):
        for command in commands(name, document):
            require_known(command)


def test_references_of_manifests_exist() -> None:
    documents = [document for name in MANIFESTS for document in read(name)]
    labels = [document["spec"]["template"]["metadata"]["labels"] for document in documents if document["kind"] == "Deployment"]
    labels += [{"ray.io/cluster": document["metadata"]["name"]} for document in documents if document["kind"] == "RayCluster"]
    claims = {document["metadata"]["name"] for document in documents if document["kind"] == "PersistentVolumeClaim"}
    resources = {path.name for path in (CLUSTER / "kuberay").glob("*.yaml")} - {"kustomization.yaml", "rayjob.yaml"}
    assert set(read("kuberay/kustomization.yaml")[0]["resources"]) == resources
    for document in documents:
        for selector in selectors(document):
            assert selector in labels, f"{document['kind']} {document['metadata']['name']}"
        for pod in pods(document):
            mounted = {volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "emptyDir" not in volume}
            assert mounted <= claims


def selectors(value: Any) -> Iterator[dict[str, str]]:
    """The labels by which a document selects pods."""
    if isinstance(value, list):
        for item in value:
            yield from selectors(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("selector", "podSelector", "clusterSelector") and item:
                yield item.get("matchLabels", item)
            else:
                yield from selectors(item)


def test_ray_version_matches_the_requirements() -> None:
    (cluster,) = read("kuberay/raycluster.yaml")
    assert cluster["spec"]["rayVersion"] == PINS["ray"]


def test_files_of_the_dockerfile_exist() -> None:
    ignored = (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for arguments in re.findall(r"^COPY --chown=\S+ (.*)$", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE):
        *sources, _ = arguments.split()
        assert all((ROOT / source).exists() and source in kept for source in sources), arguments


def test_every_ray_process_requires_the_token() -> None:
    for name in LAUNCHERS:
        (document,) = read(name)
        options = document.get("docker", {}).get("run_options", [])
        for line in (*document["head_start_ray_commands"], *document["worker_start_ray_commands"]):
            assert "ray start" not in line or "RAY_AUTH_MODE=token" in line or "--env=RAY_AUTH_MODE=token" in options, line
    services = read(COMPOSE)[0]["services"]
    for service in services.values():
        assert service.get("command", [""])[0] != "ray" or service["environment"]["RAY_AUTH_MODE"] == "token"
    assert read("kuberay/raycluster.yaml")[0]["spec"]["authOptions"]["mode"] == "token"


def test_tracking_server_has_two_connections_per_thread() -> None:
    compose = read(COMPOSE)[0]["services"]
    manifests = [document for document in read("kuberay/tracking.yaml") if document["kind"] == "Deployment"]
    containers = {pod["containers"][0]["name"]: pod["containers"][0] for document in manifests for pod in pods(document)}
    environments = {variable["name"]: variable.get("value") for variable in containers["mlflow"]["env"]}
    for environment, mlflow, database in (
        (compose["mlflow"]["environment"], compose["mlflow"]["command"], compose["database"]["command"]),
        (environments, containers["mlflow"]["command"], containers["postgres"]["args"]),
    ):
        assert {name: str(environment[name]) for name in POOL} == POOL
        (workers,) = [int(argument.removeprefix("--workers=")) for argument in mlflow if argument.startswith("--workers=")]
        (most,) = [int(argument.removeprefix("max_connections=")) for argument in database if "max_connections" in argument]
        assert workers * sum(map(int, POOL.values())) <= most


@pytest.mark.parametrize("page", ["cluster.md", "cloud-and-kubernetes.md"])
def test_files_named_in_guides_exist(page: str) -> None:
    """Its commands are checked by tests/docs/test_guides.py."""
    guide = (ROOT / "docs/guides" / page).read_text()
    named = set(re.findall(r"(?<![\w/.])(?:cluster|tests)/[\w./-]*\w", guide))
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
