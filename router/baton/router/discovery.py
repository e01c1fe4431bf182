"""Which workers there are: the interface, and the list that an operator gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Protocol


class Discovery(Protocol):
    """Tells the workers' addresses."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """All addresses, at once and after every change; never ends."""


class StaticDiscovery:
    """A list that does not change."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """The list."""
        yield self._addresses
        await asyncio.Event().wait()
