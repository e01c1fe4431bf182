"""How the connections of a server share the event loop: the owner of each request, and its turns."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.gateway.fairness.fair_queue import Turns
from baton.gateway.http.exchange import Exchange

RECEIVED_BYTES = 128 << 10  # at most, by one call
_IPV6_NETWORK_BITS = 64  # the usual allocation of one client
_REQUESTS_SECONDS = 0.002  # of requests in one turn of the event loop


def network_of(host: str) -> str:
    """Returns the owner of requests without a tenant: the address, or the network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False))


def _no_tenant(exchange: Exchange) -> str:
    return ""


def _in_memory(exchange: Exchange) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Intake:
    """The turns of one server, shared by tenant, or by address without a tenant."""

    tenant_of: Callable[[Exchange], str] = _no_tenant  # empty: unknown
    # The most bytes of a request's body that is received into a file; 0: it is received into memory.
    spooled_bytes: Callable[[Exchange], int] = _in_memory
    # For handling requests up to their first wait. The placements of one turn go to the router in one message.
    requests: Turns = field(default_factory=partial(Turns, _REQUESTS_SECONDS))
    chunks: Turns = field(default_factory=Turns)  # for reading chunks of bodies
    bulks: Turns = field(default_factory=Turns)  # for reading data that arrives faster than it is read
    # What a connection receives, copied before the next one receives.
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(RECEIVED_BYTES)), repr=False)

    def owner(self, exchange: Exchange, network: str) -> str:
        """Returns the owner of a request's turns."""
        tenant = self.tenant_of(exchange)
        return f"tenant {tenant}" if tenant else f"network {network}"
