"""One HTTP request and its response. Knows the wire format of responses, but not their content."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import formatdate
from typing import Protocol

from baton.gateway.access.identity import ANONYMOUS, Identity
from baton.gateway.access_log import log_exchange
from baton.gateway.errors.anthropic import AnthropicError, asks_for_anthropic
from baton.gateway.errors.http import HttpError, http_error_of, reason_phrase
from baton.gateway.http import ignored_fields as ignored
from baton.gateway.http.spool import Spool
from baton.gateway.resume.journal import Journal

_LAST_CHUNK = b"0\r\n\r\n"
_FIRST_BYTES = b"HTTP/1.1 "  # of every response
_MAX_LEADING_ZEROS = 8  # zeros before a chunk's size; clients accept at least 16 digits


class ExchangeTransport(Protocol):
    """The interface of a connection for its exchanges."""

    @property
    def client(self) -> str:
        """Returns the client's address, host:port; empty if unknown."""

    @property
    def writable(self) -> bool:
        """Returns whether the client keeps up with the response."""

    @property
    def closing(self) -> bool:
        """Returns whether no further request is accepted from this connection."""

    def send(self, data: bytes) -> None:
        """Writes data, or drops it after the client disconnected."""

    def exchange_ended(self, exchange: Exchange, keep_alive: bool) -> None:
        """Called when the response is complete."""

    def watch_disconnect(self) -> None:
        """Starts watching for the client's disconnect, which may already have happened."""


class Exchange:
    """A parsed request. Answered with `respond`, or with `stream`, `write` and `end`.

    The on_disconnect hooks are called at once when the client disconnects before the response is complete, the
    on_writable hooks when a slow client has caught up, and the on_end hooks at the end of the exchange in any case.
    Writes after on_disconnect are dropped.
    """

    __slots__ = (
        "_chunked",
        "_head",
        "_keep_alive",
        "_leading_zeros",
        "_length",
        "_num_early_bytes",
        "_pieces",
        "_wire",
        "authority",
        "cors",
        "ended",
        "headers",
        "http_version",
        "identity",
        "ignored",
        "journal",
        "limit_headers",
        "load_headers",
        "method",
        "on_disconnect",
        "on_end",
        "on_writable",
        "owner",
        "path",
        "query",
        "received",
        "rejection",
        "request_id",
        "spool",
        "status",
    )

    def __init__(
        self, wire: ExchangeTransport, method: str, target: bytes, http_version: str, headers: Mapping[bytes, bytes]
    ) -> None:
        self._wire = wire
        self.authority, path_and_query = _split_target(target)
        path, _, query = path_and_query.partition(b"?")
        self.method = method
        self.path = path.decode("latin-1")
        self.query = query.decode("latin-1")
        self.http_version = http_version
        self.headers = headers  # by lower-case name
        self._pieces: Sequence[bytes | bytearray] = ()  # of the body
        self.spool: Spool | None = None  # the body, if it was received into a file
        self.received = time.perf_counter()
        self.request_id = ""
        self.owner = ""  # owner of the turns for work on this request
        self.identity: Identity = ANONYMOUS
        self.cors: Mapping[str, str] = {}  # CORS headers of the response
        self.limit_headers: Mapping[str, str] = {}  # the tenant's limits, as response headers
        self.load_headers: Mapping[str, str] = {}  # the fleet's load, if the request asks
        self.ignored: tuple[str, ...] = ()  # ignored fields of the request
        self.journal: Journal | None = None  # of a resumable stream
        self.rejection: HttpError | None = None  # the error of an unreadable request
        self.status = 0  # 0: nothing was sent
        self.ended = False
        self.on_disconnect: list[Callable[[], None]] = []
        self.on_writable: list[Callable[[], None]] = []
        self.on_end: list[Callable[[Exchange], None]] = []
        self._keep_alive = True
        self._head = b""
        self._chunked = False
        self._length = 0
        self._num_early_bytes = 0  # bytes of the head that were sent before it was built
        self._leading_zeros = 0  # zeros of the next chunk's size that were already sent

    @property
    def body(self) -> bytes:
        """Returns the body as one piece. Joining a large body takes milliseconds."""
        if len(self._pieces) != 1 or not isinstance(self._pieces[0], bytes):
            self._pieces = (b"".join(self._pieces),)
        return bytes(self._pieces[0])

    @property
    def pieces(self) -> Sequence[bytes | bytearray]:
        """Returns the body in the pieces that were received."""
        return self._pieces

    @property
    def num_body_bytes(self) -> int:
        """Returns the size of the body in bytes."""
        return sum(map(len, self._pieces))

    def receive(self, pieces: Sequence[bytes | bytearray]) -> None:
        """Sets the body."""
        self._pieces = pieces

    def drop_spool(self) -> None:
        """Drops the body that was received into a file."""
        if self.spool is not None:
            self.spool.close()

    @property
    def writable(self) -> bool:
        """Returns whether the client keeps up. If not, hold data back until an on_writable hook is called."""
        return self._wire.writable

    @property
    def age(self) -> float:
        """Returns the seconds since the request's headers arrived."""
        return time.perf_counter() - self.received

    def begin_work(self, on_disconnect: Callable[[], None], on_writable: Callable[[], None]) -> None:
        """Starts long work, which is useless once the client disconnects."""
        self.on_disconnect.append(on_disconnect)
        self.on_writable.append(on_writable)
        self._wire.watch_disconnect()

    def ignore(self, names: Sequence[str]) -> None:
        """Lists names in the response header for ignored fields."""
        self.ignored += tuple(names)

    def probe(self) -> None:
        """Writes the next byte of the response early, which shows whether the client is still connected.

        Does nothing if the response has no such byte.
        """
        if self.ended:
            return
        if not self.status:
            byte = _FIRST_BYTES[self._num_early_bytes : self._num_early_bytes + 1]
            self._num_early_bytes += len(byte)
        elif self._head:
            byte, self._head = self._head[:1], self._head[1:]
        else:
            byte = b"0" if self._chunked and self._leading_zeros < _MAX_LEADING_ZEROS else b""
            self._leading_zeros += len(byte)
        if byte:
            self._wire.send(byte)

    def close_after(self) -> None:
        """Closes the connection after this response."""
        self._keep_alive = False

    def respond(
        self,
        status: int,
        body: bytes = b"",
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Sends the whole response in one write."""
        if self.ended:
            return
        fields = {"content-type": content_type} if body else {}
        fields["content-length"] = str(len(body))
        head = self._build_head(status, {**fields, **(headers or {})})
        self._length = len(body)
        self._wire.send(head if self.method == "HEAD" else head + body)
        self._end()

    def fail(self, error: Exception) -> None:
        """Sends an error as the response, or closes the connection if a response has begun."""
        if self.ended:
            return
        if self.status:
            self.close_after()
            self._end()
            return
        answer = http_error_of(error)
        if asks_for_anthropic(self.path, self.headers):
            answer = AnthropicError(answer, self.request_id)
        self.respond(answer.status, answer.body, headers=answer.headers)

    def stream(self, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        """Starts a response of unknown length. The head is sent with the first write."""
        self._chunked = self.http_version == "1.1"
        fields = {"content-type": content_type, "cache-control": "no-cache", "x-accel-buffering": "no"}
        if self._chunked:
            fields["transfer-encoding"] = "chunked"
        else:
            self._keep_alive = False
        self._head = self._build_head(200, {**fields, **(headers or {})})

    def write(self, data: bytes) -> None:
        """Sends the next piece of a stream, which must not be empty."""
        if self.ended:
            return
        self._length += len(data)
        self._leading_zeros = 0
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        self._wire.send(data)

    def end(self, data: bytes = b"") -> None:
        """Sends the last piece of a stream."""
        if self.ended:
            return
        self._length += len(data)
        if self._chunked:
            data = b"%x\r\n%b\r\n%b" % (len(data), data, _LAST_CHUNK) if data else _LAST_CHUNK
        self._wire.send(self._head + data)
        self._end()

    def disconnected(self) -> None:
        """Ends the exchange after the client disconnected. Called by the connection."""
        if self.ended:
            return
        self.status = 499
        self._keep_alive = False
        hooks = self.on_disconnect
        self._end()
        for hook in hooks:
            hook()

    def _build_head(self, status: int, fields: Mapping[str, str]) -> bytes:
        self.status = status
        if self._wire.closing:
            self._keep_alive = False
        lines = [f"HTTP/1.1 {status} {reason_phrase(status)}", _date_line()]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        lines += [f"{name}: {value}" for name, value in self.limit_headers.items() if name not in fields]
        lines += [f"{name}: {value}" for name, value in self.cors.items() if name not in fields]
        lines += [f"{name}: {value}" for name, value in self.load_headers.items()]
        if self.ignored:
            lines.append(f"{ignored.HEADER}: {ignored.header_of(self.ignored)}")
        if self.request_id:
            lines.append(f"x-request-id: {self.request_id}")
            if asks_for_anthropic(self.path, self.headers):
                lines.append(f"request-id: {self.request_id}")
        if not self._keep_alive:
            lines.append("connection: close")
        elif self.http_version == "1.0":
            lines.append("connection: keep-alive")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", errors="replace")
        return head[self._num_early_bytes :]

    def _end(self) -> None:
        self.ended = True
        log_exchange(
            self.method,
            self.path,
            self.status,
            request_id=self.request_id,
            tenant=self.identity.tenant.name,
            client=self._wire.client,
            seconds=self.age,
            num_bytes=self._length,
        )
        # A connection and its exchanges refer to each other: what stays here is freed by the next collection only.
        hooks, self.on_end = self.on_end, []
        for hook in hooks:
            hook(self)
        self._pieces = ()
        self.drop_spool()
        self.on_disconnect, self.on_writable = [], []
        self._wire.exchange_ended(self, self._keep_alive)


def _split_target(target: bytes) -> tuple[bytes, bytes]:
    """Returns the host, which only requests through a proxy have, and the path with its query."""
    if target.startswith(b"/"):
        return b"", target
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return b"", target
    host, slash, path = rest.partition(b"/")
    return host, slash + path or b"/"


class _DateLine:
    """The Date header, formatted once per second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = ""

    def __call__(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"server: baton\r\ndate: {formatdate(second, usegmt=True)}"
        return self._line


_date_line = _DateLine()
