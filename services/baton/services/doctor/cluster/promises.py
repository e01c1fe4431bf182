"""What deploy/kubernetes supports: the oldest cluster version, workloads, Services and arguments. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MINIMUM_VERSION = (1, 30)  # of Kubernetes: pods' preStop sleep

GATEWAY, ROUTER, KVSTORE, REDIS = "baton-gateway", "baton-router", "baton-kvstore", "baton-redis"
PREFILL, DECODE, BOTH = "baton-worker-prefill", "baton-worker-decode", "baton-worker-both"
WORKERS = (PREFILL, DECODE, BOTH)
FLEET_SETTINGS = "baton-fleet"  # the ConfigMap of fleet.yaml


@dataclass(frozen=True, slots=True)
class ServicePromise:
    """A Service's ports, by name. `headless`: it has no address of its own."""

    name: str
    ports: Mapping[str, int]
    headless: bool


SERVICES = (
    ServicePromise(GATEWAY, MappingProxyType({"http": 80, "grpc": 8001}), False),
    ServicePromise(ROUTER, MappingProxyType({"grpc": 8200}), True),
    ServicePromise(KVSTORE, MappingProxyType({"grpc": 8300}), True),
    ServicePromise("baton-worker", MappingProxyType({"grpc": 8100}), True),
)
TLS_EDGE_PORTS = MappingProxyType({"https": 443, "grpc": 8001})  # the gateway's, with the component tls

# The setting of fleet.yaml for the number of pods, or for their minimum.
COUNTS = MappingProxyType({GATEWAY: "gateways", PREFILL: "prefillWorkers", DECODE: "decodeWorkers", BOTH: "workers"})
IMAGES = MappingProxyType(
    {
        **dict.fromkeys((GATEWAY, ROUTER, KVSTORE), "controlImage"),
        **dict.fromkeys(WORKERS, "workerImage"),
    }
)
VARIABLES = MappingProxyType({"MODEL": "model", "SERVED_MODEL_NAME": "servedModelName", "TRANSPORTS": "transports"})

# Prefixes of the arguments that a workload has in every overlay.
ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        GATEWAY: ("--router=",),
        ROUTER: ("--workers=k8s://", "--peers=k8s://", "--kvstore="),
        KVSTORE: (),
        PREFILL: ("--role=prefill", "--kvstore=", "--drain-timeout="),
        DECODE: ("--role=decode", "--kvstore=", "--drain-timeout="),
        BOTH: ("--role=both", "--kvstore=", "--drain-timeout="),
    }
)
_KEYS: Mapping[str, tuple[str, ...]] = {GATEWAY: ("--api-keys=",)}
_GPU = {**_KEYS, **dict.fromkeys(WORKERS, ("--executor=cuda",))}
_TLS = ("--tls-certificate=", "--tls-key=", "--tls-ca=")
# Prefixes of the arguments that an overlay adds.
OVERLAYS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cpu-demo": {GATEWAY: ("--allow-anonymous",)},
        "gpu": _GPU,
        "aggregated": _GPU,
        "production": {
            GATEWAY: ("--api-keys=", *_TLS, "--rest-tls-certificate=", "--grpc-tls-certificate="),
            ROUTER: (*_TLS, "--shed"),
            KVSTORE: _TLS,
            **dict.fromkeys(WORKERS, ("--executor=cuda", *_TLS)),
        },
    }
)


@dataclass(frozen=True, slots=True)
class Extension:
    """An API that a component needs: its group and its project."""

    group: str
    kind: str
    owner: str


COMPONENTS = MappingProxyType(
    {
        "keda": Extension("keda.sh", "ScaledObject", "KEDA"),
        "pod-monitors": Extension("monitoring.coreos.com", "PodMonitor", "the Prometheus operator"),
        "gateway-api": Extension("gateway.networking.k8s.io", "HTTPRoute", "the Gateway API"),
    }
)
