"""The request that a connection answers: its turn, the app's task, and the watch for a client that is gone."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial

from baton.gateway.fairness.fair_queue import Turn
from baton.gateway.http.exchange import Exchange
from baton.gateway.http.half_close import HalfCloseWatch, can_be_probed
from baton.gateway.http.intake import Intake

_log = logging.getLogger(__name__)

_REQUEST_COST = 2048  # of a turn, in addition to the body's bytes

App = Callable[[Exchange], Coroutine[None, None, None] | None]


class Answering:
    """Runs the app on one exchange at a time. `on_task` is called when the app has not answered at once."""

    def __init__(self, app: App, intake: Intake, on_task: Callable[[], None]) -> None:
        self.exchange: Exchange | None = None  # None: no request is being answered
        self._app = app
        self._intake = intake
        self._on_task = on_task
        self._loop = asyncio.get_running_loop()
        self._turn: Turn | None = None
        self._task: asyncio.Task[None] | None = None
        self._watch: HalfCloseWatch | None = None

    @property
    def log_fields(self) -> dict[str, str]:
        return {"request_id": self.exchange.request_id if self.exchange is not None else ""}

    def begin(self, exchange: Exchange, network: str) -> None:
        """Responds to a refused request at once, and runs the app on others in their owner's turn."""
        self.exchange = exchange
        if exchange.rejection is not None:
            exchange.fail(exchange.rejection)
            return
        owner = exchange.owner = self._intake.owner(exchange, network)
        cost = _REQUEST_COST + exchange.num_body_bytes
        self._turn = self._intake.requests.take(owner, cost, partial(self._start, exchange))

    def end(self, exchange: Exchange) -> bool:
        """Ends the exchange, whose response is complete. False: it was stopped before."""
        if exchange is not self.exchange:
            return False
        self.exchange = None
        self._stop_watch()
        return True

    def stop(self) -> None:
        """Ends the exchange, whose client is gone, and cancels the app's task."""
        self._stop_watch()
        if self._turn is not None:
            self._turn.cancel()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.disconnected()
        if self._task is not None and self._working:
            self._task.cancel()

    def watch_for_disconnect(self, connection: socket.socket | None, transport: asyncio.Transport) -> None:
        """Watches a client that sends no more while it waits for a long response. Closes if that cannot be seen."""
        exchange = self.exchange
        if exchange is None or self._watch is not None or not (exchange.on_disconnect or self._working):
            return
        if can_be_probed(connection):
            self._watch = HalfCloseWatch(connection, exchange.probe, transport.abort)
        else:
            self.stop()
            transport.close()

    @property
    def _working(self) -> bool:
        return self._task is not None and not self._task.done()

    def _start(self, exchange: Exchange) -> None:
        try:
            work = self._app(exchange)
        except Exception as error:
            self._handler_failed(exchange, error)
            return
        if work is not None:
            self._task = self._loop.create_task(self._finish(exchange, work))
            self._task.add_done_callback(self._forget)
            self._on_task()

    async def _finish(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            exchange.close_after()
            raise
        except Exception as error:
            self._handler_failed(exchange, error)

    def _forget(self, task: asyncio.Task[None]) -> None:
        # A cancelled task keeps its frames, and with them the request.
        if self._task is task:
            self._task = None

    def _handler_failed(self, exchange: Exchange, error: Exception) -> None:
        # The app handles its own errors; others are defects.
        _log.error("%s %s failed", exchange.method, exchange.path, exc_info=error, extra=self.log_fields)
        exchange.fail(error)

    def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
