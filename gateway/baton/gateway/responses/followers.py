"""Clients of a running response: one that waits for the complete response, and one that streams its events."""

from __future__ import annotations

import msgspec

from baton.gateway.errors.http import HttpError
from baton.gateway.http.exchange import Exchange
from baton.gateway.responses.running import RunningResponse
from baton.gateway.rest.sse import CONTENT_TYPE


class DocumentFollower:
    """Responds once, with the response or its error."""

    def __init__(self, exchange: Exchange, running: RunningResponse) -> None:
        self._exchange = exchange
        self._running = running
        exchange.begin_work(running.abandon, running.resume)

    @property
    def writable(self) -> bool:
        return True

    def progressed(self) -> None:
        """Does nothing: the response is sent at the end."""

    def ended(self, error: HttpError | None) -> None:
        if error is not None:
            self._exchange.fail(error)
        else:
            self._exchange.respond(200, msgspec.json.encode(self._running.response))


class StreamFollower:
    """Sends events from `first` on, at its client's speed.

    Sends the headers with the first event, so that an early error keeps its status. If the client that created the
    response disconnects, the response ends, unless it runs in the background.
    """

    def __init__(self, exchange: Exchange, running: RunningResponse, first: int = 0) -> None:
        self._exchange = exchange
        self._running = running
        self._next = first
        self._over = False
        self._error: HttpError | None = None
        exchange.begin_work(self._leave, self._caught_up)

    @property
    def writable(self) -> bool:
        return self._exchange.writable

    def progressed(self) -> None:
        running, exchange = self._running, self._exchange
        while self._next < running.num_events and exchange.writable and not exchange.ended:
            if not exchange.status:
                exchange.stream(CONTENT_TYPE)
            pending = running.events[self._next - running.num_forgotten :]
            self._next = running.num_events
            exchange.write(b"".join(pending))
        if not running.response.background:
            running.forget_until(self._next)

    def ended(self, error: HttpError | None) -> None:
        self._over = True
        self._error = error
        self._finish()

    def _finish(self) -> None:
        if self._error is not None and not self._exchange.status and not self._running.begun:
            self._exchange.fail(self._error)
            return
        self.progressed()
        if self._next < self._running.num_events:
            return
        if not self._exchange.status:
            self._exchange.stream(CONTENT_TYPE)
        self._exchange.end()

    def _caught_up(self) -> None:
        if self._over:
            self._finish()
        else:
            self.progressed()
            self._running.resume()

    def _leave(self) -> None:
        self._running.unfollow(self)
        if not self._running.response.background:
            self._running.abandon()
