"""In which order clients get the event loop for what they send. Knows no HTTP.

Fair queueing: whoever used least goes first, so that a client waits for one turn of another, and not for all that the
other sent.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

_MAX_STALE = 64


@dataclass(order=True, slots=True)
class Turn:
    """A piece of work that waits."""

    start: float  # what its owner used when it is its turn, in the unit of costs
    number: int
    owner: str = field(compare=False)
    cost: float = field(compare=False)
    work: Callable[[], None] | None = field(compare=False)  # None: cancelled

    def cancel(self) -> None:
        """The work is no longer wanted. Idempotent."""
        self.work = None


class FairQueue:
    """Work by owner. An owner that waits for nothing saves nothing up, and no number of others outruns one that waits.

    Owners that wait share evenly: what one of them should have used by now is the time by which all are ordered.
    """

    def __init__(self) -> None:
        self._heap: list[Turn] = []
        self._waiting: Counter[str] = Counter()  # turns by owner
        self._used: dict[str, float] = {}  # by owner, what it queued included
        self._now = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, owner: str, cost: float, work: Callable[[], None]) -> Turn:
        """Adds work of this cost."""
        start = max(self._now, self._used.get(owner, 0.0))
        self._used[owner] = start + cost
        self._waiting[owner] += 1
        self._number += 1
        turn = Turn(start, self._number, owner, cost, work)
        heapq.heappush(self._heap, turn)
        if len(self._used) > 2 * len(self._heap) + _MAX_STALE:
            self._used = {owner: used for owner, used in self._used.items() if used > self._now}
        return turn

    def pop(self) -> Callable[[], None] | None:
        """Returns the work that is next; None: there is none."""
        while self._heap:
            turn = heapq.heappop(self._heap)
            num_waiting = len(self._waiting)
            self._waiting[turn.owner] -= 1
            if not self._waiting[turn.owner]:
                del self._waiting[turn.owner]
            if turn.work is not None:
                self._now = max(self._now, turn.start) + turn.cost / num_waiting
                return turn.work
        self._used.clear()
        self._now = 0.0
        return None


class Turns:
    """Runs work, one piece in each turn of the event loop, at once where nothing waits."""

    def __init__(self) -> None:
        self._queue = FairQueue()
        self._scheduled = False
        self._rest_seconds = 0.0

    def take(self, owner: str, cost: float, work: Callable[[], None]) -> Turn:
        """Runs the work when it is its owner's turn, which may be now."""
        turn = self._queue.push(owner, cost, work)
        if not self._scheduled:
            self._run()
        return turn

    def rest(self, seconds: float) -> None:
        """Leaves the event loop to everything else for so long after the work that runs now."""
        self._rest_seconds = seconds

    def _run(self) -> None:
        work = self._queue.pop()
        self._scheduled = work is not None
        if work is None:
            return
        try:
            work()
        finally:
            seconds, self._rest_seconds = self._rest_seconds, 0.0
            loop = asyncio.get_running_loop()
            if seconds:
                loop.call_later(seconds, self._run)
            else:
                loop.call_soon(self._run)
