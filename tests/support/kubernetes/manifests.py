"""The rendered manifests of deploy/kubernetes, for tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from support.kubernetes.deploy_tools import kustomize
from support.kubernetes.fleet_variants import folder_of

OVERLAYS = ("cpu-demo", "gpu", "aggregated", "production")
# Components whose objects need additional CRDs. No overlay enables them.
CRD_COMPONENTS = ("keda", "keda-aggregated", "pod-monitors", "pod-monitors-tls", "gateway-api", "gateway-api-tls")

Manifest = Mapping[str, Any]


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """Returns all objects of an overlay or variant."""
    return tuple(yaml.safe_load_all(kustomize(folder_of(overlay))))


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    return [one for one in rendered(overlay) if one["kind"] in kinds]


def workloads(overlay: str) -> list[Manifest]:
    """Returns the objects that create pods."""
    return of_kind(overlay, "Deployment", "StatefulSet")


def named(overlay: str, kind: str, name: str) -> Manifest:
    (found,) = (one for one in of_kind(overlay, kind) if one["metadata"]["name"] == name)
    return found


def pod_of(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def container_of(workload: Manifest) -> Manifest:
    (container,) = pod_of(workload)["containers"]
    one: Manifest = container
    return one


def services(overlay: str) -> Iterator[Manifest]:
    """Yields the workloads that run `baton`."""
    return (one for one in workloads(overlay) if one["metadata"]["name"] != "baton-redis")


def arguments(workload: Manifest) -> list[str]:
    """Returns a container's arguments, with variables replaced as Kubernetes does."""
    container = container_of(workload)
    labels = workload["spec"]["template"]["metadata"]["labels"]
    values = {one["name"]: _value_of(one, labels) for one in container.get("env", ())}
    return [_filled(word, values) for word in container["args"]]


def environment(workload: Manifest) -> dict[str, str]:
    """Returns the container's BATON_ variables. Those from secrets have a Redis address."""
    variables = container_of(workload).get("env", ())
    return {
        one["name"]: str(one.get("value", "redis://baton-redis:6379/0"))
        for one in variables
        if one["name"].startswith("BATON_")
    }


def _value_of(variable: Manifest, labels: Mapping[str, str]) -> str:
    """Returns a variable's value. The pod's address is a placeholder."""
    if "value" in variable:
        return str(variable["value"])
    path = variable["valueFrom"].get("fieldRef", {}).get("fieldPath", "")
    if path.startswith("metadata.labels["):
        return labels[path.split("'")[1]]
    return "baton" if path == "metadata.namespace" else "10.0.0.1"


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"$({name})", value)
    return word
