"""The store of records (responses, conversations, chats), and its implementation in memory. Knows only bytes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

# How long a response counts as running after the last heartbeat of its gateway.
ALIVE_SECONDS = 10
MAX_LISTED = 10_000


class RecordStore(Protocol):
    """Records by name, each with a time to live. Raises Unavailable if the store cannot be reached."""

    async def save(self, name: str, record: bytes) -> None:
        """Stores or replaces a record."""

    async def load(self, name: str) -> bytes | None:
        """Returns the record, or None."""

    async def delete(self, name: str) -> bool:
        """Deletes a record. Returns whether it existed."""

    async def append(self, name: str, pieces: Sequence[bytes]) -> bool:
        """Appends pieces to a record's list atomically, and renews the time to live of both.

        Returns False without a record.
        """

    async def pieces(self, name: str) -> list[bytes]:
        """Returns the record's list, oldest first."""

    async def remove(self, name: str, piece: bytes) -> bool:
        """Removes a piece from the record's list. Returns whether it was there."""

    async def enlist(self, group: str, name: str) -> None:
        """Adds the record's name to a group, for the record's time to live."""

    async def delist(self, group: str, name: str) -> None:
        """Removes the record's name from a group."""

    async def listed(self, group: str) -> list[str]:
        """Returns the latest MAX_LISTED names of a group, oldest first. Their records may have expired."""

    async def beat(self, names: Iterable[str]) -> list[str]:
        """Renews the heartbeat of responses that run here. Returns those to be cancelled."""

    async def is_running(self, name: str) -> bool:
        """Returns whether any gateway runs the response."""

    async def ask_cancel(self, name: str) -> None:
        """Asks the gateway that runs the response to cancel it."""

    async def close(self) -> None:
        """Closes connections."""


@dataclass(slots=True)
class _Kept:
    """A record, its list and its expiry."""

    expiry: float
    record: bytes
    pieces: list[bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.record) + sum(map(len, self.pieces))


class MemoryRecordStore:
    """Implements RecordStore in memory, bounded in bytes; the oldest records are dropped first."""

    def __init__(self, ttl: float, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._clock = clock
        self._records: OrderedDict[str, _Kept] = OrderedDict()
        self._groups: dict[str, dict[str, float]] = {}  # expiry by group and name
        self.num_bytes = 0

    async def save(self, name: str, record: bytes) -> None:
        kept = self._drop(name)
        self._keep(name, record, [] if kept is None else kept.pieces)

    async def load(self, name: str) -> bytes | None:
        kept = self._live(name)
        return None if kept is None else kept.record

    async def append(self, name: str, pieces: Sequence[bytes]) -> bool:
        kept = self._live(name)
        if kept is None:
            return False
        self._drop(name)
        self._keep(name, kept.record, [*kept.pieces, *pieces])
        return True

    async def pieces(self, name: str) -> list[bytes]:
        kept = self._live(name)
        return [] if kept is None else list(kept.pieces)

    async def remove(self, name: str, piece: bytes) -> bool:
        kept = self._live(name)
        if kept is None or piece not in kept.pieces:
            return False
        kept.pieces.remove(piece)
        self.num_bytes -= len(piece)
        return True

    async def delete(self, name: str) -> bool:
        found = await self.load(name) is not None
        self._drop(name)
        return found

    async def enlist(self, group: str, name: str) -> None:
        names = self._groups.setdefault(group, {})
        names.pop(name, None)
        names[name] = self._clock() + self._ttl
        self._prune(group)

    async def delist(self, group: str, name: str) -> None:
        self._groups.get(group, {}).pop(name, None)
        self._prune(group)

    async def listed(self, group: str) -> list[str]:
        self._prune(group)
        return list(self._groups.get(group, ()))

    async def beat(self, names: Iterable[str]) -> list[str]:
        return []

    async def is_running(self, name: str) -> bool:
        return False

    async def ask_cancel(self, name: str) -> None:
        """Does nothing: no other gateway shares this store."""

    async def close(self) -> None:
        self._records.clear()
        self._groups.clear()
        self.num_bytes = 0

    def _prune(self, group: str) -> None:
        names, now = self._groups.get(group, {}), self._clock()
        while names and (len(names) > MAX_LISTED or next(iter(names.values())) <= now):
            del names[next(iter(names))]
        if not names:
            self._groups.pop(group, None)

    def _keep(self, name: str, record: bytes, pieces: list[bytes]) -> None:
        now = self._clock()
        self._records[name] = kept = _Kept(now + self._ttl, record, pieces)
        self.num_bytes += kept.num_bytes
        while self._records:
            oldest, first = next(iter(self._records.items()))
            if first.expiry > now and self.num_bytes <= self._max_bytes:
                break
            self._drop(oldest)

    def _live(self, name: str) -> _Kept | None:
        kept = self._records.get(name)
        if kept is not None and kept.expiry <= self._clock():
            self._drop(name)
            return None
        return kept

    def _drop(self, name: str) -> _Kept | None:
        kept = self._records.pop(name, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes
        return kept
