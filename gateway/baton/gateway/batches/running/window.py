"""Bounds the lines of all batches that run at once: grows while the fleet takes them, shrinks where it refuses."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

_FIRST = 256
_SHRINK = 0.9
_GROWTH = 16.0  # lines, in the time of one
_SHRINK_PAUSE_SECONDS = 0.5  # refusals of one moment shrink the window once


class Window:
    """The places of lines in flight. Tenants that wait get places in turn, the one with fewest first."""

    def __init__(self, most: int, clock: Callable[[], float], first: int = _FIRST) -> None:
        self._most = most
        self._clock = clock
        self._limit = float(min(first, most))
        self._shrunk = float("-inf")
        self._growing = 0  # lines whose ends grow the window: those in flight when it was full last
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def in_flight(self) -> int:
        """Returns the number of lines that run."""
        return self._running.total()

    @property
    def limit(self) -> int:
        """Returns the most lines that may run now."""
        return int(self._limit)

    async def enter(self, tenant: str, again: bool = False) -> None:
        """Waits for a place of a tenant's line. `again`: before lines that have had none."""
        if self.in_flight < self.limit and not self._waiting:
            self._take(tenant)
            return
        place = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(tenant, deque())
        if again:
            waiting.appendleft(place)
        else:
            waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(tenant)
            else:
                self._drop(tenant, place)
            raise

    def leave(self, tenant: str, served: bool) -> None:
        """Gives a place back. `served`: the fleet ran the line, so that there may be room for more."""
        # The window triples in the time of one line, until the fleet has refused one. Then it grows by a few lines.
        if served and self._growing:
            self._growing -= 1
            most = float("inf") if self._shrunk < 0 else _GROWTH / self._limit
            self._limit = min(self._limit + min(2.0, most), float(self._most))
        self._leave(tenant)

    def refused(self, tenant: str) -> None:
        """Takes a line's place and shrinks the window: the fleet had no room for it."""
        now = max(0.0, self._clock())
        if now - self._shrunk >= _SHRINK_PAUSE_SECONDS:
            self._shrunk = now
            self._limit = max(1.0, min(self._limit, float(self.in_flight)) * _SHRINK)
        self._leave(tenant)

    def _take(self, tenant: str) -> None:
        self._running[tenant] += 1
        if self.in_flight >= self.limit:
            self._growing = self.in_flight

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        while self._waiting and self.in_flight < self.limit:
            chosen = min(self._waiting, key=lambda name: self._running[name])
            place = self._waiting[chosen].popleft()
            if not self._waiting[chosen]:
                del self._waiting[chosen]
            if not place.done():
                self._take(chosen)
                place.set_result(None)

    def _drop(self, tenant: str, place: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(tenant)
        if waiting is not None and place in waiting:
            waiting.remove(place)
            if not waiting:
                del self._waiting[tenant]
