"""host:port, one or several, checked."""

from __future__ import annotations

import ipaddress

from baton.rpc.errors import InvalidRequest


def split_address(address: str, field: str) -> tuple[str, int]:
    """Splits `host:port`; IPv6 hosts are in brackets. Raises InvalidRequest naming `field`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"{field}={address!r} is not host:port with a port of 0 to 65535", field=field)
    return host, int(port)


def split_addresses(addresses: str, field: str) -> tuple[str, ...]:
    """Splits `host:port,host:port`. Raises InvalidRequest naming `field`."""
    parts = tuple(address.strip() for address in addresses.split(",") if address.strip())
    for address in parts:
        split_address(address, field)
    if len(set(parts)) != len(parts):
        raise InvalidRequest(f"{field}={addresses!r} names an address twice", field=field)
    return parts


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches what listens there."""
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
