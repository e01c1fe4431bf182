"""HTTP/1.1 for load: persistent connections, and event streams split into events. Knows no OpenAI."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

OnBody = Callable[[bytes, float], None]  # a piece of the body, and its arrival
OnEvent = Callable[[bytes, float], None]


class EventSplitter:
    """Calls `on_event` with the data of each server-sent event."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Adds data, which may end anywhere in an event."""
        if self._rest:
            data = self._rest + data
        if b"\r\n" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                self._on_event(event[5:].lstrip(), now)


class HttpConnection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: asyncio.Future[int] | None = None
        self._on_body: OnBody | None = None
        self._now = 0.0
        self.is_open = False

    async def ask(self, request: bytes, on_body: OnBody) -> int:
        """Sends a request. Returns the status after the whole answer was received. Raises OSError."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Drops the connection and its response."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._fail(ConnectionError(f"the connection was lost: {error or 'closed by the server'}"))

    # Called by the parser.

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._parser.get_status_code())
        if not self._parser.should_keep_alive():
            self.close()
        self._parser = None

    def _fail(self, error: ConnectionError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class HttpPool:
    """Connections to one server, opened on demand and reused."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        fields = {"host": parts.netloc, "content-type": "application/json", **headers}
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[HttpConnection] = []

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Returns the bytes of a request."""
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._fields}content-length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    async def ask(self, request: bytes, on_body: OnBody, timeout: float) -> int:
        """Sends a request. Returns its status. Raises OSError or TimeoutError."""
        connection = await self._take(timeout)
        try:
            async with asyncio.timeout(timeout):
                status = await connection.ask(request, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return status

    async def fetch(self, method: str, path: str, body: bytes = b"", timeout: float = 30.0) -> tuple[int, bytes]:
        """Returns the status and the whole body."""
        pieces: list[bytes] = []
        status = await self.ask(self.request(method, path, body), lambda piece, now: pieces.append(piece), timeout)
        return status, b"".join(pieces)

    def close(self) -> None:
        """Closes idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _take(self, timeout: float) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout):
            _, connection = await loop.create_connection(HttpConnection, self._host, self._port, ssl=self._tls)
        return connection
