"""Runs one request of a batch through the REST handler of its route, without a connection."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from baton.gateway.access.identity import Identity
from baton.gateway.http.exchange import Exchange

Handler = Callable[[Exchange], Coroutine[None, None, None] | None]

_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The response to a request."""

    status: int
    request_id: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_refusal(self) -> bool:
        """Returns whether the fleet or the tenant's limits had no room, so that the request may run later."""
        return self.status in (429, 503) and self.headers.get("x-should-retry") != "false"

    @property
    def is_limited(self) -> bool:
        """Returns whether the tenant's limits had no room: others may run meanwhile."""
        return self.is_refusal and "retry-after-ms" in self.headers

    @property
    def retry_seconds(self) -> float:
        """Returns how long to wait before a refused request is tried again."""
        milliseconds = self.headers.get("retry-after-ms", "")
        if milliseconds.isdigit():
            return int(milliseconds) / 1000
        seconds = self.headers.get("retry-after", "")
        return float(seconds) if seconds.isdigit() else 1.0


class _Wire:
    """Implements ExchangeTransport. Keeps the bytes of the response."""

    writable = True
    closing = False

    def __init__(self, client: str) -> None:
        self.client = client
        self.data = bytearray()
        self.ended = asyncio.Event()

    def send(self, data: bytes) -> None:
        self.data += data

    def exchange_ended(self, exchange: Exchange, keep_alive: bool) -> None:
        self.ended.set()

    def watch_disconnect(self) -> None:
        """Does nothing, because no client is connected."""


async def call(handler: Handler, path: str, body: bytes, identity: Identity, batch_id: str) -> LineAnswer:
    """Returns the response of a handler. Cancelling the call ends the generation."""
    wire = _Wire(batch_id)
    # HTTP/1.0 responses are not chunked.
    exchange = Exchange(wire, "POST", path.encode(), "1.0", {b"content-type": b"application/json"})
    exchange.request_id = uuid.uuid4().hex
    exchange.owner = f"batches of {identity.tenant.name}"
    exchange.identity = identity
    exchange.receive((body,))
    try:
        work = handler(exchange)
        if work is not None:
            await work
        await wire.ended.wait()
    except asyncio.CancelledError:
        exchange.disconnected()
        raise
    except Exception as error:
        exchange.fail(error)
    head, _, answer = bytes(wire.data).partition(_HEAD_END)
    return LineAnswer(exchange.status, exchange.request_id, answer, _headers_of(head))


def _headers_of(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value for line in lines for name, _, value in (line.partition(": "),)}
