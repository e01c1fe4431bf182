"""HTTPS GETs to a Kubernetes API server, whole or line by line. Knows nothing of what is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import httptools

from baton.rpc.errors import InvalidRequest

_CONNECT_SECONDS = 5.0
_MAX_LINE_BYTES = 16 << 20
DEFAULT_URL = "https://kubernetes.default.svc"
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class ApiError(Exception):
    """The server answered with another status than 200, or cannot be spoken to (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}" if status else message)
        self.status = status


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """An API server, and how to be believed there. The files are read for each connection: tokens change."""

    url: str = DEFAULT_URL
    token_file: str = f"{_ACCOUNT}/token"  # one that does not exist: no token is sent
    ca_file: str = f"{_ACCOUNT}/ca.crt"  # one that does not exist: the system's authorities

    def validate(self, field: str) -> None:
        """Raises InvalidRequest for a URL that cannot be one."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{field}={self.url!r} is not http://host or https://host", field=field)

    async def get(self, path: str, query: dict[str, str], timeout_seconds: float) -> Any:
        """The JSON document there. ApiError, TimeoutError, OSError."""
        async with asyncio.timeout(timeout_seconds):
            body = b"".join([chunk async for chunk in self._stream(path, query, timeout_seconds)])
        return _json(body)

    async def lines(self, path: str, query: dict[str, str], silence_seconds: float) -> AsyncGenerator[Any, None]:
        """One JSON document a line, until the server ends the stream. ApiError, TimeoutError after silence, OSError."""
        rest = b""
        async with contextlib.aclosing(self._stream(path, query, silence_seconds)) as chunks:
            async for chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _json(line)
                if len(rest) > _MAX_LINE_BYTES:
                    raise ApiError(0, f"a line of more than {_MAX_LINE_BYTES} bytes")

    async def _stream(self, path: str, query: dict[str, str], silence_seconds: float) -> AsyncGenerator[bytes, None]:
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if secure else 80), ssl=self._ssl() if secure else None
            )
        try:
            writer.write(self._request(parts.netloc, f"{parts.path.rstrip('/')}{path}?{urlencode(query)}"))
            answer = _Answer()
            parser = httptools.HttpResponseParser(answer)
            while not answer.complete:
                async with asyncio.timeout(silence_seconds):
                    data = await reader.read(65536)
                if not data:
                    break
                try:
                    parser.feed_data(data)
                except httptools.HttpParserError as error:
                    raise ApiError(0, f"not an HTTP answer: {error}") from error
                if answer.started and parser.get_status_code() == 200:
                    yield answer.take()
            if not answer.started or parser.get_status_code() != 200:
                status = parser.get_status_code() if answer.started else 0
                raise ApiError(status, answer.take()[:500].decode(errors="replace") or "the connection was closed")
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()

    def _request(self, host: str, target: str) -> bytes:
        lines = [f"GET {target} HTTP/1.1", f"Host: {host}", "Accept: application/json", "Connection: close"]
        token = Path(self.token_file)
        if self.token_file and token.exists():
            lines.append(f"Authorization: Bearer {token.read_text().strip()}")
        return "\r\n".join([*lines, "", ""]).encode()

    def _ssl(self) -> ssl.SSLContext:
        has_file = bool(self.ca_file) and Path(self.ca_file).exists()
        return ssl.create_default_context(cafile=self.ca_file if has_file else None)


class _Answer:
    """What the parser found."""

    def __init__(self) -> None:
        self.started = False
        self.complete = False
        self._body = bytearray()

    def on_headers_complete(self) -> None:
        self.started = True

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self.complete = True

    def take(self) -> bytes:
        body = bytes(self._body)
        self._body.clear()
        return body


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ApiError(0, f"not JSON: {error}") from error
