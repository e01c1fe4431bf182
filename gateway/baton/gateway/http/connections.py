"""Every open connection of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol


class OpenConnection(Protocol):
    """A connection as its server sees it."""

    @property
    def unused(self) -> bool:
        """Whether no byte of a request has come over it yet."""

    def expire(self, now: float) -> None:
        """Acts where a deadline has passed."""

    def drain(self) -> None:
        """Takes no further request, and closes once those at hand are answered."""

    def abort(self) -> None:
        """Breaks off."""


class Connections:
    """Every open connection of a server."""

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
        """Returns when all are closed."""
        await self._none_left.wait()
