"""One REST connection: one exchange at a time in order, with deadlines and back-pressure.

States, each with a deadline: waiting for a request, reading headers, reading a body, answering (only the stall
deadline), and lingering: a refused client gets a moment to read the response before the socket closes. What follows a
request is not parsed before the request is answered.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import deque
from typing import cast

from baton.gateway.errors.http import HttpError
from baton.gateway.fairness.fair_queue import Turn
from baton.gateway.http.answering import Answering, App
from baton.gateway.http.connections import Connections
from baton.gateway.http.exchange import Exchange
from baton.gateway.http.intake import RECEIVED_BYTES, Intake, network_of
from baton.gateway.http.limits import HttpLimits
from baton.gateway.http.request_reader import RequestReader, State
from baton.gateway.http.spool import Spool
from baton.gateway.http.unread import Unread

_log = logging.getLogger(__name__)

_MAX_UNREAD_BYTES = 64 << 10  # received after the request that is being answered
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20
# Bytes that a slow client may leave unread in our memory before its deltas are merged.
_WRITE_HIGH_WATER = 64 << 10
_WRITE_LOW_WATER = 16 << 10
# Chunks read per turn (0.5 ms of work), and the pause before the next turn.
_CHUNKS_A_TURN = 512
_CHUNK_REST_SECONDS = 0.002
_BULK_BYTES = RECEIVED_BYTES // 2  # after this much at once, a client's next bytes are received in turns
# The pause after each turn: what clients send fast takes half of the event loop's time at most (100 MB a second).
_BULK_REST_SECONDS = 0.001


class HttpConnection(asyncio.BufferedProtocol):
    """Parses requests and runs the app on them in order. The server finds it in `connections`."""

    def __init__(self, app: App, limits: HttpLimits, connections: Connections, intake: Intake) -> None:
        self._limits = limits
        self._connections = connections
        self._intake = intake
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(self, limits, self._loop.time, self._spool_of)
        self._unread = Unread()
        self._idle_deadline = math.inf  # for waiting for a request, or lingering
        self._stall_deadline = math.inf
        self._answering = Answering(app, intake, self.watch_disconnect)
        self._pending: deque[Exchange] = deque()
        self._chunk_turn: Turn | None = None  # the turn that the next chunks wait for
        self._reads_in_turn = False  # whether the next chunks wait for a turn
        self._receipt: Turn | None = None  # the turn that the next bytes of a bulk wait for
        self._receives_in_turn = False  # whether the next bytes wait for a turn
        self._reading_paused = False
        self._lingering = False
        self._lingered_bytes = 0
        self._eof = False
        self._closed_for_reading = False  # nothing more is read
        self._draining = False
        self.unused = True  # no byte of a request has arrived
        self.writable = True
        self.client = ""
        self._network = ""

    @property
    def closing(self) -> bool:
        """Returns whether the current response is the last."""
        return self._closed_for_reading or self._draining

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_WRITE_HIGH_WATER, _WRITE_LOW_WATER)
        peer = transport.get_extra_info("peername")
        self.client = f"[{peer[0]}]:{peer[1]}" if peer and ":" in peer[0] else f"{peer[0]}:{peer[1]}" if peer else ""
        self._network = network_of(str(peer[0])) if peer else ""
        self._over_tls = transport.get_extra_info("sslcontext") is not None
        connection: socket.socket | None = transport.get_extra_info("socket")
        self._socket = None if self._over_tls else connection
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connections.add(self)
        self._idle_deadline = self._loop.time() + self._limits.header_timeout
        if len(self._connections) > self._limits.max_connections:
            headers = {"retry-after": "1"}
            message = f"the limit of {self._limits.max_connections} open connections is reached; retry later"
            self._reject(HttpError(503, message, code="too_many_connections", headers=headers))

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._drop_pending()
        if self._receipt is not None:
            self._receipt.cancel()
        self._reader.close()
        self._stop_reading()
        self._stop_current()

    def eof_received(self) -> bool:
        """Called when the client sends no more, or has closed.

        Returns whether the connection stays open for responses.
        """
        self._eof = True
        if self._over_tls:
            self._stop_current()
            return False
        self.watch_disconnect()
        return self._current is not None or bool(self._pending) or bool(self._unread)

    def pause_writing(self) -> None:
        self.writable = False
        self._stall_deadline = self._loop.time() + self._limits.stall_timeout

    def resume_writing(self) -> None:
        self.writable = True
        self._stall_deadline = math.inf
        exchange = self._current
        if exchange is None:
            self._next()
        else:
            for hook in exchange.on_writable:
                hook()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._intake.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._intake.buffer[:nbytes])
        if self._lingering:
            self._count_lingering(len(data))
        elif not self._closed_for_reading:
            self.unused = False
            self._unread.append(data)
            self._read_unread()
        if len(data) >= _BULK_BYTES and not self._transport.is_closing():
            self._receive_in_turn(len(data))

    def expire(self, now: float) -> None:
        """Acts on expired deadlines. The server calls it about once per second."""
        reads = self._reader.state if not (self._lingering or self._closed_for_reading) else State.WAITING
        if now >= self._stall_deadline:
            _log.warning(
                "closing the connection of a client that does not read its response", extra=self._answering.log_fields
            )
            self._transport.abort()
        elif reads is State.WAITING:
            if now >= self._idle_deadline:
                self._idle_deadline = math.inf
                self._transport.close()
        elif self._unread or self._receives_in_turn or self._reader.must_wait:
            # The delay is on this side.
            self._reader.deadline = max(self._reader.deadline, now + self._limits.header_timeout)
        elif now >= self._reader.deadline:
            what = "headers" if reads is State.HEADERS else "body"
            self._reject(HttpError(408, f"the request's {what} did not arrive in time", code="request_timeout"))

    def drain(self) -> None:
        """Accepts no further request, and closes once the current ones are answered.

        On a new connection the first request may be in flight and would be lost: it is still answered.
        """
        self._draining = True
        idle = self._current is None and not self._pending and not self._unread
        if idle and self._reader.state is State.WAITING and not self.unused:
            self._transport.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._transport.abort()

    # ExchangeTransport

    def send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def watch_disconnect(self) -> None:
        if self._eof:
            self._answering.watch_for_disconnect(self._socket, self._transport)

    def exchange_ended(self, exchange: Exchange, keep_alive: bool) -> None:
        if not self._answering.end(exchange):
            return
        if exchange.rejection is not None:
            self._linger()
        elif not keep_alive:
            self._stop_reading()
            self._drop_pending()
            self._transport.close()
        else:
            # One iteration later, so that a long pipeline causes no deep recursion.
            self._loop.call_soon(self._next)

    # Reading

    @property
    def _current(self) -> Exchange | None:
        return self._answering.exchange

    @property
    def _may_read(self) -> bool:
        busy = self._current is not None or bool(self._pending) or self._reads_in_turn
        return bool(self._unread) and not (busy or self._closed_for_reading)

    def _receive_in_turn(self, num_bytes: int) -> None:
        """Pauses reading until this client's turn, so that each turn receives one piece of a bulk."""
        exchange = self._reader.begun or self._current
        owner = self._network if exchange is None else self._intake.owner(exchange, self._network)
        self._receives_in_turn = True
        self._receipt = self._intake.bulks.take(owner, num_bytes, self._resume_receiving)
        self._hold_reading()

    def _resume_receiving(self) -> None:
        self._receives_in_turn = False
        self._intake.bulks.rest(_BULK_REST_SECONDS)
        self._hold_reading()

    def _read_unread(self) -> None:
        """Parses received data up to the end of a request; chunks in their turn."""
        while self._may_read:
            exchange = self._reader.begun
            if exchange is not None and self._reader.chunked:
                self._reads_in_turn = True
                owner = self._intake.owner(exchange, self._network)
                self._chunk_turn = self._intake.chunks.take(owner, 1.0, self._read_chunks)
            else:
                self._read_slice()
        self._hold_reading()

    def _read_chunks(self) -> None:
        self._reads_in_turn = False
        num_read = 0
        while self._may_read and self._reader.chunked and num_read < _CHUNKS_A_TURN:
            self._read_slice()
            num_read += 1 + self._reader.num_pieces
        if num_read >= _CHUNKS_A_TURN:
            self._intake.chunks.rest(_CHUNK_REST_SECONDS)
        self._read_unread()
        if self._eof and self._current is None and not (self._pending or self._unread):
            self._transport.close()

    def _read_slice(self) -> None:
        reader = self._reader
        reader.feed(self._unread.take(reader.slice_of))
        while reader.requests:
            self._pending.append(reader.requests.popleft())
        if reader.rejection is not None:
            self._reject(reader.rejection)
        elif self._pending:
            self._idle_deadline = math.inf
            self._next()
        else:
            self._send_continue()

    def _hold_reading(self) -> None:
        """Pauses reading while enough data is unread, or the client's turn to receive has not come."""
        enough = self._receives_in_turn or len(self._unread) > _MAX_UNREAD_BYTES or self._reader.must_wait
        if enough != self._reading_paused and not self._transport.is_closing():
            if enough:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
            self._reading_paused = enough

    def _spool_of(self, exchange: Exchange) -> Spool | None:
        max_bytes = self._intake.spooled_bytes(exchange)
        return Spool(max_bytes, self._hold_reading) if max_bytes else None

    def _drop_pending(self) -> None:
        """Drops the requests that were received and are not answered any more."""
        for exchange in self._pending:
            exchange.drop_spool()
        self._pending.clear()

    def _send_continue(self) -> None:
        # after the responses to earlier requests
        if self._current is None and not self._pending and self._reader.take_continue():
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Answering

    def _reject(self, rejection: HttpError) -> None:
        """Responds with an error after earlier requests, and reads nothing more from this client."""
        exchange = self._reader.begun or Exchange(self, "GET", b"(unread)", "1.1", {})
        exchange.rejection = rejection
        exchange.close_after()
        self._stop_reading()
        self._idle_deadline = math.inf
        self._pending.append(exchange)
        if self._current is None:
            self._next()

    def _stop_reading(self) -> None:
        """Reads nothing more."""
        self._closed_for_reading = True
        self._unread.clear()

    def _next(self) -> None:
        if self._current is not None or self._transport.is_closing():
            return
        if not self._pending:
            self._read_unread()
            if self._current is None and not (self._pending or self._unread):
                self._await_request()
            return
        if not self.writable:
            return  # The client must first read its responses, of which there may be many large ones.
        self._answering.begin(self._pending.popleft(), self._network)

    def _await_request(self) -> None:
        waiting = self._reader.state is State.WAITING
        if self._eof or (self._draining and waiting):
            self._transport.close()
            return
        self._send_continue()
        if waiting and not self._closed_for_reading:
            self._idle_deadline = self._loop.time() + self._limits.idle_timeout

    def _stop_current(self) -> None:
        if self._chunk_turn is not None:
            self._chunk_turn.cancel()
        self._answering.stop()

    def _linger(self) -> None:
        self._lingering = True
        self._idle_deadline = self._loop.time() + _LINGER_SECONDS
        if self._eof or self._transport.is_closing():
            self._transport.close()
            return
        self._hold_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _count_lingering(self, num_bytes: int) -> None:
        self._lingered_bytes += num_bytes
        if self._lingered_bytes > _LINGER_BYTES:
            self._transport.abort()
