"""A client of a gateway's console API. Blocking; every wait has a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from baton.services.rest.client import RestClient, RestError, event_lines

_KEY_ADVICE = "Give a key with the scope admin: --api-key, or BATON_TOP_API_KEY."


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's address and credentials."""

    url: str
    api_key: str = ""
    ca: str = ""  # file of trusted certificates for https; empty: the system's

    def check(self) -> None:
        """Raises InvalidRequest for an invalid address."""
        self._rest.check()

    def snapshots(self) -> Iterator[bytes]:
        """Yields snapshots as JSON, one a second. Ends only by raising RestError."""
        with self._rest.answer("GET", "/console/stream") as response:
            for line in event_lines(response):
                if line.startswith(b"data:"):
                    yield line[5:].strip()
        raise RestError(f"{self.url}: the gateway ended the connection")

    def explain(self, name: str, value: str) -> bytes:
        """Returns the explanation of a placement as JSON. `name`: placement_id, or request_id for the last one."""
        with self._rest.answer("GET", f"/console/placement?{name}={quote(value, safe='')}") as response:
            return response.read()

    @property
    def _rest(self) -> RestClient:
        return RestClient(self.url, self.api_key, self.ca, key_advice=_KEY_ADVICE)
