"""The REST listener: accepts connections, enforces deadlines, drains. Knows no routes."""

from __future__ import annotations

import asyncio
import logging
import ssl
from types import TracebackType
from typing import Self

from baton.gateway.http.answering import App
from baton.gateway.http.connection import HttpConnection
from baton.gateway.http.connections import Connections
from baton.gateway.http.intake import Intake
from baton.gateway.http.limits import HttpLimits
from baton.rpc.errors import Unavailable

_log = logging.getLogger(__name__)

_SWEEPS_PER_TIMEOUT = 10
_TURNS_OF_AN_ACCEPT = 3  # event loop iterations
_DRAIN_POLL_SECONDS = 0.02
_BACKLOG = 2048


class HttpServer:
    """Serves `app` for the lifetime of an `async with`, in which `port` is the actual port.

    Raises Unavailable that names the address if the port is in use. `shares_port`: other processes listen on it too.
    """

    def __init__(
        self,
        address: str,
        app: App,
        limits: HttpLimits | None = None,
        connections: Connections | None = None,
        tls: ssl.SSLContext | None = None,
        intake: Intake | None = None,
        shares_port: bool = False,
    ) -> None:
        self._host, _, port = address.rpartition(":")
        self._host = self._host.strip("[]")
        self.port = int(port)
        self._app = app
        self._limits = limits or HttpLimits()
        self._connections = Connections() if connections is None else connections
        self._tls = tls
        self._intake = intake or Intake()
        self._sweeper: asyncio.TimerHandle | None = None
        self._draining = False
        self._shares_port = shares_port

    @property
    def address(self) -> str:
        """Returns host:port with the actual port."""
        return f"{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._accept,
                self._host,
                self.port,
                backlog=_BACKLOG,
                reuse_port=self._shares_port or None,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.header_timeout if self._tls else None,
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unavailable(f"cannot listen on rest_listen={self.address}: {reason}", field="rest_listen") from error
        self.port = self._server.sockets[0].getsockname()[1]
        limits = self._limits
        shortest = min(limits.header_timeout, limits.body_timeout, limits.idle_timeout, limits.stall_timeout)
        self._sweep_seconds = min(1.0, shortest / _SWEEPS_PER_TIMEOUT)
        self._sweep()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for _ in range(_TURNS_OF_AN_ACCEPT):
            await asyncio.sleep(0)  # connections accepted just before are registered
        for connection in self._connections:
            connection.abort()
        await self._connections.wait_until_none()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def drain(self, seconds: float) -> None:
        """Waits until every running response has ended, at most `seconds`.

        New connections still get health checks answered.
        """
        self._draining = True
        for connection in self._connections:
            connection.drain()
        busy = frozenset(connection for connection in self._connections if not connection.unused)
        deadline = asyncio.get_running_loop().time() + seconds
        while left := busy.intersection(self._connections):
            if asyncio.get_running_loop().time() >= deadline:
                _log.warning("closing %d connections that are still busy after the drain", len(left))
                return
            await asyncio.sleep(_DRAIN_POLL_SECONDS)

    def _accept(self) -> HttpConnection:
        connection = HttpConnection(self._app, self._limits, self._connections, self._intake)
        if self._draining:
            connection.drain()
        return connection

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in self._connections:
            connection.expire(now)
        self._sweeper = loop.call_later(self._sweep_seconds, self._sweep)
