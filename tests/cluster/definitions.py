"""The definitions of clusters in `cluster/`: their documents, schemas, commands and pods."""

from __future__ import annotations

import copy
import gzip
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from referencing import Registry, Resource

from experiments.cli import cli
from experiments.grids.expand import expand
from experiments.paper.tables import table_names

ROOT = Path(__file__).parent.parent.parent
CLUSTER = ROOT / "cluster"
SCHEMAS = Path(__file__).parent / "schemas"
LAUNCHERS = ("ray/aws.yaml", "ray/local.yaml")
COMPOSE = "compose.yaml"
MANIFESTS = tuple(sorted(path.relative_to(CLUSTER).as_posix() for path in (CLUSTER / "kuberay").glob("*.yaml")))
DEFINITIONS = (*LAUNCHERS, COMPOSE, *MANIFESTS)

# Keys that Ray's autoscaler passes to boto3's create_instances.
NODE_CONFIG = {"BlockDeviceMappings", "IamInstanceProfile", "ImageId", "InstanceMarketOptions", "InstanceType", "KeyName"}
API_VERSIONS = {
    "Namespace": "v1",
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}


def read(name: str) -> list[dict[str, Any]]:
    """The documents of a definition."""
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


def _packed(name: str) -> Any:
    return json.loads(gzip.decompress((SCHEMAS / name).read_bytes()))


REGISTRY: Registry[Any] = Registry().with_resources([("kubernetes", Resource.from_contents(_packed("kubernetes.json.gz")))])
KUSTOMIZATION = yaml.safe_load((SCHEMAS / "kustomization.yaml").read_text())
KUBERAY = _packed("kuberay.json.gz")
COMPOSE_SCHEMA = jsonschema.Draft202012Validator(_packed("compose-spec.json.gz"))


def validate(name: str, document: Any) -> None:
    """Raises ValidationError or ValueError if `ray up`, Kubernetes or Compose would reject the document or ignore a key."""
    if name in LAUNCHERS:
        _validate_launcher(document)
    elif name == COMPOSE:
        COMPOSE_SCHEMA.validate(document)
        for service, content in document["services"].items():
            _require_known(f"services.{service}.depends_on", content.get("depends_on", {}), document["services"])
    else:
        _validate_manifest(document)


def _validate_launcher(document: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(document)))
    # Ray ignores unknown keys here.
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    _require_known("provider", document["provider"], schema["properties"]["provider"]["properties"])
    for name, kind in document.get("available_node_types", {}).items():
        _require_known(f"available_node_types.{name}.node_config", kind["node_config"], NODE_CONFIG)


def _require_known(place: str, found: dict[str, Any], known: Any) -> None:
    unknown = set(found) - set(known)
    if unknown:
        raise ValueError(f"{place} has unknown keys: {sorted(unknown)}")


def _validate_manifest(document: dict[str, Any]) -> None:
    kind = document["kind"]
    if kind in API_VERSIONS and document["apiVersion"] != API_VERSIONS[kind]:
        raise ValueError(f"{kind} must have the version {API_VERSIONS[kind]}, not {document['apiVersion']}")
    jsonschema.Draft202012Validator(_schema(kind), registry=REGISTRY).validate(document)


def _schema(kind: str) -> dict[str, Any]:
    if kind == "Kustomization":
        return KUSTOMIZATION
    if kind in API_VERSIONS:
        return {"$ref": f"kubernetes#/$defs/V1{kind}"}
    schema = _closed(KUBERAY[kind])
    schema["properties"] |= {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": kind},
        "metadata": {"$ref": "kubernetes#/$defs/V1ObjectMeta"},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "required": ["apiVersion", "kind", "metadata"], **schema}


def _closed(schema: Any) -> Any:
    """A schema without unknown fields, as Kubernetes uses it, unless the schema preserves them."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if key != "properties"}
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    if "properties" in schema:
        closed["properties"] = {key: _closed(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    return closed


def commands(name: str, document: dict[str, Any]) -> Iterator[list[str]]:
    """The commands of a definition as arguments: `ray ...`, `mlflow ...`, `python -m experiments ...`."""
    if name in LAUNCHERS:
        for line in (*document["head_start_ray_commands"], *document["worker_start_ray_commands"]):
            yield from (shlex.split(part) for part in re.findall(r"\bray (?:start|stop)[^;&|]*", line))
    elif name == COMPOSE:
        for service in document["services"].values():
            if service.get("command", [""])[0] in ("ray", "mlflow"):
                yield list(service["command"])
            test = service["healthcheck"]["test"][1:] if "healthcheck" in service else []
            yield from [test] if test[:1] == ["ray"] else []
    elif document["kind"] == "RayJob":
        yield shlex.split(document["spec"]["entrypoint"])
    else:
        for container in (container for pod in pods(document) for container in pod["containers"]):
            if container.get("command", [""])[0] == "mlflow":
                yield list(container["command"])


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pods of a manifest."""
    spec = document.get("spec", {})
    if document["kind"] == "Deployment":
        yield spec["template"]["spec"]
    elif document["kind"] == "RayCluster":
        yield spec["headGroupSpec"]["template"]["spec"]
        yield from (group["template"]["spec"] for group in spec["workerGroupSpecs"])


def require_known(command: list[str], folder: Path = ROOT) -> None:
    """Raises if a command of Ray, MLflow or `san`, given in a folder, rejects these arguments, or a grid these overrides."""
    if command[:3] == ["python", "-m", "experiments"] or command[0] == "san":
        group: Any = cli
        arguments = command[3:] if command[0] == "python" else command[1:]
    elif command[0] == "ray":
        from ray.scripts.scripts import cli as group

        arguments = command[1:]
    else:
        assert command[0] == "mlflow", command
        from mlflow.cli import cli as group

        arguments = command[1:]
    while isinstance(group, click.Group):
        group, arguments = group.commands[arguments[0]], arguments[1:]
    filled = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", argument) for argument in arguments]  # like Compose
    context = group.make_context(command[0], filled)
    if group in (cli.commands["plan"], cli.commands["run"], cli.commands["submit"]):
        expand(folder / context.params["grid"], context.params["profile"], context.params["overrides"], table_names())
