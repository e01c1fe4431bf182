"""One REST connection: parsing within limits, one exchange at a time in order, deadlines, back-pressure.

States, each with a deadline: waiting for a request, reading its headers, reading its body, answering (none but the
stall deadline), and lingering: a refused client gets a moment to read the answer before the socket closes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import cast

import httptools

from baton.gateway.error_body import HttpError
from baton.gateway.http.chunk_budget import ChunkBudget
from baton.gateway.http.exchange import Exchange
from baton.gateway.http.half_close import HalfCloseWatch, can_be_told

_log = logging.getLogger(__name__)

_MIN_BODY_RATE = 64 << 10  # bytes a second that extend the body's deadline
# Requests, or bytes of them, that may wait behind the one being answered.
_MAX_PIPELINED = 16
_MAX_PIPELINED_BYTES = 1 << 20
_MAX_HEADERS = 128
_LARGE_PIECE = 4096  # bytes of a body that are not put together with others as they come
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20
# What a slow client may have unread in our memory before its deltas are merged instead.
_WRITE_HIGH_WATER = 64 << 10
_WRITE_LOW_WATER = 16 << 10

App = Callable[[Exchange], Coroutine[None, None, None] | None]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may ask of a connection. Times in seconds."""

    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 32 << 10
    max_connections: int = 16384
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    idle_timeout: float = 75.0
    stall_timeout: float = 120.0


class _State(enum.Enum):
    WAITING = enum.auto()
    HEADERS = enum.auto()
    BODY = enum.auto()
    LINGERING = enum.auto()


class Connections:
    """Every open connection of a server."""

    def __init__(self) -> None:
        self._open: set[HttpConnection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[HttpConnection]:
        return iter(tuple(self._open))

    def add(self, connection: HttpConnection) -> None:
        self._open.add(connection)
        self._none_left.clear()

    def discard(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._none_left.set()

    async def wait_until_none(self) -> None:
        """Returns when all are closed."""
        await self._none_left.wait()


class HttpConnection(asyncio.Protocol):
    """Reads requests and runs the app on them, in order. `connections` is where the server finds it."""

    def __init__(self, app: App, limits: HttpLimits, connections: Connections) -> None:
        self._app = app
        self._limits = limits
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._state = _State.WAITING
        self._read_deadline = math.inf
        self._stall_deadline = math.inf
        self._current: Exchange | None = None
        self._pending: deque[Exchange] = deque()
        self._task: asyncio.Task[None] | None = None
        self._reading_paused = False
        self._lingered_bytes = 0
        self._eof = False
        self._watch: HalfCloseWatch | None = None
        self._owes_continue = False
        self._exchange: Exchange | None = None  # the one being read
        self._rejection: HttpError | None = None
        self._broken_off = False  # no more is read
        self._draining = False
        self.unused = True  # no byte of a request has come
        self.writable = True
        self.client = ""
        self._chunks: ChunkBudget | None = None  # of the chunked body being read
        self._num_pieces = 0  # of bodies, in what was read last
        self._begin_message()

    @property
    def closing(self) -> bool:
        """The response at hand is the last."""
        return self._broken_off or self._draining

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_WRITE_HIGH_WATER, _WRITE_LOW_WATER)
        peer = transport.get_extra_info("peername")
        self.client = f"[{peer[0]}]:{peer[1]}" if peer and ":" in peer[0] else f"{peer[0]}:{peer[1]}" if peer else ""
        self._over_tls = transport.get_extra_info("sslcontext") is not None
        connection: socket.socket | None = transport.get_extra_info("socket")
        self._socket = None if self._over_tls else connection
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connections.add(self)
        self._read_deadline = self._loop.time() + self._limits.header_timeout
        if len(self._connections) > self._limits.max_connections:
            headers = {"retry-after": "1"}
            message = f"{self._limits.max_connections} connections are open, the most allowed; retry later."
            self._reject(HttpError(503, message, code="too_many_connections", headers=headers))

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._pending.clear()
        self._broken_off = True
        self._stop_current()

    def eof_received(self) -> bool:
        """The client sends no more, or has closed. Returns whether the connection stays open for answers."""
        self._eof = True
        if self._over_tls:
            self._stop_current()
            return False
        self._look_for_leaving()
        return self._current is not None or bool(self._pending)

    def pause_writing(self) -> None:
        self.writable = False
        self._stall_deadline = self._loop.time() + self._limits.stall_timeout

    def resume_writing(self) -> None:
        self.writable = True
        self.client = ""
        self._stall_deadline = math.inf
        if self._current is None:
            self._next()
        elif self._current.on_writable is not None:
            self._current.on_writable()

    def data_received(self, data: bytes) -> None:
        if self._state is _State.LINGERING:
            self._linger_on(len(data))
            return
        if self._broken_off:
            return
        if self._state is _State.HEADERS:
            self._fed_header_bytes += len(data)
        chunks, num_before = self._chunks, self._body_bytes
        self._num_pieces = 0
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            if self._rejection is None:
                self._rejection = HttpError(400, f"This is no valid HTTP/1.1 request: {error}.")
        if self._rejection is None and self._state is _State.HEADERS:
            self._check_header_bytes(self._fed_header_bytes)
        if chunks is not None and chunks is self._chunks and self._rejection is None:
            problem = chunks.problem_with(len(data), self._body_bytes - num_before, self._num_pieces)
            self._rejection = HttpError(431, problem, code="headers_too_large") if problem else None
        if self._rejection is not None:
            self._reject(self._rejection)

    def expire(self, now: float) -> None:
        """Acts where a deadline has passed. The server calls it about every second."""
        if now >= self._stall_deadline:
            _log.warning("cut off a client that reads nothing of its answer", extra=self._log_fields())
            self._transport.abort()
        elif now >= self._read_deadline:
            self._read_deadline = math.inf
            if self._state in (_State.HEADERS, _State.BODY):
                what = "headers" if self._state is _State.HEADERS else "body"
                self._reject(HttpError(408, f"The request's {what} did not arrive in time.", code="request_timeout"))
            else:
                self._transport.close()

    def drain(self) -> None:
        """Takes no further request; closes when the ones at hand are answered.

        On a new connection the first one may be on its way, which a close would lose: that one is still answered.
        """
        self._draining = True
        if self._current is None and not self._pending and self._state is _State.WAITING and not self.unused:
            self._transport.close()

    def abort(self) -> None:
        """Breaks off."""
        self._transport.abort()

    # The exchange's side.

    def send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def work_begins(self) -> None:
        if self._eof:
            self._look_for_leaving()

    def exchange_ended(self, exchange: Exchange, keep_alive: bool) -> None:
        if exchange is not self._current:
            return
        self._current = None
        self._stop_watch()
        if exchange.rejection is not None:
            self._linger()
        elif not keep_alive:
            self._broken_off = True
            self._pending.clear()
            self._transport.close()
        else:
            # A loop turn later, so that a long pipeline is no deep recursion.
            self._loop.call_soon(self._next)

    # The parser's side.

    def on_message_begin(self) -> None:
        if self._rejection is not None:
            return
        self._begin_message()
        self.unused = False
        self._state = _State.HEADERS
        self._read_deadline = self._loop.time() + self._limits.header_timeout

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._check_header_bytes(len(self._url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        self._num_headers += 1
        self._check_header_bytes(len(self._url) + self._header_bytes)
        if self._num_headers > _MAX_HEADERS and self._rejection is None:
            self._rejection = HttpError(431, f"More than {_MAX_HEADERS} headers.", code="headers_too_large")
        if self._rejection is None and self._exchange is None:  # else it is a trailer
            name = name.lower()
            earlier = self._headers.get(name)
            if name == b"host" and earlier is not None:
                self._rejection = HttpError(400, "There is more than one Host header.", param="host")
            self._headers[name] = value if earlier is None else earlier + b", " + value

    def on_headers_complete(self) -> None:
        if self._rejection is not None:
            return
        self._state = _State.BODY
        self._read_deadline = self._loop.time() + self._limits.body_timeout
        method = self._parser.get_method().decode("latin-1")
        if method == "CONNECT":
            self._rejection = HttpError(
                405, "This is no proxy: CONNECT is not allowed.", headers={"allow": "GET, POST"}
            )
            return
        if self._parser.should_upgrade():
            return
        version: str = self._parser.get_http_version()
        self._exchange = Exchange(self, method, self._url, version, self._headers)
        if not self._parser.should_keep_alive():
            self._exchange.close_after()
        if b"transfer-encoding" in self._headers:
            self._chunks = ChunkBudget(self._limits.max_header_bytes)
        self._rejection = self._check_headers(version)

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        self._num_pieces += 1
        if self._rejection is not None:
            return
        if self._body_bytes > self._limits.max_body_bytes:
            self._rejection = self._too_large()
            self._body.clear()
            return
        self._read_deadline += len(data) / _MIN_BODY_RATE
        if len(data) >= _LARGE_PIECE or not self._body:
            self._body.append(data)  # joined at the end: a buffer that grows is copied again and again
        elif isinstance(last := self._body[-1], bytearray):
            last += data  # pieces of two bytes would each take twenty times their size
        else:
            self._body.append(bytearray(data))

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or self._rejection is not None:
            return
        exchange.body = b"".join(self._body)
        self._state = _State.WAITING
        self._read_deadline = math.inf
        self._begin_message()
        self._pending.append(exchange)
        if self._current is None:
            self._next()
        self._hold_reading()

    # Inside.

    def _begin_message(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._fed_header_bytes = 0
        self._num_headers = 0
        self._body: list[bytes | bytearray] = []
        self._body_bytes = 0
        self._chunks = None
        self._exchange = None

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Java's client offers h2c with every request. The standard lets us stay with HTTP/1.1; the parser does not,
            # and leaves the body to us: a new one gets the request again, without the offer.
            if self._rejection is not None:
                return
            head = self._head_without_upgrade()
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(head)
            if rest := data[upgrade.args[0] :]:
                self._feed(rest)

    def _head_without_upgrade(self) -> bytes:
        fields = {name: value for name, value in self._headers.items() if name not in (b"upgrade", b"connection")}
        if b"close" in self._headers.get(b"connection", b"").lower():
            fields[b"connection"] = b"close"
        lines = [b"%b %b HTTP/1.1" % (self._parser.get_method(), self._url)]
        lines += [b"%b: %b" % field for field in fields.items()]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _check_header_bytes(self, size: int) -> None:
        if size > self._limits.max_header_bytes and self._rejection is None:
            message = f"The request line and headers are larger than {self._limits.max_header_bytes} bytes."
            self._rejection = HttpError(431, message, code="headers_too_large")

    def _check_headers(self, version: str) -> HttpError | None:
        if version not in ("1.0", "1.1"):
            return HttpError(505, f"HTTP/{version} is not spoken here; use HTTP/1.1.")
        if version == "1.1" and b"host" not in self._headers:
            return HttpError(400, "The Host header is missing.", param="host")
        coding = self._headers.get(b"transfer-encoding", b"chunked").lower()
        if coding != b"chunked":
            shown = coding.decode("latin-1")
            message = f"The transfer encoding is {shown!r}; the only one that is read here is chunked."
            return HttpError(400, message, param="transfer-encoding")
        length = self._headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            return self._too_large()
        expectation = self._headers.get(b"expect", b"").lower()
        if expectation and expectation != b"100-continue":
            return HttpError(417, "The only expectation that is met here is 100-continue.")
        if expectation and version == "1.1":
            self._owes_continue = True
            self._send_continue()
        return None

    def _too_large(self) -> HttpError:
        message = f"The request body is larger than {self._limits.max_body_bytes} bytes, the most allowed."
        return HttpError(413, message, code="request_too_large")

    def _send_continue(self) -> None:
        # Behind the answers to whatever came before.
        if self._owes_continue and self._current is None and not self._pending:
            self._owes_continue = False
            if not self._body_bytes:
                self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _reject(self, rejection: HttpError) -> None:
        """Answers with an error, after whatever came before, and takes no more from this client."""
        exchange = self._exchange or Exchange(self, "GET", b"(unread)", "1.1", {})
        exchange.rejection = rejection
        exchange.close_after()
        self._exchange = None
        self._broken_off = True
        self._read_deadline = math.inf
        self._state = _State.WAITING
        self._pending.append(exchange)
        if self._current is None:
            self._next()

    def _next(self) -> None:
        if self._current is not None or self._transport.is_closing():
            return
        if not self._pending:
            self._await_request()
            return
        if not self.writable:
            return  # The client reads its answers first; there may be many large ones.
        exchange = self._current = self._pending.popleft()
        self._hold_reading()
        self._run(exchange)

    def _hold_reading(self) -> None:
        """Reads no further while enough waits."""
        waiting = sum(len(exchange.body) for exchange in self._pending)
        enough = len(self._pending) >= _MAX_PIPELINED or waiting > _MAX_PIPELINED_BYTES
        if enough and not self._reading_paused:
            self._transport.pause_reading()
        elif self._reading_paused and not enough:
            self._transport.resume_reading()
        self._reading_paused = enough

    def _await_request(self) -> None:
        if self._eof or (self._draining and self._state is _State.WAITING):
            self._transport.close()
            return
        self._send_continue()
        if self._state is _State.WAITING:
            self._read_deadline = self._loop.time() + self._limits.idle_timeout

    def _run(self, exchange: Exchange) -> None:
        if exchange.rejection is not None:
            exchange.fail(exchange.rejection)
            return
        try:
            work = self._app(exchange)
        except Exception as error:
            self._handler_failed(exchange, error)
            return
        if work is not None:
            self._task = self._loop.create_task(self._finish(exchange, work))
            self.work_begins()

    async def _finish(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            exchange.close_after()
            raise
        except Exception as error:
            self._handler_failed(exchange, error)

    def _handler_failed(self, exchange: Exchange, error: Exception) -> None:
        # The app answers its own errors; what arrives here is a defect.
        _log.error("%s %s failed", exchange.method, exchange.path, exc_info=error, extra=self._log_fields())
        exchange.fail(error)

    def _look_for_leaving(self) -> None:
        """Watches a client that sends no more, while it waits for an answer that takes time."""
        exchange = self._current
        if exchange is None or self._watch is not None or not (exchange.on_disconnect or self._is_working):
            return
        if can_be_told(self._socket):
            self._watch = HalfCloseWatch(self._socket, exchange.probe, self._transport.abort)
        else:
            self._stop_current()
            self._transport.close()

    @property
    def _is_working(self) -> bool:
        return self._task is not None and not self._task.done()

    def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def _stop_current(self) -> None:
        self._stop_watch()
        exchange, self._current = self._current, None
        if exchange is not None:
            exchange.disconnected()
        if self._task is not None and self._is_working:
            self._task.cancel()

    def _linger(self) -> None:
        self._state = _State.LINGERING
        self._read_deadline = self._loop.time() + _LINGER_SECONDS
        if self._eof or self._transport.is_closing():
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _linger_on(self, num_bytes: int) -> None:
        self._lingered_bytes += num_bytes
        if self._lingered_bytes > _LINGER_BYTES:
            self._transport.abort()

    def _log_fields(self) -> dict[str, str]:
        return {"request_id": self._current.request_id if self._current is not None else ""}
