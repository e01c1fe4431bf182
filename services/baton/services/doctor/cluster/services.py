"""Baton's Services: ports, target ports and ready endpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.services.doctor.cluster.facts import ClusterFacts, Document
from baton.services.doctor.cluster.promises import GATEWAY, SERVICES, TLS_EDGE_PORTS, ServicePromise
from baton.services.doctor.finding import Finding, failed, ok, warning

_TOPIC = "services"


def check_services(facts: ClusterFacts) -> Iterator[Finding]:
    """Checks each Service of the base."""
    if not facts.was_read("Service"):
        return
    for promise in SERVICES:
        service = facts.named("Service", promise.name)
        if service is None:
            yield failed(_TOPIC, f"Service {promise.name} is missing", "kubectl apply -k of the overlay")
            continue
        wrong = [*_ports(service, promise, facts), *_kind(service, promise), *_targets(service, promise, facts)]
        wrong += _endpoints(promise.name, facts)
        yield from wrong or [ok(_TOPIC, f"Service {promise.name}: {_text(_ports_of(service))}")]


def _ports(service: Document, promise: ServicePromise, facts: ClusterFacts) -> Iterator[Finding]:
    promised, live = _promised_ports(promise, facts), _ports_of(service)
    if promised and live != promised:
        what = f"Service {promise.name} has {_text(live)}, and {_text(promised)} is promised"
        yield failed(_TOPIC, what, "kubectl apply -k of the overlay; callers use the promised ports")


def _promised_ports(promise: ServicePromise, facts: ClusterFacts) -> Mapping[str, int]:
    """Returns the ports by name. The gateway's ports depend on its arguments; without them they are unknown."""
    if promise.name != GATEWAY:
        return promise.ports
    gateway = facts.workload(GATEWAY)
    if gateway is None:
        return {}
    return TLS_EDGE_PORTS if gateway.value_of("--rest-tls-certificate") else promise.ports


def _kind(service: Document, promise: ServicePromise) -> Iterator[Finding]:
    is_headless = service.get("spec", {}).get("clusterIP") == "None"
    if is_headless != promise.headless:
        what = f"Service {promise.name} has clusterIP {service.get('spec', {}).get('clusterIP')!r}"
        expected = "None: callers choose a pod themselves" if promise.headless else "an address of its own"
        yield failed(_TOPIC, f"{what}, and must have {expected}", "delete it, and apply the overlay again")


def _targets(service: Document, promise: ServicePromise, facts: ClusterFacts) -> Iterator[Finding]:
    """Reports target ports that no container behind the Service has."""
    selector = service.get("spec", {}).get("selector") or {}
    behind = [one for one in facts.workloads() if selector and selector.items() <= one.labels.items()]
    if not behind and any(one.name.startswith(promise.name) for one in facts.workloads()):
        what = f"Service {promise.name} selects {selector or 'nothing'}, and no workload has such pods"
        yield failed(_TOPIC, what, "kubectl apply -k of the overlay")
    for workload in behind:
        names = {port.get("name") for one in workload.containers for port in one.get("ports") or ()}
        numbers = {port.get("containerPort") for one in workload.containers for port in one.get("ports") or ()}
        for port in service.get("spec", {}).get("ports") or ():
            target = port.get("targetPort", port.get("port"))
            if target not in names | numbers:
                what = f"Service {promise.name} sends to port {target!r}, which {workload.name}'s containers lack"
                yield failed(_TOPIC, what, "kubectl apply -k of the overlay")


def _endpoints(name: str, facts: ClusterFacts) -> list[Finding]:
    if not facts.was_read("EndpointSlice"):
        return []
    slices = [
        one
        for one in facts.of_kind("EndpointSlice")
        if (one.get("metadata", {}).get("labels") or {}).get("kubernetes.io/service-name") == name
    ]
    endpoints = [endpoint for one in slices for endpoint in one.get("endpoints") or ()]
    if any((one.get("conditions") or {}).get("ready") is not False for one in endpoints):
        return []
    what = f"Service {name} has {len(endpoints)} endpoints, none of them ready"
    return [warning(_TOPIC, what, f"kubectl -n {facts.namespace} get endpointslices,pods")]


def _ports_of(service: Document) -> dict[str, int]:
    return {str(one.get("name", "")): one.get("port", 0) for one in service.get("spec", {}).get("ports") or ()}


def _text(ports: Document) -> str:
    return ", ".join(f"{name} {number}" for name, number in ports.items()) or "no ports"
