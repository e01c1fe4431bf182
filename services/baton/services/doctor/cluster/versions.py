"""The cluster's version, and the APIs that components need."""

from __future__ import annotations

import re
from collections.abc import Iterator

from baton.services.doctor.cluster.facts import ClusterFacts, Document, name_of
from baton.services.doctor.cluster.promises import COMPONENTS, MINIMUM_VERSION
from baton.services.doctor.finding import Finding, failed, ok, unknown, warning

_TOPIC = "cluster"
_LEAST = ".".join(map(str, MINIMUM_VERSION))
_METRICS = {"Pods": "custom.metrics.k8s.io", "Resource": "metrics.k8s.io"}  # of autoscalers' metrics, by type


def check_versions(facts: ClusterFacts) -> Iterator[Finding]:
    """Checks the version and the APIs."""
    match = re.match(r"v?(\d+)\.(\d+)", facts.version)
    if match is None:
        yield unknown(_TOPIC, f"its version {facts.version!r} cannot be read")
    elif (int(match[1]), int(match[2])) < MINIMUM_VERSION:
        fix = f"upgrade the cluster to Kubernetes {_LEAST} or newer"
        yield failed(_TOPIC, f"Kubernetes {facts.version} is older than {_LEAST}, the oldest that is supported", fix)
    else:
        yield ok(_TOPIC, f"Kubernetes {facts.version}; {_LEAST} or newer is needed")
    yield from _extensions(facts)
    for one in facts.of_kind("HorizontalPodAutoscaler"):
        yield from _metrics(one, facts)


def _extensions(facts: ClusterFacts) -> Iterator[Finding]:
    for component in facts.components:
        needed = COMPONENTS[component]
        if needed.group not in facts.groups:
            what = f"the component {component} needs {needed.kind} of {needed.group}, a CRD that the cluster lacks"
            yield failed(_TOPIC, what, f"install {needed.owner}, or take the component out of the overlay")
        else:
            yield ok(_TOPIC, f"the component {component} has its CRD {needed.kind} of {needed.group}")


def _metrics(autoscaler: Document, facts: ClusterFacts) -> Iterator[Finding]:
    spec = autoscaler.get("spec", {})
    if spec.get("minReplicas", 1) == spec.get("maxReplicas"):
        return  # the count is fixed
    types = {one.get("type", "") for one in spec.get("metrics") or ()}
    for kind in sorted(types & _METRICS.keys()):
        if _METRICS[kind] not in facts.groups:
            what = f"the autoscaler {name_of(autoscaler)} needs the API {_METRICS[kind]}, which the cluster lacks"
            fix = "install prometheus-adapter as deploy/README.md shows" if kind == "Pods" else "install metrics-server"
            yield warning(_TOPIC, what, fix)
