"""The targets of a service's settings: addresses, files, a model, a Redis. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.rpc.identity.identity import KVSTORE, ROUTER, WORKER
from baton.rpc.tls.files import TlsFiles
from baton.services.settings import SettingsError

_KUBERNETES = "k8s://"
_DNS = "dns://"


@dataclass(frozen=True, slots=True)
class Address:
    """An address, and the flag that sets it."""

    flag: str
    address: str
    service: str = ""  # the service that listens there


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a service. Empty fields are not set, or do not apply to the service."""

    service: str = ""  # empty: only the machine is examined
    executor: str = ""
    role: str = ""
    transports: tuple[str, ...] = ()  # set by the operator; empty: all that are available
    listens: tuple[Address, ...] = ()
    peers: tuple[Address, ...] = ()
    tls: TlsFiles | None = None
    edges: tuple[TlsFiles, ...] = ()
    redis_url: str = ""
    api_keys: str = ""  # a file, or "redis"
    model: str = ""
    needs_weights: bool = False
    kv_bytes: int = 0  # memory for a worker's KV; 0: automatic
    host_cache_bytes: int = 0
    gpu_part: float = 0.0  # part of a GPU's memory for a worker
    max_connections: int = 0
    kubernetes_url: str = ""
    watched: tuple[str, ...] = ()  # k8s:// addresses


def targets_of(service: str, config: Any) -> Targets:
    """Returns the targets of a service's config; no targets without a config."""
    if config is None:
        return Targets(service)
    is_worker = service == WORKER
    named = getattr(config, "transports", "auto") if is_worker else "auto"
    return Targets(
        service=service,
        executor=getattr(config, "executor", ""),
        role=getattr(config, "role", ""),
        transports=() if named == "auto" else tuple(name.strip() for name in named.split(",")),
        listens=tuple(_listens(config)),
        peers=tuple(_peers(service, config)),
        tls=config.tls,
        edges=tuple(one for one in (getattr(config, "rest_tls", None), getattr(config, "grpc_tls", None)) if one),
        redis_url=getattr(config, "redis_url", ""),
        api_keys=getattr(config, "api_keys", ""),
        model=getattr(config, "model", ""),
        needs_weights=is_worker and config.executor != "sim" and config.load_format != "dummy",
        kv_bytes=getattr(config, "kv_cache_memory", 0),
        host_cache_bytes=int(getattr(config, "host_cache_gb", 0.0) * 1e9),
        gpu_part=getattr(config, "gpu_memory_utilization", 0.0),
        max_connections=getattr(config, "max_connections", 0),
        kubernetes_url=getattr(config, "kubernetes_api", ""),
        watched=tuple(one for one in _sources(config) if one.startswith(_KUBERNETES)),
    )


def service_of(words: tuple[str, ...], services: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Returns the service on a command line, and the other arguments. Raises SettingsError for an unknown service."""
    if not words or words[0].startswith("-"):
        return "", words
    if words[0] not in services:
        raise SettingsError(
            f"{words[0]!r} is no service; give one of {', '.join(services)}, kubernetes, or none for the machine"
        )
    return words[0], words[1:]


def _listens(config: Any) -> Iterator[Address]:
    for name in ("listen", "rest_listen", "grpc_listen", "metrics_listen", "transfer_listen", "ext_authz_listen"):
        address = getattr(config, name, "")
        if address:
            yield Address("--" + name.replace("_", "-"), address)


def _peers(service: str, config: Any) -> Iterator[Address]:
    for address in getattr(config, "router", ()):
        yield Address("--router", address, ROUTER)
    if service in (ROUTER, WORKER):
        for address in config.kvstore.split(","):
            if address.strip():
                yield Address("--kvstore", address.strip(), KVSTORE)
    for source in getattr(config, "workers", ()):
        if not source.startswith((_KUBERNETES, _DNS)):
            yield Address("--workers", source, WORKER)


def _sources(config: Any) -> tuple[str, ...]:
    return (*getattr(config, "workers", ()), *getattr(config, "peers", ()))
