"""Compares the arguments, images and variables of Baton's containers with the overlay and fleet.yaml."""

from __future__ import annotations

from collections.abc import Iterator

from baton.services.doctor.cluster.facts import ClusterFacts, Workload, has_tls
from baton.services.doctor.cluster.promises import (
    ARGUMENTS,
    BOTH,
    FLEET_SETTINGS,
    GATEWAY,
    IMAGES,
    OVERLAYS,
    VARIABLES,
    WORKERS,
)
from baton.services.doctor.finding import Finding, failed, ok, warning

_TOPIC = "arguments"
_PLAIN_TRANSPORTS = ("nccl", "rdma")  # they do not encrypt


def overlay_of(facts: ClusterFacts) -> str:
    """Returns the overlay that the operator named, or infers it from the objects."""
    if facts.overlay:
        return facts.overlay
    if has_tls(facts):
        return "production"
    on_gpus = any(one.has_argument("--executor=cuda") for one in facts.workloads())
    if not on_gpus:
        return "cpu-demo"
    return "aggregated" if facts.workload(BOTH) is not None else "gpu"


def check_arguments(facts: ClusterFacts) -> Iterator[Finding]:
    """Checks every workload that runs `baton`."""
    overlay = overlay_of(facts)
    for one in facts.workloads():
        if one.name in ARGUMENTS:
            found = [*_missing(one, overlay), *_contradictions(one, facts), *_settings(one, facts)]
            yield from found or [ok(_TOPIC, f"{one.kind} {one.name} is as {overlay} promises")]


def _missing(workload: Workload, overlay: str) -> Iterator[Finding]:
    promised = (*ARGUMENTS[workload.name], *OVERLAYS[overlay].get(workload.name, ()))
    for argument in promised:
        if not workload.has_argument(argument) and not _given_otherwise(workload, argument):
            what = f"{workload.kind} {workload.name} lacks {argument.removesuffix('=')}, which {overlay} promises"
            yield failed(_TOPIC, what, f"kubectl apply -k deploy/kubernetes/overlays/{overlay}; or --overlay NAME")


def _given_otherwise(workload: Workload, argument: str) -> bool:
    """Returns whether a variable sets the flag: BATON_ROUTER_KVSTORE sets a router's --kvstore."""
    service = workload.name.split("-")[1].upper()
    flag = argument.partition("=")[0].removeprefix("--").replace("-", "_").upper()
    names = {one.get("name") for one in workload.container.get("env") or ()}
    return f"BATON_{service}_{flag}" in names


def _contradictions(workload: Workload, facts: ClusterFacts) -> Iterator[Finding]:
    named = f"{workload.kind} {workload.name}"
    if has_tls(facts) and not workload.value_of("--tls-certificate"):
        yield failed(_TOPIC, f"{named} has no --tls-certificate, and others of the fleet have one", "the component tls")
    transports = workload.value_of("--transports").split(",")
    plain = [one for one in transports if one in _PLAIN_TRANSPORTS]
    if plain and workload.value_of("--tls-certificate") and not workload.has_argument("--kv-plain"):
        fix = "--kv-plain where the nodes' network is the fleet's own, or `transports: tcp`"
        yield failed(_TOPIC, f"{named} has TLS and --transports={','.join(transports)} without --kv-plain", fix)
    if workload.name == GATEWAY and workload.has_argument("--allow-anonymous") and overlay_of(facts) != "cpu-demo":
        yield warning(_TOPIC, f"{named} requires no API keys (--allow-anonymous)", "the component api-keys")
    drain = workload.value_of("--drain-timeout")
    grace = int(workload.pod.get("terminationGracePeriodSeconds", 30))
    if drain and float(drain) + _sleep_of(workload) > grace:
        what = f"{named}: its grace period of {grace} s is shorter than the sleep before and --drain-timeout={drain}"
        yield failed(
            _TOPIC, what, "terminationGracePeriodSeconds: a few seconds more than both; otherwise streams are cut"
        )


def _sleep_of(workload: Workload) -> float:
    sleep = workload.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    return float(sleep.get("seconds", 0))


def _settings(workload: Workload, facts: ClusterFacts) -> Iterator[Finding]:
    """Compares images and variables with fleet.yaml."""
    settings = (facts.named("ConfigMap", FLEET_SETTINGS) or {}).get("data", {})
    live = {IMAGES[workload.name]: str(workload.container.get("image", ""))}
    variables = workload.variables
    if workload.name in (GATEWAY, *WORKERS):
        live |= {setting: variables[name] for name, setting in VARIABLES.items() if name in variables}
    for setting, value in live.items():
        if setting in settings and settings[setting] != value:
            what = (
                f"{workload.kind} {workload.name} has {value!r}, and {FLEET_SETTINGS} {setting}={settings[setting]!r}"
            )
            yield failed(_TOPIC, what, "kubectl apply -k of the overlay: one of the two was changed by hand")
