"""The cluster definitions in `cluster/`: valid for the programs that read them, consistent with this project, and secure."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from cuda_ext import build
from tests.cluster.definitions import (
    CLUSTER,
    COMPOSE,
    DEFINITIONS,
    MANIFESTS,
    ROOT,
    commands,
    dockerfile,
    pods,
    read,
    require_known,
    validate,
    weaknesses,
)
from tests.experiments.servers import POOL

PINS = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line)
every_definition = pytest.mark.parametrize("name", DEFINITIONS)


@every_definition
def test_definition_matches_its_schema(name: str) -> None:
    for document in read(name):
        validate(name, document)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("ray/aws.yaml", ("provider", "region")),
        ("ray/local.yaml", ("auth", "ssh_user")),
        (COMPOSE, ("services", "head", "command")),
        ("kuberay/raycluster.yaml", ("spec", "headGroupSpec", "rayStartParams")),
        ("kuberay/rayjob.yaml", ("spec", "entrypoint")),
        ("kuberay/tracking.yaml", ("spec", "selector")),
    ],
    ids=lambda value: value if isinstance(value, str) else ".".join(value),
)
def test_schema_rejects_a_misspelt_key(name: str, path: tuple[str, ...]) -> None:
    document = read(name)[0]
    *parents, key = path
    place: Any = document
    for parent in parents:
        place = place[parent]
    place[f"{key}s"] = place.pop(key)
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError, RuntimeError, click.ClickException)):
        validate(name, document)


def test_kustomize_replaces_the_image() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(CLUSTER / "kuberay")], capture_output=True, text=True, check=True)
    images = re.findall(r"image: (\S+)", done.stdout)
    (filled,) = read("kuberay/kustomization.yaml")[0]["images"]
    assert sorted(set(images)) == ["postgres:17", f"{filled['newName']}:{filled['newTag']}"]
    for document in yaml.safe_load_all(done.stdout):
        validate("kuberay", document)


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


def test_ray_still_reads_these_settings() -> None:
    from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR, _get_default_token_path

    assert AUTH_MODE_ENV_VAR == "RAY_AUTH_MODE"
    assert _get_default_token_path() == Path.home() / ".ray" / "auth_token"


INSTRUCTIONS = {"CMD", "COPY", "ENV", "EXPOSE", "FROM", "RUN", "USER", "WORKDIR"}


def test_files_of_the_dockerfile_exist() -> None:
    ignored = (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert ignored[1] == "*" and all((ROOT / path).exists() for path in kept)
    for word, arguments in dockerfile():
        assert word in INSTRUCTIONS, word
        if word == "COPY":
            *sources, _ = [part for part in arguments.split() if not part.startswith("--")]
            assert all((ROOT / source).exists() and source.split("/")[0] in kept for source in sources), arguments
        for module in re.findall(r"python -m (\S+)", arguments):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or module == "venv", module


def test_image_has_the_right_cuda_python_and_user() -> None:
    instructions = dockerfile()
    (base,) = [arguments for word, arguments in instructions if word == "FROM"]
    version = re.fullmatch(r"nvidia/cuda:(12)\.(\d)\.\d+-cudnn-devel-ubuntu22\.04", base)
    assert version is not None, base
    runs = " ".join(arguments for word, arguments in instructions if word == "RUN")
    assert f"whl/cu{version[1]}{version[2]} " in runs
    assert re.findall(r"python3\.(\d+)", runs) and set(re.findall(r"python3\.(\d+)", runs)) == {"11"}
    assert [arguments for word, arguments in instructions if word == "USER"][-1] == "san"
    assert {"80", "90"} <= set(build.CUDA_ARCHITECTURES) and "sm_80" in (CLUSTER / "Dockerfile").read_text()


@every_definition
def test_definition_is_secure(name: str) -> None:
    for document in read(name):
        assert list(weaknesses(name, document)) == []


POD = ("spec", "workerGroupSpecs", 0, "template", "spec")
WEAKENED: list[tuple[str, int, tuple[Any, ...], Any]] = [
    ("ray/aws.yaml", 0, ("docker", "run_options"), ["--privileged"]),
    ("ray/aws.yaml", 0, ("file_mounts",), {}),
    ("ray/local.yaml", 0, ("worker_start_ray_commands",), ["ray start --address=$RAY_HEAD_IP:6379"]),
    ("ray/local.yaml", 0, ("head_start_ray_commands",), ["RAY_AUTH_MODE=token ray start --head --dashboard-host=0.0.0.0"]),
    ("ray/local.yaml", 0, ("auth", "ssh_user"), "root"),
    (COMPOSE, 0, ("services", "head", "ports"), ["8265:8265"]),
    (COMPOSE, 0, ("services", "head", "environment", "RAY_AUTH_MODE"), "disabled"),
    (COMPOSE, 0, ("services", "head", "environment", "RAY_LOGGER_LEVEL"), "info"),
    (COMPOSE, 0, ("services", "worker", "environment", "RAY_AUTH_TOKEN"), "0123456789abcdef"),
    (COMPOSE, 0, ("services", "worker", "environment", "RAY_AUTH_TOKEN"), "${RAY_AUTH_TOKEN:-}"),
    (COMPOSE, 0, ("services", "objects", "user"), "0:0"),
    (COMPOSE, 0, ("services", "objects", "cap_drop"), []),
    (COMPOSE, 0, ("services", "database", "privileged"), True),
    (COMPOSE, 0, ("services", "mlflow", "command"), ["mlflow", "server", "--allowed-hosts=*"]),
    ("kuberay/raycluster.yaml", 0, ("spec", "authOptions", "mode"), "disabled"),
    ("kuberay/raycluster.yaml", 0, ("spec", "headGroupSpec", "serviceType"), "LoadBalancer"),
    ("kuberay/raycluster.yaml", 0, ("spec", "autoscalerOptions", "securityContext"), {}),
    ("kuberay/raycluster.yaml", 0, (*POD, "securityContext"), {"runAsNonRoot": False}),
    ("kuberay/raycluster.yaml", 0, (*POD, "containers", 0, "securityContext"), {"privileged": True}),
    ("kuberay/raycluster.yaml", 0, (*POD, "containers", 0, "env"), [{"name": "RAY_AUTH_TOKEN", "value": "0123"}]),
    ("kuberay/raycluster.yaml", 0, (*POD, "containers", 0, "env"), []),
    ("kuberay/raycluster.yaml", 0, (*POD, "volumes"), [{"name": "runs", "hostPath": {"path": "/"}}]),
    ("kuberay/tracking.yaml", 0, ("spec", "type"), "NodePort"),
    ("kuberay/tracking.yaml", 1, ("spec", "template", "spec", "containers", 0, "command"), ["mlflow", "server"]),
]


@pytest.mark.parametrize(("name", "index", "path", "value"), WEAKENED, ids=lambda value: str(value)[:40])
def test_weakness_is_found(name: str, index: int, path: tuple[Any, ...], value: Any) -> None:
    document = copy.deepcopy(read(name)[index])
    place: Any = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert list(weaknesses(name, document)) != []


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


def test_example_values_are_marked() -> None:
    """Every value that a user must replace has a FILL comment."""
    examples = re.compile(r"example\.org|fs-example|192\.168\.")
    for name in DEFINITIONS:
        lines = (CLUSTER / name).read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if examples.search(line):
                assert "FILL" in line or "FILL" in before or before.strip().startswith("#"), f"{name}: {line}"


@pytest.mark.parametrize("page", ["cluster.md", "cloud-and-kubernetes.md"])
def test_files_named_in_guides_exist(page: str) -> None:
    """Its commands are checked by tests/docs/test_guides.py."""
    guide = (ROOT / "docs/guides" / page).read_text()
    named = set(re.findall(r"(?<![\w/.])(?:cluster|tests)/[\w./-]*\w", guide))
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
