"""Orders clients' work by fair queueing. Knows no HTTP.

The owner that used least goes first, so that a client waits for one turn of another, and not for everything the other
sent.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

_MAX_STALE = 64


@dataclass(order=True, slots=True)
class Turn:
    """A piece of waiting work."""

    start: float  # the owner's usage before this work, in the unit of costs
    number: int
    owner: str = field(compare=False)
    cost: float = field(compare=False)
    work: Callable[[], None] | None = field(compare=False)  # None: cancelled

    def cancel(self) -> None:
        """Cancels the work. Idempotent."""
        self.work = None


class FairQueue:
    """Work by owner. Idle owners accumulate no credit, and new owners cannot starve a waiting one.

    Waiting owners share evenly: the order follows a virtual time, the usage that each of them should have by now.
    """

    def __init__(self) -> None:
        self._heap: list[Turn] = []
        self._waiting: Counter[str] = Counter()  # turns by owner
        self._used: dict[str, float] = {}  # by owner, including queued work
        self._now = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, owner: str, cost: float, work: Callable[[], None]) -> Turn:
        """Adds work with a cost."""
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
        """Returns the next work, or None."""
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
    """Runs work in turns of the event loop; at once if nothing waits.

    A turn is one piece of work, and the next ones that begin within `turn_seconds`.
    """

    def __init__(self, turn_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = FairQueue()
        self._turn_seconds = turn_seconds
        self._clock = clock
        self._scheduled = False
        self._rest_seconds = 0.0

    def take(self, owner: str, cost: float, work: Callable[[], None]) -> Turn:
        """Runs the work in its owner's turn, which may be now."""
        turn = self._queue.push(owner, cost, work)
        if not self._scheduled:
            self._run()
        return turn

    def rest(self, seconds: float) -> None:
        """Pauses for `seconds` after the current work, so that the event loop can do everything else."""
        self._rest_seconds = seconds

    def _run(self) -> None:
        work = self._queue.pop()
        self._scheduled = work is not None
        if work is None:
            return
        until = self._clock() + self._turn_seconds
        try:
            while work is not None:
                work()
                work = self._queue.pop() if self._goes_on(until) else None
        finally:
            seconds, self._rest_seconds = self._rest_seconds, 0.0
            loop = asyncio.get_running_loop()
            if seconds:
                loop.call_later(seconds, self._run)
            else:
                loop.call_soon(self._run)

    def _goes_on(self, until: float) -> bool:
        return bool(self._queue) and not self._rest_seconds and self._clock() < until
