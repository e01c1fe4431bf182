"""Endpoints of discovery: addresses and whether they take work. Does no I/O."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping


class EndpointState(enum.IntEnum):
    """The state of an address. If two sources differ, the greater state applies."""

    NOT_READY = 0  # it starts, restarts or refuses new work; followed only where it is followed already
    TERMINATING = 1  # it is shutting down: running requests continue, but no new ones are sent
    SERVING = 2


Endpoints = Mapping[str, EndpointState]  # by address, host:port


def serving(addresses: Iterable[str]) -> Endpoints:
    """Returns these addresses, all of them in service."""
    return dict.fromkeys(addresses, EndpointState.SERVING)


def merged(parts: Iterable[Endpoints]) -> Endpoints:
    """Returns the union of several sources or slices."""
    found: dict[str, EndpointState] = {}
    for part in parts:
        for address, state in part.items():
            found[address] = max(state, found.get(address, state))
    return found


def followed(now: Collection[str], found: Endpoints) -> set[str]:
    """Returns the addresses to follow, given those that are followed now.

    A new endpoint is added when it is ready. A known one that stops being ready is kept.
    """
    return {address for address, state in found.items() if state is not EndpointState.NOT_READY or address in now}
