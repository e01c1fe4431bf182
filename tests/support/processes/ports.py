"""Ports for tests. Concurrent test processes get different ports."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from itertools import count, cycle

# Above the range of baton.services.ports, and below the kernel's range for outgoing connections by more than 10,000,
# which is the distance of a Redis Cluster's second ports.
_LOWEST, _HIGHEST = 20_000, 30_000
_SLOTS = 8  # concurrent test processes, as numbered by pytest-xdist


def _own() -> range:
    """Returns this test process's share of the ports."""
    slot = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SLOTS
    size = (_HIGHEST - _LOWEST) // _SLOTS
    return range(_LOWEST + slot * size, _LOWEST + (slot + 1) * size)


# A cycle does not soon return a port again that nothing listens on yet. Two runs on one machine start at different
# ports.
_next = cycle(_own())
for _ in range(os.getpid() * 37 % len(_own())):
    next(_next)


def free_ports(number: int, host: str = "127.0.0.1") -> list[int]:
    """Returns different free ports that were not returned recently."""
    found: list[int] = []
    for tried in count():
        if len(found) == number:
            break
        assert tried < len(_own()), f"no {number} free ports in {_own()}"
        port = next(_next)
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        found.append(port)
    return found
