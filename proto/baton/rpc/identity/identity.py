"""The identity of a fleet's process in its certificate: spiffe://baton/FLEET/SERVICE/NAME. Checks no certificate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from baton.rpc.errors import InvalidRequest

GATEWAY = "gateway"
ROUTER = "router"
WORKER = "worker"
KVSTORE = "kvstore"
OPERATOR = "operator"  # people and their tools
ENVOY = "envoy"  # in front of gateways
SERVICES = (GATEWAY, ROUTER, WORKER, KVSTORE, OPERATOR, ENVOY)

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PREFIX = "spiffe://baton/"


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, or one kind of them where they share a certificate. Raises InvalidRequest for what is none."""

    fleet: str  # a DNS label
    service: str  # one of SERVICES
    name: str  # among its service's; has no effect

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.fleet):
            raise InvalidRequest(f"fleet={self.fleet!r} must be 1 to 63 of a-z, 0-9 and inner hyphens", field="fleet")
        if self.service not in SERVICES:
            raise InvalidRequest(f"service={self.service!r} must be one of {', '.join(SERVICES)}", field="service")
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(f"name={self.name!r} must be 1 to 128 of A-Z, a-z, 0-9, '.', '_', '-'", field="name")

    @property
    def uri(self) -> str:
        """The URI among the subject's alternative names, by which servers know a peer."""
        return f"{_PREFIX}{self.fleet}/{self.service}/{self.name}"

    @property
    def host_name(self) -> str:
        """The DNS name among them, equal for all of a service, by which clients know a server at any address."""
        return service_host_name(self.fleet, self.service)


def service_host_name(fleet: str, service: str) -> str:
    """Returns the DNS name in the certificates of a fleet's service."""
    return f"{service}.{fleet}.baton.internal"


def identity_of(uris: Iterable[str]) -> Identity | None:
    """Returns the identity among a certificate's URIs, or None if there is none or more than one."""
    found = [uri for uri in uris if uri.startswith(_PREFIX)]
    if len(found) != 1:
        return None
    parts = found[0].removeprefix(_PREFIX).split("/")
    if len(parts) != 3:
        return None
    try:
        return Identity(*parts)
    except InvalidRequest:
        return None
