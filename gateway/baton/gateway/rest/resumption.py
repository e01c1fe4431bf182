"""Last-Event-ID in REST: replaces a request for the rest of a stream by the stream's original request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from baton.gateway.http.exchange import Exchange
from baton.gateway.resume.position import parse_position
from baton.rpc.errors import InvalidRequest

if TYPE_CHECKING:
    from baton.gateway.resume.store import StreamStore

Handler = Callable[[Exchange], Awaitable[None]]

_HEADER = "last-event-id"


def event_id(request_id: str, position: str) -> str:
    """Returns the id of an event."""
    return f"{request_id}/{position}"


class Resumable:
    """Wraps a generating route's handler with resumption. Ignores the body of a request that resumes."""

    def __init__(self, inner: Handler, store: StreamStore | None) -> None:
        self._inner = inner
        self._store = store

    async def __call__(self, exchange: Exchange) -> None:
        last = exchange.headers.get(_HEADER.encode())
        if last is not None:
            await self._find(exchange, last.decode("latin-1"))
        await self._inner(exchange)

    async def _find(self, exchange: Exchange, last: str) -> None:
        if self._store is None:
            raise InvalidRequest("cannot resume streams: resumable_streams is disabled", field=_HEADER)
        request_id, slash, position = last.rpartition("/")
        if not slash:
            raise InvalidRequest(
                f"{_HEADER} is {last[:40]!r}; give the id of the last event as received", field=_HEADER
            )
        positions = parse_position(position, _HEADER)
        tenant = exchange.identity.tenant.name
        journal = await self._store.resume(tenant, request_id, exchange.path, positions, _HEADER)
        exchange.request_id = request_id
        exchange.receive((journal.head.body,))
        exchange.journal = journal
