"""TCP ports of this machine: which are free, which are taken."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection
from contextlib import ExitStack

from baton.rpc.address import split_address
from baton.rpc.errors import InvalidRequest

# Below the kernel's range for outgoing connections, so that none of those takes a port between choice and use.
_LOWEST, _HIGHEST = 15000, 20000


def free_ports(count: int, host: str = "127.0.0.1", *, besides: Collection[int] = ()) -> list[int]:
    """Returns different free ports, none of them in `besides`."""
    found: list[int] = []
    with ExitStack() as held:
        candidates = [port for port in range(_LOWEST, _HIGHEST) if port not in besides]
        for port in random.sample(candidates, k=min(len(candidates), 50 * count + 200)):
            if len(found) == count:
                return found
            probe = held.enter_context(_listener())
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found.append(port)
    raise OSError(errno.EADDRINUSE, f"no {count} free ports from {_LOWEST} to {_HIGHEST}")


def why_unusable(address: str) -> str | None:
    """Returns why `host:port` cannot be listened on, or None if it can."""
    try:
        host, port = split_address(address, "address")
    except InvalidRequest as error:
        return error.message
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return str(error)
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
            probe.listen(1)
        except OSError as error:
            return "the port is in use" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
    return None


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener
