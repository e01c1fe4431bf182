"""Parses an operator's addresses: host:port, dns://name:port, k8s://namespace/service:port."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.discovery.addresses import Discovery, DnsDiscovery, StaticDiscovery, UnionDiscovery
from baton.router.discovery.kubernetes_api import KubernetesApi
from baton.router.discovery.kubernetes_discovery import KubernetesDiscovery
from baton.router.discovery.pace import Pace
from baton.rpc.address import split_address
from baton.rpc.errors import InvalidRequest

_DNS, _KUBERNETES = "dns://", "k8s://"


def check_sources(values: Sequence[str], field: str) -> None:
    """Raises InvalidRequest for a value that names no address, or one that is given twice."""
    for value in values:
        if value.startswith(_KUBERNETES):
            _kubernetes_parts(value, field)
        else:
            split_address(value.removeprefix(_DNS), field)
    if len(set(values)) != len(values):
        raise InvalidRequest(f"{field}={','.join(values)} names an address twice", field=field)


def discovery_of(values: Sequence[str], api: KubernetesApi, field: str, pace: Pace | None = None) -> Discovery:
    """Returns the source of all addresses that the values stand for."""
    check_sources(values, field)
    if any(value.startswith(_KUBERNETES) for value in values):
        api.load_client(field)
    fixed = [value for value in values if not value.startswith((_DNS, _KUBERNETES))]
    sources: list[Discovery] = [StaticDiscovery(fixed)] if fixed else []
    for value in values:
        if value.startswith(_DNS):
            sources.append(DnsDiscovery(*split_address(value.removeprefix(_DNS), field)))
        elif value.startswith(_KUBERNETES):
            sources.append(KubernetesDiscovery(api, *_kubernetes_parts(value, field), pace))
    return sources[0] if len(sources) == 1 else UnionDiscovery(sources)


def _kubernetes_parts(value: str, field: str) -> tuple[str, str, str]:
    namespace, _, rest = value.removeprefix(_KUBERNETES).partition("/")
    service, _, port = rest.partition(":")
    if not (namespace and service and port) or "/" in rest:
        raise InvalidRequest(
            f"{field}={value!r} is not k8s://namespace/service:port, port a name or number", field=field
        )
    return namespace, service, port
