"""The open connections of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol


class OpenConnection(Protocol):
    """The interface of a connection for its server."""

    @property
    def unused(self) -> bool:
        """Returns whether no byte of a request has arrived yet."""

    def expire(self, now: float) -> None:
        """Acts on expired deadlines."""

    def drain(self) -> None:
        """Accepts no further request, and closes once the current ones are answered."""

    def abort(self) -> None:
        """Closes the connection at once."""


class Connections:
    """The open connections of a server."""

    def __init__(self) -> None:
        self._open: set[OpenConnection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenConnection]:
        return iter(tuple(self._open))

    def add(self, connection: OpenConnection) -> None:
        self._open.add(connection)
        self._none_left.clear()

    def discard(self, connection: OpenConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._none_left.set()

    async def wait_until_none(self) -> None:
        """Waits until all connections are closed."""
        await self._none_left.wait()
