"""Sends one event per second to all watchers; produces none without watchers. Knows nothing of the fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.gateway.http.exchange import Exchange
from baton.gateway.rest.sse import CONTENT_TYPE
from baton.rpc.errors import NoCapacity, ServiceError

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0
_MAX_WATCHERS = 64
_RETRY_AFTER_MS = 5000
_HELLO = b": one snapshot a second\n\n"


class Broadcast:
    """Sends server-sent events to all watchers.

    `make` returns the next event's data. `check` is called for each watcher before each event, and raises if it may no
    longer watch. `closing` returns whether the gateway is shutting down; then streams end.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[bytes]],
        check: Callable[[Exchange], object],
        closing: Callable[[], bool],
        interval_seconds: float = _INTERVAL_SECONDS,
        max_watchers: int = _MAX_WATCHERS,
    ) -> None:
        self._make = make
        self._check = check
        self._closing = closing
        self._interval_seconds = interval_seconds
        self._max_watchers = max_watchers
        self._watchers: set[Exchange] = set()
        self._task: asyncio.Task[None] | None = None  # set while there are watchers

    def __len__(self) -> int:
        """Returns the number of watchers."""
        return len(self._watchers)

    def watch(self, exchange: Exchange) -> None:
        """Sends events until the client disconnects. Raises NoCapacity if there are too many watchers."""
        if len(self._watchers) >= self._max_watchers:
            raise NoCapacity(
                f"the gateway already serves {self._max_watchers} consoles; close one", retry_after_ms=_RETRY_AFTER_MS
            )
        exchange.begin_work(lambda: self._watchers.discard(exchange), lambda: None)
        if exchange.ended:
            return
        exchange.stream(CONTENT_TYPE)
        exchange.write(_HELLO)
        self._watchers.add(exchange)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while self._watchers and not self._closing():
                event = b"data: %b\n\n" % await self._make()
                for exchange in list(self._watchers):
                    self._send(exchange, event)
                due = max(due + self._interval_seconds, loop.time())
                await asyncio.sleep(due - loop.time())
        except Exception:
            _log.exception("cannot make an event for consoles")
        finally:
            self._task = None
            watchers, self._watchers = self._watchers, set()
            for exchange in watchers:
                exchange.end()

    def _send(self, exchange: Exchange, event: bytes) -> None:
        try:
            self._check(exchange)
        except ServiceError:
            self._watchers.discard(exchange)
            exchange.end()
            return
        if exchange.writable:  # a slow watcher misses events
            exchange.write(event)
