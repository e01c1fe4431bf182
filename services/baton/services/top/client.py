"""A client of a gateway's console API. Blocking; every wait has a deadline."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from baton.rpc.errors import InvalidRequest

_SILENCE_SECONDS = 10.0  # snapshots are sent every second
_MAX_LINE_BYTES = 64 << 20


class TopError(Exception):
    """The gateway is unreachable or rejects the request. With `is_final`, a retry would fail too."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's address and credentials."""

    url: str
    api_key: str = ""
    ca: str = ""  # file of trusted certificates for https; empty: the system's

    def check(self) -> None:
        """Raises InvalidRequest for an invalid address."""
        try:
            parts = urlsplit(self.url)
            is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good:
            raise InvalidRequest(f"url is {self.url!r}; give http://HOST:PORT or https://HOST:PORT", field="url")

    def snapshots(self) -> Iterator[bytes]:
        """Yields snapshots as JSON. Ends only by raising TopError."""
        with self._asked("/console/stream") as response:
            while line := response.readline(_MAX_LINE_BYTES):
                if line.startswith(b"data:"):
                    yield line[5:].strip()
        raise TopError(f"{self.url}: the gateway ended the connection")

    def explain(self, name: str, value: str) -> bytes:
        """Returns the explanation of a placement as JSON. `name`: placement_id, or request_id for the last one."""
        with self._asked(f"/console/placement?{name}={quote(value, safe='')}") as response:
            return response.read()

    @contextlib.contextmanager
    def _asked(self, path: str) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection()
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            connection.request("GET", urlsplit(self.url).path.rstrip("/") + path, headers=headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise _refusal(self.url, response)
            yield response
        except TimeoutError as error:
            raise TopError(f"{self.url}: nothing was heard for {_SILENCE_SECONDS:g} s") from error
        except ssl.SSLError as error:
            raise TopError(f"{self.url}: {error}; --ca names the certificates to trust", is_final=True) from error
        except (OSError, http.client.HTTPException) as error:
            raise TopError(f"{self.url}: cannot be reached: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, parts.port, timeout=_SILENCE_SECONDS)
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:
            raise TopError(f"ca: {self.ca}: {error}", is_final=True) from error
        return http.client.HTTPSConnection(host, parts.port, timeout=_SILENCE_SECONDS, context=context)


def _refusal(url: str, response: http.client.HTTPResponse) -> TopError:
    body = response.read(1 << 16)
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the gateway answered {response.status} {response.reason}"
    if response.status in (401, 403):
        message += " Give a key with the scope admin: --api-key, or BATON_TOP_API_KEY."
    return TopError(f"{url}: {message}", is_final=response.status < 500 and response.status != 429)
