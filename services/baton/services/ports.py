"""TCP ports of this machine: which are free, which are taken."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection
from contextlib import ExitStack
from typing import Self

from baton.rpc.address import split_address
from baton.rpc.errors import InvalidRequest

# Below the kernel's range for outgoing connections, so that none of those takes a port between choice and use.
_LOWEST, _HIGHEST = 15000, 20000


class HeldPorts:
    """Free ports, held until the end of the block: no other process that chooses ports in this way gets them.

    A service may listen on one all the same, since every service sets SO_REUSEADDR.
    """

    def __init__(self) -> None:
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def choose(self, count: int, host: str = "127.0.0.1", *, besides: Collection[int] = ()) -> list[int]:
        """Returns different free ports, none of them in `besides`. Raises OSError if there are not so many."""
        found: list[int] = []
        candidates = [port for port in range(_LOWEST, _HIGHEST) if port not in besides]
        for port in random.sample(candidates, k=min(len(candidates), 50 * count + 200)):
            if len(found) == count:
                break
            if (holder := _hold(host, port)) is not None:
                self._held.enter_context(holder)
                found.append(port)
        if len(found) < count:
            raise OSError(errno.EADDRINUSE, f"no {count} free ports from {_LOWEST} to {_HIGHEST}")
        return found


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


def _hold(host: str, port: int) -> socket.socket | None:
    """Returns a socket that is bound to a port, or None if another one is."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.bind((host, port))
    except OSError:
        holder.close()
        return None
    # Only now: before, this port could have been bound twice in this way.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
