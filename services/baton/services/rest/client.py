"""A blocking client of a gateway's REST API, on the standard library. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from baton.rpc.errors import InvalidRequest

_MAX_LINE_BYTES = 64 << 20
_MAX_ERROR_BYTES = 1 << 16
_UNAUTHORIZED = (401, 403)


class RestError(Exception):
    """The gateway is unreachable or refuses the request. With `is_final`, a retry would fail too."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Unreachable(RestError):
    """No gateway answers at the address."""


@dataclass(frozen=True, slots=True)
class RestClient:
    """The gateway's address and credentials."""

    url: str
    api_key: str = ""
    ca: str = ""  # file of trusted certificates for https; empty: the system's
    silence_seconds: float = 10.0  # the longest wait for anything
    key_advice: str = ""  # follows the error of a client without the right key

    def check(self) -> None:
        """Raises InvalidRequest for an invalid address."""
        try:
            parts = urlsplit(self.url)
            is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good:
            raise InvalidRequest(f"url is {self.url!r}; give http://HOST:PORT or https://HOST:PORT", field="url")

    def get(self, path: str) -> Any:
        """Returns a JSON answer. Raises RestError."""
        with self.answer("GET", path) as response:
            data = response.read()
        try:
            return json.loads(data)
        except ValueError as error:
            raise RestError(f"{self.url}: {path} is not JSON: is this a gateway?", is_final=True) from error

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Posts a request and yields the chunks of its streamed answer. Raises RestError, also for a cut answer."""
        with self.answer("POST", path, json.dumps(body).encode()) as response:
            if "event-stream" not in (response.getheader("content-type") or ""):
                raise RestError(f"{self.url}: the answer is no event stream: is this a gateway?", is_final=True)
            for data in _event_data(response):
                if data == b"[DONE]":
                    return
                chunk = self._chunk(data)
                if "error" in chunk:
                    raise RestError(_message_of(chunk) or "the answer ended with an error")
                yield chunk
        raise RestError(f"{self.url}: the gateway ended the connection in the middle of the answer")

    def _chunk(self, data: bytes) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise RestError(f"{self.url}: an event is not JSON: is this a gateway?", is_final=True) from error
        if not isinstance(chunk, dict):
            raise RestError(f"{self.url}: an event is no object: is this a gateway?", is_final=True)
        return chunk

    @contextlib.contextmanager
    def answer(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """Yields a successful response, and closes the connection afterwards. Raises RestError."""
        connection = self._connection()
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            connection.request(method, urlsplit(self.url).path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise self._refusal(response)
            yield response
        except TimeoutError as error:
            raise RestError(f"{self.url}: no answer within {self.silence_seconds:g} s") from error
        except ssl.SSLError as error:
            raise RestError(f"{self.url}: {error}; --ca names the certificates to trust", is_final=True) from error
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url}: cannot be reached: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, parts.port, timeout=self.silence_seconds)
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:
            raise RestError(f"ca: {self.ca}: {error}", is_final=True) from error
        return http.client.HTTPSConnection(host, parts.port, timeout=self.silence_seconds, context=context)

    def _refusal(self, response: http.client.HTTPResponse) -> RestError:
        try:
            message = _message_of(json.loads(response.read(_MAX_ERROR_BYTES)))
        except ValueError:
            message = ""
        message = message or f"the gateway answered {response.status} {response.reason}"
        if response.status in _UNAUTHORIZED:
            message = f"{message} {self.key_advice}".rstrip()
        return RestError(f"{self.url}: {message}", is_final=response.status < 500 and response.status != 429)


def event_lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yields the lines of a streamed answer."""
    while line := response.readline(_MAX_LINE_BYTES):
        yield line


def _event_data(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yields the data of each event, whose lines are joined."""
    parts: list[bytes] = []
    for line in event_lines(response):
        text = line.rstrip(b"\r\n")
        if text.startswith(b"data:"):
            parts.append(text[5:].removeprefix(b" "))
        elif not text and parts:
            yield b"\n".join(parts)
            parts = []


def _message_of(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
