"""Parses the bytes of a connection into requests, within limits, slice by slice. Knows no transport and sends nothing.

A slice ends at the end of a request's head. It has at most a few kilobytes where bytes may be expensive: in heads, and
in chunked bodies, whose chunks may have one byte each.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable

import httptools

from baton.gateway.errors.http import HttpError
from baton.gateway.http.chunk_budget import ChunkBudget
from baton.gateway.http.exchange import Exchange, ExchangeTransport
from baton.gateway.http.limits import HttpLimits
from baton.gateway.http.spool import Spool

_MIN_BODY_RATE = 64 << 10  # bytes per second that extend the body's deadline
_MAX_HEADERS = 128
_SLICE_BYTES = 4096
_LARGE_PIECE = 2048  # pieces of a body that are not merged on arrival
_END_OF_HEAD = b"\r\n\r\n"


class State(enum.Enum):
    """What the reader expects next."""

    WAITING = enum.auto()
    HEADERS = enum.auto()
    BODY = enum.auto()


class _Refused(Exception):
    """Ends the parsing of a refused request."""


def _in_memory(exchange: Exchange) -> None:
    return None


class RequestReader:
    """Parses the requests of one connection. Stops after a rejection."""

    def __init__(
        self,
        wire: ExchangeTransport,
        limits: HttpLimits,
        clock: Callable[[], float],
        spool_of: Callable[[Exchange], Spool | None] = _in_memory,
    ) -> None:
        self._wire = wire
        self._spool_of = spool_of
        self._limits = limits
        self._clock = clock
        self._parser = httptools.HttpRequestParser(self)
        self.state = State.WAITING
        self.deadline = math.inf  # deadline of the current headers or body, by `clock`
        self.requests: deque[Exchange] = deque()  # complete requests; the connection removes them
        self.rejection: HttpError | None = None
        self.owes_continue = False
        self.num_pieces = 0  # number of body pieces in the last slice
        self._chunks: ChunkBudget | None = None  # budget of the current chunked body
        self._exchange: Exchange | None = None  # the current request
        self._begin_message()

    @property
    def chunked(self) -> bool:
        """Returns whether the current body is chunked."""
        return self._chunks is not None

    @property
    def must_wait(self) -> bool:
        """Returns whether the body's file is behind."""
        return self._exchange is not None and self._exchange.spool is not None and self._exchange.spool.full

    def close(self) -> None:
        """Drops the body that is being read."""
        if self._exchange is not None:
            self._exchange.drop_spool()

    @property
    def begun(self) -> Exchange | None:
        """Returns the request whose body is being read."""
        return self._exchange

    def slice_of(self, data: bytes, begin: int) -> int:
        """Returns the end of the next slice of unread data, which starts at `begin`."""
        if self.state is State.BODY and self._chunks is None:
            # Without a length there is no body, and the state has already changed.
            return min(len(data), begin + max(1, self._length - self._body_bytes))
        end = min(len(data), begin + _SLICE_BYTES)
        if self.state is State.BODY:
            return end
        found = data.find(_END_OF_HEAD, begin, end)
        return end if found < 0 else found + len(_END_OF_HEAD)

    def feed(self, data: bytes) -> None:
        """Parses a slice. Adds to `requests`, or sets `rejection`."""
        if self.state is State.HEADERS:
            self._fed_header_bytes += len(data)
        chunks, num_before = self._chunks, self._body_bytes
        self.num_pieces = 0
        try:
            self._parse(data)
            self._join_pieces()
            if self.state is State.HEADERS:
                self._check_header_bytes(self._fed_header_bytes)
            if chunks is not None and chunks is self._chunks:
                problem = chunks.problem_with(len(data), self._body_bytes - num_before, self.num_pieces)
                if problem:
                    self._refuse(HttpError(431, problem, code="headers_too_large"))
        except (_Refused, httptools.HttpParserError) as error:
            if self.rejection is None:
                self.rejection = HttpError(400, f"invalid HTTP/1.1 request: {error}")

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._begin_message()
        self.state = State.HEADERS
        self.deadline = self._clock() + self._limits.header_timeout

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._check_header_bytes(len(self._url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        self._num_headers += 1
        self._check_header_bytes(len(self._url) + self._header_bytes)
        if self._num_headers > _MAX_HEADERS:
            self._refuse(HttpError(431, f"the request has more than {_MAX_HEADERS} headers", code="headers_too_large"))
        if self._exchange is None:  # otherwise it is a trailer
            name = name.lower()
            earlier = self._headers.get(name)
            if name == b"host" and earlier is not None:
                self._refuse(HttpError(400, "the request has several Host headers", param="host"))
            self._headers[name] = value if earlier is None else earlier + b", " + value

    def on_headers_complete(self) -> None:
        self.state = State.BODY
        self.deadline = self._clock() + self._limits.body_timeout
        method = self._parser.get_method().decode("latin-1")
        if method == "CONNECT":
            message = "CONNECT is not allowed"
            self._refuse(HttpError(405, message, headers={"allow": "GET, POST"}))
        if self._parser.should_upgrade():
            return
        version: str = self._parser.get_http_version()
        self._exchange = Exchange(self._wire, method, self._url, version, self._headers)
        if not self._parser.should_keep_alive():
            self._exchange.close_after()
        if b"transfer-encoding" in self._headers:
            self._chunks = ChunkBudget(self._limits.max_header_bytes)
        self._exchange.spool = spool = self._spool_of(self._exchange)
        if spool is not None:
            self._max_body_bytes = spool.max_bytes
        self._check_headers(version)

    def on_body(self, data: bytes) -> None:
        # Called for every chunk, which may have one byte: the rest is done once per slice.
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self._join_pieces()
        exchange.receive(self._body)
        self.state = State.WAITING
        self.deadline = math.inf
        self._begin_message()
        self.requests.append(exchange)

    def _begin_message(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._fed_header_bytes = 0
        self._num_headers = 0
        self._length = 0
        self._pieces: list[bytes] = []  # pieces of the current slice
        self._body: list[bytes | bytearray] = []
        self._body_bytes = 0
        self._max_body_bytes = self._limits.max_body_bytes
        self._chunks = None
        self._exchange = None

    def _refuse(self, rejection: HttpError) -> None:
        self.rejection = rejection
        self._pieces.clear()
        self._body.clear()
        self.close()
        raise _Refused

    def _join_pieces(self) -> None:
        """Appends the slice's pieces to the body."""
        if not self._pieces:
            return
        self.num_pieces += len(self._pieces)
        data = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        self._body_bytes += len(data)
        if self._body_bytes > self._max_body_bytes:
            self._refuse(self._too_large())
        self.deadline += len(data) / _MIN_BODY_RATE
        if self._exchange is not None and self._exchange.spool is not None:
            self._exchange.spool.write(data)
        elif len(data) >= _LARGE_PIECE or not self._body:
            self._body.append(data)  # not joined, since a growing buffer is copied repeatedly
        elif isinstance(last := self._body[-1], bytearray):
            last += data  # separate pieces of two bytes would each take twenty times their size
        else:
            self._body.append(bytearray(data))

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Java's client offers h2c with every request. The standard allows HTTP/1.1 instead, but the parser stops
            # there and leaves the body unread: a new parser gets the request without the offer.
            head = self._head_without_upgrade()
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(head)
            if rest := data[upgrade.args[0] :]:
                self._parse(rest)

    def _head_without_upgrade(self) -> bytes:
        fields = {name: value for name, value in self._headers.items() if name not in (b"upgrade", b"connection")}
        if b"close" in self._headers.get(b"connection", b"").lower():
            fields[b"connection"] = b"close"
        lines = [b"%b %b HTTP/1.1" % (self._parser.get_method(), self._url)]
        lines += [b"%b: %b" % field for field in fields.items()]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _check_header_bytes(self, size: int) -> None:
        if size > self._limits.max_header_bytes:
            message = f"the request line and headers exceed {self._limits.max_header_bytes} bytes"
            self._refuse(HttpError(431, message, code="headers_too_large"))

    def _check_headers(self, version: str) -> None:
        if version not in ("1.0", "1.1"):
            self._refuse(HttpError(505, f"HTTP/{version} is not supported; use HTTP/1.1"))
        if version == "1.1" and b"host" not in self._headers:
            self._refuse(HttpError(400, "the Host header is missing", param="host"))
        coding = self._headers.get(b"transfer-encoding", b"chunked").lower()
        if coding != b"chunked":
            shown = coding.decode("latin-1")
            message = f"the transfer encoding is {shown!r}; give chunked"
            self._refuse(HttpError(400, message, param="transfer-encoding"))
        length = self._headers.get(b"content-length", b"")
        self._length = int(length) if length.isdigit() else 0
        if self._length > self._max_body_bytes:
            self._refuse(self._too_large())
        expectation = self._headers.get(b"expect", b"").lower()
        if expectation and expectation != b"100-continue":
            self._refuse(HttpError(417, "the expectation is not supported; give 100-continue"))
        self.owes_continue = bool(expectation) and version == "1.1"

    def _too_large(self) -> HttpError:
        message = f"the request body exceeds the limit of {self._max_body_bytes} bytes"
        return HttpError(413, message, code="request_too_large")

    def take_continue(self) -> bool:
        """Returns once whether the client waits for a 100 Continue."""
        owed, self.owes_continue = self.owes_continue, False
        return owed and not self._body_bytes
