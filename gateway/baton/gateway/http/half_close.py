"""Distinguishes a client that closed its connection from one that only closed its sending side (half-close).

Both look the same at first: the connection ends in one direction. A closed peer answers bytes with a reset, a
half-closed one does not. So bytes of the response are written early, and the state of the connection is polled.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

_CLOSE_WAIT = 8  # Linux's TCP state after the peer's end of input; a reset changes it
_FIRST_POLL_SECONDS = 0.005
_MAX_POLL_SECONDS = 1.0
_SECOND_PROBE_SECONDS = 1.0


def can_be_probed(connection: Any) -> bool:
    """Returns whether the connection's state can be read: TCP without TLS, on Linux."""
    is_tcp = connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6)
    return is_tcp and hasattr(socket, "TCP_INFO")


class HalfCloseWatch:
    """Watches a connection from its end of input until `stop`. Calls `on_gone` once if the client has closed it.

    `probe` writes a byte of the response, if there is one to write. Probes follow at growing intervals, to detect a
    client that closes later with few bytes.
    """

    def __init__(self, connection: Any, probe: Callable[[], None], on_gone: Callable[[], None]) -> None:
        self._connection = connection
        self._probe = probe
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._next_probe_age = _SECOND_PROBE_SECONDS
        self._poll_seconds = _FIRST_POLL_SECONDS
        probe()
        self._timer = self._loop.call_later(self._poll_seconds, self._poll)

    def stop(self) -> None:
        """Stops probing. Idempotent."""
        self._timer.cancel()

    def _poll(self) -> None:
        if not self._is_half_closed():
            self._on_gone()
            return
        if self._loop.time() - self._began >= self._next_probe_age:
            self._next_probe_age *= 2
            self._probe()
        self._poll_seconds = min(2 * self._poll_seconds, _MAX_POLL_SECONDS)
        self._timer = self._loop.call_later(self._poll_seconds, self._poll)

    def _is_half_closed(self) -> bool:
        try:
            state: bytes = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except OSError:
            return False
        return state[0] == _CLOSE_WAIT
