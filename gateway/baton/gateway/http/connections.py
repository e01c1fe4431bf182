"""Every open connection of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.gateway.http.connection import HttpConnection


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
