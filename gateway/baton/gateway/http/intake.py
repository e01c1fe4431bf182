"""How the connections of a server share the event loop: for whom each one reads, and when."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.gateway.fairness.fair_queue import Turns
from baton.gateway.http.exchange import Exchange

_IPV6_NETWORK_BITS = 64  # what one client is given as a rule


def network_of(host: str) -> str:
    """Returns what clients without a tenant share their turns by: the address, or an IPv6 address's network."""
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


@dataclass(frozen=True, slots=True)
class Intake:
    """One server's. Turns are a tenant's; where there is none, an address's."""

    tenant_of: Callable[[Exchange], str] = _no_tenant  # empty: not known
    requests: Turns = field(default_factory=Turns)  # a request's way up to its first wait
    chunks: Turns = field(default_factory=Turns)  # some chunks of a body
    bulks: Turns = field(default_factory=Turns)  # a piece of what comes faster than it is read

    def owner(self, exchange: Exchange, network: str) -> str:
        """Returns whose turn reads this request."""
        tenant = self.tenant_of(exchange)
        return f"tenant {tenant}" if tenant else f"network {network}"
