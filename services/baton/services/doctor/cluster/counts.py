"""The number of pods of each workload, compared with fleet.yaml and its autoscaler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.services.doctor.cluster.facts import ClusterFacts, Workload, name_of
from baton.services.doctor.cluster.promises import BOTH, COUNTS, DECODE, FLEET_SETTINGS, GATEWAY, KVSTORE, ROUTER
from baton.services.doctor.finding import Finding, failed, ok, warning

_TOPIC = "counts"
_AUTOSCALERS = {
    "HorizontalPodAutoscaler": ("minReplicas", "maxReplicas"),
    "ScaledObject": ("minReplicaCount", "maxReplicaCount"),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most pods that an autoscaler allows."""

    name: str
    least: int
    most: int


def check_counts(facts: ClusterFacts) -> Iterator[Finding]:
    """Checks all workloads of Baton."""
    if not facts.was_read("Deployment") or not facts.was_read("StatefulSet"):
        return
    apply = "kubectl apply -k deploy/kubernetes/overlays/..."
    for name in (GATEWAY, ROUTER, KVSTORE):
        if facts.workload(name) is None:
            yield failed(_TOPIC, f"there is no {name} in the namespace {facts.namespace}", apply)
    if facts.workload(DECODE) is None and facts.workload(BOTH) is None:
        yield failed(_TOPIC, f"there is neither {DECODE} nor {BOTH}: nothing decodes", apply)
    for one in facts.workloads():
        if one.name.startswith("baton-"):
            yield from _check(one, facts)


def _check(workload: Workload, facts: ClusterFacts) -> Iterator[Finding]:
    bounds = _bounds_of(workload.name, facts)
    wrong = list(_wrong(workload, bounds, facts))
    yield from wrong
    named = f"{workload.kind} {workload.name}"
    if workload.num_ready < workload.replicas:
        level = warning if workload.num_ready else failed
        what = f"{named}: {workload.num_ready} of {workload.replicas} pods are ready"
        yield level(_TOPIC, what, f"kubectl -n {facts.namespace} describe pods; their logs name what is missing")
    elif not wrong:
        yield ok(_TOPIC, f"{named}: {workload.replicas} pods, all ready")


def _wrong(workload: Workload, bounds: Bounds | None, facts: ClusterFacts) -> Iterator[Finding]:
    named = f"{workload.kind} {workload.name}"
    setting, count = COUNTS.get(workload.name, ""), _count(workload.name, facts)
    patch = f"kubectl -n {facts.namespace} scale {workload.kind.lower()} {workload.name} --replicas={count}"
    again = "set it in fleet.yaml, and apply"
    if count is not None and count < 1:
        yield failed(_TOPIC, f"{FLEET_SETTINGS} has {setting}={count}; it must be 1 at least", again)
    elif bounds is None and count is not None and workload.replicas != count:
        yield failed(_TOPIC, f"{named} has {workload.replicas} replicas, and {FLEET_SETTINGS} {setting}={count}", patch)
    elif bounds is not None:
        if count is not None and bounds.least != count:
            what = (
                f"the autoscaler {bounds.name} has {bounds.least} pods at least, and {FLEET_SETTINGS} {setting}={count}"
            )
            yield failed(_TOPIC, what, again)
        if not bounds.least <= workload.replicas <= bounds.most:
            what = (
                f"{named} has {workload.replicas} replicas, and its autoscaler allows {bounds.least} to {bounds.most}"
            )
            yield failed(_TOPIC, what, f"kubectl -n {facts.namespace} describe hpa {bounds.name}")
    if workload.replicas < 1:
        yield failed(_TOPIC, f"{named} has no replicas", again)


def _count(name: str, facts: ClusterFacts) -> int | None:
    """Returns the count in fleet.yaml; None if this workload has none, or if it is not a number."""
    settings = facts.named("ConfigMap", FLEET_SETTINGS)
    text = str((settings or {}).get("data", {}).get(COUNTS.get(name, ""), ""))
    return int(text) if text.lstrip("-").isdecimal() else None


def _bounds_of(name: str, facts: ClusterFacts) -> Bounds | None:
    for kind, (least, most) in _AUTOSCALERS.items():
        for one in facts.of_kind(kind):
            spec = one.get("spec", {})
            if spec.get("scaleTargetRef", {}).get("name") == name:
                low = int(spec.get(least, 1))
                return Bounds(name_of(one), low, int(spec.get(most, max(low, 100))))
    return None
