"""The rendered manifests of deploy/kubernetes, as tests look at them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from deploy_tools import ROOT, kustomize

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "gpu", "production")
# Components of objects that a cluster knows only with somebody's CRDs; no overlay has them on.
CRD_COMPONENTS = ("keda", "pod-monitors", "pod-monitors-tls", "gateway-api")

Manifest = Mapping[str, Any]


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """Every object of an overlay."""
    return tuple(yaml.safe_load_all(kustomize(KUBERNETES / "overlays" / overlay)))


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    return [one for one in rendered(overlay) if one["kind"] in kinds]


def workloads(overlay: str) -> list[Manifest]:
    """What makes pods."""
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
    """The workloads that run `baton`."""
    return (one for one in workloads(overlay) if one["metadata"]["name"] != "baton-redis")


def arguments(workload: Manifest) -> list[str]:
    """A container's arguments, its variables filled in as Kubernetes does."""
    container = container_of(workload)
    values = {one["name"]: str(one.get("value", "10.0.0.1")) for one in container.get("env", ())}
    return [_filled(word, values) for word in container["args"]]


def environment(workload: Manifest) -> dict[str, str]:
    """Its BATON_ variables; those of secrets have a Redis's address."""
    variables = container_of(workload).get("env", ())
    return {
        one["name"]: str(one.get("value", "redis://baton-redis:6379/0"))
        for one in variables
        if one["name"].startswith("BATON_")
    }


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"$({name})", value)
    return word
